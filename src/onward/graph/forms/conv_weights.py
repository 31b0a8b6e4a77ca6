"""The gradient of a convolution's weights: formulations with equal results and different speed.

`weight_formulation` chooses by shape. What it chose is noted on the node of the result, so that a session for known
shapes may choose again (`proto.conv_forms`). Registers no rule.
"""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np
import onnx_ir as ir

from onward.contract import CONV_WEIGHT
from onward.graph.forms.windows import Sizes, Window, calculate, cut, padded, spatial, tap_slice

# Places up to which a list of all that the taps of all windows read is made, when a session is made: 1 MB.
_MOST_PLACES = 1 << 17
# Places up to which that list is in the file: 32 kB.
_FEW_PLACES = 1 << 12
# Numbers of one image's columns up to which those of all taps are made at once; else by rows of the kernel.
_MANY_COLUMNS = 1 << 20
# Channels below which the columns of one image at a time are the faster.
_FEW_CHANNELS = 16
# Taps of a kernel of 3×3.
_FEW_TAPS = 9
# Positions of an image up to which one product over all images is faster than one for each: 7×7.
_FEW_POSITIONS = 64
# Places that a window reads along one axis up to which products of whole rows are the faster for depthwise kernels.
_NARROW = 64
# Positions of two images times taps up to which products of whole images are: 3×3 over 7×7.
_TINY_IMAGES = 1 << 15


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
        # Sums as products with ones take half the time of ReduceSum or less.
        ones = op.constant(np.ones((1, count), op.dtype(dy).numpy()), name="ones")
        sums = [op.MatMul(ones, op.Mul(dy, read)) for read in _gathered_taps(op, product)]
        by_tap = op.ReduceSum(stack(op, sums, axis=1), [0], keepdims=0)
    return op.Reshape(op.Transpose(by_tap, perm=[1, 0]), op.shape(product.w))


def _weight_depthwise_rows(op, product: Product) -> ir.Value:
    """dw[c, r, j] = Σ over w of g[c, r, w, w·stride + j·dilation],  g = Σ over batch and rows of dy[w]·x[v] at tap r

    Along one axis, g multiplies all pairs of places: more arithmetic than there is in dw, but in products of
    matrices, and 11 nodes instead of three for each tap.
    """
    window, kernel = product.window, product.window.static_kernel or []
    axis = _product_axis(op, product)
    others = [other for other in range(len(kernel)) if other != axis]
    order, channels = [*others, axis], op.static_dim(product.w, 0)
    perm = [1, *(2 + other for other in others), 0, 2 + axis]
    ends = [np.asarray(side)[order] for side in (window.begin, window.end)]
    x = padded(op, op.Transpose(product.x, perm=perm), *ends, axes=[*range(1, len(kernel)), len(kernel) + 1])
    dy = op.Transpose(product.dy, perm=perm)
    rows = int(np.prod([kernel[other] for other in others]))
    size, count = _padded_size(op, product, axis), _size(op, product.dy, axis)
    if others:
        if len(others) > 1:
            area = int(np.prod([np.asarray(_padded_size(op, product, other)) for other in others]))
            x = op.Reshape(x, op.concat_shape(channels, area, -1, _part(size)))
        x = op.Gather(x, _read_positions(op, product, axes=others, taps_first=True), axis=1)
        x = op.Reshape(x, op.concat_shape(channels, rows, -1, _part(size)))
        dy = op.Reshape(dy, op.concat_shape(channels, 1, -1, _part(count)))
    turned = op.Transpose(dy, perm=[0, 1, 3, 2] if others else [0, 2, 1])
    pairs = op.Flatten(op.MatMul(turned, x), axis=2 if others else 1)
    sums = op.MatMul(pairs, _one_hot(op, _tap_positions(op, product, axis), size, op.dtype(product.x)))
    if axis == len(kernel) - 1:
        return op.Reshape(sums, op.shape(product.w))
    back = [0, 1, *(2 + order.index(axis_index) for axis_index in range(len(kernel)))]
    return op.Transpose(op.Reshape(sums, [channels, 1, *(kernel[i] for i in order)]), perm=back)


