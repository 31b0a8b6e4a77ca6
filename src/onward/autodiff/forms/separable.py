"""Operators that are one matrix along each axis: pooling by sums and resizing.

The matrix of an axis is the operator itself applied to an identity matrix, so that borders, coordinates
and rounding match the runtime's; the gradient multiplies by the transposes. Registers no rule.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir


def identity(op, size: ir.Value, *, like: ir.Value) -> ir.Value:
    """The identity matrix of a size given as a vector of one."""
    dtype = op.dtype(like)
    zeros = op.ConstantOfShape(op.Concat(size, size, axis=0), value=ir.tensor(np.zeros(1, dtype.numpy())))
    return op.EyeLike(zeros, dtype=int(dtype))


def multiply(op, dy: ir.Value, matrices: Mapping[int, ir.Value]) -> ir.Value:
    """dx[… i …] = Σ_j matrix[i, j]·dy[… j …] for each axis that has a matrix."""
    rank = op.rank(dy)
    # The last axes are plain products; the others need a reshape, of what is smaller by then.
    for axis in sorted(matrices, reverse=True):
        matrix = matrices[axis]
        if axis == rank - 1:
            dy = op.MatMul(dy, op.Transpose(matrix, perm=[1, 0]))
        elif axis == rank - 2:
            dy = op.MatMul(matrix, dy)
        else:
            lead = [0] * axis
            after = op.Shape(dy, start=axis + 1)
            flat = op.Reshape(dy, op.Concat([*lead, 0], [-1], axis=0))
            whole = op.Concat(*([lead] if lead else []), op.Shape(matrix, start=0, end=1), after, axis=0)
            dy = op.Reshape(op.MatMul(matrix, flat), whole)
    return dy
