"""The gradient of a convolution's weights: formulations with equal results and different speed.

`weight_formulation` chooses by shape. What it chose is noted on the node of the result, so that a session for known
shapes may choose again (`passes.conv_forms`). Registers no rule.
"""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np
import onnx_ir as ir

from onward.contract import CONV_WEIGHT
from onward.graph.forms.windows import Sizes, Window, cut, padded, spatial, tap_slice

__all__ = ["FORMS", "Product", "possible_forms", "weight_formulation", "weight_gradient"]

# Places up to which a list of all that the taps of all windows read is made, when a session is made: 1 MB.
_MOST_PLACES = 1 << 17
# Places up to which that list is in the file: 32 kB.
_FEW_PLACES = 1 << 12
# Numbers of one image's columns up to which those of all taps are made at once; else by rows of the kernel.
_MANY_COLUMNS = 1 << 20
# Taps of a kernel of 3×3.
_FEW_TAPS = 9
# Positions of an image up to which one product over all images is faster than one for each: 7×7.
_FEW_POSITIONS = 64


@dataclasses.dataclass(frozen=True)
class Product:
    """A convolution y = x ⋆ w with the gradient dy of its result."""

    x: ir.Value
    w: ir.Value
    dy: ir.Value
    window: Window
    group: int


def weight_gradient(op, product: Product) -> ir.Value:
    """dw of y = x ⋆ w."""
    form = weight_formulation(op, product)
    result = FORMS[form](op, product)
    window, node = product.window, result.producer()
    shape = [op.static_dim(product.w, axis) for axis in range(op.rank(product.w))]
    if node is not None and window.static_pads is not None and None not in shape:
        note = {
            "x": product.x.name, "dy": product.dy.name, "weight": shape, "group": product.group, "form": form,
            "strides": window.strides.tolist(), "dilations": window.dilations.tolist(), "pads": window.static_pads,
        }  # fmt: skip
        node.metadata_props[CONV_WEIGHT] = json.dumps(note)
    return result


def _weight_depthwise(op, product: Product) -> ir.Value:
    """dw[c, m, t] = Σ over batch and positions of dy[c, m]·x[c] at tap t; m outputs for each channel"""
    window, dy = product.window, product.dy
    x = padded(op, product.x, window.begin, window.end, axes=window.axes)
    count = spatial(op, dy)
    axes, single = [0, *window.axes], op.static_dim(product.w, 0) == product.group
    if not single:
        dy = op.Reshape(dy, op.Concat([0, product.group, -1], values(op, count), axis=0))
        axes = [0, *range(3, 3 + len(window.axes))]
    sums = []
    for tap in window.taps():
        read = tap_slice(op, x, tap, window, count, axes=window.axes)
        read = read if single else op.Unsqueeze(read, [2])
        sums.append(op.Reshape(op.ReduceSum(op.Mul(dy, read), axes, keepdims=0), [-1, 1]))
    return op.Reshape(stack(op, sums), op.shape(product.w))


def _weight_depthwise_last(op, product: Product, *, by_rows: bool | None = None) -> ir.Value:
    """dw[c, t] = Σ over batch and positions of dy[…, c]·x[…, c] at tap t, for each tap or those of a row at once"""
    window, count = product.window, int(np.prod(np.asarray(spatial(op, product.dy))))
    channels, kernel = op.static_dim(product.x, 1), window.static_kernel or []
    dy = op.Transpose(product.dy, perm=[0, *window.axes, 1])
    if by_rows is None:  # all taps of a row at once: slower than each by itself, and far fewer nodes
        by_rows = bool(np.prod(kernel) > _FEW_TAPS)
    if by_rows:
        dy = op.Reshape(dy, [0, count, 1, channels])
        reads = _gathered(op, product, by_rows=True, shape=[0, count, -1, channels])
        by_tap = stack(op, [op.ReduceSum(op.Mul(dy, read), [0, 1], keepdims=0) for read in reads], axis=0)
    else:
        dy = op.Reshape(dy, [0, count, channels])
        ones = op.constant(np.ones((1, count), op.dtype(dy).numpy()), name="ones")
        sums = [op.MatMul(ones, op.Mul(dy, read)) for read in _gathered_taps(op, product)]
        by_tap = op.ReduceSum(stack(op, sums, axis=1), [0], keepdims=0)
    return op.Reshape(op.Transpose(by_tap, perm=[1, 0]), op.shape(product.w))


