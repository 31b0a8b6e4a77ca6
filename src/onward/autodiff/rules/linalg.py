"""Gradients of matrix products, contractions and determinants, and of quantized numbers."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onward.autodiff.registry import gradient_rule
from onward.errors import ModelError
from onward.graph.shapes.dims import dims_of


@gradient_rule("Gemm", broadcasts=True)
def gemm(op, node, dy):
    """y = α·A'·B' + β·C   ⇒   dA' = α·dy·B'ᵀ,  dB' = α·A'ᵀ·dy,  dC = β·dy summed to C"""
    a, b, *addend = node.inputs
    alpha = node.attributes.get_float("alpha", 1.0)
    beta = node.attributes.get_float("beta", 1.0)
    trans_a = node.attributes.get_int("transA", 0)
    trans_b = node.attributes.get_int("transB", 0)
    # as products with flags: a transposition of its own would be a copy
    da = (
        _product(op, b, dy, alpha=alpha, turn_a=trans_b, turn_b=1)
        if trans_a
        else _product(op, dy, b, alpha=alpha, turn_b=1 - trans_b)
    )
    db = (
        _product(op, dy, a, alpha=alpha, turn_a=1, turn_b=trans_a)
        if trans_b
        else _product(op, a, dy, alpha=alpha, turn_a=1 - trans_a)
    )
    dc = dy if beta == 1.0 else op.Mul(dy, beta)
    return da, db, dc if addend else None


@gradient_rule("MatMul")
def matmul(op, node, dy):
    """y = A·B   ⇒   dA = dy·Bᵀ,  dB = Aᵀ·dy, each summed over the batches that were broadcast

    A vector stands for a matrix of one row (A) or one column (B).
    """
    a, b = node.inputs
    rank_a, rank_b = op.rank(a), op.rank(b)
    if rank_a == 1 and rank_b == 1:
        return op.Mul(dy, b), op.Mul(dy, a)
    if rank_b == 1:
        return _by_vector(op, a, b, dy)
    if rank_a == 1:
        # y = aᵀ·B is Bᵀ·a, a product with a column
        db, da = _by_vector(op, b, a, dy, transposed=True)
        return da, db
    if rank_a == 2 and rank_b == 2:
        return _product(op, dy, b, turn_b=1), _product(op, a, dy, turn_a=1)
    if rank_b == 2 and not op.needs_gradient(b):
        return op.MatMul(dy, transposed(op, b)), None  # the runtime multiplies without a transposed copy
    if rank_b == 2:
        # One product over all batches: A's rows are the rows of every batch together.
        rows = op.Reshape(dy, op.concat_shape(-1, op.dim(b, 1)))
        da = op.Reshape(_product(op, rows, b, turn_b=1), op.shape(a))
        return da, _product(op, op.Reshape(a, op.concat_shape(-1, op.dim(b, 0))), rows, turn_a=1)
    da = op.MatMul(dy, transposed(op, b))
    db = op.MatMul(transposed(op, a), dy)
    return op.sum_to(da, a), op.sum_to(db, b)


def _product(op, a, b, *, alpha=1.0, turn_a=0, turn_b=0):
    """α·A'·B' of two matrices, each transposed first where it is turned."""
    return op.Gemm(a, b, alpha=alpha, transA=turn_a, transB=turn_b)


def _by_vector(op, matrix, vector, dy, *, transposed=False):
    """y = M·v (or Mᵀ·v)   ⇒   dM = dy·vᵀ (or v·dyᵀ),  dv = Mᵀ·dy (or M·dy) summed over the batches"""
    if transposed:
        spread = op.Mul(op.Unsqueeze(vector, [-1]), op.Unsqueeze(dy, [-2]))
        product = op.Squeeze(op.MatMul(matrix, op.Unsqueeze(dy, [-1])), [-1])
        return spread, op.sum_to(product, vector)
    spread = op.Mul(op.Unsqueeze(dy, [-1]), vector)
    # The rows of every batch together, in one product.
    rows = op.Reshape(matrix, op.concat_shape(-1, op.dim(vector, 0)))
    return spread, op.Squeeze(op.MatMul(op.Reshape(dy, [1, -1]), rows), [0])


def transposed(op, value):
    """Each matrix of a batch, transposed."""
    rank = op.rank(value)
    return op.Transpose(value, perm=[*range(rank - 2), rank - 1, rank - 2])


@gradient_rule("Einsum")
def einsum(op, node, dy):
    """y = Σ ∏ xₖ over the labels that y lacks   ⇒   dxᵢ = Σ dy·∏ₖ≠ᵢ xₖ over the labels that xᵢ lacks"""
    contraction = Contraction.parse(
        node.attributes.get_string("equation", ""), [op.rank(value) for value in node.inputs]
    )
    return [
        contraction.gradient(op, index, list(node.inputs), dy) if op.needs_gradient(value) else None
        for index, value in enumerate(node.inputs)
    ]


@gradient_rule("Det")
def det(op, node, dy):
    """y = |X|   ⇒   dX = dy·cof(X), each cofactor the signed determinant of a minor

    Cofactors exist where X has no inverse, too.
    """
    x = node.inputs[0]
    side = op.static_dim(x, -1)
    if side is None:
        side = op.static_dim(x, -2)
    rank = op.rank(x)
    scale = op.Unsqueeze(dy, [-2, -1])
    if side == 1:
        return op.Reshape(dy, op.shape(x))
    if side is not None:
        position = np.arange(side - 1)
        others = position[None, :] + (position[None, :] >= np.arange(side)[:, None])  # row i: all but i
        # All minors in one Gather: n² determinants of n − 1, which is for the small matrices that Det is used on.
        index = others[:, None, :, None] * side + others[None, :, None, :]
        signs = (-1.0) ** np.add.outer(np.arange(side), np.arange(side))
        index, signs = op.constant(index.astype(np.int64)), op.constant(signs.astype(op.dtype(x).numpy()))
    else:
        size = op.Squeeze(op.dim(x, -1), [0])
        every = op.Range(np.int64(0), size, np.int64(1))
        position = op.Unsqueeze(op.Range(np.int64(0), op.Sub(size, 1), np.int64(1)), [0])
        skip = op.Cast(op.GreaterOrEqual(position, op.Unsqueeze(every, [1])), to=7)
        others = op.Add(position, skip)
        rows = op.Unsqueeze(op.Mul(others, size), [1, 3])
        index = op.Add(rows, op.Unsqueeze(others, [0, 2]))
        odd = op.Mod(op.Add(op.Unsqueeze(every, [0]), op.Unsqueeze(every, [1])), 2)
        signs = op.CastLike(op.Sub(1, op.Mul(odd, 2)), x)
    flat = op.Reshape(x, op.Concat(op.Shape(x, start=0, end=rank - 2), [-1], axis=0) if rank > 2 else [-1])
    minors = op.Gather(flat, index, axis=rank - 2)
    return op.Mul(op.Mul(op.Det(minors), signs), scale)


@dataclasses.dataclass(frozen=True)
class Contraction:
    """The labels of each operand and of the result, an ellipsis written out as labels of its own.

    >>> Contraction.parse("...ij,jk", [3, 2])
    Contraction(operands=('Aij', 'jk'), result='Aik')
    """

    operands: tuple[str, ...]
    result: str

    @staticmethod
    def parse(equation: str, ranks: Sequence[int]) -> Contraction:
        """Read an equation for operands of the given ranks."""
        left, arrow, right = equation.replace(" ", "").partition("->")
        terms = left.split(",")
        if len(terms) != len(ranks):
            raise ModelError(f"Einsum '{equation}' names {len(terms)} operands and has {len(ranks)}")
        # An ellipsis stands for axes without letters; here they get letters that the equation leaves free.
        free = [c for c in string.ascii_uppercase + string.ascii_lowercase if c not in equation]
        hidden = [
            rank - len(term.replace("...", "")) if "..." in term else 0 for term, rank in zip(terms, ranks)
        ]
        ellipsis = "".join(free[: max(hidden, default=0)])
        spelled = tuple(
            term.replace("...", ellipsis[len(ellipsis) - count :]) for term, count in zip(terms, hidden)
        )
        if not arrow:
            letters = left.replace("...", "").replace(",", "")
            right = "..." + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
        return Contraction(spelled, right.replace("...", ellipsis))

    def gradient(self, op, index: int, operands: list[ir.Value], dy: ir.Value) -> ir.Value:
        """The gradient of one operand."""
        x, labels = operands[index], self.operands[index]
        own = "".join(dict.fromkeys(labels))
        terms = [self.result, *(t for i, t in enumerate(self.operands) if i != index)]
        values = [dy, *(v for i, v in enumerate(operands) if i != index)]
        present = set("".join(terms))
        shared = "".join(c for c in own if c in present)
        dx = values[0]
        # The equation is the identity otherwise.
        if len(terms) > 1 or terms[0] != shared:
            dx = op.Einsum(*values, equation=f"{','.join(terms)}->{shared}")
        if labels == shared:
            return op.sum_to(dx, x) if self._may_broadcast(op, index, operands, dy) else dx
        # Labels summed away in x alone come back as axes of size 1, spread over x's own shape; of a label
        # that x repeats, only the diagonal is not zero.
        axes = [axis for axis, c in enumerate(labels) if c not in shared or c in labels[:axis]]
        dx = op.Unsqueeze(dx, axes) if axes else dx
        if self._may_broadcast(op, index, operands, dy):
            dx = self._sum_broadcast(op, dx, x)
        dx = op.Expand(dx, op.shape(x))
        for axis, c in enumerate(labels):
            first = labels.index(c)
            if first != axis:
                dx = op.Where(_diagonal(op, x, first, axis), dx, op.constant_like(0.0, x))
        return dx

    def _may_broadcast(self, op, index: int, operands: list[ir.Value], dy: ir.Value) -> bool:
        """Whether an axis of x may be 1 where another operand's is not, as far as shapes tell."""
        x, labels = operands[index], self.operands[index]
        others = [(value, term) for i, (value, term) in enumerate(zip(operands, self.operands)) if i != index]
        others.append((dy, self.result))
        for axis, label in enumerate(labels):
            own = None if x.shape is None else dims_of(x.shape)[axis]
            if own == 1:
                return True
            if isinstance(own, int):
                continue
            # an open size may be 1 when it runs, unless every size of this letter has its name
            for value, term in others:
                if label in term:
                    other = None if value.shape is None else dims_of(value.shape)[term.index(label)]
                    if own is None or other != own:
                        return True
        return False

    def _sum_broadcast(self, op, dx: ir.Value, x: ir.Value) -> ir.Value:
        """Sum over the axes where x has size 1 and the gradient has more."""
        axes = op.Squeeze(op.NonZero(op.Equal(op.Shape(x), 1)), [0])
        return op.ReduceSum(dx, axes, keepdims=1, noop_with_empty_axes=1)


