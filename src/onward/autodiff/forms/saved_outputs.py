"""Optional outputs of forward nodes that a gradient reads (a mask, statistics). Registers no rule."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["saved_output"]


def saved_output(
    op, node: ir.Node, index: int, *, dtype: ir.DataType | None, shape: ir.Shape | None
) -> ir.Value:
    """An optional output of a forward node; it is added if the model omits it."""
    if len(node.outputs) <= index:
        node.resize_outputs(index + 1)
    value = node.outputs[index]
    if not value.name:
        value.name = op.namer(f"{node.name or node.op_type}.saved_{index}")
    if value.dtype is None and dtype is not None:
        value.type = ir.TensorType(dtype)
    if value.shape is None and shape is not None:
        value.shape = shape
    return value
