"""Prepares a forward graph, so that a gradient rule needs to look at its own node only.

Knows what lies around a node; rules do not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import onnx_ir as ir
from numpy.polynomial import Polynomial

from onward.graph.builder import Builder
from onward.graph.nodes import GRADIENT, MASKED, is_used, nodes_within, only_user, producer_of


def prepare(graph: ir.Graph, targets: Collection[ir.Value]) -> None:
    """Mark and rewrite forward nodes whose gradient depends on their neighbours; `targets` are differentiated."""
    for node in nodes_within(graph):
        if node.domain not in ("", "ai.onnx"):
            continue
        # torch writes attention without a key as NaN, and a Where behind it that puts zero there.
        if node.op_type == "Softmax" and _is_replaced(node.outputs[0]):
            node.metadata_props[GRADIENT] = MASKED
        elif node.op_type == "SoftmaxCrossEntropyLoss" and len(node.outputs) > 1:
            # An unused second output would be kept for a gradient that never arrives.
            if not is_used(node, 1) and node.outputs[1] not in targets:
                node.resize_outputs(1)
        elif node.op_type == "ConcatFromSequence":
            _join_tensors(node)


def _is_replaced(value: ir.Value) -> bool:
    """Whether the model puts something else in place of parts of a value."""
    return any(
        user.op_type == "Where"
        or (user.op_type in ("Cast", "CastLike", "Identity") and _is_replaced(user.outputs[0]))
        for user in value.consumers()
    )


def _join_tensors(node: ir.Node) -> None:
    """ConcatFromSequence(SequenceConstruct(a, b, …))   →   Concat(a, b, …): its gradient needs no sequence."""
    construct = producer_of(node.inputs[0], "SequenceConstruct")
    # With a new axis it is a stack, which Concat is not.
    if construct is None or node.attributes.get_int("new_axis", 0):
        return
    node.op_type = "Concat"
    node.attributes.pop("new_axis", None)
    node.resize_inputs(len(construct.inputs))
    for index, part in enumerate(construct.inputs):
        node.replace_input_with(index, part)


# --- Fuses Gelu that exporters decompose into elementary operators: its gradient is cheaper than those of its parts.


# What Gelu reads of x, as coefficients of x, x², x³, and the form of Gelu that has it.
_ARGUMENTS = {
    "Erf": ((math.sqrt(0.5), 0.0, 0.0), None),
    "Tanh": ((math.sqrt(2 / math.pi), 0.0, 0.044715 * math.sqrt(2 / math.pi)), "tanh"),
}


def fuse_gelu(model: ir.Model) -> int:
    """½·x·(1 + erf(x/√2)) and ½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), in whichever order, become Gelu.

    Its gradient needs x alone, where the parts would keep several tensors of x's size until the backward
    pass. Gelu exists since opset 20. Returns how many were found.
    """
    graph = model.graph
    # Gelu is an operator since opset 20.
    if graph.opset_imports.get("", 0) < 20:
        return 0
    op = Builder(graph)
    count = 0
    for node in [node for node in graph if node.op_type in _ARGUMENTS and node.domain == ""]:
        coefficients, form = _ARGUMENTS[node.op_type]
        for x, last in _candidates(op, node):
            if not _has_coefficients(_polynomial(op, node.inputs[0], x), coefficients):
                continue
            result = last.outputs[0]
            with op.inserting(last, node.name or node.op_type):
                fused = op.Gelu(x, approximate=form)
            fused.type, fused.shape = result.type, result.shape
            if result.is_graph_output():
                fused.name, result.name = result.name, op.namer(f"{result.name}.parts")
            ir.convenience.replace_all_uses_with(result, fused, replace_graph_outputs=True)
            count += 1
            break
    return count


def _candidates(op: Builder, node: ir.Node) -> Iterator[tuple[ir.Value, ir.Node]]:
    """What x may be in ½·x·(1 + node), and the last node of that."""
    plus_one = only_user(node.outputs[0], "Add")
    first = None if plus_one is None else only_user(plus_one.outputs[0], "Mul")
    if plus_one is None or first is None or _constant(op, plus_one) != 1.0:
        return
    second = only_user(first.outputs[0], "Mul")
    other = _other(first, plus_one.outputs[0])
    if second is not None:
        factor = _other(second, first.outputs[0])
        if _constant(op, second) == 0.5 and other is not None:
            yield other, second  # (x·(1 + …))·½
        if _constant(op, first) == 0.5 and factor is not None:
            yield factor, second  # x·((1 + …)·½)
    x = _scaled_by(op, producer_of(other, "Mul", "Div"), 0.5)
    if x is not None:
        yield x, first  # (x·½)·(1 + …)


def _other(node: ir.Node, value: ir.Value) -> ir.Value | None:
    return next((operand for operand in node.inputs if operand is not value), None)


def _polynomial(op: Builder, value: ir.Value | None, x: ir.Value, depth: int = 8) -> Polynomial | None:
    """A value as a polynomial in x; None where it is something else, or of a high degree."""
    if value is x:
        return Polynomial([0.0, 1.0])
    constant = op.const_value(value)
    if constant is not None:
        return Polynomial([float(np.ravel(constant)[0])]) if constant.size == 1 else None
    node = producer_of(value, "Add", "Sub", "Mul", "Div", "Pow")
    if node is None or depth == 0:
        return None
    a, b = (_polynomial(op, part, x, depth - 1) for part in node.inputs)
    if a is None or b is None:
        return None
    if node.op_type in ("Add", "Sub"):
        return a + b if node.op_type == "Add" else a - b
    if node.op_type == "Mul":
        return a * b if a.degree() + b.degree() <= 3 else None
    number = b.coef[0] if b.degree() == 0 else 0.0
    if node.op_type == "Div":
        return a / number if number else None
    return a ** int(number) if number in (1.0, 2.0, 3.0) and a.degree() * number <= 3 else None


def _has_coefficients(polynomial: Polynomial | None, expected: Sequence[float]) -> bool:
    """Whether a polynomial without a constant term has (about) these coefficients."""
    if polynomial is None or polynomial.degree() > len(expected):
        return False
    actual = np.zeros(len(expected) + 1)
    actual[: len(polynomial.coef)] = polynomial.coef
    # Exporters write √2 and √(2/π) with as few digits as float32 or the original source have.
    return bool(np.allclose(actual, [0.0, *expected], rtol=1e-4, atol=1e-7))


def _scaled_by(op: Builder, node: ir.Node | None, factor: float) -> ir.Value | None:
    """x where a node computes x times (about) the factor, as a product or a quotient."""
    number = None if node is None else _constant(op, node)
    if node is None or not number:
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
