"""The gradient of RoiAlign, to the image and to the regions.

A bin is sampled at a grid of points. Each point's coordinate along an axis depends on the region alone, and
linear interpolation is a product of axes, so that everything but the final product is done per axis.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onward.autodiff.forms.sampling import add_into, count_to, extent, from_rows, to_rows
from onward.autodiff.registry import gradient_rule
from onward.graph.forms.windows import spatial


@dataclasses.dataclass(frozen=True)
class Points:
    """Along one axis, the sample points of every bin of every region: [region, bin, point]."""

    coordinate: ir.Value  # clipped into the image
    used: ir.Value  # 1 where the region has that many points
    weight: ir.Value  # `used`, and 0 too where the point lies outside the image
    moves: ir.Value  # the derivative of the clipped coordinate by the plain one
    share: ir.Value  # one over the number of points, [region, 1, 1]
    reach: ir.Value  # the derivative of the coordinate by the bin's size
    free: ir.Value  # the derivative of the region's size by its end, [region]
    size: ir.Value
    bins: int
    scale: float


@gradient_rule("RoiAlign")
def roi_align(op, node, dy):
    """y = A·x·Bᵀ for each region, A and B its rows' and columns' weights   ⇒   dx = Aᵀ·dy·B summed over regions

    and dA = dy·B·xᵀ, which reaches the regions through the points. In mode max, y is the largest of
    weight·pixel (the standard's and onnxruntime's meaning), and only that one has a gradient.
    """
    x, rois, batch = node.inputs
    rows = _points(op, node, rois, 1, "output_height", extent(op, spatial(op, x), 0, like=rois))
    columns = _points(op, node, rois, 0, "output_width", extent(op, spatial(op, x), 1, like=rois))
    batch = op.Cast(batch, to=ir.DataType.INT64)
    if node.attributes.get_string("mode", "avg") == "max":
        dx, d_rows, d_columns = _maximum(op, x, rois, batch, rows, columns, dy)
    else:
        dx, d_rows, d_columns = _average(op, x, rois, batch, rows, columns, dy)
    if d_rows is None or d_columns is None:
        return dx, None, None
    low_x, high_x = _to_corners(op, columns, d_columns)
    low_y, high_y = _to_corners(op, rows, d_rows)
    corners = [op.Unsqueeze(part, [1]) for part in (low_x, low_y, high_x, high_y)]
    return dx, op.Concat(*corners, axis=1), None


def _points(op, node: ir.Node, rois: ir.Value, corner: int, bins: str, size: ir.Value) -> Points:
    count = node.attributes.get_int(bins, 1)
    ratio = node.attributes.get_int("sampling_ratio", 0)
    scale = node.attributes.get_float("spatial_scale", 1.0)
    half = node.attributes.get_string("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    zero, one = op.constant_like(0.0, rois), op.constant_like(1.0, rois)
    low, high = (
        op.Sub(op.Mul(op.Gather(rois, at, axis=1), scale), 0.5 if half else 0.0)
        for at in (corner, corner + 2)
    )
    length = op.Sub(high, low)
    free = op.CastLike(np.ones(1, np.float32), rois)
    if not half:
        # Without half_pixel, a region narrower than one pixel counts as one: its size then does not depend on its
        # ends.
        free = op.CastLike(op.Greater(length, 1.0), rois)
        length = op.Max(length, one)
    step = op.Div(length, float(count))
    if ratio > 0:
        number = op.Expand(op.constant_like(float(ratio), rois), op.Shape(step))
        point = op.CastLike(np.arange(ratio, dtype=np.float32), rois)
    else:
        # Without a ratio the number of points follows from the bin's size, and differs between regions.
        number = op.Max(op.Ceil(step), zero)
        # With no region at all there is still one point to build the graph's shapes from.
        most = op.ReduceMax(op.Concat(number, op.Reshape(one, [1]), axis=0), [0], keepdims=0)
        point = count_to(op, most)
    at_least_one = op.Unsqueeze(op.Max(number, one), [1, 2])
    bin_ = op.CastLike(np.arange(count, dtype=np.float32).reshape(1, -1, 1), rois)
    reach = op.Add(bin_, op.Div(op.Add(point, 0.5), at_least_one))
    plain = op.Add(op.Unsqueeze(low, [1, 2]), op.Mul(op.Unsqueeze(step, [1, 2]), reach))
    used = op.CastLike(op.Less(point, op.Unsqueeze(number, [1, 2])), rois)
    # A point up to one pixel outside still reads the border, further out it reads zero: torchvision's and ONNX's
    # rule.
    inside = op.And(op.GreaterOrEqual(plain, -1.0), op.LessOrEqual(plain, size))
    last = op.Sub(size, 1.0)
    moves = op.And(op.Greater(plain, zero), op.Less(plain, last))
    return Points(
        coordinate=op.Min(op.Max(plain, zero), last),
        used=used,
        weight=op.Mul(used, op.CastLike(inside, rois)),
        moves=op.CastLike(moves, rois),
        share=op.Div(1.0, at_least_one),
        reach=reach,
        free=free,
        size=size,
        bins=count,
        scale=scale,
    )


def _to_corners(op, points: Points, d_coordinate: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The gradients of a region's low and high corner from those of its points, [region, bin, point]."""
    plain = op.Mul(d_coordinate, points.moves)
    total = op.ReduceSum(plain, [1, 2], keepdims=0)
    stretched = op.ReduceSum(op.Mul(plain, points.reach), [1, 2], keepdims=0)
    end = op.Mul(op.Div(stretched, float(points.bins)), points.free)
    return op.Mul(op.Sub(total, end), points.scale), op.Mul(end, points.scale)