def _product_axis(op, product: Product) -> int:
    """The axis along which all pairs of places are the fewest for each tap; the last of several."""
    kernel = product.window.static_kernel or []
    spatial_sizes = spatial(op, product.x)
    # Sizes that only the run knows count as equal.
    sizes = spatial_sizes if isinstance(spatial_sizes, np.ndarray) else np.ones(len(kernel))
    return max(range(len(kernel)), key=lambda axis: (kernel[axis] / sizes[axis], axis))


def _weight_depthwise_images(op, product: Product) -> ir.Value:
    """dw[c, t] = Σ over p of g[c, p, p at t],  g[c, p, q] = Σ over the batch of dy[c, p]·x[c, q]: for tiny images"""
    window, channels = product.window, op.static_dim(product.w, 0)
    size, count = np.asarray(spatial(op, product.x)), np.asarray(spatial(op, product.dy))
    inside, outside = int(np.prod(size)), int(np.prod(count))
    positions, valid = np.zeros((1,) * 2 * len(size), np.int64), np.ones((1,) * 2 * len(size), bool)
    for axis in range(len(size)):
        along = np.asarray(_tap_positions(op, product, axis)) - np.asarray(window.begin)[axis]
        along = np.expand_dims(along, [i for i in range(positions.ndim) if i not in (axis, len(size) + axis)])
        valid = valid & (along >= 0) & (along < size[axis])
        positions = positions + along * int(np.prod(size[axis + 1 :]))
    reads = np.where(valid, positions, inside).reshape(outside, -1)
    dy = op.Transpose(op.Reshape(product.dy, [0, channels, outside]), perm=[1, 2, 0])
    x = op.Transpose(op.Reshape(product.x, [0, channels, inside]), perm=[1, 0, 2])
    pairs = op.Reshape(op.MatMul(dy, x), [channels, outside * inside])
    chosen = _one_hot(op, reads, np.asarray([inside], np.int64), op.dtype(product.x))
    return op.Reshape(op.MatMul(pairs, chosen), op.shape(product.w))


def _one_hot(op, positions: Sizes, size: Sizes, kind: ir.DataType) -> ir.Value:
    """[windows·size, taps]: one where a tap of a window reads the place, else zero. Places past the end are none."""
    length = int(size[0]) if isinstance(size, np.ndarray) else None
    if length is not None and isinstance(positions, np.ndarray) and positions.size * length <= _FEW_PLACES:
        ones = positions[:, None, :] == np.arange(length)[None, :, None]
        return op.constant(ones.astype(kind.numpy()).reshape(-1, positions.shape[1]), name="reads")
    # A place past the end is out of OneHot's range, which it answers with zeros.
    chosen = op.OneHot(positions, size, op.constant(np.asarray([0, 1], kind.numpy())), axis=1)
    return op.Flatten(chosen, axis=2)


def _weight_gathered(op, product: Product) -> ir.Value:
    """dw[t, o, c] = Σ dy[o, pn]·x[pn at t, c], places before the batch: sizes of images may be open

    Where the columns of all taps would be many and sizes are open, those of one row of the kernel at a time.
    """
    window, kernel = product.window, product.window.static_kernel or []
    channels, rank = op.static_dim(product.w, 1), len(kernel)
    dy = op.Flatten(op.Transpose(product.dy, perm=[1, *window.axes, 0]), axis=1)
    x = op.Transpose(product.x, perm=[*window.axes, 0, 1])
    x = op.Flatten(padded(op, x, window.begin, window.end, axes=list(range(rank))), axis=rank)
    by_rows = (
        not _has_sizes(op, product) and int(np.prod(kernel)) > _FEW_TAPS and (channels or 0) >= _FEW_CHANNELS
    )
    parts = []
    for rows in [(row, row + 1) for row in range(kernel[0])] if by_rows else [(0, kernel[0])]:
        read = op.Gather(x, _read_positions(op, product, rows, taps_first=True), axis=0)
        read = op.Reshape(read, [rows[1] - rows[0], *kernel[1:], -1, channels])
        parts.append(op.MatMul(dy, read))
    return op.Transpose(stack(op, parts, axis=0), perm=[rank, rank + 1, *range(rank)])


