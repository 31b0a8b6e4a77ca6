"""Variants of Gelu, dropout with a bias, and operators that have since become standard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.graph.dialect.contrib.table import fused, needed
from onward.graph.nodes import attribute, given, wanted

if TYPE_CHECKING:
    from onward.graph.builder import Builder


@fused("Gelu")
def _gelu(op: Builder, node: ir.Node) -> ir.Value:
    """Gelu(x)"""
    return op.Gelu(needed(node, 0))


@fused("BiasGelu")
def _bias_gelu(op: Builder, node: ir.Node) -> ir.Value:
    """Gelu(x + bias)"""
    return op.Gelu(op.Add(needed(node, 0), needed(node, 1)))


@fused("FastGelu")
def _fast_gelu(op: Builder, node: ir.Node) -> ir.Value:
    """Gelu by tanh of x + bias"""
    x, bias = needed(node, 0), given(node, 1)
    return op.Gelu(x if bias is None else op.Add(x, bias), approximate="tanh")


@fused("GemmFastGelu")
def _gemm_fast_gelu(op: Builder, node: ir.Node) -> ir.Value:
    """Gelu by tanh of x·w + bias"""
    x, bias = op.MatMul(needed(node, 0), needed(node, 1)), given(node, 2)
    return op.Gelu(x if bias is None else op.Add(x, bias), approximate="tanh")


@fused("QuickGelu")
def _quick_gelu(op: Builder, node: ir.Node) -> ir.Value:
    """x·sigmoid(α·x)"""
    x = needed(node, 0)
    alpha = op.constant_like(attribute(node, "alpha", 1.702), x)
    return op.Mul(x, op.Sigmoid(op.Mul(x, alpha)))


@fused("BiasAdd")
def _bias_add(op: Builder, node: ir.Node) -> ir.Value:
    """x + bias + skip"""
    return op.Add(op.Add(needed(node, 0), needed(node, 1)), needed(node, 2))


@fused("BiasDropout", "BitmaskBiasDropout")
def _bias_dropout(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """Dropout(x + bias) + residual"""
    biased = op.Add(needed(node, 0), needed(node, 1))
    y, mask = _dropout(op, node, biased, given(node, 3), given(node, 4))
    residual = given(node, 2)
    return [y if residual is None else op.Add(y, residual), mask]


@fused("BitmaskDropout")
def _bitmask_dropout(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """Dropout(x)"""
    return _dropout(op, node, needed(node, 0), given(node, 1), given(node, 2))


def _dropout(
    op: Builder, node: ir.Node, x: ir.Value, ratio: ir.Value | None, training: ir.Value | None
) -> tuple[ir.Value, ir.Value | None]:
    y, mask = op.node("Dropout", [x, ratio, training], {"seed": attribute(node, "seed")}, outputs=2)
    # A bit mask has no standard form; only onnxruntime-training's backward pass reads it.
    return y, mask if wanted(node, 1) and not node.op_type.startswith("Bitmask") else None


@fused("Trilu")
def _trilu(op: Builder, node: ir.Node) -> ir.Value:
    """Trilu"""
    return op.Trilu(needed(node, 0), given(node, 1), upper=attribute(node, "upper", 1))


@fused("GatherND")
def _gather_nd(op: Builder, node: ir.Node) -> ir.Value:
    """GatherND"""
    return op.GatherND(needed(node, 0), op.Cast(needed(node, 1), to=ir.DataType.INT64.value))


@fused("ExpandDims")
def _expand_dims(op: Builder, node: ir.Node) -> ir.Value:
    """Unsqueeze"""
    axis = op.Reshape(op.Cast(needed(node, 1), to=ir.DataType.INT64.value), np.asarray([1], np.int64))
    return op.Unsqueeze(needed(node, 0), axis)


@fused("Range")
def _range(op: Builder, node: ir.Node) -> ir.Value:
    """Range, with a step of one where none is given"""
    start, limit, step = needed(node, 0), needed(node, 1), given(node, 2)
    scalar = np.asarray([], np.int64)
    ends = [op.Reshape(value, scalar) for value in (start, limit)]
    return op.Range(*ends, op.constant_like(1, start) if step is None else op.Reshape(step, scalar))


@fused("GridSample")
def _grid_sample(op: Builder, node: ir.Node) -> ir.Value:
    """GridSample"""
    mode = attribute(node, "mode", "bilinear")
    return op.GridSample(
        needed(node, 0),
        needed(node, 1),
        mode={"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode),
        padding_mode=attribute(node, "padding_mode", "zeros"),
        align_corners=attribute(node, "align_corners", 0),
    )
