"""Operators that exporters spell out, recognised and put together again.

Only where the whole has a gradient that is cheaper than those of its parts.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onward.graph.builder import Builder

__all__ = ["fuse_gelu"]


def fuse_gelu(model: ir.Model) -> int:
    """½·x·(1 + erf(x/√2)), in whichever order it was multiplied, becomes Gelu; returns how many were found.

    Its gradient needs x alone, where the parts would keep three more tensors of x's size until the backward
    pass. Gelu exists since opset 20.
    """
    graph = model.graph
    if graph.opset_imports.get("", 0) < 20:
        return 0
    op = Builder(graph)
    count = 0
    for node in [node for node in graph if node.op_type == "Erf" and node.domain == ""]:
        found = _match(op, node)
        if found is None:
            continue
        x, result, last = found
        op.before, op.scope = last, node.name or "Erf"
        fused = op.Gelu(x)
        fused.type, fused.shape = result.type, result.shape
        if result.is_graph_output():
            fused.name, result.name = result.name, op.namer(f"{result.name}.parts")
        ir.convenience.replace_all_uses_with(result, fused, replace_graph_outputs=True)
        count += 1
    return count


def _match(op: Builder, erf: ir.Node) -> tuple[ir.Value, ir.Value, ir.Node] | None:
    """x, the value that is gelu(x), and the node that computes it."""
    scaled = erf.inputs[0]
    assert scaled is not None
    x = _scaled_by(op, scaled.producer(), math.sqrt(0.5))
    plus_one = _only_user(erf.outputs[0])
    if x is None or plus_one is None or plus_one.op_type != "Add" or _constant(op, plus_one) != 1.0:
        return None
    first = _only_user(plus_one.outputs[0])
    if first is None or first.op_type != "Mul":
        return None
    second = _only_user(first.outputs[0])
    other = next((value for value in first.inputs if value is not plus_one.outputs[0]), None)
    if other is x and second is not None and second.op_type == "Mul" and _constant(op, second) == 0.5:
        return x, second.outputs[0], second  # (x·(1 + erf))·½
    if _constant(op, first) == 0.5 and second is not None and second.op_type == "Mul" and x in second.inputs:
        return x, second.outputs[0], second  # x·((1 + erf)·½)
    if other is not None and _scaled_by(op, other.producer(), 0.5) is x:
        return x, first.outputs[0], first  # (x·½)·(1 + erf)
    return None


def _scaled_by(op: Builder, node: ir.Node | None, factor: float) -> ir.Value | None:
    """x where a node computes x times (about) the factor, as a product or a quotient."""
    if node is None or node.op_type not in ("Mul", "Div") or len(node.inputs) != 2:
        return None
    number = _constant(op, node)
    if number is None or number == 0:
        return None
    if node.op_type == "Div":
        number = 1.0 / number if op.const_value(node.inputs[1]) is not None else math.nan
    values = [value for value in node.inputs if op.const_value(value) is None]
    return values[0] if len(values) == 1 and abs(number - factor) < 1e-4 * factor else None


def _constant(op: Builder, node: ir.Node) -> float | None:
    """The number that a node combines a value with, where it is one number."""
    for value in node.inputs:
        array = op.const_value(value)
        if array is not None:
            return float(np.ravel(array)[0]) if array.size == 1 else None
    return None


def _only_user(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None
