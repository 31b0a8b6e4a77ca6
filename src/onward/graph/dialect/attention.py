"""Scaled dot-product attention and rotary embeddings in elementary operators.

The operators for them (`Attention` of opset 23 and later, the contrib attentions) differ in layout and masks and
all use this module. Rows that may attend to nothing give zeros, without an intermediate NaN that would get into
gradients.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from onward.graph.builder import Builder


@dataclasses.dataclass
class Mask:
    """The bias added to the scores and, where a query may have no key at all, the pairs that may attend."""

    bias: ir.Value | None = None
    allowed: ir.Value | None = None
    # Whether a row of `allowed` can be all False: only then is there something to guard.
    may_be_empty: bool = True

    def allow(self, op: Builder, condition: ir.Value) -> None:
        """Keep only pairs for which the condition holds too."""
        self.allowed = condition if self.allowed is None else op.And(self.allowed, condition)

    def add(self, op: Builder, bias: ir.Value) -> None:
        """Add numbers to the scores; minus infinity forbids a pair."""
        lowest = op.constant_like(-np.inf, bias)
        self.allow(op, op.Greater(bias, lowest))
        # Softmax over a row of −∞ alone is NaN, which no Where behind it keeps out of gradients.
        finite = op.Max(bias, op.constant_like(_low(op, bias), bias))
        self.bias = finite if self.bias is None else op.Add(self.bias, finite)


def _low(op: Builder, like: ir.Value) -> float:
    """A number so low that its exponential is zero, but not so low that adding to it overflows."""
    return -3e4 if op.dtype(like) == ir.DataType.FLOAT16 else -1e30


def split_heads(op: Builder, x: ir.Value, heads: int) -> ir.Value:
    """[batch, length, heads·size] → [batch, heads, length, size]."""
    width = op.static_dim(x, 2)
    # A known size lets every reshape downstream be a constant.
    size = -1 if width is None else width // heads
    return op.Transpose(op.Reshape(x, [0, 0, heads, size]), perm=[0, 2, 1, 3])


def merge_heads(op: Builder, x: ir.Value) -> ir.Value:
    """[batch, heads, length, size] → [batch, length, heads·size]."""
    heads, size = op.static_dim(x, 1), op.static_dim(x, 3)
    width = -1 if heads is None or size is None else heads * size
    return op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), [0, 0, width])


def repeat_heads(op: Builder, x: ir.Value, times: int) -> ir.Value:
    """[batch, heads, length, size] → each head `times` times in a row."""
    if times == 1:
        return x
    heads = op.static_dim(x, 1)
    wide = op.Expand(op.Unsqueeze(x, [2]), [1, 1, times, 1, 1])
    batch, length, size = (op.dim(x, axis) for axis in (0, 2, 3))
    shape = op.Concat(batch, [-1 if heads is None else heads * times], length, size, axis=0)
    return op.Reshape(wide, shape)


def query_positions(op: Builder, q: ir.Value, offset: ir.Value | None) -> ir.Value:
    """Positions of queries as a column, counted on from a cache of `offset` keys."""
    column = op.Unsqueeze(op.positions(op.dim(q, 2)), [1])
    return column if offset is None else op.Add(column, offset)


def key_positions(op: Builder, total: ir.Value) -> ir.Value:
    """Positions of keys as a row, [1, total]."""
    return op.Unsqueeze(op.positions(total), [0])


@dataclasses.dataclass
class Attended:
    """The output of attention and what it went through."""

    output: ir.Value
    scores: ir.Value
    capped: ir.Value
    masked: ir.Value
    probabilities: ir.Value


def attend(
    op: Builder,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    *,
    scale: float | None = None,
    mask: Mask | None = None,
    softcap: float = 0.0,
    softmax_type: ir.DataType | None = None,
) -> Attended:
    """softmax(cap(scale·q·kᵀ) + bias)·v over [batch, heads, length, size]."""
    mask = mask or Mask()
    if scale is None:
        size = op.static_dim(q, 3)
        if size is not None:
            factor = op.constant_like(1 / np.sqrt(size), q)
        else:
            width = op.Cast(op.Squeeze(op.dim(q, 3), [0]), to=op.dtype(q))
            factor = op.Reciprocal(op.Sqrt(width))
    else:
        factor = op.constant_like(scale, q)
    # queries are scaled rather than scores, of which there are more
    scores = op.MatMul(op.Mul(q, factor), op.Transpose(k, perm=[0, 1, 3, 2]))
    capped = scores
    # 0 means no cap: tanh would be a pass over all scores.
    if softcap:
        cap = op.constant_like(softcap, scores)
        capped = op.Mul(op.Tanh(op.Div(scores, cap)), cap)
    bias = mask.bias
    if mask.allowed is not None and not _from_bias_only(mask):
        hidden = op.Where(mask.allowed, op.constant_like(0.0, q), op.constant_like(_low(op, q), q))
        bias = hidden if bias is None else op.Add(bias, hidden)
    masked = capped if bias is None else op.Add(capped, bias)
    weights = masked
    if softmax_type is not None and softmax_type != op.dtype(q):
        weights = op.Cast(op.Softmax(op.Cast(masked, to=softmax_type.value), axis=-1), to=op.dtype(q))
    else:
        weights = op.Softmax(masked, axis=-1)
    output = op.MatMul(weights, v)
    if mask.allowed is not None and mask.may_be_empty:
        # ReduceMax takes booleans since opset 20 only: older output opsets have no such form.
        some = op.Cast(op.ReduceMax(op.Cast(mask.allowed, to=ir.DataType.INT32), [-1], keepdims=1), to=9)
        zero = op.constant_like(0.0, q)
        # A query without any key gives zero, as ONNX has it: the softmax of equal low scores would give a mean.
        output = op.Where(some, output, zero)
        weights = op.Where(some, weights, zero)
    return Attended(output, scores, capped, masked, weights)


def _from_bias_only(mask: Mask) -> bool:
    producer = mask.allowed.producer() if mask.allowed is not None else None
    return mask.bias is not None and producer is not None and producer.op_type == "Greater"


def rotate(
    op: Builder, x: ir.Value, cos: ir.Value, sin: ir.Value, *, rotary: int = 0, interleaved: bool = False
) -> ir.Value:
    """Turn pairs of the last axis of [batch, heads, length, size] by angles of [batch, 1, length, pairs]."""
    unrotated = None
    size = op.static_dim(x, 3)
    if rotary and rotary != size:
        unrotated = op.Slice(x, [rotary], [np.iinfo(np.int64).max], [3])
        x = op.Slice(x, [0], [rotary], [3])
    pairs = op.static_dim(x, 3)
    if interleaved:
        half = -1 if pairs is None else pairs // 2
        split = op.Reshape(x, [0, 0, 0, half, 2])
        first, second = (op.Gather(split, index, axis=4) for index in (0, 1))
    else:
        first, second = op.Split(x, num_outputs=2, axis=3, outputs=2)
    real = op.Sub(op.Mul(cos, first), op.Mul(sin, second))
    imaginary = op.Add(op.Mul(sin, first), op.Mul(cos, second))
    if interleaved:
        both = op.Concat(op.Unsqueeze(real, [4]), op.Unsqueeze(imaginary, [4]), axis=4)
        turned = op.Reshape(both, [0, 0, 0, -1 if pairs is None else pairs])
    else:
        turned = op.Concat(real, imaginary, axis=3)
    return turned if unrotated is None else op.Concat(turned, unrotated, axis=3)