def _weight_columns(op, product: Product) -> ir.Value:
    """dw[o, t·c] = Σ over images of dy·columnsᵀ, columns = every tap's channels side by side"""
    window, dy = product.window, product.dy
    x = padded(op, product.x, window.begin, window.end, axes=window.axes)
    count, kernel = spatial(op, dy), window.static_kernel or []
    taps = int(np.prod(kernel))
    if taps > _FEW_TAPS and isinstance(count, np.ndarray):
        # along one axis at a time, the last first: as many slices as the kernel's sizes have in sum
        for axis in reversed(range(len(count))):
            x = stack(
                op,
                [_slice_along(op, x, tap, axis, window, count) for tap in range(kernel[axis])],
                axis=1,
            )
        columns = x
    else:
        columns = stack(
            op, [tap_slice(op, x, tap, window, count, axes=window.axes) for tap in window.taps()], axis=1
        )
    columns = op.Reshape(columns, per_image(op, product.x, taps, count))
    flat = op.Reshape(dy, per_image(op, dy, 1, count))
    product_each = op.MatMul(flat, op.Transpose(columns, perm=[0, 2, 1]))
    return _tap_major(op, op.ReduceSum(product_each, [0], keepdims=0), product)


def _slice_along(op, x: ir.Value, tap: int, axis: int, window: Window, count: np.ndarray) -> ir.Value:
    """What one tap reads along one axis alone."""
    start = tap * int(window.dilations[axis])
    end = start + (int(count[axis]) - 1) * int(window.strides[axis]) + 1
    return op.Slice(x, [start], [end], [window.axes[axis]], [int(window.strides[axis])])


def _weight_channels_first(op, product: Product) -> ir.Value:
    """dw[g, o, c, t] = Σ dy[g, o, np]·x[g, c, np at t]"""
    window, group = product.window, product.group
    swap = [1, 0, *window.axes]
    x = op.Transpose(padded(op, product.x, window.begin, window.end, axes=window.axes), perm=swap)
    dy = op.Transpose(product.dy, perm=swap)
    count = spatial(op, product.dy)
    dy = op.Reshape(dy, grouped(op, product.dy, group))
    parts = []
    for tap in window.taps():
        read = tap_slice(op, x, tap, window, count, axes=window.axes)
        read = op.Reshape(read, grouped(op, product.x, group))
        if group == 1:
            part = op.Gemm(dy, read, transB=1)
        else:
            part = op.MatMul(dy, op.Transpose(read, perm=[0, 2, 1]))
        parts.append(op.Unsqueeze(part, [-1]))
    return op.Reshape(stack(op, parts), op.shape(product.w))


def _weight_channels_last(op, product: Product, *, by_rows: bool | None = None) -> ir.Value:
    """dw[o, t·c] = Σ dy[o, np]·x[np at t, c], for all taps at once, those of a row, or each"""
    dy = op.Transpose(product.dy, perm=[1, 0, *product.window.axes])
    dy = op.Reshape(dy, grouped(op, product.dy, 1))
    if _has_sizes(op, product):
        places, channels = spatial(op, product.dy), op.static_dim(product.x, 1)
        taps = int(np.prod(product.window.static_kernel or []))
        if by_rows is None:
            by_rows = bool(int(np.prod(np.asarray(places))) * taps * channels > _MANY_COLUMNS)
        width = taps // (product.window.static_kernel or [1])[0] if by_rows else taps
        columns = _gathered(op, product, by_rows=bool(by_rows), shape=[-1, width * channels])
        return _tap_major(op, stack(op, [op.Gemm(dy, part) for part in columns], axis=1), product)
    return _by_taps(op, product, dy)


def _weight_taps(op, product: Product) -> ir.Value:
    """dw[o, t, c] = Σ dy[o, np]·x[np at t, c] for each tap t, from slices of the input"""
    dy = op.Transpose(product.dy, perm=[1, 0, *product.window.axes])
    return _by_taps(op, product, op.Reshape(dy, grouped(op, product.dy, 1)))


def _by_taps(op, product: Product, dy: ir.Value) -> ir.Value:
    channels = op.static_dim(product.x, 1)
    shape = [-1, channels] if channels is not None else op.Concat([-1], op.dim(product.x, 1), axis=0)
    parts = [op.Gemm(dy, op.Reshape(read, shape)) for read in _sliced(op, product)]
    if len(parts) > 1:
        parts = [op.Unsqueeze(part, [-1]) for part in parts]
    return op.Reshape(stack(op, parts), op.shape(product.w))


def _channels_last(op, product: Product) -> ir.Value:
    """The input with zeros around it, channels last."""
    window = product.window
    x = op.Transpose(product.x, perm=[0, *window.axes, 1])
    return padded(op, x, window.begin, window.end, axes=[axis - 1 for axis in window.axes])