# ---- mode avg -------------------------------------------------------------------------------------


def _offsets(op, points: Points) -> ir.Value:
    """How far each pixel is from each point: [region, bin, point, pixel]."""
    return op.Sub(count_to(op, points.size), op.Unsqueeze(points.coordinate, [3]))


def _matrix(op, points: Points, like: ir.Value) -> ir.Value:
    """[region, bin, pixel]: the mean over a bin's points of the weights with which they read pixels."""
    hat = op.Relu(op.Sub(1.0, op.Abs(_offsets(op, points))))
    shares = op.Unsqueeze(op.Mul(points.weight, points.share), [3])
    return op.CastLike(op.ReduceSum(op.Mul(hat, shares), [2], keepdims=0), like)


def _through_matrix(op, points: Points, d_matrix: ir.Value) -> ir.Value:
    """The gradient of each point's coordinate from that of the matrix."""
    offsets = _offsets(op, points)
    # The hat has no slope beyond one pixel.
    near = op.CastLike(op.Less(op.Abs(offsets), 1.0), offsets)
    slope = op.Mul(op.Sign(offsets), near)
    felt = op.ReduceSum(op.Mul(slope, op.Unsqueeze(op.CastLike(d_matrix, offsets), [2])), [3], keepdims=0)
    return op.Mul(felt, op.Mul(points.weight, points.share))


def _average(op, x, rois, batch, rows: Points, columns: Points, dy):
    down, across = _matrix(op, rows, x), _matrix(op, columns, x)
    dx = d_rows = d_columns = None
    if op.needs_gradient(x):
        # [region, bin row, channel, width], then all regions at once: [batch, height, channel·width].
        wide = op.MatMul(op.Transpose(dy, perm=[0, 2, 1, 3]), op.Unsqueeze(across, [1]))
        mine = op.Equal(op.Unsqueeze(op.positions(op.dim(x, 0)), [1]), batch)
        # All regions in one product: those of other images are zero in it.
        left = op.Mul(op.Transpose(down, perm=[2, 0, 1]), op.CastLike(op.Unsqueeze(mine, [1, 3]), x))
        inner = op.Mul(op.Shape(down, end=1), op.Shape(down, start=1, end=2))
        flat = op.Mul(op.dim(x, 1), op.dim(x, 3))
        left = op.Reshape(left, op.Concat(op.dim(x, 0), op.dim(x, 2), inner, axis=0), allowzero=1)
        product = op.MatMul(left, op.Reshape(wide, op.Concat(inner, flat, axis=0), allowzero=1))
        shape = op.Concat(op.dim(x, 0), op.dim(x, 2), op.dim(x, 1), op.dim(x, 3), axis=0)
        dx = op.Transpose(op.Reshape(product, shape, allowzero=1), perm=[0, 2, 1, 3])
    if op.needs_gradient(rois):
        image = op.Gather(x, batch, axis=0)
        narrow = op.MatMul(image, op.Unsqueeze(op.Transpose(across, perm=[0, 2, 1]), [1]))
        d_down = op.ReduceSum(op.MatMul(dy, op.Transpose(narrow, perm=[0, 1, 3, 2])), [1], keepdims=0)
        low = op.MatMul(op.Unsqueeze(down, [1]), image)
        d_across = op.ReduceSum(op.MatMul(op.Transpose(dy, perm=[0, 1, 3, 2]), low), [1], keepdims=0)
        d_rows, d_columns = _through_matrix(op, rows, d_down), _through_matrix(op, columns, d_across)
    return dx, d_rows, d_columns