def _weight_folded(op, product: Product) -> ir.Value:
    """dw[o, t, c] = Σ dy[o]·x[c] at tap t: one convolution, with the batch for its channels

    Channels lie side by side in the last axis of x, so a step of one place is one of as many numbers as there are
    channels: strides become dilations. The runtime makes columns a tile at a time, none is stored, and no size of
    an image needs to be known.
    """
    window, group, rank = product.window, product.group, len(product.window.strides)
    kernel, channels = np.asarray(window.kernel), op.static_dim(product.w, 1)
    x, pads = product.x, window.static_pads
    # Pads that only the run knows (SAME over open sizes) cannot be attributes of the convolution below.
    if pads is None:
        x, pads = padded(op, x, window.begin, window.end, axes=window.axes), [0] * 2 * rank
    begin, end = np.asarray(pads[:rank]), np.asarray(pads[rank:])
    sizes = [op.static_dim(x, axis) for axis in window.axes]
    # a size left open here rather than the batch's: the runtime's convolution does not end without images
    if group == 1:
        x = op.Reshape(op.Transpose(x, perm=[0, *window.axes, 1]), [0] * rank + [-1])
        x = op.Unsqueeze(x, [0])
    else:
        x = op.Reshape(x, [0, group, channels, *sizes])
        x = op.Reshape(op.Transpose(x, perm=[1, 0, *range(3, 3 + rank), 2]), [0, 0, -1])
        x = op.Reshape(x, [1, -1, *sizes[:-1], sizes[-1] * channels])
    count = spatial(op, product.dy)
    if None not in sizes and isinstance(count, np.ndarray):  # what no window reads
        used = (kernel - 1) * window.dilations + (count - 1) * window.strides + 1
        end = np.maximum(end + used - (np.asarray(sizes) + begin + end), 0)
    fold = np.asarray([1] * (rank - 1) + [channels], np.int64)
    dw = op.Conv(
        x,
        op.Transpose(product.dy, perm=[1, 0, *window.axes]),
        strides=[*window.dilations[:-1].tolist(), 1],
        dilations=(window.strides * fold).tolist(),
        pads=[*(begin * fold).tolist(), *(end * fold).tolist()],
        group=group,
    )
    # A stride may leave out the last places: then the convolution has more results than there are taps.
    if np.any(window.strides > 1):
        dw = cut(op, dw, np.zeros_like(kernel), kernel * fold, axes=window.axes)
    dw = op.Reshape(dw, [op.static_dim(product.w, 0), *kernel.tolist(), channels])
    return op.Transpose(dw, perm=[0, rank + 1, *range(1, rank + 1)])


