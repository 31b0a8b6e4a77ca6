"""Gradients of Fourier transforms.

A transform is linear, so its gradient is its adjoint: with E the matrix of e^(−2πi·kn/N), that of y = E·x is
Ē·dy, which is N times the inverse transform. Pairs on the last axis are complex numbers; a real signal takes
the real part.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.autodiff.registry import gradient_rule
from onward.graph.nodes import optional_input, required_input


@gradient_rule("DFT")
def dft(op, node, dy):
    """y = E·x   ⇒   dx = N·inverse(dy);  inverse: y = Ē·x/N   ⇒   dx = E·dy/N

    One-sided, y has the first half of the bins, the others' gradient being 0. One-sided inverse: bins that
    stand for two count twice. x is cut or padded to N, so dx is padded or cut back.
    """
    x, length, axis = required_input(node), optional_input(node, 1), optional_input(node, 2)
    inverse = node.attributes.get_int("inverse", 0)
    onesided = node.attributes.get_int("onesided", 0)
    axis = op.constant(np.asarray(-2, np.int64)) if axis is None else axis
    line = _Line(op, axis, op.rank(x))
    size = line.length(node.outputs[0] if inverse or not onesided else x)
    if length is not None:
        size = op.Reshape(op.Cast(length, to=ir.DataType.INT64), [1])
    scalar = op.Squeeze(size, [0])
    count = op.CastLike(scalar, x)
    if not inverse:
        # inverse=1 divides by N, which the adjoint does not.
        dx = op.Mul(op.DFT(dy, scalar, axis, inverse=1), count)
    elif not onesided:
        dx = op.Div(op.DFT(dy, scalar, axis), count)
    else:
        # The first bin, and for even N the last, are their own mirror images.
        bins = op.Range(np.int64(0), op.Add(op.Div(scalar, 2), 1), np.int64(1))
        mirrored = op.Equal(op.Mod(op.Mul(bins, 2), scalar), 0)
        weight = op.Where(mirrored, op.constant_like(1.0, x), op.constant_like(2.0, x))
        weight = op.Reshape(op.Div(weight, count), line.only(op.Shape(weight)))
        dx = op.Mul(op.DFT(dy, scalar, axis, onesided=1), weight)
    if length is not None:
        dx = line.fit(dx, x)
    return _part(op, dx, x)


class _Line:
    """The axis of a transform, which may be known only at run time."""

    def __init__(self, op, axis: ir.Value, rank: int) -> None:
        self.op, self.rank = op, rank
        constant = op.const_value(axis)
        self.axis = None if constant is None else int(constant.reshape(())) % rank
        self.axes = (
            op.Reshape(axis, [1]) if constant is None else op.constant(np.asarray([self.axis], np.int64))
        )

    def length(self, value: ir.Value) -> ir.Value:
        """The size of a value along the axis, as a vector of one number."""
        if self.axis is not None:
            return self.op.dim(value, self.axis)
        return self.op.Gather(self.op.Shape(value), self.axes, axis=0)

    def only(self, size: ir.Value) -> ir.Value:
        """A shape with this size along the axis and 1 elsewhere."""
        ones = self.op.constant(np.ones(self.rank, np.int64))
        axes = self.axes
        if self.axis is None:
            axes = self.op.Mod(self.op.Add(axes, self.rank), self.rank)
        return self.op.ScatterElements(ones, axes, size, axis=0)

    def fit(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """A value cut or padded with zeros to another's size along the axis."""
        op = self.op
        if self.axis is not None:
            have, want = op.static_dim(value, self.axis), op.static_dim(like, self.axis)
            if have is not None and have == want:
                return value
        want = self.length(like)
        value = op.Slice(value, [0], want, self.axes)
        missing = op.Sub(want, self.length(value))
        return op.Pad(value, op.Concat(np.zeros(1, np.int64), missing, axis=0), None, self.axes)


def _part(op, value, like):
    """The real part where `like` is real: it has one number on the last axis, not two."""
    if op.static_dim(like, -1) == op.static_dim(value, -1) is not None:
        return value
    return op.Slice(value, [0], op.dim(like, -1), [-1])


@gradient_rule("STFT")
def stft(op, node, dy):
    """y = E·(window·frame) for each frame   ⇒   dframe = window·N·inverse(dy), added where frames overlap;

    dwindow = Σ frame·N·inverse(dy)
    """
    signal, step, window, length = (*node.inputs, None, None)[:4]
    one = np.asarray([1], np.int64)
    if window is not None:
        size = op.dim(window, 0)
    elif length is not None:
        size = op.Reshape(op.Cast(length, to=ir.DataType.INT64), one)
    else:
        size = op.dim(signal, 1)
    scalar = op.Squeeze(size, [0])
    dframe = op.DFT(dy, scalar, np.int64(2), inverse=1)  # [batch, frames, N, 2]
    dframe = _part(op, op.Mul(dframe, op.CastLike(scalar, signal)), signal)
    frames = op.Squeeze(op.Shape(dy, start=1, end=2), [0])  # inference may not know dy's rank
    starts = op.Mul(op.Range(np.int64(0), frames, np.int64(1)), op.Cast(step, to=ir.DataType.INT64))
    offsets = op.Range(np.int64(0), scalar, np.int64(1))
    index = op.Add(op.Unsqueeze(op.Reshape(starts, [-1]), [1]), op.Unsqueeze(offsets, [0]))  # [frames, N]
    dwindow = None
    if op.needs_gradient(window):
        taken = op.Gather(signal, index, axis=1)
        dwindow = op.ReduceSum(op.Mul(taken, dframe), [0, 1, 3], keepdims=0)
    if window is not None:
        dframe = op.Mul(dframe, op.Unsqueeze(window, [1]))
    zeros = op.Transpose(op.zeros_like(signal), perm=[1, 0, 2])
    updates = op.Transpose(dframe, perm=[1, 2, 0, 3])
    # Frames overlap: what falls on one sample adds up.
    added = op.ScatterND(zeros, op.Unsqueeze(index, [2]), updates, reduction="add")
    return op.Transpose(added, perm=[1, 0, 2]), None, dwindow
