"""Granularity of quantization scales: per tensor, per axis, or per block. Registers no rule."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onward.autodiff.forms.joined_shapes import joined

__all__ = ["Scales"]


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
            wide = op.Cast(wide, to=ir.DataType.INT32.value)  # small integers cannot be expanded or sliced
        wide = op.Expand(wide, times)
        merged = [op.dim(value, axis) if axis != self.axis else -1 for axis in range(op.rank(value))]
        wide = op.Reshape(wide, joined(op, *merged))
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
        split = joined(op, *lead, blocks, self.block, *tail)
        return op.ReduceSum(op.Reshape(padded, split), [self.axis + 1], keepdims=0)
