"""Gradients of indexing: the Gather and Scatter families, TopK, OneHot, Compress, Unique; of slicing, joining, padding.

An element that is gathered twice gets the sum of both gradients. ScatterND may not be used for that: on the stock
CPU provider its threads add to the same place without a lock, and updates are lost. ScatterElements is
sequential.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.autodiff.registry import gradient_rule, no_gradient
from onward.autodiff.rules.elementwise import mask
from onward.autodiff.rules.shape import difference, padded, reshape_like, size_of, total

# A table of up to this many rows gets its gradient from a product with one-hot rows (measured: 0.05 ms for 2
# rows, 0.8 ms for 128, 3.3 ms for 512, of 384 numbers with 1024 indices), a larger one from a scatter (1.3 ms).
_FEW_ROWS = 128


def scatter_selected(op, x, dz, select):
    """The gradient of any operator that only selects elements: `select` applied to the flat indices of x tells
    where each element of dz came from."""
    size = op.Size(x)
    index = select(op.Reshape(op.Range(0, size, 1), op.shape(x), allowzero=1))
    zeros = op.Expand(op.constant_like(0.0, x), op.Reshape(size, [1]))
    flat = [op.Reshape(value, [-1]) for value in (index, dz)]
    return reshape_like(op, op.ScatterElements(zeros, *flat, axis=0, reduction="add"), x)


def scatter_rows(op, x, index, dz, *, axis):
    """Add dz's slices along an axis to zeros of x's shape, at the places that the indices name."""
    rank = op.rank(x)
    places = op.Reshape(index, [-1 if other == axis else 1 for other in range(rank)])
    if rank > 1:
        places = op.Expand(places, op.shape(dz))
    return op.ScatterElements(op.zeros_like(x), places, dz, axis=axis, reduction="add")


@gradient_rule("Gather")
def gather(op, node, dz):
    """z = x at the indices along an axis   ⇒   dx = dz added up at those indices"""
    x, index = node.inputs
    axis = node.attributes.get_int("axis", 0) % op.rank(x)
    rows = _as_rows(op, x, index, dz, axis)
    size = op.static_dim(x, axis)
    # x[:, 0] and the like: zeros around dz, and no scatter.
    if (run := _run(op.const_value(index))) is not None:
        start, count = run
        whole = size_of(op, x, axis)
        before = start if start >= 0 else total(op, [whole, start])
        return padded(op, rows, [(axis, before, difference(op, whole, [before, count]))])
    few = size is not None and 0 < size <= _FEW_ROWS
    if few and axis == 0 and op.rank(x) == 2 and op.dtype(x) == ir.DataType.FLOAT:
        flat = op.Reshape(index, [-1])
        if op.dtype(index) != ir.DataType.INT64:
            flat = op.Cast(flat, to=ir.DataType.INT64)
        return op.MatMul(op.OneHot(flat, size, np.array([0, 1], np.float32), axis=0), rows)
    return scatter_rows(op, x, index, rows, axis=axis)


def _as_rows(op, x, index, dz, axis):
    """dz with one axis for all indices, where x has the axis that was picked from."""
    if op.rank(index) == 1:
        return dz
    if op.rank(index) == 0:
        return op.Unsqueeze(dz, [axis])
    dims = [-1 if other == axis else size_of(op, x, other) for other in range(op.rank(x))]
    if all(isinstance(dim, int) and dim for dim in dims):
        return op.Reshape(dz, np.asarray(dims))
    dims[axis] = op.Reshape(op.Size(index), [1])
    return op.Reshape(dz, op.concat_shape(*dims), allowzero=1)


def _run(index: np.ndarray | None) -> tuple[int, int] | None:
    """(start, length) of constant indices that follow each other, else None."""
    if index is None or index.size == 0:
        return None
    flat = index.reshape(-1).astype(np.int64)
    follows = np.all(np.diff(flat) == 1) and (flat[0] < 0) == (flat[-1] < 0)
    return (int(flat[0]), flat.size) if follows else None


@gradient_rule("GatherElements")
def gather_elements(op, node, dz):
    """z = x at an index for each element   ⇒   dx = dz added up at those indices"""
    x, index = node.inputs
    axis = node.attributes.get_int("axis", 0) % op.rank(x)
    return op.ScatterElements(op.zeros_like(x), index, dz, axis=axis, reduction="add")


@gradient_rule("GatherND")
def gather_nd(op, node, dz):
    """z = slices of x at tuples of indices   ⇒   dx = dz added up at those tuples"""
    x, index = node.inputs
    rows = _Rows(op, x, index, batch_dims=node.attributes.get_int("batch_dims", 0))
    return rows.scatter(op.zeros_like(x), dz, "add")


class _Rows:
    """The slices of a tensor that tuples of indices name, as rows of a matrix with one number for each."""

    def __init__(self, op, x, index, *, batch_dims: int = 0) -> None:
        self.op, self.x = op, x
        length = op.static_dim(index, -1)
        # Where only the run knows how long the tuples are, every element is a row.
        self.depth = op.rank(x) if length is None else batch_dims + length
        self.inner = [size_of(op, x, axis) for axis in range(self.depth, op.rank(x))]
        if length is None:
            every = op.Reshape(op.Range(0, op.Size(x), 1), op.shape(x), allowzero=1)
            number = op.GatherND(every, index, batch_dims=batch_dims)
        else:
            number = self._number(index, length, batch_dims)
        self.number = op.Reshape(number, [-1, 1])

    def _number(self, index, length, batch_dims):
        """The row of each tuple: its indices are the digits, the sizes of the axes the bases."""
        op, x = self.op, self.x
        if length == 1 and batch_dims == 0:
            return index
        number = None
        if batch_dims:
            sizes = [size_of(op, x, axis) for axis in range(batch_dims)]
            count = op.ReduceProd(op.concat_shape(*sizes), keepdims=0)
            aligned = op.concat_shape(*sizes, *[1] * (op.rank(index) - batch_dims))
            number = op.Reshape(op.Range(0, count, 1), aligned, allowzero=1)
        # Tuples as one number for each row: ScatterElements is sequential, ScatterND's threads lose updates.
        digits = op.Split(index, [1] * length, axis=-1, outputs=length) if length > 1 else (index,)
        for axis, digit in enumerate(digits, start=batch_dims):
            base = op.dim(x, axis)
            digit = op.Mod(digit, base)  # negative indices count from the end
            number = digit if number is None else op.Add(op.Mul(number, base), digit)
        return number

    def _matrix(self, value):
        op = self.op
        if all(isinstance(size, int) and size for size in self.inner):
            return op.Reshape(value, [-1, int(np.prod(self.inner))])
        # Sizes may be 0, so that nothing may be left for Reshape to find out.
        outer = op.rank(value) - len(self.inner)
        parts = (op.Shape(value, start=0, end=outer), op.Shape(value, start=outer))
        return op.Reshape(value, op.Concat(*(op.ReduceProd(part) for part in parts), axis=0), allowzero=1)

    def scatter(self, base, updates, reduction):
        """The base with updates put at the rows."""
        op = self.op
        matrix = self._matrix(updates)
        places = op.Expand(self.number, op.shape(matrix)) if self.inner else self.number
        done = op.ScatterElements(self._matrix(base), places, matrix, axis=0, reduction=reduction)
        return reshape_like(op, done, self.x)


@gradient_rule("ScatterElements")
def scatter_elements(op, node, dz):
    """z = x with u put at the indices   ⇒   dx = dz where nothing was put,  du = dz at the indices

    With a reduction: see `_scatter_gradients`.
    """
    x, index, updates = node.inputs
    axis = node.attributes.get_int("axis", 0) % op.rank(x)

    def scatter(base, values, reduction):
        return op.ScatterElements(base, index, values, axis=axis, reduction=reduction)

    def pick(value):
        return op.GatherElements(value, index, axis=axis)

    return _scatter_gradients(op, node, dz, updates, scatter, pick)


@gradient_rule("ScatterND")
def scatter_nd(op, node, dz):
    """z = x with slices u put at tuples of indices   ⇒   dx = dz where nothing was put,  du = dz there"""
    x, index, updates = node.inputs
    rows: list[_Rows] = []

    def scatter(base, values, reduction):
        if reduction == "none":
            return op.ScatterND(base, index, values)
        if not rows:
            rows.append(_Rows(op, x, index))
        return rows[0].scatter(base, values, reduction)

    return _scatter_gradients(op, node, dz, updates, scatter, lambda value: op.GatherND(value, index))


def _scatter_gradients(op, node, dz, u, scatter, pick):
    """What all scatters share; `pick` reads a tensor of z's shape at the indices.

    add   z = x + Σu        dx = dz                     du = dz there
    mul   z = x·Πu          dx = dz·Πu                  du = dz·x·Π of the others, there
    max   z = max(x, u…)    dx = dz where x = z         du = dz where u = z; equal ones share it
    """
    x, z = node.inputs[0], node.outputs[0]
    reduction = node.attributes.get_string("reduction", "none")
    if reduction == "none":
        return scatter(dz, op.zeros_like(u), "none") if op.needs_gradient(x) else None, None, pick(dz)
    if reduction == "add":
        return dz, None, pick(dz)
    one = op.constant_like(1.0, x)
    if reduction == "mul":
        # Not z/x: that is 0/0 where x is 0.
        dx = op.Mul(dz, scatter(op.Expand(one, op.shape(x)), u, "mul")) if op.needs_gradient(x) else None
        if not op.needs_gradient(u):
            return dx
        zero = op.Equal(u, 0.0)
        safe = op.Where(zero, one, u)
        zeros = mask(op, zero, like=u)
        product = scatter(x, safe, "mul")
        alone = op.Equal(pick(scatter(op.zeros_like(x), zeros, "add")), zeros)
        return dx, None, op.Where(alone, op.Div(pick(op.Mul(dz, product)), safe), 0.0)
    from_x = mask(op, op.Equal(x, z), like=x)
    from_u = mask(op, op.Equal(u, pick(z)), like=u)
    share = op.Div(dz, scatter(from_x, from_u, "add"))
    return op.Mul(share, from_x), None, op.Mul(pick(share), from_u)


def _put_back(op, x, index, dz, axis):
    """dz's slices at the places of x that they came from, each a place of its own; without an axis, of all elements."""
    if axis is not None:
        return scatter_rows(op, x, index, dz, axis=axis % op.rank(x))
    zeros = op.Expand(op.constant_like(0.0, x), op.Reshape(op.Size(x), [1]))
    return reshape_like(op, op.ScatterElements(zeros, index, dz, axis=0), x)


