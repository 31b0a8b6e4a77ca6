"""Shapes built from numbers and from sizes known only at run time. Registers no rule."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

__all__ = ["joined"]


def joined(op, *parts: int | ir.Value) -> ir.Value:
    """A shape from numbers and int64 vectors, in order; a constant where every part is."""
    known = [np.asarray([part]) if isinstance(part, int) else op.const_value(part) for part in parts]
    if all(part is not None for part in known):
        return op.constant(np.concatenate(known).astype(np.int64), name="shape")  # type: ignore[arg-type]
    vectors = [np.asarray([part], np.int64) if isinstance(part, int) else part for part in parts]
    return op.Concat(*vectors, axis=0)
