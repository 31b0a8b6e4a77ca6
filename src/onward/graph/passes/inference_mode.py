"""Converts a model from training mode to inference mode.

Dropout becomes the identity, batch norm uses its running statistics, and stochastic depth (branches dropped at
random, as exporters write it in elementary operators) is replaced by its mean, as are the random slopes of RReLU.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused
from onward.graph.nodes import subgraphs_of

__all__ = ["freeze_statistics", "to_inference"]

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
            elif len(node.inputs) > 2:
                node.replace_input_with(2, None)
        elif node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode", 0):
            _freeze_statistics(op, node)
        elif node.op_type == "Mul":
            _remove_drop_path(op, node)
        elif node.op_type == "PRelu":
            _fix_slopes(op, node)
    op.before = None


def _remove_dropout(op: Builder, node: ir.Node) -> None:
    source = node.inputs[0]
    assert source is not None
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        ones = op.Expand(np.ones((1,), np.bool_), op.shape(source))
        _pass_on(op, node.outputs[1], ones)
    _pass_on(op, node.outputs[0], source)
    op.graph.remove(node, safe=True)


def _remove_alpha_dropout(op: Builder, node: ir.Node) -> None:
    """Where(Dropout(1) > 0, x, α)·a + b, with the a and b that keep mean and variance at this rate: x"""
    scaled, shift = _producer(node.inputs[0]), _number(node.inputs[1])
    if scaled is None or scaled.op_type != "Mul" or shift is None:
        return
    chosen, scale = _producer(scaled.inputs[0]), _number(scaled.inputs[1])
    if chosen is None or chosen.op_type != "Where" or scale is None:
        return
    kept, alpha = _producer(chosen.inputs[0]), _number(chosen.inputs[2])
    dropout = _producer(kept.inputs[0]) if kept is not None and kept.op_type == "Greater" else None
    if dropout is None or dropout.op_type != "Dropout" or alpha is None:
        return
    ratio = _number(dropout.inputs[1]) if len(dropout.inputs) > 1 else 0.5
    if ratio is None:
        return
    wanted = ((1 - ratio) * (1 + ratio * alpha**2)) ** -0.5
    if np.allclose([scale, shift], [wanted, -wanted * alpha * ratio], rtol=1e-4):
        assert chosen.inputs[1] is not None
        _pass_on(op, node.outputs[0], chosen.inputs[1])
        op.graph.remove(node, safe=True)


def _fix_slopes(op: Builder, node: ir.Node) -> None:
    """Slopes drawn between two numbers: the middle of both, as RReLU has in eval mode."""
    drawn = _producer(node.inputs[1])
    if drawn is None or drawn.op_type not in _UNIFORM:
        return
    low, high = drawn.attributes.get_float("low", 0.0), drawn.attributes.get_float("high", 1.0)
    assert node.inputs[0] is not None
    _pass_on(op, node.outputs[0], op.LeakyRelu(node.inputs[0], alpha=(low + high) / 2))
    op.graph.remove(node, safe=True)


def _producer(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()


def _freeze_statistics(op: Builder, node: ir.Node) -> None:
    """The running statistics are read, and come out as they went in."""
    for output, current in zip(node.outputs[1:3], node.inputs[3:5]):
        if current is not None:
            _pass_on(op, output, current)
    node.attributes["training_mode"] = ir.AttrInt64("training_mode", 0)
    node.resize_outputs(1)


def _remove_drop_path(op: Builder, node: ir.Node) -> None:
    """x/k·mask or x·mask/k with a mask that is 1 with probability k: x on average."""
    for branch, noise in (node.inputs, reversed(node.inputs)):
        if branch is None or noise is None:
            continue
        mean = _mean(noise)
        if mean is None:
            continue
        divided = branch.producer()
        if mean != 1.0 and divided is not None and divided.op_type == "Div":
            divisor = _number(divided.inputs[1])
            if divisor is not None and np.isclose(divisor, mean, rtol=1e-6):
                assert divided.inputs[0] is not None
                branch, mean = divided.inputs[0], 1.0
        if not np.isclose(mean, 1.0, rtol=1e-6):
            branch = op.Mul(branch, op.constant_like(mean, branch))
        _pass_on(op, node.outputs[0], branch)
        op.graph.remove(node, safe=True)
        return


def _mean(value: ir.Value | None) -> float | None:
    """The mean of a random mask; None for anything that is not one."""
    node = None if value is None else value.producer()
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
            added = None if node.inputs[0] is None else node.inputs[0].producer()
            if added is None or added.op_type != "Add":
                return None
            for uniform, keep in (added.inputs, reversed(added.inputs)):
                if _is_uniform(uniform):
                    return _share(_number(keep))
            return None
        case "Less" | "LessOrEqual":
            return _share(_number(node.inputs[1])) if _is_uniform(node.inputs[0]) else None
        case "Greater" | "GreaterOrEqual":
            return _share(_number(node.inputs[0])) if _is_uniform(node.inputs[1]) else None
        case _:
            return None


def _share(number: float | None) -> float | None:
    return number if number is not None and 0.0 < number <= 1.0 else None


def _is_uniform(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    return (
        node is not None
        and node.op_type in _UNIFORM
        and node.attributes.get_float("low", 0.0) == 0.0
        and node.attributes.get_float("high", 1.0) == 1.0
    )


def _number(value: ir.Value | None) -> float | None:
    """A constant that is the same number everywhere."""
    if value is None:
        return None
    node = value.producer()
    if node is not None and node.op_type in ("Expand", "Cast", "CastLike", "Identity"):
        return _number(node.inputs[0])
    if node is not None and node.op_type == "ConstantOfShape":
        held = node.attributes.get("value")
        return 0.0 if held is None else float(held.as_tensor().numpy().reshape(-1)[0])
    tensor = value.const_value if node is None else ir.convenience.get_const_tensor(value)
    if tensor is None or value.is_graph_input() or tensor.size == 0 or tensor.size > 1:
        return None
    return float(tensor.numpy().reshape(-1)[0])


def _pass_on(op: Builder, old: ir.Value, new: ir.Value) -> None:
    """Everyone reads `new` instead; a graph output keeps its name."""
    if old.is_graph_output():
        name, old.name = old.name, None
        new = op.Identity(new)
        new.name = name
        new.shape = new.shape if old.shape is None else old.shape
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