@gradient_rule("Compress")
def compress(op, node, dz):
    """z = the slices of x where a condition holds   ⇒   dx = dz at those, 0 elsewhere"""
    x, condition = node.inputs
    index = op.Squeeze(op.NonZero(condition), [0])
    return _put_back(op, x, index, dz, node.attributes.get_int("axis", None))


@gradient_rule("TopK")
def top_k(op, node, dz, _):
    """z = the k largest of x, at i   ⇒   dx = dz at i, 0 elsewhere"""
    x = node.inputs[0]
    axis = node.attributes.get_int("axis", -1) % op.rank(x)
    return op.ScatterElements(op.zeros_like(x), node.outputs[1], dz, axis=axis)


@gradient_rule("OneHot")
def one_hot(op, node, dz):
    """z = v₁ at the indices, v₀ elsewhere   ⇒   dv₁ = Σ dz there,  dv₀ = Σ dz elsewhere"""
    index, depth, values = node.inputs
    axis = node.attributes.get_int("axis", -1)
    sums = []
    for off_on in ([1, 0], [0, 1]):
        # The operator itself says where its two values are, negative indices and all.
        pattern = op.constant(np.asarray(off_on, op.dtype(values).numpy()))
        chosen = op.OneHot(index, depth, pattern, axis=axis)
        sums.append(op.Reshape(op.ReduceSum(op.Mul(dz, chosen), keepdims=0), [1]))
    return None, None, op.Concat(*sums, axis=0)


