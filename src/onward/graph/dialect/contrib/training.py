"""Operators that training builds of onnxruntime put into forward models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.graph.dialect.contrib.table import fused
from onward.graph.nodes import attribute, is_used, optional_input, required_input

if TYPE_CHECKING:
    from onward.graph.builder import Builder


@fused("ConcatTraining")
def _concat_training(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """Concat, and the length of each part along the axis"""
    parts = [value for value in node.inputs if value is not None]
    axis = attribute(node, "axis")
    lengths = op.Concat(*(op.dim(part, axis) for part in parts), axis=0) if is_used(node, 1) else None
    return [op.Concat(*parts, axis=axis), lengths]


@fused("ScaledSum")
def _scaled_sum(op: Builder, node: ir.Node) -> ir.Value:
    """Σ scaleᵢ·xᵢ of two or three inputs"""
    total = None
    for index, value in enumerate(node.inputs):
        if value is not None:
            part = op.Mul(value, op.constant_like(attribute(node, f"scale_{index}"), value))
            total = part if total is None else op.Add(total, part)
    assert total is not None
    return total


@fused("BatchNormInternal")
def _batch_norm_internal(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """BatchNormalization, and the mean and inverse deviation of the batch"""
    x = required_input(node)
    training = attribute(node, "training_mode", 0)
    attributes = {name: node.attributes[name] for name in ("epsilon", "momentum") if name in node.attributes}
    count = 3 if training else 1
    outputs: list[ir.Value | None] = list(
        op.node(
            "BatchNormalization", list(node.inputs), {**attributes, "training_mode": training}, outputs=count
        )
    )
    outputs += [None] * (5 - len(outputs))
    if is_used(node, 3) or is_used(node, 4):
        axes = np.asarray([0, *range(2, op.rank(x))], np.int64)
        spread = op.Sub(x, op.ReduceMean(x, axes, keepdims=1))
        variance = op.ReduceMean(op.Mul(spread, spread), axes, keepdims=0)
        epsilon = op.constant_like(attribute(node, "epsilon", 1e-5), x)
        outputs[3] = op.ReduceMean(x, axes, keepdims=0)
        outputs[4] = op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))
    return outputs


@fused("PadAndUnflatten")
def _pad_and_unflatten(op: Builder, node: ir.Node) -> ir.Value:
    """Rows put at their places among zeros, and the first axis split into two"""
    rows, indices, dims = (required_input(node, index) for index in range(3))
    row_shape = op.Shape(rows, start=1)
    count = op.ReduceProd(dims, keepdims=1)
    zero = op.constant(np.zeros((), op.dtype(rows).numpy()))
    empty = op.Expand(zero, op.Concat(count, row_shape, axis=0))
    filled = op.ScatterND(empty, op.Unsqueeze(indices, [1]), rows)
    return op.Reshape(filled, op.Concat(dims, row_shape, axis=0))


@fused("SoftmaxCrossEntropy")
def _softmax_cross_entropy(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """−Σ label·log softmax(x) over the last axis, for labels that are distributions"""
    scores, labels = required_input(node), required_input(node, 1)
    log_prob = op.LogSoftmax(scores, axis=-1)
    each = op.Neg(op.ReduceSum(op.Mul(log_prob, labels), [-1], keepdims=0))
    reduction = attribute(node, "reduction", "mean")
    if reduction != "none":
        each = (op.ReduceMean if reduction == "mean" else op.ReduceSum)(each, keepdims=0)
    return [each, log_prob]


@fused("SparseSoftmaxCrossEntropy")
def _sparse_softmax_cross_entropy(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """SoftmaxCrossEntropyLoss with the classes on the last axis"""
    scores, labels, weights = required_input(node), required_input(node, 1), optional_input(node, 2)
    classes = op.static_dim(scores, -1)
    flat = op.Reshape(scores, [-1, classes]) if classes else op.Flatten(scores, axis=-1)
    reduction = attribute(node, "reduction", "mean")
    rows = op.Reshape(labels, [-1])
    loss, log_prob = op.SoftmaxCrossEntropyLoss(flat, rows, weights, reduction=reduction, outputs=2)
    if reduction == "none":
        loss = op.Reshape(loss, op.Shape(labels))
    return [loss, op.Reshape(log_prob, op.Shape(scores))]
