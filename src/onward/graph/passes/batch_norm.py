"""Expands training-mode batch norm: onnxruntime's CUDA provider has no kernel for opset 14 or later."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

__all__ = ["expand_batch_norm"]


def expand_batch_norm(model: onnx.ModelProto) -> None:
    """Replace each training-mode BatchNormalization by its statistics and inference mode; in place.

    Mean and variance of the batch over all axes but 1, y by inference mode with them, and the running
    statistics momentum·input + (1 − momentum)·batch.
    """
    graph = model.graph
    if not any(_trains(node) for node in graph.node):
        return
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    ranks, kinds = _ranks_and_types(model)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if _trains(node) and ranks.get(node.input[0]):
            nodes += _expand(graph, node, ranks[node.input[0]], kinds, opset)
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _trains(node: onnx.NodeProto) -> bool:
    return (
        node.op_type == "BatchNormalization" and not node.domain and _attribute(node, "training_mode", 0) == 1
    )


def _attribute(node: onnx.NodeProto, name: str, default: float) -> float:
    found = next((a for a in node.attribute if a.name == name), None)
    return default if found is None else onnx.helper.get_attribute_value(found)


def _expand(
    graph: onnx.GraphProto, node: onnx.NodeProto, rank: int, kinds: dict[str, int], opset: int
) -> list[onnx.NodeProto]:
    x, scale, bias, mean_in, var_in = node.input
    y = node.output[0]
    running = [*node.output[1:], "", ""][:2]
    momentum = _attribute(node, "momentum", 0.9)
    made: list[onnx.NodeProto] = []

    def constant(name: str, array: np.ndarray) -> str:
        graph.initializer.append(onnx.numpy_helper.from_array(array, f"{y}/{name}"))
        return f"{y}/{name}"

    def add(kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        made.append(onnx.helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    axes = [axis for axis in range(rank) if axis != 1]

    def average(value: str, output: str) -> str:
        if opset < 18:
            return add("ReduceMean", [value], output, keepdims=1, axes=axes)
        return add(
            "ReduceMean", [value, constant(f"axes{len(made)}", np.array(axes, np.int64))], output, keepdims=1
        )

    channels = constant("channels", np.array([-1], np.int64))
    # with momentum 0 the running statistics are the batch's own
    own = [
        name if name and momentum == 0.0 else f"{y}/{what}" for name, what in zip(running, ("mean", "var"))
    ]
    mean = average(x, f"{y}/mean_kept")
    centred = add("Sub", [x, mean], f"{y}/centred")
    square = add("Mul", [centred, centred], f"{y}/square")
    var = average(square, f"{y}/var_kept")
    kinds_of = kinds.get(mean_in, onnx.TensorProto.FLOAT), kinds.get(x, onnx.TensorProto.FLOAT)
    for kept, name in ((mean, own[0]), (var, own[1])):
        if kinds_of[0] == kinds_of[1]:
            add("Reshape", [kept, channels], name)
        else:
            add("Cast", [add("Reshape", [kept, channels], f"{name}/narrow")], name, to=kinds_of[0])
    add("BatchNormalization", [x, scale, bias, *own], y, epsilon=_attribute(node, "epsilon", 1e-5))
    if momentum != 0.0:
        kind = onnx.helper.tensor_dtype_to_np_dtype(kinds_of[0])
        for old, batch, name in zip((mean_in, var_in), own, running):
            if name:
                kept = add(
                    "Mul", [old, constant("momentum" + name, np.array(momentum, kind))], f"{name}/kept"
                )
                fresh = add(
                    "Mul", [batch, constant("rest" + name, np.array(1 - momentum, kind))], f"{name}/fresh"
                )
                add("Add", [kept, fresh], name)
    return made


def _ranks_and_types(model: onnx.ModelProto) -> tuple[dict[str, int], dict[str, int]]:
    inferred = onnx.shape_inference.infer_shapes(model).graph
    kinds = {tensor.name: tensor.data_type for tensor in inferred.initializer}
    ranks = {tensor.name: len(tensor.dims) for tensor in inferred.initializer}
    for value in [*inferred.value_info, *inferred.input, *inferred.output]:
        tensor = value.type.tensor_type
        kinds[value.name] = tensor.elem_type
        if tensor.HasField("shape"):
            ranks[value.name] = len(tensor.shape.dim)
    return ranks, kinds
