"""Dead code elimination, constant folding and common-subexpression elimination.

Trainable values are initializers like any other constant, so floating
initializers are folded or merged only if the caller says which ones are parameters.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from onward.graph.compute import COMPUTABLE, compute
from onward.graph.dialect.fold import replace_by_constants
from onward.graph.nodes import computation_key, nodes_within, subgraphs_of

__all__ = [
    "fold_constants",
    "remove_identities",
    "remove_unused",
    "share_constants",
    "share_subexpressions",
    "simplify",
]

# Shapes, axes and pads; nothing that takes noticeable space in a file.
_SMALL = 1024


def remove_unused(model: ir.Model) -> ir.Model:
    """Drop nodes, initializers and opset imports that no output needs; inputs stay."""
    passes.RemoveUnusedNodesPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    return model


def remove_identities(model: ir.Model) -> ir.Model:
    """Remove Identity nodes; outputs keep their names.

    An Identity stays where a graph's output would otherwise be an input, an initializer, a value of a graph
    around, or the same value as another output.
    """
    for node in nodes_within(model.graph):
        if node.op_type != "Identity" or node.domain not in ("", "ai.onnx"):
            continue
        source, result = node.inputs[0], node.outputs[0]
        if source is None or node.graph is None:
            continue
        if not result.is_graph_output():
            ir.convenience.replace_all_uses_with(result, source)
            node.graph.remove(node, safe=True)
            continue
        producer = source.producer()
        if producer is None or producer.graph is not node.graph or source.is_graph_output():
            continue
        name, kind, shape = result.name, result.type, result.shape
        ir.convenience.replace_all_uses_with(result, source, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)
        source.name = name
        source.type = source.type or kind
        source.shape = source.shape if shape is None else shape
    return model


def simplify(model: ir.Model, *, parameters: Collection[str] | None = None) -> ir.Model:
    """Fold constants, merge equal nodes and remove dead code, without changing a result.

    `parameters` names the initializers that may change later; without it, every floating one may.
    """
    fold_constants(model)
    remove_identities(model)
    share_constants(model, parameters=parameters)
    share_subexpressions(model)
    return remove_unused(model)


def fold_constants(model: ir.Model) -> ir.Model:
    """Compute shape arithmetic now: sizes that are known, and what follows from them alone."""
    _fold(model.graph, model.graph, set())
    return model


def _fold(root: ir.Graph, graph: ir.Graph, known: set[ir.Value]) -> None:
    for node in list(graph):
        for inner in subgraphs_of(node):
            _fold(root, inner, known)
        results = _computed(node, known)
        if results is None:
            continue
        known.update(replace_by_constants(root, node, results))


def _computed(node: ir.Node, known: set[ir.Value]) -> list[np.ndarray] | None:
    """The outputs of a node whose inputs are known now; None where they are not, or are none of ours."""
    if node.domain != "" or (node.op_type not in COMPUTABLE and node.op_type not in ("Shape", "Size")):
        return None
    if any(value.is_graph_output() for value in node.outputs):
        return None
    if node.op_type in ("Shape", "Size"):
        dims = _static(node.inputs[0], node)
        return None if dims is None else [dims]
    feeds: list[np.ndarray | None] = []
    for value in node.inputs:
        if value is None:
            feeds.append(None)
            continue
        tensor = value.const_value
        if tensor is None or value.is_graph_input() or not value.is_initializer() or tensor.size > _SMALL:
            return None
        # A float that was not computed here may be a parameter.
        if value not in known and tensor.dtype.is_floating_point():
            return None
        feeds.append(tensor.numpy())
    for value in node.outputs:
        size = 1
        for dim in [_SMALL + 1] if value.shape is None else value.shape:
            size *= dim if isinstance(dim, int) else _SMALL + 1
        if size > _SMALL:
            return None
    return compute(node.op_type, {name: attr.value for name, attr in node.attributes.items()}, feeds)


def _static(value: ir.Value | None, node: ir.Node) -> np.ndarray | None:
    if value is None or value.shape is None:
        return None
    dims = list(value.shape)
    if node.op_type == "Shape":
        dims = dims[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)]
    sizes = [dim for dim in dims if isinstance(dim, int)]
    if len(sizes) != len(dims):
        return None
    return np.asarray(sizes if node.op_type == "Shape" else math.prod(sizes), np.int64)


def share_constants(model: ir.Model, *, parameters: Collection[str] | None = None) -> ir.Model:
    """Keep one of equal small constants; never one in the place of a parameter."""
    found: dict[tuple, ir.Value] = {}
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.size > _SMALL or value.is_graph_input() or value.is_graph_output():
            continue
        if tensor.dtype.is_floating_point() if parameters is None else name in parameters:
            continue
        if tensor.dtype == ir.DataType.STRING:
            continue
        first = found.setdefault((tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes()), value)
        if first is not value:
            ir.convenience.replace_all_uses_with(value, first)
            del model.graph.initializers[name]
    return model


def share_subexpressions(model: ir.Model) -> ir.Model:
    """Common-subexpression elimination; random operators and subgraphs are not changed."""
    _share(model.graph, {})
    return model


def _share(graph: ir.Graph, outer: dict[tuple, ir.Node]) -> None:
    found = dict(outer)
    for node in list(graph):
        for inner in subgraphs_of(node):
            _share(inner, found)
        key = computation_key(node)
        if key is None:
            continue
        first = found.setdefault(key, node)
        if first is node or any(value.is_graph_output() for value in node.outputs):
            continue
        if any(bool(a.name) != bool(b.name) for a, b in zip(first.outputs, node.outputs)):
            continue
        ir.convenience.replace_all_uses_with(list(node.outputs), list(first.outputs))
        graph.remove(node, safe=True)