# ---- mode max -------------------------------------------------------------------------------------


def _neighbours(op, points: Points) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """(pixel, weight, slope, used) of the two neighbours of each point: [region, bin, point·2]."""
    low = op.Floor(points.coordinate)
    last = op.Sub(points.size, 1.0)
    pair = op.CastLike(np.array([0, 1], np.float32), low)
    pixel = op.Add(op.Unsqueeze(low, [3]), pair)
    part = op.Sub(1.0, op.Abs(op.Sub(op.Unsqueeze(points.coordinate, [3]), pixel)))
    weight = op.Unsqueeze(points.weight, [3])
    slope = op.Mul(op.CastLike(np.array([-1, 1], np.float32), low), weight)
    used = op.Expand(op.Unsqueeze(points.used, [3]), op.Shape(pixel))
    both = op.Cast(op.Min(pixel, last), to=ir.DataType.INT64), op.Mul(part, weight), slope, used
    flat = op.Concat(op.Shape(low, end=2), op.Mul(op.Shape(low, start=2), [2]), axis=0)
    pixel, part, slope, used = (op.Reshape(value, flat, allowzero=1) for value in both)
    return pixel, part, slope, used


def _maximum(op, x, rois, batch, rows: Points, columns: Points, dy):
    """Everything is [region, bin row, bin column, row neighbour, column neighbour, channel]."""
    pixel_y, weight_y, slope_y, used_y = _neighbours(op, rows)
    pixel_x, weight_x, slope_x, used_x = _neighbours(op, columns)

    def down(value: ir.Value) -> ir.Value:
        return op.Unsqueeze(value, [2, 4])

    def across(value: ir.Value) -> ir.Value:
        return op.Unsqueeze(value, [1, 3])

    line = op.Add(op.Mul(op.Unsqueeze(batch, [1, 2]), op.dim(x, 2)), pixel_y)
    index = op.Add(op.Mul(down(line), op.dim(x, 3)), across(pixel_x))
    pixels = to_rows(op, x)
    read = op.Gather(pixels, index)
    weight = op.CastLike(op.Unsqueeze(op.Mul(down(weight_y), across(weight_x)), [-1]), x)
    used = op.Unsqueeze(op.Greater(op.Mul(down(used_y), across(used_x)), 0.0), [-1])
    value = op.Where(used, op.Mul(read, weight), op.constant_like(-np.inf, x))
    choices = op.Mul(op.Shape(pixel_y, start=2), op.Shape(pixel_x, start=2))
    flat = op.Concat(op.Shape(index, end=3), choices, op.dim(x, 1), axis=0)
    best = op.ArgMax(op.Reshape(value, flat, allowzero=1), axis=3, keepdims=1)
    chosen = op.Equal(op.Unsqueeze(op.positions(choices), [1]), best)
    spread = op.Unsqueeze(op.Transpose(dy, perm=[0, 2, 3, 1]), [3])
    felt = op.Reshape(op.Where(chosen, spread, op.constant_like(0.0, x)), op.Shape(value), allowzero=1)
    dx = d_rows = d_columns = None
    if op.needs_gradient(x):
        updates = op.Reshape(op.Mul(felt, weight), op.Concat([-1], op.dim(x, 1), axis=0))
        dx = from_rows(op, add_into(op, op.Shape(pixels), op.Reshape(index, [-1, 1]), updates), x)
    if op.needs_gradient(rois):
        d_weight = op.CastLike(op.ReduceSum(op.Mul(felt, read), [5], keepdims=0), rois)
        d_rows = op.ReduceSum(op.Mul(d_weight, op.Mul(down(slope_y), across(weight_x))), [2, 4], keepdims=0)
        d_columns = op.ReduceSum(
            op.Mul(d_weight, op.Mul(down(weight_y), across(slope_x))), [1, 3], keepdims=0
        )
        d_rows, d_columns = _pairs(op, d_rows, rows), _pairs(op, d_columns, columns)
    return dx, d_rows, d_columns


def _pairs(op, value: ir.Value, points: Points) -> ir.Value:
    """The sum over the two neighbours of each point."""
    shape = op.Concat(op.Shape(points.coordinate), [2], axis=0)
    return op.ReduceSum(op.Reshape(value, shape, allowzero=1), [3], keepdims=0)