@gradient_rule("Unique")
def unique(op, node, dz, *_):
    """z = the different slices of x   ⇒   dx = dz at the first of each, 0 elsewhere"""
    x = node.inputs[0]
    axis = node.attributes.get_int("axis", None)
    ordered = node.attributes.get_int("sorted", 1)
    # The first occurrence: which of equal elements gets the gradient is a convention, and torch has none.
    index = op.Unique(x, axis=axis, sorted=ordered, outputs=2)[1]
    return _put_back(op, x, index, dz, axis)


no_gradient("NonZero", because="indices")


# --- Slice, Split, Concat, Pad and CenterCropPad.
#
# Each gradient is made of Slice, Pad and Concat. Scatters are used only for what is known only at run time: steps,
# axes, and the extent of mirrored pads.


_END = np.iinfo(np.int64).max
_BEFORE_START = np.iinfo(np.int64).min
# Bounds at or beyond this mean "to the end": exporters write the largest int32 or int64.
_FAR = np.iinfo(np.int32).max


@gradient_rule("Concat")
def concat(op, node, dz):
    """z = x₁, x₂, … joined   ⇒   dx₁, dx₂, … = dz split"""
    axis = node.attributes["axis"].as_int()
    inputs = node.inputs
    if len(inputs) == 1:
        return dz
    sizes = [size_of(op, x, axis) for x in inputs]
    chosen = [index for index, x in enumerate(inputs) if op.needs_gradient(x)]
    # One Split for all rather than a Slice each.
    if len(chosen) > 1:
        return op.Split(dz, op.concat_shape(*sizes), axis=axis, outputs=len(inputs))
    only = chosen[0]
    start = total(op, sizes[:only])
    part = op.Slice(dz, op.concat_shape(start), op.concat_shape(total(op, [start, sizes[only]])), [axis])
    return [part if index == only else None for index in range(len(inputs))]


