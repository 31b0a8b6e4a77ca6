"""Replaces an If whose condition is known before the model runs by the branch that is taken.

Exporters and operator definitions ask for ranks and sizes that the model's types already tell; the branch that
is never taken then hides the types of what follows. Evaluates only small integers and booleans.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.graph.nodes import subgraphs_of

__all__ = ["resolve_branches"]

# Operators between a shape and a condition; numpy computes each.
_EVALUATE = {
    "Identity": lambda x: x,
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Not": np.logical_not,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
}
_SMALL = 64


def resolve_branches(model: ir.Model) -> bool:
    """Put the branch in the place of each If whose condition is known; says whether there was one.

    Types and shapes must be inferred; where this returns True, inferring again finds more.
    """
    return _resolve(model.graph)


def _resolve(graph: ir.Graph) -> bool:
    changed = False
    for node in list(graph):
        if node.op_type == "If" and node.domain in ("", "ai.onnx"):
            condition = _value_of(node.inputs[0])
            if condition is not None and condition.size == 1:
                _take(graph, node, "then_branch" if condition.item() else "else_branch")
                changed = True
                continue
        for body in subgraphs_of(node):
            changed = _resolve(body) or changed
    return changed


def _take(graph: ir.Graph, node: ir.Node, name: str) -> None:
    branch = node.attributes[name].as_graph()
    results = list(branch.outputs)
    branch.outputs.clear()
    for initializer in list(branch.initializers.values()):
        branch.initializers.pop(initializer.name or "")
        graph.register_initializer(initializer)
    for inner in list(branch):
        branch.remove(inner)
        graph.insert_before(node, inner)
    for outer, result in zip(node.outputs, results):
        copy = ir.Node("", "Identity", [result], num_outputs=1, name=f"{node.name}/{outer.name}")
        value = copy.outputs[0]
        value.type, value.shape = outer.type, outer.shape
        graph.insert_before(node, copy)
        ir.convenience.replace_all_uses_with(outer, value, replace_graph_outputs=True)
        value.name = outer.name
    graph.remove(node, safe=True)


def _value_of(value: ir.Value | None) -> np.ndarray | None:
    """The numbers in a value, if they are few and known before the model runs."""
    if value is None or value.is_graph_input():
        return None
    if value.const_value is not None:
        return value.const_value.numpy() if value.const_value.size <= _SMALL else None
    node = value.producer()
    if node is None or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type in ("Shape", "Size"):
        return _measured(node)
    function = _EVALUATE.get(node.op_type)
    if function is None:
        return None
    inputs = [_value_of(x) for x in node.inputs]
    known = [x for x in inputs if x is not None and x.dtype.kind in "iub"]
    return np.asarray(function(*known)) if len(known) == len(inputs) else None


def _measured(node: ir.Node) -> np.ndarray | None:
    source = node.inputs[0]
    shape = None if source is None else source.shape
    if shape is None or not all(isinstance(dim, int) for dim in shape):
        return None
    dims = np.asarray(list(shape), np.int64)
    if node.op_type == "Size":
        return np.asarray(dims.prod(), np.int64)
    end = node.attributes.get_int("end", None)
    return dims[node.attributes.get_int("start", 0) or 0 : end]
