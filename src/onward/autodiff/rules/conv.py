"""Gradients of convolutions, deformable ones too, and of Col2Im.

The gradient of a convolution's input has two formulations, with equal results and different speed:
`input_formulation` chooses by shape. The weights' gradient is in `forms.conv_weights`.
"""

from __future__ import annotations

import numpy as np
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
from onward.errors import ModelError
from onward.graph.forms.conv_weights import Product, values, weight_gradient
from onward.graph.forms.windows import (
    Sizes,
    Window,
    calculate,
    cut,
    ints,
    padded,
    ranked,
    reach,
    spatial,
    split_padding,
    window_of,
)


@gradient_rule("Conv")
def conv(op, node, dy):
    """y = x ⋆ w + b   ⇒   dx = dy ∗ w (transposed),  dw = x ⋆ dy over batch and positions,  db = Σ dy"""
    x, w, *optional = node.inputs
    bias = optional[0] if optional else None
    dy = ranked(dy, x)
    window = window_of(op, node, x, kernel_of(op, node, w))
    product = Product(x, w, dy, window, node.attributes.get_int("group", 1))
    dx = input_gradient(op, product) if op.needs_gradient(x) else None
    dw = weight_gradient(op, product) if op.needs_gradient(w) else None
    return dx, dw, sum_channels(op, dy) if op.needs_gradient(bias) else None


@gradient_rule("ConvTranspose")
def conv_transpose(op, node, dy):
    """y = x ∗ w + b, the transpose of ⋆   ⇒   dx = dy ⋆ w,  dw = dy ⋆ x over batch and positions,  db = Σ dy"""
    x, w, *optional = node.inputs
    bias = optional[0] if optional else None
    dy = ranked(dy, x)
    window = transposed_window(op, node, x, kernel_of(op, node, w))
    group = node.attributes.get_int("group", 1)
    dx = dw = None
    if op.needs_gradient(x):
        pads = window.static_pads
        source = dy if pads is not None else padded(op, dy, window.begin, window.end, axes=window.axes)
        dx = op.Conv(source, w, **placement(window), pads=pads, group=group)
        # Output padding of a whole stride and more gives windows that no input made.
        if np.any(ints(node, "output_padding", [0]) >= window.strides) or has(node, "output_shape"):
            dx = cut(op, dx, np.zeros_like(window.strides), spatial(op, x), axes=window.axes)
    if op.needs_gradient(w):
        dw = weight_gradient(op, Product(dy, w, x, window, group))
    return dx, dw, sum_channels(op, dy) if op.needs_gradient(bias) else None


@gradient_rule("Col2Im")
def col2im(op, node, dy):
    """y adds up blocks of pixels   ⇒   dx[c, t, p] = dy[c, p·stride + t·dilation − pad]"""
    x, image_shape, block_shape = node.inputs
    size, block = sizes_of(op, image_shape), sizes_of(op, block_shape)
    rank = op.rank(dy) - 2 if dy.shape is not None else op.static_dim(image_shape, 0)
    strides, dilations = ints(node, "strides", [1] * rank), ints(node, "dilations", [1] * rank)
    pads = ints(node, "pads", [0] * 2 * rank)
    window = Window(block, strides, dilations, pads[:rank], pads[rank:])
    total = calculate(op, "Add", size, pads[:rank] + pads[rank:])
    free = calculate(op, "Sub", total, reach(op, block, dilations))
    count = calculate(op, "Add", calculate(op, "Div", free, strides), 1)
    columns = padded(op, dy, window.begin, window.end, axes=window.axes)
    for axis in range(rank):
        tap = count_up(op, block, axis, int(dilations[axis]))
        start = count_up(op, count, axis, int(strides[axis]))
        index = op.Add(op.Unsqueeze(tap, [1]), op.Unsqueeze(start, [0]))
        columns = op.Gather(columns, index, axis=2 + 2 * axis)
    # Col2Im's columns have all taps before all positions.
    order = [0, 1, *range(2, 2 + 2 * rank, 2), *range(3, 3 + 2 * rank, 2)]
    return op.Reshape(op.Transpose(columns, perm=order), op.shape(x)), None, None


# ---- the two products of a convolution ------------------------------------------------------------


def input_formulation(op, product: Product) -> str:
    """Choose the formulation of dx: "transpose" (ConvTranspose) or "flip" (Conv with the kernel flipped).

    Conv has a kernel for depthwise weights, and shares large images among threads where ConvTranspose adds up
    its columns in one; ConvTranspose is the faster on small images, and needs no size to be known. From
    measurements on the CPU provider.
    """
    window, pads = product.window, product.window.static_pads
    outputs, inputs = op.static_dim(product.w, 0), op.static_dim(product.w, 1)
    if window.static_kernel is None or pads is None or np.any(window.strides > 1):
        return "transpose"
    # Conv takes no negative padding; more padding than the kernel reaches needs it.
    if np.any(mirrored_pads(window) < 0):
        return "transpose"
    if product.group > 1:
        # The runtime's kernel for depthwise Conv has no counterpart in ConvTranspose.
        return "flip" if inputs == 1 and outputs == product.group else "transpose"
    places = spatial(op, product.dy)
    large = isinstance(places, np.ndarray) and np.prod(places) >= 256
    return "flip" if large or np.all(window.kernel == 1) else "transpose"