def _weight_winograd(op, product: Product) -> ir.Value:
    """dw = Gᵀ·U·G,  U = Σ over tiles of (A·dy·Aᵀ)·(Bᵀ·x·B): Winograd's F(2×2, 3×3), 16 products for each tile of 36

    0.7 to 0.8 of the time of "channels_last" on one thread from 128 channels of 14×14 or 8×8 on, up to 1.16 for fewer.
    """
    window, outputs, channels = product.window, *(op.static_dim(product.w, axis) for axis in (0, 1))
    count, kind = np.asarray(spatial(op, product.dy)), op.dtype(product.x).numpy()
    # Tiles of 2×2 results; an odd size gets a row or column of zeros.
    tiles = -(-count // 2)
    odd = 2 * tiles - count
    image, gradient, kernel = (np.kron(part, part).astype(kind) for part in _WINOGRAD)
    x = padded(op, op.Transpose(product.x, perm=[2, 3, 0, 1]), window.begin, window.end + odd, axes=[0, 1])
    rows, columns = (np.arange(4)[:, None] + 2 * np.arange(size)[None, :] for size in tiles)
    positions = rows[:, None, :, None] * (2 * int(tiles[1]) + 2) + columns[None, :, None, :]
    read = op.Gather(op.Flatten(x, axis=2), op.constant(positions.reshape(16, -1), name="places"), axis=0)
    v = op.Reshape(op.MatMul(image, op.Flatten(read, axis=1)), [16, -1, channels])
    dy = padded(op, product.dy, np.zeros_like(odd), odd, axes=window.axes)
    dy = op.Reshape(dy, [0, outputs, int(tiles[0]), 2, int(tiles[1]), 2])
    dy = op.Flatten(op.Transpose(dy, perm=[3, 5, 2, 4, 0, 1]), axis=2)
    m = op.Reshape(op.MatMul(gradient, dy), [16, -1, outputs])
    u = op.MatMul(op.Transpose(m, perm=[0, 2, 1]), v)
    dw = op.Reshape(op.MatMul(kernel, op.Flatten(u, axis=1)), [3, 3, outputs, channels])
    return op.Transpose(dw, perm=[2, 3, 0, 1])


# Bᵀ, A and Gᵀ
_WINOGRAD = (
    np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]]),
    np.array([[1, 0], [1, 1], [1, -1], [0, -1]]),
    np.array([[1, 0.5, 0.5, 0], [0, 0.5, -0.5, 0], [0, 0.5, 0.5, 1]]),
)


def _has_winograd(product: Product) -> bool:
    """Whether Winograd's form is for this kernel."""
    window = product.window
    steps = [*window.strides, *window.dilations]
    return product.group == 1 and window.static_kernel == [3, 3] and all(step == 1 for step in steps)


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
                op, [_slice_along(op, x, tap, axis, window, count) for tap in range(kernel[axis])], axis=1
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
        windows, channels = spatial(op, product.dy), op.static_dim(product.x, 1)
        taps = int(np.prod(product.window.static_kernel or []))
        if by_rows is None:
            by_rows = bool(int(np.prod(np.asarray(windows))) * taps * channels > _MANY_COLUMNS)
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
    x = _flatten_positions(op, product)
    return [op.Reshape(op.Gather(x, _read_positions(op, product, row), axis=1), shape) for row in rows]


def _gathered_taps(op, product: Product) -> list[ir.Value]:
    """What each tap reads for all windows: [batch, windows, channels]."""
    x, kernel = _flatten_positions(op, product), product.window.static_kernel or []
    count = int(np.prod(np.asarray(spatial(op, product.dy))))
    positions = op.Reshape(_read_positions(op, product, (0, kernel[0])), [count, -1])
    taps = op.Split(
        op.Transpose(positions, perm=[1, 0]),
        axis=0,
        num_outputs=int(np.prod(kernel)),
        outputs=int(np.prod(kernel)),
    )
    return [op.Gather(x, op.Reshape(tap, [-1]), axis=1) for tap in taps]


def _flatten_positions(op, product: Product) -> ir.Value:
    window = product.window
    sizes = np.asarray(spatial(op, product.x)) + window.begin + window.end
    return op.Reshape(_channels_last(op, product), [0, int(np.prod(sizes)), op.static_dim(product.x, 1)])


def _read_positions(
    op,
    product: Product,
    rows: tuple[int, int] | None = None,
    *,
    axes: list[int] | None = None,
    taps_first: bool = False,
) -> ir.Value:
    """Where taps read, counted over all places of a padded image: [windows…, taps…], or taps first.

    Of some rows of the kernel, or along some axes only. Where they are many, the sum of one small vector for each
    axis: the runtime adds them up when it loads the model.
    """
    axes = list(range(len(product.window.strides))) if axes is None else axes
    parts: list[Sizes] = []
    for index, axis in enumerate(axes):
        behind = 2 * len(axes) - 1 - index, len(axes) - 1 - index
        after_windows, after_taps = behind[::-1] if taps_first else behind
        part = _tap_positions(op, product, axis, rows if axis == 0 else None, after_windows, after_taps)
        for inner in axes[index + 1 :]:
            part = calculate(op, "Mul", part, _padded_size(op, product, inner))
        parts.append(part)
    constants = [part for part in parts if isinstance(part, np.ndarray)]
    few = (
        len(constants) == len(parts)
        and np.prod(np.broadcast_shapes(*(p.shape for p in constants))) <= _FEW_PLACES
    )
    if few:
        return op.constant(sum(constants), name="places")
    return functools.reduce(op.Add, [values(op, part) for part in parts])


