"""Variants of Gelu, dropout with a bias, and operators that have since become standard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.graph.dialect.contrib.table import add_optional, fused
from onward.graph.nodes import attribute, is_used, optional_input, required_input

if TYPE_CHECKING:
    from onward.graph.builder import Builder


@fused("Gelu")
def _gelu(op: Builder, node: ir.Node) -> ir.Value:
    """Gelu(x)"""
    return op.Gelu(required_input(node))


@fused("BiasGelu")
def _bias_gelu(op: Builder, node: ir.Node) -> ir.Value:
    """Gelu(x + bias)"""
    return op.Gelu(op.Add(required_input(node), required_input(node, 1)))


@fused("FastGelu")
def _fast_gelu(op: Builder, node: ir.Node) -> ir.Value:
    """Gelu by tanh of x + bias"""
    return op.Gelu(add_optional(op, required_input(node), optional_input(node, 1)), approximate="tanh")


@fused("GemmFastGelu")
def _gemm_fast_gelu(op: Builder, node: ir.Node) -> ir.Value:
    """Gelu by tanh of x·w + bias"""
    product = op.MatMul(required_input(node), required_input(node, 1))
    return op.Gelu(add_optional(op, product, optional_input(node, 2)), approximate="tanh")


@fused("QuickGelu")
def _quick_gelu(op: Builder, node: ir.Node) -> ir.Value:
    """x·sigmoid(α·x)"""
    x = required_input(node)
    alpha = op.constant_like(attribute(node, "alpha", 1.702), x)
    return op.Mul(x, op.Sigmoid(op.Mul(x, alpha)))


@fused("BiasAdd")
def _bias_add(op: Builder, node: ir.Node) -> ir.Value:
    """x + bias + skip"""
    return op.Add(op.Add(required_input(node), required_input(node, 1)), required_input(node, 2))


@fused("BiasDropout", "BitmaskBiasDropout")
def _bias_dropout(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """Dropout(x + bias) + residual"""
    biased = op.Add(required_input(node), required_input(node, 1))
    y, mask = _dropout(op, node, biased, optional_input(node, 3), optional_input(node, 4))
    return [add_optional(op, y, optional_input(node, 2)), mask]


@fused("BitmaskDropout")
def _bitmask_dropout(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """Dropout(x)"""
    return _dropout(op, node, required_input(node), optional_input(node, 1), optional_input(node, 2))


def _dropout(
    op: Builder, node: ir.Node, x: ir.Value, ratio: ir.Value | None, training: ir.Value | None
) -> tuple[ir.Value, ir.Value | None]:
    y, mask = op.node("Dropout", [x, ratio, training], {"seed": attribute(node, "seed")}, outputs=2)
    # A bit mask has no standard form; only onnxruntime-training's backward pass reads it.
    return y, mask if is_used(node, 1) and not node.op_type.startswith("Bitmask") else None


@fused("Trilu")
def _trilu(op: Builder, node: ir.Node) -> ir.Value:
    """Trilu"""
    return op.Trilu(required_input(node), optional_input(node, 1), upper=attribute(node, "upper", 1))


@fused("GatherND")
def _gather_nd(op: Builder, node: ir.Node) -> ir.Value:
    """GatherND"""
    # The contrib operator also took int32, which the standard one does not.
    return op.GatherND(required_input(node), op.Cast(required_input(node, 1), to=ir.DataType.INT64))


@fused("ExpandDims")
def _expand_dims(op: Builder, node: ir.Node) -> ir.Value:
    """Unsqueeze"""
    axis = op.Reshape(op.Cast(required_input(node, 1), to=ir.DataType.INT64), [1])
    return op.Unsqueeze(required_input(node), axis)


@fused("Range")
def _range(op: Builder, node: ir.Node) -> ir.Value:
    """Range, with a step of one where none is given"""
    start, limit, step = required_input(node), required_input(node, 1), optional_input(node, 2)
    scalar = np.asarray([], np.int64)
    ends = [op.Reshape(value, scalar) for value in (start, limit)]
    return op.Range(*ends, op.constant_like(1, start) if step is None else op.Reshape(step, scalar))


@fused("GridSample")
def _grid_sample(op: Builder, node: ir.Node) -> ir.Value:
    """GridSample"""
    mode = attribute(node, "mode", "bilinear")
    return op.GridSample(
        required_input(node),
        required_input(node, 1),
        mode={"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode),
        padding_mode=attribute(node, "padding_mode", "zeros"),
        align_corners=attribute(node, "align_corners", 0),
    )
