"""Gradients of quantized operators, by the straight-through estimator: rounding counts as the identity.

The gradient of an integer tensor q that stands for real numbers is a floating tensor: that of the loss with
respect to q as if it were real. Where a value saturates, its gradient is zero.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onward.autodiff.registry import gradient_rule
from onward.autodiff.rules.linalg import transposed

# The largest finite number of each 8-bit float; integers have −2ⁿ⁻¹ … 2ⁿ⁻¹ − 1 or 0 … 2ⁿ − 1.
_FLOAT8 = {
    ir.DataType.FLOAT8E4M3FN: 448.0,
    ir.DataType.FLOAT8E4M3FNUZ: 240.0,
    ir.DataType.FLOAT8E5M2: 57344.0,
    ir.DataType.FLOAT8E5M2FNUZ: 57344.0,
    ir.DataType.FLOAT4E2M1: 6.0,
}


@gradient_rule("QuantizeLinear", straight_through=True)
def quantize_linear(op, node, dq):
    """q = saturate(round(x/s) + z)   ⇒   dx = dq/s,  ds = −Σ dq·x/s², both 0 where q saturates"""
    x, scale, *optional = node.inputs
    zero = optional[0] if optional else None
    scales = Scales.read(op, node, x)
    s = op.CastLike(scales.spread(op, scale), x)
    dq = op.CastLike(dq, x)
    low, high = _range(op.dtype(node.outputs[0]))
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
