"""Converts a model from training mode to inference mode.

Dropout becomes the identity, batch norm uses its running statistics, and stochastic depth (branches dropped at
random, as exporters write it in elementary operators) is replaced by its mean, as are the random slopes of RReLU.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused
from onward.graph.nodes import attribute, is_used, producer_of, required_input, single_number, subgraphs_of

_UNIFORM = ("RandomUniform", "RandomUniformLike")


def to_inference(model: ir.Model, *, keep_dropout: bool = False) -> ir.Model:
    """Convert a model in place to inference mode; returns it.

    `keep_dropout` keeps Dropout nodes, with training mode off.
    """
    _walk(Builder(model.graph), model.graph, keep_dropout)
    return remove_unused(model)


def freeze_statistics(model: ir.Model) -> None:
    """Make every batch norm of the main graph use its running statistics; nothing else changes."""
    op = Builder(model.graph)
    for node in list(model.graph):
        if node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode", 0):
            op.before = node
            _freeze_statistics(op, node)


def _walk(op: Builder, graph: ir.Graph, keep_dropout: bool) -> None:
    for node in list(graph):  # first: the dropout within it must still be there
        if node.op_type == "Add":
            op.before = node
            _remove_alpha_dropout(op, node)
    for node in list(graph):
        for inner in subgraphs_of(node):
            _walk(Builder(inner, parent=op), inner, keep_dropout)
        op.before = node
        if node.op_type == "Dropout" and node.domain == "":
            if not keep_dropout:
                _remove_dropout(op, node)
            elif len(node.inputs) > 2:  # training mode is off where the input is left out
                node.replace_input_with(2, None)
        elif node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode", 0):
            _freeze_statistics(op, node)
        elif node.op_type == "Mul":
            _remove_drop_path(op, node)
        elif node.op_type == "PRelu":
            _fix_slopes(op, node)
    op.before = None


def _remove_dropout(op: Builder, node: ir.Node) -> None:
    source = required_input(node)
    if is_used(node, 1):
        ones = op.Expand(np.ones((1,), np.bool_), op.shape(source))
        _replace_uses(op, node.outputs[1], ones)
    _replace_uses(op, node.outputs[0], source)
    op.graph.remove(node, safe=True)


def _remove_alpha_dropout(op: Builder, node: ir.Node) -> None:
    """Where(Dropout(1) > 0, x, α)·a + b, with the a and b that keep mean and variance at this rate: x"""
    scaled = producer_of(node.inputs[0], "Mul")
    chosen = None if scaled is None else producer_of(scaled.inputs[0], "Where")
    condition = None if chosen is None else producer_of(chosen.inputs[0], "Greater")
    dropout = None if condition is None else producer_of(condition.inputs[0], "Dropout")
    if scaled is None or chosen is None or dropout is None:
        return
    scale, shift, alpha = (_number(value) for value in (scaled.inputs[1], node.inputs[1], chosen.inputs[2]))
    ratio = _number(dropout.inputs[1]) if len(dropout.inputs) > 1 else 0.5
    if scale is None or shift is None or alpha is None or ratio is None:
        return
    # AlphaDropout's constants: only with these is it the identity on average.
    expected_scale = ((1 - ratio) * (1 + ratio * alpha**2)) ** -0.5
    if np.allclose([scale, shift], [expected_scale, -expected_scale * alpha * ratio], rtol=1e-4):
        _replace_uses(op, node.outputs[0], required_input(chosen, 1))
        op.graph.remove(node, safe=True)


def _fix_slopes(op: Builder, node: ir.Node) -> None:
    """Slopes drawn between two numbers: the middle of both, as RReLU has in eval mode."""
    drawn = producer_of(node.inputs[1], *_UNIFORM)
    if drawn is None:
        return
    low, high = drawn.attributes.get_float("low", 0.0), drawn.attributes.get_float("high", 1.0)
    _replace_uses(op, node.outputs[0], op.LeakyRelu(required_input(node), alpha=(low + high) / 2))
    op.graph.remove(node, safe=True)


def _freeze_statistics(op: Builder, node: ir.Node) -> None:
    """The running statistics are read, and come out as they went in."""
    for output, current in zip(node.outputs[1:3], node.inputs[3:5]):
        if current is not None:
            _replace_uses(op, output, current)
    node.attributes["training_mode"] = ir.AttrInt64("training_mode", 0)
    node.resize_outputs(1)


def _remove_drop_path(op: Builder, node: ir.Node) -> None:
    """x/k·mask or x·mask/k with a mask that is 1 with probability k: x on average."""
    # Either factor may be the mask.
    for branch, noise in (node.inputs, reversed(node.inputs)):
        if branch is None or noise is None:
            continue
        mean = _mean(noise)
        if mean is None:
            continue
        divided = producer_of(branch, "Div") if mean != 1.0 else None
        divisor = None if divided is None else _number(divided.inputs[1])
        if divided is not None and divisor is not None and np.isclose(divisor, mean, rtol=1e-6):
            branch, mean = required_input(divided), 1.0
        if not np.isclose(mean, 1.0, rtol=1e-6):
            branch = op.Mul(branch, op.constant_like(mean, branch))
        _replace_uses(op, node.outputs[0], branch)
        op.graph.remove(node, safe=True)
        return


def _mean(value: ir.Value | None) -> float | None:
    """The mean of a random mask; None for anything that is not one."""
    node = producer_of(value)
    if node is None or node.domain != "":
        return None
    match node.op_type:
        case "Cast" | "CastLike" | "Identity" | "Reshape" | "Expand" | "Unsqueeze":
            return _mean(node.inputs[0])
        case "Div":
            mean, divisor = _mean(node.inputs[0]), _number(node.inputs[1])
            return None if mean is None or divisor is None else mean / divisor
        case "Bernoulli":
            return _number(node.inputs[0])
        case "Floor":  # floor(k + u) is 1 with probability k
            added = producer_of(node.inputs[0], "Add")
            terms = () if added is None else (added.inputs, added.inputs[::-1])
            return next((_share(_number(keep)) for uniform, keep in terms if _is_uniform(uniform)), None)
        case "Less" | "LessOrEqual":
            return _share(_number(node.inputs[1])) if _is_uniform(node.inputs[0]) else None
        case "Greater" | "GreaterOrEqual":
            return _share(_number(node.inputs[0])) if _is_uniform(node.inputs[1]) else None
        case _:
            return None


def _share(number: float | None) -> float | None:
    return number if number is not None and 0.0 < number <= 1.0 else None


def _is_uniform(value: ir.Value | None) -> bool:
    node = producer_of(value, *_UNIFORM)
    return (
        node is not None
        and node.attributes.get_float("low", 0.0) == 0.0
        and node.attributes.get_float("high", 1.0) == 1.0
    )


def _number(value: ir.Value | None) -> float | None:
    """A constant that is the same number everywhere."""
    if (node := producer_of(value, "Expand", "Cast", "CastLike", "Identity")) is not None:
        return _number(node.inputs[0])
    if (node := producer_of(value, "ConstantOfShape")) is not None:
        tensor = attribute(node, "value")
        return 0.0 if tensor is None else float(tensor.numpy().reshape(-1)[0])
    return None if value is None or value.is_graph_input() else single_number(value)


def _replace_uses(op: Builder, old: ir.Value, new: ir.Value) -> None:
    """Everyone reads `new` instead; a graph output keeps its name."""
    if old.is_graph_output():
        name, old.name = old.name, None
        new = op.Identity(new)
        new.name = name
        new.shape = new.shape if old.shape is None else old.shape
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
