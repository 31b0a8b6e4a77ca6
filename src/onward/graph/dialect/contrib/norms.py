"""Fused variants of layer normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.graph.dialect.contrib.table import fused, needed
from onward.graph.nodes import attribute, given, wanted

if TYPE_CHECKING:
    from onward.graph.builder import Builder


@fused("SkipLayerNormalization")
def _skip_layer_norm(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """LayerNormalization(x + skip + bias)"""
    total = _sum(op, needed(node, 0), needed(node, 1), given(node, 4))
    made = op.node(
        "LayerNormalization",
        [total, needed(node, 2), given(node, 3)],
        {"axis": -1, "epsilon": attribute(node, "epsilon", 1e-12)},
        outputs=3 if wanted(node, 1) or wanted(node, 2) else 1,
    )
    return [*made, *[None] * (3 - len(made)), total]


@fused("SkipSimplifiedLayerNormalization")
def _skip_rms_norm(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """RMS normalization of x + skip + bias"""
    total = _sum(op, needed(node, 0), needed(node, 1), given(node, 3))
    y, inverse = _rms(op, total, needed(node, 2), attribute(node, "epsilon", 1e-12), -1)
    return [y, None, inverse, total]


@fused("SimplifiedLayerNormalization", domain="")
@fused("SimplifiedLayerNormalization")
def _rms_norm(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """RMS normalization"""
    return _rms(
        op,
        needed(node, 0),
        needed(node, 1),
        attribute(node, "epsilon", 1e-5),
        attribute(node, "axis", -1),
    )


@fused("EmbedLayerNormalization")
def _embed_layer_norm(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """LayerNormalization of the sum of word, position and segment embeddings"""
    ids, segments, positions = needed(node, 0), given(node, 1), given(node, 8)
    total = op.Gather(needed(node, 2), ids)
    table = needed(node, 3)
    if positions is not None:
        total = op.Add(total, op.Gather(table, positions))
    else:
        total = op.Add(total, op.Slice(table, [0], op.dim(ids, 1), [0]))
    if segments is not None:
        total = op.Add(total, op.Gather(needed(node, 4), segments))
    y = op.LayerNormalization(
        total, needed(node, 5), needed(node, 6), axis=-1, epsilon=attribute(node, "epsilon", 1e-12)
    )
    mask = given(node, 7)
    lengths = None
    if wanted(node, 1):
        if mask is None:
            lengths = op.Expand(np.asarray([0], np.int32), op.dim(ids, 0))
        else:
            lengths = op.Cast(op.ReduceSum(mask, [1], keepdims=0), to=ir.DataType.INT32.value)
    return [y, lengths, total]


def _sum(op: Builder, x: ir.Value, skip: ir.Value, bias: ir.Value | None) -> ir.Value:
    total = op.Add(x, skip)
    return total if bias is None else op.Add(total, bias)


def _rms(op: Builder, x: ir.Value, scale: ir.Value, epsilon: float, axis: int) -> tuple[ir.Value, ir.Value]:
    """(x·r·scale, r) with r = 1/√(mean(x²) + ε), in float32."""
    rank = op.rank(x)
    wide = x
    if op.dtype(x) in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        wide = op.Cast(x, to=ir.DataType.FLOAT.value)
    mean = op.ReduceMean(op.Mul(wide, wide), list(range(axis % rank, rank)), keepdims=1)
    inverse = op.Reciprocal(op.Sqrt(op.Add(mean, op.constant_like(epsilon, wide))))
    normal = op.Mul(wide, inverse)
    if op.dtype(normal) != op.dtype(scale):
        normal = op.Cast(normal, to=op.dtype(scale).value)
    return op.Mul(normal, scale), inverse