def _sliced(op, product: Product) -> list[ir.Value]:
    """What each tap reads for all windows, channels last: [batch, windows…, channels]."""
    window, count, x = product.window, spatial(op, product.dy), _channels_last(op, product)
    inner = [axis - 1 for axis in window.axes]
    return [tap_slice(op, x, tap, window, count, axes=inner) for tap in window.taps()]


def _gathered(op, product: Product, *, by_rows: bool, shape: list[int]) -> list[ir.Value]:
    """What all taps (or those of each row of the kernel) read: [batch, windows, taps, channels] in some shape.

    A Gather of places shares its rows among threads, which a Slice does not; it needs to know all sizes.
    """
    kernel = product.window.static_kernel or []
    rows = [(row, row + 1) for row in range(kernel[0])] if by_rows else [(0, kernel[0])]
    x = _flat_places(op, product)
    return [op.Reshape(op.Gather(x, _places(op, product, row), axis=1), shape) for row in rows]


def _gathered_taps(op, product: Product) -> list[ir.Value]:
    """What each tap reads for all windows: [batch, windows, channels]."""
    x, kernel = _flat_places(op, product), product.window.static_kernel or []
    count = int(np.prod(np.asarray(spatial(op, product.dy))))
    places = op.Reshape(_places(op, product, (0, kernel[0])), [count, -1])
    taps = op.Split(
        op.Transpose(places, perm=[1, 0]),
        axis=0,
        num_outputs=int(np.prod(kernel)),
        outputs=int(np.prod(kernel)),
    )
    return [op.Gather(x, op.Reshape(tap, [-1]), axis=1) for tap in taps]


def _flat_places(op, product: Product) -> ir.Value:
    window = product.window
    sizes = np.asarray(spatial(op, product.x)) + window.begin + window.end
    return op.Reshape(_channels_last(op, product), [0, int(np.prod(sizes)), op.static_dim(product.x, 1)])


def _places(op, product: Product, rows: tuple[int, int]) -> ir.Value:
    """Where taps of some rows of the kernel read, counted over all places of a padded image: [windows…, taps…].

    Where they are many, the sum of one small vector for each axis: the runtime adds them up when it loads the
    model.
    """
    window, count = product.window, np.asarray(spatial(op, product.dy))
    sizes = np.asarray(spatial(op, product.x)) + window.begin + window.end
    parts = []
    for axis, size in enumerate(count):
        first, last = rows if axis == 0 else (0, int(np.asarray(window.kernel)[axis]))
        along = np.arange(size)[:, None] * window.strides[axis]
        along = (along + np.arange(first, last)[None, :] * window.dilations[axis]) * np.prod(
            sizes[axis + 1 :]
        )
        shape = np.ones(2 * len(count), np.int64)
        shape[axis], shape[len(count) + axis] = along.shape
        parts.append(along.astype(np.int64).reshape(shape))
    if np.prod(np.broadcast_shapes(*(part.shape for part in parts))) <= _FEW_PLACES:
        return op.constant(sum(parts), name="places")
    return functools.reduce(op.Add, [op.constant(part, name="places") for part in parts])


def _weight_correlate(op, product: Product) -> ir.Value:
    """dw = x ⋆ dy with batch and channels exchanged, strides and dilations too"""
    window, group = product.window, product.group
    x = padded(op, product.x, window.begin, window.end, axes=window.axes)
    shape = op.Shape(x)
    tail = op.Shape(x, start=2)
    x = op.Reshape(x, op.Concat([0, group, -1], tail, axis=0))
    x = op.Transpose(x, perm=[2, 1, 0, *range(3, 3 + len(window.axes))])
    merged = op.Concat([-1], op.Mul(op.Gather(shape, [0]), [group]), tail, axis=0)
    x = op.Reshape(x, merged)
    dy = op.Transpose(product.dy, perm=[1, 0, *window.axes])
    dw = op.Conv(x, dy, strides=window.dilations.tolist(), dilations=window.strides.tolist(), group=group)
    dw = cut(op, dw, np.zeros_like(window.strides), window.kernel, axes=window.axes)
    return op.Transpose(dw, perm=[1, 0, *window.axes])


def _tap_major(op, flat: ir.Value, product: Product) -> ir.Value:
    """[out, tap·in] as weights [out, in, taps…]."""
    kernel = product.window.static_kernel or []
    if all(size == 1 for size in kernel):
        return op.Reshape(flat, op.shape(product.w))
    last = len(kernel) + 1
    shaped = op.Reshape(flat, [0, *kernel, -1])
    return op.Transpose(shaped, perm=[0, last, *range(1, last)])