def _tap_positions(
    op,
    product: Product,
    axis: int,
    rows: tuple[int, int] | None = None,
    after_windows: int = 1,
    after_taps: int = 0,
) -> Sizes:
    """Where the taps of each window read along one axis of the padded input: [windows, taps].

    Both may have more axes of size 1 after them, and so come in another order.
    """
    window = product.window
    first, last = rows or (0, int(np.asarray(window.kernel)[axis]))
    offsets = np.arange(first, last, dtype=np.int64) * window.dilations[axis]
    offsets = offsets.reshape([-1] + [1] * after_taps)
    stride, count = window.strides[axis : axis + 1], _size(op, product.dy, axis)
    if isinstance(count, np.ndarray):
        starts = np.arange(int(count[0]), dtype=np.int64) * stride
        return starts.reshape([-1] + [1] * after_windows) + offsets
    end = count if stride[0] == 1 else op.Mul(count, stride)
    starts = op.Range(np.int64(0), op.Squeeze(end, [0]), np.int64(stride[0]))
    if after_windows:
        starts = op.Unsqueeze(starts, list(range(1, 1 + after_windows)))
    return op.Add(starts, offsets)


def _size(op, value: ir.Value, axis: int) -> Sizes:
    """The size of one spatial axis, as a vector of one."""
    static = op.static_dim(value, 2 + axis)
    return op.dim(value, 2 + axis) if static is None else np.asarray([static], np.int64)


def _padded_size(op, product: Product, axis: int) -> Sizes:
    """The size of one spatial axis of the padded input."""
    begin, end = (np.asarray(side)[axis : axis + 1] for side in (product.window.begin, product.window.end))
    size, more = _size(op, product.x, axis), begin + end
    return calculate(op, "Add", size, more) if more.any() else size


