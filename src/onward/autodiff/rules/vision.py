"""Gradients of GridSample, AffineGrid and MaxRoiPool. RoiAlign is in `roi_align`."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.autodiff.forms.sampling import (
    add_into,
    axis_taps,
    combine,
    coordinate_gradients,
    count_to,
    extent,
    from_rows,
    scatter_rows,
    to_rows,
)
from onward.autodiff.registry import gradient_rule
from onward.graph.forms.windows import ranked, spatial


@gradient_rule("GridSample")
def grid_sample(op, node, dy):
    """y = Σ weight(grid)·x[pixel]   ⇒   dx[pixel] += weight·dy,  d grid = Σ dy·x[pixel]·∂weight

    Rounding to the nearest pixel has no slope. At the edges of a bordered image the slope is 0, as in torch.
    """
    x, grid = node.inputs
    dy = ranked(dy, x)
    mode = node.attributes.get_string("mode", "linear").removeprefix("bi")
    aligned = bool(node.attributes.get_int("align_corners", 0))
    padding = node.attributes.get_string("padding_mode", "zeros")
    size = spatial(op, x)
    count = op.rank(x) - 2
    axes, stretch = [], []
    for axis in range(count):
        length = extent(op, size, axis, like=grid)
        # The grid names the last axis first.
        shifted = op.Add(op.Gather(grid, np.asarray(count - 1 - axis, np.int64), axis=-1), 1.0)
        stretch.append(op.Mul(op.Sub(length, 1.0) if aligned else length, 0.5))
        coordinate = op.Mul(shifted, stretch[axis])
        if not aligned:
            coordinate = op.Sub(coordinate, 0.5)
        axes.append(axis_taps(op, coordinate, length, mode=mode, padding=padding, align_corners=aligned))
    taps = combine(op, axes, size, lead=op.positions(op.dim(x, 0)), lead_rank=1)
    rows = to_rows(op, x)
    dy = op.Transpose(dy, perm=[0, *range(2, 2 + count), 1])
    dx = from_rows(op, scatter_rows(op, taps, dy, rows), x) if op.needs_gradient(x) else None
    # Rounding has no slope.
    if mode == "nearest" or not op.needs_gradient(grid):
        return dx, None
    felt = op.ReduceSum(op.Mul(op.Gather(rows, taps.index), dy), [-1], keepdims=0)
    moved = coordinate_gradients(op, taps, op.CastLike(felt, grid))
    parts = [op.Unsqueeze(op.Mul(part, scale), [-1]) for part, scale in zip(moved, stretch)]
    return dx, op.Concat(*reversed(parts), axis=-1)


@gradient_rule("AffineGrid")
def affine_grid(op, node, dy):
    """grid = base·θᵀ, base the grid of the identity with ones beside it   ⇒   dθ = d gridᵀ·base"""
    theta, size = node.inputs
    static = op.const_value(size)
    if static is not None:
        count = len(static) - 2
    else:
        count = (op.static_dim(theta, 1) or op.rank(dy) - 2) if theta.shape is not None else op.rank(dy) - 2
    # The grid of the identity is AffineGrid's own, so that its convention of corners holds.
    unit = op.CastLike(np.eye(count, count + 1, dtype=np.float32)[None], theta)
    one = op.Concat([1], op.Slice(size, [1], [np.iinfo(np.int64).max], [0]), axis=0)
    base = op.AffineGrid(unit, one, align_corners=node.attributes.get_int("align_corners", 0))
    base = op.Reshape(base, [-1, count])
    ones = op.Expand(
        op.CastLike(np.ones((1, 1), np.float32), theta), op.Concat(op.Shape(base, end=1), [1], axis=0)
    )
    base = op.Concat(base, ones, axis=1)
    flat = op.Reshape(dy, [0, -1, count])
    return op.MatMul(op.Transpose(flat, perm=[0, 2, 1]), base), None


@gradient_rule("MaxRoiPool")
def max_roi_pool(op, node, dy):
    """y = x[i], i the first largest of each bin   ⇒   dx[i] = Σ dy; the regions are rounded, so they get none

    The maximum of a bin is the maximum over its rows of their maxima, which needs no [bins, height, width].
    """
    x, rois = node.inputs
    height, width = node.attributes.get_ints("pooled_shape")
    scale = node.attributes.get_float("spatial_scale", 1.0)
    column = lambda index: op.Gather(rois, index, axis=1)  # noqa: E731
    # C's round(), half away from zero, of numbers that are not negative.
    corners = [op.Floor(op.Add(op.Mul(column(index), scale), 0.5)) for index in range(1, 5)]
    size = spatial(op, x)
    in_column = _bin_mask(op, corners[0], corners[2], width, extent(op, size, 1, like=rois))
    in_row = _bin_mask(op, corners[1], corners[3], height, extent(op, size, 0, like=rois))
    batch = op.Cast(column(0), to=ir.DataType.INT64)
    image = op.Gather(x, batch, axis=0)
    # Pixels outside of the bin must not be the maximum.
    lowest = op.constant_like(-np.inf, x)
    maxima, places = [], []
    for index in range(width):
        seen = op.Unsqueeze(op.Gather(in_column, index, axis=1), [1, 2])
        strip = op.Where(seen, image, lowest)
        maxima.append(op.ReduceMax(strip, [3], keepdims=1))
        places.append(op.ArgMax(strip, axis=3, keepdims=1))
    best, where = op.Concat(*maxima, axis=3), op.Concat(*places, axis=3)
    rows = op.Where(op.Unsqueeze(in_row, [1, 4]), op.Unsqueeze(best, [2]), lowest)
    row = op.Squeeze(op.ArgMax(rows, axis=3, keepdims=1), [3])
    at = op.GatherElements(where, row, axis=2)
    filled = op.Unsqueeze(
        op.And(op.Unsqueeze(_any(op, in_row), [2]), op.Unsqueeze(_any(op, in_column), [1])), [1]
    )
    channels = op.Unsqueeze(op.positions(op.dim(x, 1)), [0])
    plane = op.Add(op.Mul(op.Unsqueeze(batch, [1]), op.dim(x, 1)), channels)
    index = op.Add(op.Mul(op.Unsqueeze(plane, [2, 3]), op.dim(x, 2)), row)
    index = op.Add(op.Mul(index, op.dim(x, 3)), at)
    updates = op.Reshape(op.Where(filled, dy, 0.0), [-1])
    length = op.ReduceProd(op.shape(x), keepdims=1)
    return op.Reshape(add_into(op, length, op.Reshape(index, [-1, 1]), updates), op.shape(x)), None


def _bin_mask(op, low: ir.Value, high: ir.Value, bins: int, size: ir.Value) -> ir.Value:
    """[region, bin, pixel]: which pixels of an axis are in which bin."""
    length = op.Max(op.Add(op.Sub(high, low), 1.0), op.constant_like(1.0, low))
    step = op.Unsqueeze(op.Div(length, float(bins)), [1])
    number = np.arange(bins).reshape(1, -1)
    low = op.Unsqueeze(low, [1])
    first = op.Add(op.Floor(op.Mul(step, op.CastLike(number.astype(np.float32), low))), low)
    last = op.Add(op.Ceil(op.Mul(step, op.CastLike((number + 1).astype(np.float32), low))), low)
    pixel = count_to(op, size)
    return op.And(op.GreaterOrEqual(pixel, op.Unsqueeze(first, [2])), op.Less(pixel, op.Unsqueeze(last, [2])))


def _any(op, mask: ir.Value) -> ir.Value:
    """Whether any of the last axis is true."""
    return op.Cast(op.ReduceMax(op.Cast(mask, to=ir.DataType.INT32), [-1], keepdims=0), to=ir.DataType.BOOL)
