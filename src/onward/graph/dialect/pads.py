"""Pads of all axes, in place of pads with a list of axes.

onnxruntime moves transposes across a Pad as if it named all axes, and then reads past the end of its list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.graph.nodes import required_input

if TYPE_CHECKING:
    from onward.graph.builder import Builder


def all_pads(op: Builder, node: ir.Node) -> ir.Value | None:
    """The pads of a Pad with a list of axes, for all axes; None where rank or axes are not known."""
    x, pads, axes = (required_input(node, index) for index in (0, 1, 3))
    named = op.const_value(axes)
    if named is None or x.shape is None:
        return None
    rank = x.shape.rank()
    first = np.asarray(named, np.int64).reshape(-1) % rank
    indices = np.concatenate([first, first + rank])
    constant = op.const_value(pads)
    if constant is None:
        # Pads are int64 by the schema, and shape arithmetic before inference may not have a type yet.
        pads.type = pads.type or ir.TensorType(ir.DataType.INT64)
        zeros = op.constant(np.zeros(2 * rank, np.int64), name="pads")
        return op.ScatterElements(zeros, op.constant(indices, name="places"), pads, axis=0)
    full = np.zeros(2 * rank, np.int64)
    full[indices] = constant
    return op.constant(full, name="pads")
