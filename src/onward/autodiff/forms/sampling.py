"""Sampling an image at real coordinates: which pixels are read, with which weights, and how those change.

Shared by GridSample and DeformConv. An image [batch, channels, sizes…] is seen as rows of channels, one row
per pixel; a sample is a weighted sum of rows. Registers no rule.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from onward.graph.forms.windows import Sizes

# Keys' cubic convolution with a = −0.75, as polynomials in the distance: outer, inner, inner, outer tap.
_A = -0.75
_CUBIC = np.array(
    [
        [-4 * _A, 8 * _A, -5 * _A, _A],
        [1.0, 0.0, -(_A + 3), _A + 2],
        [1.0, 0.0, -(_A + 3), _A + 2],
        [-4 * _A, 8 * _A, -5 * _A, _A],
    ]
)


@dataclasses.dataclass(frozen=True)
class AxisTaps:
    """Along one axis, the pixels that each sample reads: all are [taps, …positions]."""

    index: ir.Value
    weight: ir.Value
    # The derivative of the weight by the coordinate; None where it is zero.
    slope: ir.Value | None


@dataclasses.dataclass(frozen=True)
class Taps:
    """The rows that each sample reads: all are [one axis of taps per spatial axis, …positions]."""

    index: ir.Value
    weight: ir.Value
    slopes: list[ir.Value | None]
    tap_axes: list[int]


def axis_taps(
    op,
    coordinate: ir.Value,
    size: ir.Value,
    *,
    mode: str,
    padding: str = "zeros",
    align_corners: bool = False,
) -> AxisTaps:
    """What one coordinate reads along its axis; `size` is that axis's size in the coordinate's type."""
    turn = None
    # Cubic taps are moved into the image one by one, further down: their coordinates are not.
    if mode != "cubic":
        coordinate, turn = _into_image(op, coordinate, size, padding=padding, align_corners=align_corners)
    rank = op.rank(coordinate)

    def per_tap(numbers: Sequence[float] | np.ndarray) -> ir.Value:
        array = np.asarray(numbers, dtype=op.dtype(coordinate).numpy())
        return op.constant(array.reshape(-1, *[1] * rank))

    slope = None
    if mode == "nearest":
        # Half to even, as torch and onnxruntime round here.
        pixel = op.Unsqueeze(op.Round(coordinate), [0])
        weight = op.CastLike(np.ones([1] * (rank + 1), np.float32), coordinate)
    elif mode == "linear":
        pixel = op.Add(op.Floor(coordinate), per_tap([0, 1]))
        weight = op.Sub(1.0, op.Abs(op.Sub(coordinate, pixel)))
        slope = per_tap([-1, 1])
    else:
        pixel = op.Add(op.Floor(coordinate), per_tap([-1, 0, 1, 2]))
        distance = op.Abs(op.Sub(coordinate, pixel))
        # Horner's scheme: three products for each tap.
        c0, c1, c2, c3 = (per_tap(column) for column in _CUBIC.T)
        weight = op.Add(op.Mul(op.Add(op.Mul(op.Add(op.Mul(c3, distance), c2), distance), c1), distance), c0)
        rise = op.Add(op.Mul(op.Add(op.Mul(op.Mul(c3, 3.0), distance), op.Mul(c2, 2.0)), distance), c1)
        slope = op.Mul(rise, per_tap([1, 1, -1, -1]))
    last = op.Sub(size, 1.0)
    if padding == "zeros":
        inside = op.And(op.GreaterOrEqual(pixel, 0.0), op.LessOrEqual(pixel, last))
        inside = op.CastLike(inside, coordinate)
        weight = op.Mul(weight, inside)
        slope = None if slope is None else op.Mul(slope, inside)
    elif padding == "reflection":
        pixel, _ = _reflect(op, pixel, size, align_corners=align_corners)
    if turn is not None and slope is not None:
        slope = op.Mul(slope, turn)
    zero = op.constant_like(0.0, coordinate)
    return AxisTaps(op.Cast(op.Min(op.Max(pixel, zero), last), to=ir.DataType.INT64), weight, slope)


def combine(op, axes: Sequence[AxisTaps], size: Sizes, *, lead: ir.Value, lead_rank: int) -> Taps:
    """The taps of several axes multiplied out. `lead` numbers the images, shaped as the leading positions."""
    count = len(axes)
    positions = op.rank(axes[0].index) - 1

    def align_axis(value: ir.Value, axis: int) -> ir.Value:
        others = [i for i in range(count) if i != axis]
        return op.Unsqueeze(value, others) if others else value

    weights = [align_axis(axis.weight, i) for i, axis in enumerate(axes)]
    index = op.Unsqueeze(lead, [*range(count), *range(count + lead_rank, count + positions)])
    for i, axis in enumerate(axes):
        extent = size[i : i + 1] if isinstance(size, np.ndarray) else op.Gather(size, [i])
        index = op.Add(op.Mul(index, extent), align_axis(axis.index, i))
    slopes: list[ir.Value | None] = []
    for i, axis in enumerate(axes):
        if axis.slope is None:
            slopes.append(None)
        else:
            slopes.append(
                functools.reduce(op.Mul, [align_axis(axis.slope, i), *weights[:i], *weights[i + 1 :]])
            )
    return Taps(index, functools.reduce(op.Mul, weights), slopes, list(range(count)))


def to_rows(op, x: ir.Value, *, parts: int = 1) -> ir.Value:
    """An image as rows: [batch·parts·pixels, channels/parts]."""
    channels = op.dim(x, 1) if parts == 1 else op.Div(op.dim(x, 1), [parts])
    images = op.Reshape(x, op.Concat([-1], channels, op.ReduceProd(op.Shape(x, start=2), keepdims=1), axis=0))
    return op.Reshape(op.Transpose(images, perm=[0, 2, 1]), op.Concat([-1], channels, axis=0))


def from_rows(op, rows: ir.Value, like: ir.Value) -> ir.Value:
    """Rows as the image `like` that they came from."""
    pixels = op.ReduceProd(op.Shape(like, start=2), keepdims=1)
    images = op.Reshape(rows, op.Concat([-1], pixels, op.Shape(rows, start=1), axis=0))
    return op.Reshape(op.Transpose(images, perm=[0, 2, 1]), op.shape(like))


def scatter_rows(op, taps: Taps, gradient: ir.Value, rows: ir.Value) -> ir.Value:
    """Add each sample's gradient […positions, channels], weighted, into the rows that it read."""
    # A scalar broadcast of nearest mode's weights needs every tap's own row in the updates.
    weight = op.CastLike(op.Unsqueeze(op.Expand(taps.weight, op.Shape(taps.index)), [-1]), gradient)
    updates = op.Reshape(op.Mul(weight, gradient), op.Concat([-1], op.Shape(rows, start=1), axis=0))
    return add_into(op, op.Shape(rows), op.Reshape(taps.index, [-1, 1]), updates)


