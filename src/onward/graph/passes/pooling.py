"""Adds what makes one vector of a sequence of states: pooling over the positions that count, and length 1."""

from __future__ import annotations

from typing import Literal

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.shapes.model import infer_shapes

Pooling = Literal["mean", "cls", "last", "max"]
# below every state that a network computes, and finite: −∞ times 0 is NaN
_LOWEST = -1e9


def add_pooling(
    model: ir.Model, states: ir.Value, mask: ir.Value | None, mode: Pooling | None, *, normalize: bool
) -> ir.Value:
    """A value [batch, size] of states [batch, positions, size]; of a value that is one already for mode None.

    `mask` [batch, positions] is 1 where there is text and 0 where there is padding.
    """
    if states.shape is None:
        infer_shapes(model)
    op = Builder(model.graph)
    op.scope = "pooling"
    vectors = states if mode is None else _pool(op, states, mask, mode)
    if normalize:
        # under the root: its slope at 0 is infinite
        square = op.Add(reduce_over(op, "ReduceSum", op.Mul(vectors, vectors), [1], keepdims=1), 1e-12)
        vectors = op.Div(vectors, op.Sqrt(square))
    return vectors


def _pool(op: Builder, states: ir.Value, mask: ir.Value | None, mode: Pooling) -> ir.Value:
    if states.shape is not None and states.shape.rank() != 3:
        raise ModelError(f"'{states.name}' has shape {states.shape}: pooling takes [batch, positions, size]")
    if mode == "cls":
        return op.Gather(states, 0, axis=1)
    if mask is None and mode == "last":
        return op.Gather(states, -1, axis=1)
    if mask is None:
        return reduce_over(op, "ReduceMean" if mode == "mean" else "ReduceMax", states, [1])
    dtype = op.dtype(states)
    if mode == "last":
        # the last position that counts, whichever side the padding is on
        count = op.Squeeze(op.dim(mask, 1), [0])
        positions = op.Range(1, op.Add(count, 1), 1)
        index = op.ArgMax(op.Mul(op.Cast(mask, to=ir.DataType.INT64), positions), axis=1, keepdims=1)
        chosen = op.Equal(op.Sub(positions, 1), index)
        return reduce_over(op, "ReduceSum", op.Mul(states, op.Unsqueeze(op.Cast(chosen, to=dtype), [2])), [1])
    weights = op.Unsqueeze(op.Cast(mask, to=dtype), [2])
    if mode == "max":
        hidden = op.Add(states, op.Mul(op.Sub(1.0, weights), _LOWEST))
        return reduce_over(op, "ReduceMax", hidden, [1])
    total, count = (reduce_over(op, "ReduceSum", value, [1]) for value in (op.Mul(states, weights), weights))
    return op.Div(total, op.Max(count, 1e-9))


def reduce_over(op: Builder, kind: str, value: ir.Value, axes: list[int], *, keepdims: int = 0) -> ir.Value:
    """A reduction over axes, which became an input in opset 13 (ReduceSum) or 18."""
    if op.opset >= (13 if kind == "ReduceSum" else 18):
        return op.node(kind, [value, axes], {"keepdims": keepdims})[0]
    return op.node(kind, [value], {"axes": axes, "keepdims": keepdims})[0]
