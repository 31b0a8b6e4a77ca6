"""Losses of sentence embeddings: what pairs, triplets and scores say about vectors of one encoder.

The vectors of a batch are rows of one value, those of a sample one after the other (`functions.split_rows`): both sides
go through the same encoder in one graph, and gradients flow through both. `functions.multiple_negatives` is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from onward.losses.functions import LossFunction, mse, unit

if TYPE_CHECKING:
    from onward.graph.builder import Builder

# exp of it is 0 in float32, and it is far from its limits
_NEVER = -1e12


def cosine(op: Builder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x·y / (‖x‖‖y‖) of each row"""
    return op.ReduceSum(op.Mul(unit(op, x), unit(op, y)), [-1], keepdims=0)


def cosine_mse(
    op: Builder, x: ir.Value, y: ir.Value, scores: ir.Value, *, reduction: str = "mean"
) -> ir.Value:
    """(cos(x, y) − score)²"""
    return mse(op, cosine(op, x, y), scores, reduction=reduction)


def cosent(op: Builder, x: ir.Value, y: ir.Value, scores: ir.Value, *, scale: float = 20.0) -> ir.Value:
    """log(1 + Σ exp(scale·(cos_i − cos_j))) over all pairs i, j of which j has the higher score"""
    similarity = op.Mul(cosine(op, x, y), scale)
    difference = op.Sub(op.Unsqueeze(similarity, [1]), op.Unsqueeze(similarity, [0]))
    ordered = op.Less(op.Unsqueeze(scores, [1]), op.Unsqueeze(scores, [0]))
    wrong = op.Where(ordered, difference, op.constant_like(_NEVER, difference))
    flat = op.Concat(op.Reshape(wrong, [-1]), op.Reshape(op.constant_like(0.0, wrong), [1]), axis=0)
    return op.ReduceLogSumExp(flat, [0], keepdims=0)


def matryoshka(loss: LossFunction, sizes: Sequence[int]) -> LossFunction:
    """The sum of a loss of vectors over their first numbers, for each of these sizes"""

    def summed(op: Builder, vectors: ir.Value, *targets: ir.Value) -> ir.Value:
        total: ir.Value | None = None
        for size in sizes:
            part = loss(op, op.Slice(vectors, [0], [size], [1]), *targets)
            total = part if total is None else op.Add(total, part)
        assert total is not None
        return total

    return summed