def _part(size: Sizes) -> int | ir.Value:
    """A size as a part of a shape."""
    return int(size[0]) if isinstance(size, np.ndarray) else size


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
    "depthwise_by_rows": functools.partial(_weight_depthwise_last, by_rows=True),
    "depthwise_rows": _weight_depthwise_rows,
    "depthwise_images": _weight_depthwise_images,
    "folded": _weight_folded,
    "gathered": _weight_gathered,
    "winograd": _weight_winograd,
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

    Depthwise kernels: "depthwise_images" and "depthwise_rows" multiply whole images or rows, where these are short;
    "depthwise_last" and "depthwise" multiply and sum per tap, channels last or first. "columns": all taps side by side,
    one MatMul per image, best where there are few input channels. "folded": one convolution; 0.35 to 0.95 of the next
    best from 8 channels on, on one thread and two. For dilated kernels, "gathered": one product for each tap with the
    batch folded into the summed axis; "channels_last": one for all taps or for a row of them, better for few positions
    and for so many that the columns of all would be large; "channels_first" where sizes are known and large.
    "taps": the same from slices, for a kernel of one tap over few positions. "correlate": no size needs to be known.
    """
    window = product.window
    if window.static_kernel is None:
        return "correlate"
    inputs, outputs = op.static_dim(product.w, 1), op.static_dim(product.w, 0)
    if inputs == 1 and product.group > 1:
        return _depthwise_formulation(op, product) if outputs == product.group else "depthwise"
    if product.group > 1:
        few = product.group < _FEW_CHANNELS and not np.any(window.strides > 1)
        return (
            "folded" if _can_fold(op, product) and _has_sizes(op, product) and not few else "channels_first"
        )
    windows = spatial(op, product.dy)
    count = int(np.prod(windows)) if isinstance(windows, np.ndarray) else None
    if np.all(window.kernel == 1):
        return "columns" if count is None or count > _FEW_POSITIONS else "taps"
    narrow = (inputs or 1) * window.static_kernel[-1] < _FEW_CHANNELS
    if _can_fold(op, product) and (count is None or not narrow or np.any(window.strides > 1)):
        return "folded"
    if count is None:
        return "gathered" if inputs is not None and window.static_pads is not None else "channels_first"
    if inputs is not None and inputs < _FEW_CHANNELS:
        return "columns"
    if not _has_sizes(op, product):
        return "channels_last" if count < 1000 else "channels_first"
    taps = int(np.prod(window.static_kernel))
    few = count < _FEW_POSITIONS // 2 or count * taps * (inputs or 1) > _MANY_COLUMNS
    return "channels_last" if few else "gathered"


def _can_fold(op, product: Product) -> bool:
    """Whether taps are side by side along the last axis, and all sizes of the kernel are known."""
    static = all(op.static_dim(product.w, axis) is not None for axis in (0, 1))
    return bool(static and product.window.dilations[-1] == 1)


def _depthwise_formulation(op, product: Product) -> str:
    kernel, size, count = product.window.static_kernel or [], spatial(op, product.x), spatial(op, product.dy)
    if product.window.static_pads is None:
        return "depthwise"
    if not isinstance(size, np.ndarray) or not isinstance(count, np.ndarray):
        return "depthwise_rows" if len(kernel) <= 2 else "depthwise"
    if int(np.prod(size) * np.prod(count) * np.prod(kernel)) <= _TINY_IMAGES:
        return "depthwise_images"
    if size[_product_axis(op, product)] <= _NARROW:
        return "depthwise_rows"
    return "depthwise_last" if _has_sizes(op, product) else "depthwise"


def possible_forms(op, product: Product) -> list[str]:
    """The formulations for a product whose sizes are all known."""
    inputs, outputs = op.static_dim(product.w, 1), op.static_dim(product.w, 0)
    one = bool(np.all(np.asarray(product.window.kernel) == 1))
    sized = _has_sizes(op, product)
    if inputs == 1 and product.group > 1:
        last = (
            ["depthwise_rows", "depthwise_last", "depthwise_by_rows"]
            if outputs == product.group and sized
            else []
        )
        tiny = last and weight_formulation(op, product) == "depthwise_images"
        return [*(["depthwise_images"] if tiny else []), *last, "depthwise", "correlate"]
    folded = ["folded"] if _can_fold(op, product) else []
    if product.group > 1:
        return [*folded, "channels_first", "correlate"]
    if one:
        return ["columns", "channels_first", "taps"]
    return [
        *folded,
        *(["gathered", "channels_last_rows", "channels_last_all"] if sized else []),
        *(["winograd"] if sized and _has_winograd(product) else []),
        "columns",
        "channels_first",
        "taps",
        "correlate",
    ]


def _has_sizes(op, product: Product) -> bool:
    """Whether all sizes but the batch are known, and so few that lists of places take little memory."""
    size, windows = spatial(op, product.x), spatial(op, product.dy)
    if not isinstance(size, np.ndarray) or not isinstance(windows, np.ndarray):
        return False
    taps = np.prod(product.window.static_kernel or [])
    few = bool(np.prod(windows) * taps <= _MOST_PLACES)
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
    windows = op.ReduceProd(values(op, count), keepdims=1)
    each = op.Mul(op.dim(value, 1), [times]) if channels is None else channels * times
    return op.concat_shape(0, each, windows)


def stack(op, parts: list[ir.Value], *, axis: int = -1) -> ir.Value:
    """Concat, where there is more than one."""
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)


def values(op, sizes: Sizes) -> ir.Value:
    """Sizes as a value of the graph."""
    return sizes if isinstance(sizes, ir.Value) else op.constant(sizes, name="sizes")
