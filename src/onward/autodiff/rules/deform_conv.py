"""The gradient of DeformConv: a convolution over samples at learned offsets."""

from __future__ import annotations

import onnx_ir as ir

from onward.autodiff.forms.sampling import (
    axis_taps,
    combine,
    coordinate_gradients,
    extent,
    from_rows,
    scatter_rows,
    to_rows,
)
from onward.autodiff.registry import gradient_rule
from onward.autodiff.rules.conv import count_up, kernel_of, sum_channels
from onward.errors import ModelError
from onward.graph.forms.conv_weights import values
from onward.graph.forms.windows import Sizes, Window, ranked, spatial, window_of


@gradient_rule("DeformConv")
def deform_conv(op, node, dy):
    """y = w·s + b, samples s = m·x(place + offset)   ⇒   dw = dy·sᵀ,  ds = wᵀ·dy,  db = Σ dy,  dm = Σ ds·x(…)

    Sampling is linear with zeros outside: dx adds m·ds·weight into each pixel that was read, and
    d offset = Σ m·ds·pixel·∂weight. Samples are laid out [batch, part, tap, position, channel of the part].
    """
    x, w, offset, *optional = node.inputs
    bias, mask = (*optional, None, None)[:2]
    dy = ranked(dy, x)
    group = node.attributes.get_int("group", 1)
    parts = node.attributes.get_int("offset_group", 1)
    if op.rank(x) != 4:
        raise ModelError(
            f"DeformConv '{node.name}': only two spatial axes have a gradient, as in onnxruntime"
        )
    window = window_of(op, node, x, kernel_of(op, node, w))
    batch, size = op.dim(x, 0), spatial(op, x)
    taps = op.ReduceProd(values(op, window.kernel), keepdims=1)

    places = base_positions(op, window, spatial(op, dy), like=offset)
    offsets = op.Reshape(offset, op.Concat(batch, [parts], taps, [2, -1], axis=0))
    read = []
    for axis, base in enumerate(places):
        coordinate = op.Add(op.Gather(offsets, axis, axis=3), base)
        read.append(axis_taps(op, coordinate, extent(op, size, axis, like=offset), mode="linear"))
    images = op.Reshape(op.positions(op.Mul(batch, [parts])), op.Concat(batch, [parts], axis=0))
    samples = combine(op, read, size, lead=images, lead_rank=2)

    rows = to_rows(op, x, parts=parts)
    pixels = op.Gather(rows, samples.index)
    weight = op.Unsqueeze(samples.weight, [-1])
    plain = op.ReduceSum(op.Mul(pixels, weight), samples.tap_axes, keepdims=0)
    scale = None
    if mask is not None:
        scale = op.Unsqueeze(op.Reshape(mask, op.Concat(batch, [parts], taps, [-1], axis=0)), [-1])

    positions = op.ReduceProd(op.Shape(dy, start=2), keepdims=1)
    # [batch, group, channels·taps of the group, position] is the layout of the weights' products.
    dy_groups = op.Reshape(dy, op.Concat(batch, [group, -1], positions, axis=0))
    dw = None
    if op.needs_gradient(w):
        sampled = plain if scale is None else op.Mul(plain, scale)
        columns = op.Transpose(sampled, perm=[0, 1, 4, 2, 3])
        columns = op.Reshape(columns, op.Concat(batch, [group, -1], positions, axis=0))
        each = op.MatMul(dy_groups, op.Transpose(columns, perm=[0, 1, 3, 2]))
        dw = op.Reshape(op.ReduceSum(each, [0], keepdims=0), op.shape(w))
    per_output = op.ReduceProd(op.Shape(w, start=1), keepdims=1)
    w_groups = op.Reshape(w, op.Concat([group, -1], per_output, axis=0))
    ds = op.MatMul(op.Transpose(w_groups, perm=[0, 2, 1]), dy_groups)
    ds = op.Reshape(ds, op.Concat(batch, [parts, -1], taps, positions, axis=0))
    ds = op.Transpose(ds, perm=[0, 1, 3, 4, 2])
    dm = None
    if scale is not None:
        if op.needs_gradient(mask):
            dm = op.Reshape(op.ReduceSum(op.Mul(ds, plain), [-1], keepdims=0), op.shape(mask))
        ds = op.Mul(ds, scale)
    dx = from_rows(op, scatter_rows(op, samples, ds, rows), x) if op.needs_gradient(x) else None
    d_offset = None
    if op.needs_gradient(offset):
        felt = op.ReduceSum(op.Mul(pixels, ds), [-1], keepdims=0)
        moved = [op.Unsqueeze(part, [3]) for part in coordinate_gradients(op, samples, felt)]
        d_offset = op.Reshape(op.Concat(*moved, axis=3), op.shape(offset))
    return dx, dw, d_offset, sum_channels(op, dy) if op.needs_gradient(bias) else None, dm


def base_positions(op, window: Window, places: Sizes, *, like: ir.Value) -> list[ir.Value]:
    """For each axis, where each tap of each window lies before offsets: [taps, positions]."""
    kernel, places_value = values(op, window.kernel), values(op, places)
    flat = op.Concat(op.ReduceProd(kernel, keepdims=1), [-1], axis=0)
    rank = len(window.axes)
    grids = []
    for axis in range(rank):
        tap = count_up(op, window.kernel, axis, int(window.dilations[axis]))
        start = count_up(op, places, axis, int(window.strides[axis]))
        start = op.Sub(start, op.Gather(values(op, window.begin), [axis]))
        others = [i for i in range(2 * rank) if i not in (axis, rank + axis)]
        spread = op.Unsqueeze(op.Add(op.Unsqueeze(tap, [1]), op.Unsqueeze(start, [0])), others)
        whole = op.Expand(spread, op.Concat(kernel, places_value, axis=0))
        grids.append(op.Cast(op.Reshape(whole, flat), to=op.dtype(like)))
    return grids
