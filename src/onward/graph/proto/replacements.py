"""Replaces nodes of protobuf by others, in the graph and in all bodies: the mechanism of `conservative_forms`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from onward.graph.protobuf import inner_graphs, opset_of, set_nodes

Types = dict[str, onnx.TypeProto.Tensor]


class Inserter:
    """Collects the nodes that stand in another's place, and their constants."""

    def __init__(self, graph: onnx.GraphProto, opset: int) -> None:
        self._graph, self.opset = graph, opset
        self._prefix = ""
        self.nodes: list[onnx.NodeProto] = []

    def begin(self, node: onnx.NodeProto) -> None:
        """Start the replacement of a node; names come from its first output."""
        self._prefix, self.nodes = node.output[0], []

    def node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add a node, which has the name of its output; returns that."""
        self.nodes.append(onnx.helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def constant(self, name: str, array: np.ndarray) -> str:
        """Add a constant of the graph; returns its whole name."""
        self._graph.initializer.append(onnx.numpy_helper.from_array(array, f"{self._prefix}/{name}"))
        return f"{self._prefix}/{name}"

    def over_axes(self, kind: str, value: str, axes: list[int], output: str, **attributes: Any) -> str:
        """A Squeeze, Unsqueeze or reduction, whose axes were an attribute before some opset."""
        if self.opset < (18 if kind in ("ReduceMean", "ReduceMax") else 13):
            return self.node(kind, [value], output, axes=axes, **attributes)
        axes_name = self.constant(f"axes{len(self.nodes)}", np.array(axes, np.int64))
        return self.node(kind, [value, axes_name], output, **attributes)

    def reversal(self, value: str, axis: int, output: str) -> str:
        """A value from behind along an axis."""
        position = len(self.nodes)
        bounds = [
            self.constant(f"{name}{position}", np.array([number], np.int64))
            for name, number in (("start", -1), ("end", -(2**62)), ("axis", axis), ("step", -1))
        ]
        return self.node("Slice", [value, *bounds], output)


def rewrite_nodes(model: onnx.ModelProto, rewrite: Callable[[onnx.NodeProto, Inserter, Types], bool]) -> None:
    """Let `rewrite` replace nodes of the graph and of all bodies; it says whether it did."""
    opset = opset_of(model)

    def visit(graph: onnx.GraphProto, inferred: onnx.GraphProto, outer: Types) -> None:
        # A body reads values of the graphs around it.
        types = {**outer, **types_of(inferred)}
        add, nodes = Inserter(graph, opset), []
        for node, twin in zip(graph.node, inferred.node):
            for body, inferred_body in zip(inner_graphs(node), inner_graphs(twin)):
                visit(body, inferred_body, types)
            add.begin(node)
            nodes += add.nodes if not node.domain and rewrite(node, add, types) else [node]
        set_nodes(graph, nodes)

    # inference copies the model, so that its nodes keep the order of the ones that are replaced
    visit(model.graph, onnx.shape_inference.infer_shapes(model).graph, {})


def types_of(graph: onnx.GraphProto) -> Types:
    types = {v.name: v.type.tensor_type for v in [*graph.value_info, *graph.input, *graph.output]}
    for tensor in graph.initializer:
        value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        types[tensor.name] = value.type.tensor_type
    return types


def static_shape(types: Types, name: str, *, first: int = 0) -> list[int] | None:
    """A shape from an axis on, where every size of it is known."""
    if not has_rank(types, name):
        return None
    dims = types[name].shape.dim[first:]
    return [dim.dim_value for dim in dims] if all(dim.HasField("dim_value") for dim in dims) else None


def has_rank(types: Types, name: str) -> bool:
    return name in types and types[name].HasField("shape")
