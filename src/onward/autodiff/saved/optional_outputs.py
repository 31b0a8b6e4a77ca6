"""Optional outputs of forward nodes: the mask of Dropout, statistics of LayerNormalization, indices of MaxPool."""

from __future__ import annotations

import functools

import onnx_ir as ir

__all__ = ["add_output", "saved_output"]


def saved_output(
    op, node: ir.Node, index: int, *, dtype: ir.DataType | None, shape: ir.Shape | None
) -> ir.Value:
    """An optional output of a forward node; it is added if the model omits it."""
    like = ir.Value(type=None if dtype is None else ir.TensorType(dtype), shape=shape)
    (value,) = op.save(node, [like], functools.partial(_computed, op, node, index, like))
    return value


def _computed(op, node: ir.Node, index: int, like: ir.Value) -> list[ir.Value]:
    return [add_output(op, node, index, like)]


def add_output(op, node: ir.Node, index: int, like: ir.Value) -> ir.Value:
    """The output of a node at an index, added or described where it is not yet."""
    if len(node.outputs) <= index:
        node.resize_outputs(index + 1)
    value = node.outputs[index]
    value.name = value.name or op.namer(f"{node.name or node.op_type}.saved_{index}")
    value.type = value.type or like.type
    value.shape = value.shape if value.shape is not None else like.shape
    return value