def add_into(op, shape: ir.Value, index: ir.Value, updates: ir.Value) -> ir.Value:
    """Zeros of a shape with updates added at an index along the first axis."""
    dtype = op.dtype(updates)
    # The CPU provider adds while scattering in float32 and float64 only.
    narrow = dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    wide = ir.DataType.FLOAT if narrow else dtype
    zeros = op.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, wide.numpy())))
    summed = op.ScatterND(zeros, index, op.Cast(updates, to=wide) if narrow else updates, reduction="add")
    return op.Cast(summed, to=dtype) if narrow else summed


def coordinate_gradients(op, taps: Taps, felt: ir.Value) -> list[ir.Value | None]:
    """d coordinate = Σ over taps of (gradient · pixel) · ∂weight; `felt` is the bracket, shaped as the taps."""
    return [
        None if slope is None else op.ReduceSum(op.Mul(felt, slope), taps.tap_axes, keepdims=0)
        for slope in taps.slopes
    ]


def count_to(op, length: ir.Value) -> ir.Value:
    """0 … length − 1 in the type of a scalar length, which Range may not know."""
    limit = op.Cast(length, to=ir.DataType.INT64)
    return op.CastLike(op.Range(0, limit, 1), length)


def extent(op, size: Sizes, axis: int, *, like: ir.Value) -> ir.Value:
    """One size as a number of another value's type."""
    if isinstance(size, np.ndarray):
        return op.constant_like(float(size[axis]), like)
    return op.Cast(op.Gather(size, axis), to=op.dtype(like))


def _into_image(op, coordinate, size, *, padding: str, align_corners: bool):
    """(coordinate moved into the image as the padding says, its derivative or None where that is 1)."""
    if padding == "border":
        last = op.Sub(size, 1.0)
        inside = op.And(op.Greater(coordinate, 0.0), op.Less(coordinate, last))
        zero = op.constant_like(0.0, coordinate)
        return op.Min(op.Max(coordinate, zero), last), op.CastLike(inside, coordinate)
    if padding == "reflection":
        return _reflect(op, coordinate, size, align_corners=align_corners)
    return coordinate, None


def _reflect(op, coordinate, size, *, align_corners: bool):
    """Fold a coordinate at the image's edges: the centres of the outer pixels, or their outer borders."""
    low = 0.0 if align_corners else -0.5
    # An image of one pixel has no extent to fold; whatever is read is clipped to that pixel.
    span = op.Max(op.Sub(size, 1.0), op.constant_like(1.0, coordinate)) if align_corners else size
    shifted = op.Sub(coordinate, low)
    period = op.Mul(span, 2.0)
    along = op.Sub(shifted, op.Mul(op.Floor(op.Div(shifted, period)), period))
    back = op.Sub(period, along)
    rising = op.LessOrEqual(along, span)
    sign = op.Sub(op.Mul(op.CastLike(rising, coordinate), 2.0), 1.0)
    return op.Add(op.Min(along, back), low), sign