def _diagonal(op, x: ir.Value, first: int, second: int) -> ir.Value:
    """True where two axes of x have the same index, shaped to broadcast against x."""
    rank = op.rank(x)

    def positions(axis: int) -> ir.Value:
        along = op.positions(op.dim(x, axis))
        return op.Unsqueeze(along, [a for a in range(rank) if a != axis]) if rank > 1 else along

    return op.Equal(positions(first), positions(second))


# The largest finite number of each 8-bit float; integers have −2ⁿ⁻¹ … 2ⁿ⁻¹ − 1 or 0 … 2ⁿ − 1.
_FLOAT8 = {
    ir.DataType.FLOAT8E4M3FN: 448.0,
    ir.DataType.FLOAT8E4M3FNUZ: 240.0,
    ir.DataType.FLOAT8E5M2: 57344.0,
    ir.DataType.FLOAT8E5M2FNUZ: 57344.0,
    ir.DataType.FLOAT4E2M1: 6.0,
}


# --- Quantized operators, by the straight-through estimator: rounding counts as the identity.
#
# The gradient of an integer tensor q that stands for real numbers is a floating tensor: that of the loss with
# respect to q as if it were real. Where a value saturates, its gradient is zero.


@gradient_rule("QuantizeLinear", straight_through=True)
def quantize_linear(op, node, dq):
    """q = saturate(round(x/s) + z)   ⇒   dx = dq/s,  ds = −Σ dq·x/s², both 0 where q saturates"""
    x, scale, *optional = node.inputs
    zero = optional[0] if optional else None
    scales = Scales.read(op, node, x)
    s = op.CastLike(scales.spread(op, scale), x)
    dq = op.CastLike(dq, x)
    low, high = _range(op.dtype(node.outputs[0]))
    # As the operator rounds: half to even. Inside means that this number is one that the type has.
    level = op.Round(op.Div(x, s))
    if zero is not None:
        # cast first: the runtime has no Unsqueeze of 4-bit integers
        level = op.Add(level, scales.spread(op, op.CastLike(zero, x)))
    inside = op.And(op.GreaterOrEqual(level, low), op.LessOrEqual(level, high))
    dx = op.Where(inside, op.Div(dq, s), op.constant_like(0.0, x))
    ds = None
    if op.needs_gradient(scale):
        ds = op.CastLike(scales.gather(op, op.Neg(op.Div(op.Mul(dx, x), s)), scale), scale)
    return dx, ds


