"""Fused variants of layer normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.graph.dialect.contrib.table import add_optional, fused
from onward.graph.nodes import attribute, is_used, optional_input, required_input

if TYPE_CHECKING:
    from onward.graph.builder import Builder


@fused("SkipLayerNormalization")
def _skip_layer_norm(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """LayerNormalization(x + skip + bias)"""
    total = add_optional(op, op.Add(required_input(node), required_input(node, 1)), optional_input(node, 4))
    outputs = op.node(
        "LayerNormalization",
        [total, required_input(node, 2), optional_input(node, 3)],
        {"axis": -1, "epsilon": attribute(node, "epsilon", 1e-12)},
        # Mean and inverse deviation are written only for training builds, which read them.
        outputs=3 if is_used(node, 1) or is_used(node, 2) else 1,
    )
    return [*outputs, *[None] * (3 - len(outputs)), total]


@fused("SkipSimplifiedLayerNormalization")
def _skip_rms_norm(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """RMS normalization of x + skip + bias"""
    total = add_optional(op, op.Add(required_input(node), required_input(node, 1)), optional_input(node, 3))
    y, inverse = _rms(op, total, required_input(node, 2), attribute(node, "epsilon", 1e-12), -1)
    return [y, None, inverse, total]


@fused("SimplifiedLayerNormalization", domain="")
@fused("SimplifiedLayerNormalization")
def _rms_norm(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """RMS normalization"""
    return _rms(
        op,
        required_input(node),
        required_input(node, 1),
        attribute(node, "epsilon", 1e-5),
        attribute(node, "axis", -1),
    )


@fused("EmbedLayerNormalization")
def _embed_layer_norm(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """LayerNormalization of the sum of word, position and segment embeddings"""
    ids, segments, positions = required_input(node), optional_input(node, 1), optional_input(node, 8)
    total = op.Gather(required_input(node, 2), ids)
    table = required_input(node, 3)
    if positions is not None:
        total = op.Add(total, op.Gather(table, positions))
    else:
        total = op.Add(total, op.Slice(table, [0], op.dim(ids, 1), [0]))
    if segments is not None:
        total = op.Add(total, op.Gather(required_input(node, 4), segments))
    y = op.LayerNormalization(
        total,
        required_input(node, 5),
        required_input(node, 6),
        axis=-1,
        epsilon=attribute(node, "epsilon", 1e-12),
    )
    mask = optional_input(node, 7)
    lengths = None
    if is_used(node, 1):
        if mask is None:
            lengths = op.Expand(np.asarray([0], np.int32), op.dim(ids, 0))
        else:
            lengths = op.Cast(op.ReduceSum(mask, [1], keepdims=0), to=ir.DataType.INT32)
    return [y, lengths, total]


def _rms(op: Builder, x: ir.Value, scale: ir.Value, epsilon: float, axis: int) -> tuple[ir.Value, ir.Value]:
    """(x·r·scale, r) with r = 1/√(mean(x²) + ε), in float32."""
    rank = op.rank(x)
    # In float32: squares of float16 overflow from 256 on.
    wide = x
    if op.dtype(x) in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        wide = op.Cast(x, to=ir.DataType.FLOAT)
    mean = op.ReduceMean(op.Mul(wide, wide), list(range(axis % rank, rank)), keepdims=1)
    inverse = op.Reciprocal(op.Sqrt(op.Add(mean, op.constant_like(epsilon, wide))))
    normal = op.Mul(wide, inverse)
    if op.dtype(normal) != op.dtype(scale):
        normal = op.Cast(normal, to=op.dtype(scale))
    return op.Mul(normal, scale), inverse