# By name. Those with "rows" and "all" need to know all sizes, as does "depthwise_last".
FORMS = {
    "depthwise": _weight_depthwise,
    "depthwise_last": _weight_depthwise_last,
    "depthwise_rows": functools.partial(_weight_depthwise_last, by_rows=True),
    "columns": _weight_columns,
    "channels_first": _weight_channels_first,
    "channels_last": _weight_channels_last,
    "channels_last_rows": functools.partial(_weight_channels_last, by_rows=True),
    "channels_last_all": functools.partial(_weight_channels_last, by_rows=False),
    "taps": _weight_taps,
    "correlate": _weight_correlate,
}


def weight_formulation(op, product: Product) -> str:
    """Choose the formulation of dw; measured with one and two threads on the CPU provider.

    "depthwise": multiply and sum per tap, channels first or (where sizes are known) last. "columns": all taps side
    by side, one MatMul per image, best where there are few input channels. "channels_first"/"channels_last": one
    Gemm per tap with the batch folded into the summed axis; last is the faster, but for large images whose size
    is not known. "taps": the same from slices, for a kernel of one tap over few positions. "correlate": no size
    needs to be known.
    """
    window = product.window
    if window.static_kernel is None:
        return "correlate"
    inputs, outputs = op.static_dim(product.w, 1), op.static_dim(product.w, 0)
    if inputs == 1 and product.group > 1:
        return "depthwise_last" if outputs == product.group and _has_sizes(op, product) else "depthwise"
    if product.group > 1:
        return "channels_first"
    places = spatial(op, product.dy)
    count = np.prod(places) if isinstance(places, np.ndarray) else None
    if np.all(window.kernel == 1):
        return "columns" if count is None or count > _FEW_POSITIONS else "taps"
    if inputs is not None and inputs < 16:
        return "columns"
    small = count is not None and count < 1000
    return "channels_last" if small or _has_sizes(op, product) else "channels_first"


def possible_forms(op, product: Product) -> list[str]:
    """The formulations for a product whose sizes are all known."""
    inputs, outputs = op.static_dim(product.w, 1), op.static_dim(product.w, 0)
    one = bool(np.all(np.asarray(product.window.kernel) == 1))
    sized = _has_sizes(op, product)
    if inputs == 1 and product.group > 1:
        last = ["depthwise_last", "depthwise_rows"] if outputs == product.group and sized else []
        return [*last, "depthwise", "correlate"]
    if product.group > 1:
        return ["channels_first", "correlate"]
    if one:
        return ["columns", "channels_first", "taps"]
    return [
        *(["channels_last_rows", "channels_last_all"] if sized else []),
        "columns",
        "channels_first",
        "taps",
        "correlate",
    ]


def _has_sizes(op, product: Product) -> bool:
    """Whether all sizes but the batch are known, and so few that lists of places take little memory."""
    size, places = spatial(op, product.x), spatial(op, product.dy)
    if not isinstance(size, np.ndarray) or not isinstance(places, np.ndarray):
        return False
    taps = np.prod(product.window.static_kernel or [])
    few = bool(np.prod(places) * taps <= _MOST_PLACES)
    return few and product.window.static_pads is not None and op.static_dim(product.x, 1) is not None


def grouped(op, value: ir.Value, group: int) -> ir.Value | list[int]:
    """The shape [group, channels/group, everything else], without the first where there is one group."""
    channels = op.static_dim(value, 1)
    lead = [] if group == 1 else [group]
    if channels is not None:
        return [*lead, channels // group, -1]
    each = op.dim(value, 1) if group == 1 else op.Div(op.dim(value, 1), [group])
    return op.Concat(*([lead] if lead else []), each, [-1], axis=0)


def per_image(op, value: ir.Value, times: int, count: Sizes) -> ir.Value | list[int]:
    """The shape [batch, times·channels, positions]; the batch may be empty, so no size is left open."""
    channels = op.static_dim(value, 1)
    if channels is not None and isinstance(count, np.ndarray):
        return [0, times * channels, int(np.prod(count))]
    places = op.ReduceProd(values(op, count), keepdims=1)
    return op.Concat([0], op.Mul(op.dim(value, 1), [times]), places, axis=0)


def stack(op, parts: list[ir.Value], *, axis: int = -1) -> ir.Value:
    """Concat, where there is more than one."""
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)


def values(op, sizes: Sizes) -> ir.Value:
    """Sizes as a value of the graph."""
    return sizes if isinstance(sizes, ir.Value) else op.constant(sizes, name="sizes")