@gradient_rule("DequantizeLinear", straight_through=True)
def dequantize_linear(op, node, dy):
    """y = (q − z)·s   ⇒   dq = dy·s,  ds = Σ dy·(q − z)"""
    q, scale, *optional = node.inputs
    zero = optional[0] if optional else None
    scales = Scales.read(op, node, q)
    dq = op.Mul(dy, scales.spread(op, scale)) if op.needs_gradient(q) else None
    ds = None
    if op.needs_gradient(scale):
        # Dequantizing with scales of one gives q − z in floats, for types that Sub does not take.
        ones = op.Expand(op.constant_like(1.0, scale), op.shape(scale))
        steps = op.DequantizeLinear(q, ones, zero, **dict(node.attributes))  # q − z, whatever q's type
        ds = scales.gather(op, op.Mul(dy, steps), scale)
    return dq, ds


@gradient_rule("DynamicQuantizeLinear", straight_through=True)
def dynamic_quantize_linear(op, node, dq, ds=None, _dz=None):
    """q = round(x/s) + z, s = (max(x, 0) − min(x, 0))/255   ⇒   dx = dq/s

    What s contributes through q and through a later product with s cancels but for rounding, so s and z count
    as constants there. A gradient that comes through s alone goes to the extremes of x.
    """
    x, s = node.inputs[0], node.outputs[1]
    if dq is not None:
        return op.Div(dq, s)
    if ds is None:
        return None

    def spread(extreme, beyond):
        """1 at the elements that are the extreme (their share where several are), 0 where that is not x's."""
        here = op.CastLike(op.And(op.Equal(x, extreme), beyond(extreme, 0.0)), x)
        return op.Div(here, op.Max(op.ReduceSum(here, keepdims=0), 1.0))

    # The scale's range always includes 0: an extreme on the wrong side of it has no part in s.
    high = spread(op.ReduceMax(x, keepdims=0), op.Greater)
    low = spread(op.ReduceMin(x, keepdims=0), op.Less)
    return op.Mul(op.Sub(high, low), op.Div(ds, 255.0))


