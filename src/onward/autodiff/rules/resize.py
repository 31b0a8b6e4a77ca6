"""The gradient of Resize, in every mode: one interpolation matrix along each axis that changes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.autodiff.forms.separable import identity, multiply
from onward.autodiff.registry import gradient_rule
from onward.errors import UnsupportedOps
from onward.graph.forms.windows import ints, ranked
from onward.graph.nodes import optional_input, required_input

# What decides where an output pixel reads; the rest of the attributes say how large the output is.
_COORDINATES = (
    "mode",
    "coordinate_transformation_mode",
    "nearest_mode",
    "cubic_coeff_a",
    "exclude_outside",
    "antialias",
)
# (coordinates, rounding) with which enlarging by a whole factor repeats each pixel that often.
_BLOCKS = {("asymmetric", "floor")} | {
    (coordinates, rounding)
    for coordinates in ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric")
    for rounding in ("round_prefer_floor", "round_prefer_ceil")
}


@gradient_rule("Resize")
def resize(op, node, dy):
    """y = x·R along each axis, R the weights of the interpolation   ⇒   dx = dy·Rᵀ"""
    x = node.inputs[0]
    dy = ranked(dy, x)
    _refuse_moving_coordinates(op, node)
    factors = _whole_factors(op, node)
    # Means of blocks times their size: the runtime has a fast AveragePool, and no matrices are needed.
    if factors is not None:
        if all(factor == 1 for factor in factors):
            return dy
        means = op.AveragePool(dy, kernel_shape=factors, strides=factors)
        return op.Mul(means, float(math.prod(factors)))
    rank = op.rank(x)
    axes = [int(axis) % rank for axis in ints(node, "axes", list(range(rank)))]
    matrices = {
        axis: _axis_matrix(op, node, axes, position)
        for position, axis in enumerate(axes)
        if not _unchanged(op, node, position, axis)
    }
    return multiply(op, dy, matrices)


def _axis_matrix(op, node: ir.Node, axes: list[int], position: int) -> ir.Value:
    """[in, out]: the identity of one axis, resized along its rows as the node resizes that axis."""
    x, roi, scales, sizes = _inputs(node)
    attributes: dict[str, Any] = {n: node.attributes[n] for n in _COORDINATES if n in node.attributes}
    # What lies outside the image is a constant there, so it has no gradient.
    attributes["extrapolation_value"] = 0.0
    crops = attributes["coordinate_transformation_mode"].as_string() == "tf_crop_and_resize"
    at = np.asarray([position], np.int64)
    basis = identity(op, op.dim(x, axes[position]), like=x)
    region = op.Gather(roi, [position, position + len(axes)]) if crops else None
    if scales is not None:
        return op.Resize(basis, region, op.Gather(scales, at), None, **attributes, axes=[1])
    policy = node.attributes.get_string("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return op.Resize(basis, region, None, op.Gather(sizes, at), **attributes, axes=[1])
    # All axes share the scale of the one that limits it. That axis comes along, so that the runtime finds
    # the same scale and rounds the same size; any of its columns is the answer.
    shape = op.Gather(op.shape(x), np.asarray(axes, np.int64))
    ratios = op.Div(op.Cast(sizes, to=ir.DataType.FLOAT), op.Cast(shape, to=ir.DataType.FLOAT))
    choose = op.ArgMin if policy == "not_larger" else op.ArgMax
    limit = choose(ratios, axis=0, keepdims=1)
    basis = op.Unsqueeze(basis, [0, 3])
    wide = op.Expand(basis, op.Concat([1, 1, 1], op.Gather(shape, limit), axis=0))
    pair = op.Concat(op.Gather(sizes, at), op.Gather(sizes, limit), axis=0)
    if crops:
        low, high = op.Split(region, outputs=2, num_outputs=2)
        zero, one = op.constant_like(0.0, roi), op.constant_like(1.0, roi)
        region = op.Concat(low, op.Reshape(zero, [1]), high, op.Reshape(one, [1]), axis=0)
    resized = op.Resize(wide, region, None, pair, **attributes, axes=[2, 3], keep_aspect_ratio_policy=policy)
    return op.Gather(op.Squeeze(resized, [0]), 0, axis=2)


def _whole_factors(op, node: ir.Node) -> list[int] | None:
    """By which whole number each spatial axis is enlarged, where pixels are just repeated; else None."""
    x, _, scales, _ = _inputs(node)
    rank = op.rank(x)
    how = tuple(
        node.attributes.get_string(name) for name in ("coordinate_transformation_mode", "nearest_mode")
    )
    if node.attributes.get_string("mode") != "nearest" or how not in _BLOCKS or not 3 <= rank <= 5:
        return None
    if node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch":
        return None
    factors = [1.0] * rank
    constant = op.const_value(scales)
    for position, axis in enumerate(ints(node, "axes", list(range(rank)))):
        if scales is not None:
            if constant is None:
                return None
            factors[axis] = float(constant[position])
        else:
            before, after = op.static_dim(x, axis), op.static_dim(node.outputs[0], axis)
            if not before or not after:
                return None
            factors[axis] = after / before
    if factors[0] != 1 or factors[1] != 1 or any(f != int(f) or f < 1 for f in factors):
        return None
    return [int(factor) for factor in factors[2:]]


def _unchanged(op, node: ir.Node, position: int, axis: int) -> bool:
    """Whether an axis is known to be read as it is."""
    x, roi, scales, _ = _inputs(node)
    if node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch" and scales is None:
        return False
    if node.attributes.get_string("coordinate_transformation_mode") == "tf_crop_and_resize":
        region = op.const_value(roi)
        if region is None or region[position] != 0 or region[position + len(region) // 2] != 1:
            return False
    if scales is not None:
        constant = op.const_value(scales)
        return constant is not None and float(constant[position]) == 1.0
    y = node.outputs[0]
    if x.shape is None or y.shape is None:
        return False
    before, after = x.shape[axis], y.shape[axis]
    named = isinstance(before, int) or before.value is not None
    return named and before == after


def _inputs(node: ir.Node) -> tuple[Any, ...]:
    """(x, roi, scales, sizes)."""
    return required_input(node), *(optional_input(node, index) for index in (1, 2, 3))


def _refuse_moving_coordinates(op, node: ir.Node) -> None:
    """Only the image has a gradient; the region and the scales move the coordinates that are read."""
    _, roi, scales, _ = _inputs(node)
    if node.attributes.get_string("mode") == "nearest":
        return
    crops = node.attributes.get_string("coordinate_transformation_mode") == "tf_crop_and_resize"
    for value, name in ((roi if crops else None, "roi"), (scales, "scales")):
        # A wrong zero would train something else without a word.
        if value is not None and op.needs_gradient(value):
            raise UnsupportedOps(
                f"Resize '{node.name}' has no gradient with respect to its {name} ('{value.name}'): "
                "leave it out of what is differentiated"
            )
