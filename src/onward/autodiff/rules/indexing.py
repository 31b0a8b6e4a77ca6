"""Gradients of indexing: the Gather and Scatter families, TopK, OneHot, Compress, Unique.

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
    index = op.Unique(x, axis=axis, sorted=ordered, outputs=2)[1]
    return _put_back(op, x, index, dz, axis)


no_gradient("NonZero", because="indices")