@gradient_rule("MatMulInteger", straight_through=True)
def matmul_integer(op, node, dy):
    """y = (A − a)·(B − b)   ⇒   dA = dy·(B − b)ᵀ,  dB = (A − a)ᵀ·dy"""
    a, b, zero_a, zero_b = (*node.inputs, None, None)[:4]

    def real(value, zero, *, rows):
        numbers = op.CastLike(value, dy)
        if zero is None:
            return numbers
        zero = op.CastLike(zero, dy)
        return op.Sub(numbers, op.Unsqueeze(zero, [-1]) if rows and op.rank(zero) == 1 else zero)

    da = db = None
    if op.needs_gradient(a):
        da = op.sum_to(op.MatMul(dy, transposed(op, real(b, zero_b, rows=False))), a)
    if op.needs_gradient(b):
        db = op.sum_to(op.MatMul(transposed(op, real(a, zero_a, rows=True)), dy), b)
    return da, db


def _range(kind: ir.DataType) -> tuple[float, float]:
    if kind in _FLOAT8:
        return -_FLOAT8[kind], _FLOAT8[kind]
    bits, signed = int(kind.bitwidth), kind.name.startswith("INT")
    return (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) if signed else (0.0, 2.0**bits - 1)


@dataclasses.dataclass(frozen=True)
class Scales:
    """The granularity of one quantized tensor."""

    of: ir.Value
    rank: int  # of the scale
    axis: int
    block: int

    @staticmethod
    def read(op, node: ir.Node, of: ir.Value) -> Scales:
        """What a (De)QuantizeLinear node says; an input with one element is a scale for all."""
        scale = node.inputs[1]
        block = node.attributes.get_int("block_size", 0)
        rank = op.rank(scale)
        if not block and rank == 1 and op.static_dim(scale, 0) == 1:
            rank = 0
        axis = node.attributes.get_int("axis", 1)
        return Scales(of, rank, axis % op.rank(of) if rank else 0, block)

    def spread(self, op, value: ir.Value) -> ir.Value:
        """A scale or zero point, shaped to broadcast against the tensor."""
        if self.block:
            return self._repeat(op, value)
        if self.rank == 0:
            return value
        others = [axis for axis in range(op.rank(self.of)) if axis != self.axis]
        return op.Unsqueeze(value, others) if others else value

    def _repeat(self, op, value: ir.Value) -> ir.Value:
        """Each scale `block` times along the axis; the last block may be short."""
        wide = op.Unsqueeze(value, [self.axis + 1])
        times = np.ones(op.rank(value) + 1, np.int64)
        times[self.axis + 1] = self.block
        if value.dtype is not None and not value.dtype.is_floating_point():
            wide = op.Cast(wide, to=ir.DataType.INT32)  # small integers cannot be expanded or sliced
        wide = op.Expand(wide, times)
        merged = [op.dim(value, axis) if axis != self.axis else -1 for axis in range(op.rank(value))]
        wide = op.Reshape(wide, op.concat_shape(*merged))
        return op.Slice(wide, [0], op.dim(self.of, self.axis), [self.axis])

    def gather(self, op, each: ir.Value, scale: ir.Value) -> ir.Value:
        """Sum the contributions of all elements that share a scale."""
        if self.rank == 0 and not self.block:
            total = op.ReduceSum(each, keepdims=0)
            return op.Reshape(total, op.shape(scale)) if op.rank(scale) else total
        count = op.rank(self.of)
        if not self.block:
            return op.ReduceSum(each, [axis for axis in range(count) if axis != self.axis], keepdims=0)
        blocks = op.dim(scale, self.axis)
        missing = op.Sub(op.Mul(blocks, self.block), op.dim(self.of, self.axis))
        pads = op.Concat(np.zeros(1, np.int64), missing, axis=0)
        padded = op.Pad(each, pads, None, [self.axis])
        lead = [op.dim(self.of, a) for a in range(self.axis)]
        tail = [op.dim(self.of, a) for a in range(self.axis + 1, count)]
        split = op.concat_shape(*lead, blocks, self.block, *tail)
        return op.ReduceSum(op.Reshape(padded, split), [self.axis + 1], keepdims=0)
