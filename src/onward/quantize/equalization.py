"""Rewrites the float model before it is quantized: batch norms go into convolutions, channels are balanced.

Neither changes what the model computes. A convolution has one integer kernel, and a batch norm behind it has none:
its factors belong into the weights before these are rounded. Balancing (Nagel et al., 2019) moves a factor for each
channel from one convolution into the next, where a few large channels would leave the others few levels.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused
from onward.graph.nodes import attribute, optional_input

# Behind these a positive factor may be moved: f(s·x) = s·f(x).
_HOMOGENEOUS = frozenset({"Relu", "LeakyRelu"})


def fold_batch_norms(model: ir.Model) -> int:
    """Fold batch norms that use their running statistics into the convolutions before them; returns how many.

    γ·(W·x + b − μ)/√(σ² + ε) + β = (W·γ/√…)·x + (b − μ)·γ/√… + β, under the names of the weight and of b, or of β.
    """
    op, count = Builder(model.graph), 0
    for node in list(model.graph):
        if node.op_type != "BatchNormalization" or attribute(node, "training_mode", 0) or node.domain != "":
            continue
        conv = None if node.inputs[0] is None else node.inputs[0].producer()
        if conv is None or conv.op_type != "Conv" or not _is_own(conv.outputs[0]):
            continue
        weight, bias = _array(conv.inputs[1]), _array(optional_input(conv, 2))
        numbers = [_array(value) for value in node.inputs[1:5]]
        if weight is None or any(array is None for array in numbers):
            continue
        if optional_input(conv, 2) is not None and bias is None:
            continue
        gamma, beta, mean, variance = (array.astype(np.float64) for array in numbers if array is not None)
        factor = gamma / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
        shifted = ((0 if bias is None else bias) - mean) * factor + beta
        _set(conv.inputs[1], weight * factor.reshape(-1, *[1] * (weight.ndim - 1)))
        target = optional_input(conv, 2) if bias is not None else node.inputs[2]
        if target is None or len(target.uses()) > 1:  # another layer reads it as it is
            target = op.constant(shifted.astype(np.float32), name=f"{conv.name or 'conv'}.bias")
        _set(target, shifted)
        conv.resize_inputs(3)
        conv.replace_input_with(2, target)
        result, source = node.outputs[0], conv.outputs[0]
        name, shape = result.name, result.shape
        ir.convenience.replace_all_uses_with(result, source, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        source.name, source.shape = name, shape
        count += 1
    if count:
        remove_unused(model)
    return count


def equalize_channels(model: ir.Model) -> int:
    """Balance the channels of convolutions that follow one another; returns how many pairs changed.

    A channel with ranges r₁ in the first weight and r₂ in the second is divided by √(r₁/r₂) in the first and
    multiplied by it in the second, so that both have √(r₁·r₂).
    """
    count = 0
    for node in model.graph:
        following = _next_convolution(node)
        if following is None:
            continue
        first, second, bias = (
            _array(node.inputs[1]), _array(following.inputs[1]), _array(optional_input(node, 2)),
        )  # fmt: skip
        if first is None or second is None or (bias is None and optional_input(node, 2) is not None):
            continue
        depthwise = attribute(following, "group", 1) == len(first) and second.shape[1] == 1
        if not depthwise and (attribute(following, "group", 1) != 1 or second.shape[1] != len(first)):
            continue
        axis = 0 if depthwise else 1
        if depthwise and len(second) != len(first):
            continue
        ranges = _channel_ranges(first, 0), _channel_ranges(second, axis)
        dead = (ranges[0] == 0) | (ranges[1] == 0)
        factor = np.sqrt(np.where(dead, 1, ranges[0]) / np.where(dead, 1, ranges[1]))
        _set(node.inputs[1], first / factor.reshape(-1, *[1] * (first.ndim - 1)))
        if bias is not None:
            _set(node.inputs[2], bias / factor)
        shape = [1] * second.ndim
        shape[axis] = -1
        _set(following.inputs[1], second * factor.reshape(shape))
        count += 1
    return count


def _next_convolution(node: ir.Node) -> ir.Node | None:
    """The convolution that alone reads a convolution's result, directly or behind a Relu."""
    if node.op_type != "Conv" or node.domain != "" or not _is_own(node.outputs[0]):
        return None
    reader = next(iter(node.outputs[0].consumers()))
    if reader.op_type in _HOMOGENEOUS and _is_own(reader.outputs[0]):
        reader = next(iter(reader.outputs[0].consumers()))
    return reader if reader.op_type == "Conv" and reader is not node else None


def _channel_ranges(weight: np.ndarray, axis: int) -> np.ndarray:
    return np.abs(weight).max(axis=tuple(index for index in range(weight.ndim) if index != axis))


def _is_own(value: ir.Value) -> bool:
    """Whether one node reads a value, once, and nothing else does."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def _array(value: ir.Value | None) -> np.ndarray | None:
    """The numbers of an initializer that one node alone reads; a shared one would change for the others too."""
    if value is None or not value.is_initializer() or value.is_graph_input() or value.const_value is None:
        return None
    if len(value.consumers()) > 1 and value.const_value.shape.rank() > 1:
        return None
    return value.const_value.numpy()


def _set(value: ir.Value | None, array: np.ndarray) -> None:
    assert value is not None
    value.const_value = ir.tensor(array.astype(np.float32), name=value.name)