@gradient_rule("Split")
def split(op, node, *dys):
    """y₁, y₂, … = x split   ⇒   dx = dy₁, dy₂, … joined, with zeros for outputs that nothing used"""
    x = node.inputs[0]
    axis = node.attributes.get_int("axis", 0) % op.rank(x)
    arriving = [index for index, dy in enumerate(dys) if dy is not None]
    first, last = arriving[0], arriving[-1]
    # All outputs are used: no zeros in between.
    if len(arriving) == len(dys):
        return op.Concat(*dys, axis=axis) if len(arriving) > 1 else dys[first]
    sizes = _split_sizes(op, node, axis)
    parts = [
        _zeros(op, x, axis, size) if dy is None else dy
        for dy, size in zip(dys[first : last + 1], sizes[first : last + 1])
    ]
    middle = op.Concat(*parts, axis=axis) if len(parts) > 1 else parts[0]
    before, after = total(op, sizes[:first]), total(op, sizes[last + 1 :])
    return padded(op, middle, [(axis, before, after)])


def _split_sizes(op, node, axis):
    """The size of each output, also of those that the node leaves out."""
    x, sizes = (*node.inputs, None)[:2]
    count = len(node.outputs)
    constant = op.const_value(sizes)
    if constant is not None:
        return constant.tolist()
    if sizes is not None:
        return list(op.Split(sizes, [1] * count, axis=0, outputs=count)) if count > 1 else [sizes]
    whole = size_of(op, x, axis)
    if isinstance(whole, int):
        each = -(-whole // count)
        return [each] * (count - 1) + [whole - each * (count - 1)]
    each = op.Div(op.Add(whole, [count - 1]), [count])
    return [each] * (count - 1) + [op.Sub(whole, op.Mul(each, [count - 1]))]


def _zeros(op, x, axis, size):
    dims = [size if other == axis else size_of(op, x, other) for other in range(op.rank(x))]
    return op.Expand(op.constant_like(0.0, x), op.concat_shape(*dims))


@gradient_rule("Slice")
def slice_(op, node, dz):
    """z = x from s to e by t   ⇒   dx = dz between zeros, turned round where t < 0, spread out where |t| > 1"""
    x, starts, ends = node.inputs[:3]
    axes, steps = (*node.inputs[3:], None, None)[:2]
    low, high, by = op.const_value(starts), op.const_value(ends), op.const_value(steps)
    along = op.const_value(axes)
    if axes is None and starts.shape is not None and isinstance(starts.shape[0], int):
        along = np.arange(starts.shape[0])
    if along is None or (steps is not None and by is None):
        return _sliced_by_index(op, node, dz)
    along = [int(axis) % op.rank(x) for axis in along]
    by = [1] * len(along) if by is None else by.tolist()
    turned = [axis for axis, step in zip(along, by) if step < 0]
    pads, spread = [], []
    for index, (axis, step) in enumerate(zip(along, by)):
        size = op.static_dim(x, axis)
        if size is not None and low is not None and high is not None:
            taken = range(*slice(int(low[index]), int(high[index]), step).indices(size))
            if not taken:
                return op.zeros_like(x)
            before, width = min(taken), abs(step)
            if width > 1:
                # Each element gets a block of its own; the first block begins as early as it can.
                inside = min(before, width - 1)
                before -= inside
                spread.append((axis, inside, width, size - before))
            pads.append((axis, before, max(size - before - len(taken) * width, 0)))
        elif abs(step) == 1:
            bounds = [None if bound is None else int(bound[index]) for bound in (low, high)]
            start = op.Slice(starts, [index], [index + 1]) if low is None else None
            pads.append((axis, *_pads_at_run_time(op, x, dz, axis, step, bounds, start)))
        else:
            return _sliced_by_index(op, node, dz)
    if turned:
        count = len(turned)
        dz = op.Slice(dz, [-1] * count, [_BEFORE_START] * count, turned, [-1] * count)
    for axis, inside, width, room in spread:
        dz = _spread(op, dz, axis, inside, width, room)
    return padded(op, dz, pads)


def _pads_at_run_time(op, x, dz, axis, step, bounds, start):
    """How many zeros go before and after, where a slice of step ±1 has an end that only the run knows."""
    size, taken = op.dim(x, axis), op.dim(dz, axis)
    remainder = op.Sub(size, taken)
    first, last = bounds if step > 0 else bounds[::-1]
    from_start = first == 0 if step > 0 else first is not None and first <= -_FAR
    to_end = last is not None and (last >= _FAR or (step < 0 and last == -1))
    if from_start and to_end:
        return 0, 0
    if from_start:
        return 0, remainder
    if to_end:
        return remainder, 0
    if start is not None:
        start = op.Max(op.Where(op.Less(start, [0]), op.Add(start, size), start), [0])
    elif bounds[0] < 0:
        start = op.Max(op.Add(size, [bounds[0]]), [0])
    lowest = op.Min(size if step > 0 else op.Sub(size, [1]), [bounds[0]] if start is None else start)
    if step < 0:
        lowest = op.Sub(lowest, op.Sub(taken, [1]))
    return lowest, op.Sub(remainder, lowest)


def _spread(op, value, axis, inside, width, room):
    """Zeros around each element along an axis: it takes `width` places and stands at `inside` of them.

    Of the last element's places, those beyond `room` are cut off.
    """
    dims = [size_of(op, value, other) for other in range(op.rank(value))]
    # Concat: Pad takes fifty times as long where the last axis has one element.
    parts = [op.Unsqueeze(value, [axis + 1])]
    if inside:
        parts.insert(0, _block(op, value, dims, axis, inside))
    if width - 1 - inside:
        parts.append(_block(op, value, dims, axis, width - 1 - inside))
    blocks = op.Concat(*parts, axis=axis + 1)
    count = op.static_dim(value, axis)
    dims[axis] = count * width
    wide = op.Reshape(blocks, op.concat_shape(*dims), allowzero=1)
    return op.Slice(wide, [0], [room], [axis]) if count * width > room else wide


def _block(op, value, dims, axis, count):
    shape = [*dims[: axis + 1], count, *dims[axis + 1 :]]
    return op.Expand(op.constant_like(0.0, value), op.concat_shape(*shape))


def _sliced_by_index(op, node, dz):
    x, *parameters = node.inputs
    return scatter_selected(op, x, dz, lambda index: op.Slice(index, *parameters))


@gradient_rule("CenterCropPad")
def center_crop_pad(op, node, dz):
    """z = the middle of x, or x in the middle of zeros   ⇒   dx = the same back to x's size"""
    x = node.inputs[0]
    axes = node.attributes.get_ints("axes", None)
    every = range(op.rank(x)) if axes is None else axes
    return op.CenterCropPad(dz, op.concat_shape(*(size_of(op, x, axis) for axis in every)), axes=axes)


@gradient_rule("Pad")
def pad(op, node, dz):
    """z = x with more around it   ⇒   dx = the part of dz that is x, and what the rest repeats of x

    A negative pad is a cut, where dx is 0. The constant's gradient is the sum of dz where it stands.
    """
    x, pads, constant, axes = (*node.inputs, None, None)[:4]
    mode = node.attributes.get_string("mode", "constant")
    counts, along = op.const_value(pads), op.const_value(axes)
    plan = None
    if counts is not None and (axes is None or along is not None):
        along = list(range(op.rank(x))) if along is None else [int(axis) % op.rank(x) for axis in along]
        halves = counts.reshape(2, -1).tolist()
        plan = [(axis, b, e) for axis, b, e in zip(along, *halves) if b or e]
    if mode == "constant":
        dx = _unpad_at_run_time(op, dz, pads, axes) if plan is None else _unpad(op, dz, plan)
        return (dx, None, _constant_gradient(op, node, dz)) if op.needs_gradient(constant) else dx
    if plan is not None and all(_is_one_fold(op, x, mode, *pad) for pad in plan):
        for axis, before, after in plan:
            dz = _fold(op, dz, size_of(op, x, axis), mode, axis, before, after)
        return dz
    return scatter_selected(op, x, dz, lambda index: op.Pad(index, pads, None, axes, mode=mode))


def _constant_gradient(op, node, dz):
    x, pads, constant, axes = (*node.inputs, None)[:4]
    # Ones where the constant stands: Pad itself says where that is, in every mode of its arguments.
    around = op.Pad(op.zeros_like(x), pads, op.constant_like(1.0, x), axes)
    return op.Reshape(op.ReduceSum(op.Mul(dz, around), keepdims=0), op.shape(constant))


def _unpad(op, dz, plan):
    cut = [(axis, max(b, 0), -e if e > 0 else _END) for axis, b, e in plan if b > 0 or e > 0]
    if cut:
        axes, starts, ends = (list(column) for column in zip(*cut))
        dz = op.Slice(dz, starts, ends, axes)
    return padded(op, dz, [(axis, max(-b, 0), max(-e, 0)) for axis, b, e in plan])


def _unpad_at_run_time(op, dz, pads, axes):
    nothing = op.constant(np.zeros(1, np.int64))
    before, after = op.Split(op.Max(pads, nothing), num_outputs=2, axis=0, outputs=2)
    sizes = op.Shape(dz) if axes is None else op.Gather(op.Shape(dz), axes, axis=0)
    inner = op.Slice(dz, before, op.Sub(sizes, after), axes)
    return op.Pad(inner, op.Max(op.Neg(pads), nothing), None, axes)


def _is_one_fold(op, x, mode, axis, before, after):
    """Whether each pad repeats a part of x once; a symbolic size must allow it, or the forward run fails."""
    if before < 0 or after < 0:
        return False
    size = op.static_dim(x, axis)
    if size is None:
        return mode != "wrap"
    reach = {"reflect": size - 1, "wrap": size, "edge": np.inf if size else 0}[mode]
    return max(before, after) <= reach


def _fold(op, dz, size, mode, axis, before, after):
    """Add the pads of one axis to the elements that they repeat."""
    parts = [op.Slice(dz, [before], [-after if after else _END], [axis])]
    for count, is_front in ((before, True), (after, False)):
        if count == 0:
            continue
        pad = op.Slice(dz, [0], [count], [axis]) if is_front else op.Slice(dz, [-count], [_END], [axis])
        if mode == "edge":
            pad, count, skip = op.ReduceSum(pad, [axis], keepdims=1), 1, 0
        elif mode == "reflect":
            pad, skip = op.Slice(pad, [-1], [_BEFORE_START], [axis], [-1]), 1
        else:
            skip = 0
        remainder = difference(op, size, [count, skip])
        at_start = is_front if mode != "wrap" else not is_front
        parts.append(padded(op, pad, [(axis, skip, remainder) if at_start else (axis, remainder, skip)]))
    return op.Sum(*parts) if len(parts) > 1 else parts[0]