def input_gradient(op, product: Product) -> ir.Value:
    """dx of y = x ⋆ w."""
    window, x, w, dy = product.window, product.x, product.w, product.dy
    if input_formulation(op, product) == "flip":
        return _input_by_flip(op, product)
    pads, size = window.static_pads, spatial(op, x)
    attributes = {**placement(window), "group": product.group}
    covered = calculate(op, "Mul", calculate(op, "Sub", spatial(op, dy), 1), window.strides)
    covered = calculate(op, "Add", covered, reach(op, window.kernel, window.dilations))
    remainder = calculate(
        op, "Sub", calculate(op, "Add", size, calculate(op, "Add", window.begin, window.end)), covered
    )
    # What a stride leaves over at the end has no window, and so a gradient of zero: output padding says how much.
    if pads is not None and isinstance(remainder, np.ndarray):
        return op.ConvTranspose(dy, w, **attributes, pads=pads, output_padding=remainder.tolist())
    # Which remainder there is only the run knows: as much as there can be, cut off afterwards.
    spare = (window.strides - 1).tolist() if np.any(window.strides > 1) else None
    if pads is not None:
        full = op.ConvTranspose(dy, w, **attributes, pads=pads, output_padding=spare)
        if spare is None:
            return full
        return cut(op, full, np.zeros_like(window.strides), size, axes=window.axes)
    full = op.ConvTranspose(dy, w, **attributes, output_padding=spare)
    return cut(op, full, window.begin, size, axes=window.axes)


def mirrored_pads(window: Window) -> np.ndarray:
    """The padding with which a flipped kernel of stride 1 restores the input's size."""
    span = (np.asarray(window.kernel) - 1) * window.dilations
    return np.concatenate([span - np.asarray(window.begin), span - np.asarray(window.end)])


def _input_by_flip(op, product: Product) -> ir.Value:
    window, w = product.window, product.w
    many = [axis for axis, size in zip(window.axes, np.asarray(window.kernel)) if size > 1]
    if many:
        low = [np.iinfo(np.int64).min] * len(many)
        # A Slice with negative steps turns the kernel around: it is small beside the images.
        w = op.Slice(w, [-1] * len(many), low, many, [-1] * len(many))
    if product.group == 1:
        w = op.Transpose(w, perm=[1, 0, *window.axes])
    return op.Conv(
        product.dy,
        w,
        dilations=window.dilations.tolist(),
        strides=window.strides.tolist(),
        pads=mirrored_pads(window).tolist(),
        group=product.group,
    )


# ---- sizes ----------------------------------------------------------------------------------------


def kernel_of(op, node: ir.Node, w: ir.Value) -> Sizes:
    """The kernel's size, from the weights or the attribute."""
    if has(node, "kernel_shape"):
        return ints(node, "kernel_shape", [])
    return spatial(op, w)


def transposed_window(op, node: ir.Node, x: ir.Value, kernel: Sizes) -> Window:
    """The window of a ConvTranspose over its output."""
    rank = op.rank(x) - 2
    strides, dilations = ints(node, "strides", [1] * rank), ints(node, "dilations", [1] * rank)
    extra = ints(node, "output_padding", [0] * rank)
    auto_pad = node.attributes.get_string("auto_pad", "NOTSET")
    same = auto_pad in ("SAME_UPPER", "SAME_LOWER")
    if not has(node, "output_shape") and not same:
        pads = ints(node, "pads", [0] * 2 * rank) if auto_pad == "NOTSET" else np.zeros(2 * rank, np.int64)
        return Window(kernel, strides, dilations, pads[:rank], pads[rank:])
    size = spatial(op, x)
    full = calculate(op, "Add", reach(op, kernel, dilations), extra)
    if has(node, "output_shape"):
        full = calculate(op, "Add", full, calculate(op, "Mul", calculate(op, "Sub", size, 1), strides))
        # onnxruntime takes batch and channels in front of the sizes, too.
        requested: Sizes = ints(node, "output_shape", [])[-rank:]
    else:
        requested = strides
    # Padding is never negative here: an output larger than the windows gets none.
    total = calculate(op, "Max", calculate(op, "Sub", full, requested), np.zeros(rank, np.int64))
    return Window(kernel, strides, dilations, *split_padding(op, total, upper=auto_pad == "SAME_UPPER"))


def placement(window: Window) -> dict[str, list[int]]:
    """The attributes of a convolution operator that say where its windows are."""
    return {"strides": window.strides.tolist(), "dilations": window.dilations.tolist()}


def has(node: ir.Node, name: str) -> bool:
    """Whether a list attribute is present and not empty."""
    return bool(node.attributes.get_ints(name, []))


def sum_channels(op, dy: ir.Value) -> ir.Value:
    """Σ over batch and positions: the gradient of a bias."""
    return op.ReduceSum(dy, [0, *range(2, op.rank(dy))], keepdims=0)


def sizes_of(op, vector: ir.Value) -> Sizes:
    """A vector of sizes that may be constant."""
    constant = op.const_value(vector)
    return vector if constant is None else np.asarray(constant, np.int64)


def count_up(op, sizes: Sizes, axis: int, step: int) -> ir.Value:
    """0, step, 2·step … with as many entries as one of the sizes says."""
    if isinstance(sizes, np.ndarray):
        return op.constant(np.arange(int(sizes[axis]), dtype=np.int64) * step)
    limit = op.Mul(op.Gather(sizes, axis), np.asarray(step, np.int64))
    return op.Range(0, limit, np.asarray(step, np.int64))


# --- DeformConv: a convolution over samples at learned offsets.


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
