"""Gradients of Softmax, LogSoftmax and Dropout."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.autodiff.registry import gradient_rule, no_gradient
from onward.autodiff.saved.optional_outputs import saved_output
from onward.graph.nodes import GRADIENT, MASKED

no_gradient("Hardmax")


@gradient_rule("Softmax")
def softmax(op, node, dy):
    """y = softmax(x)   ⇒   dx = y·(dy − Σ dy·y)

    Attention masks rows of scores with −∞, and a model may then replace the NaN that a row of nothing else
    gives; such rows have no gradient. `prepare` marks these nodes.
    """
    y = node.outputs[0]
    axis = node.attributes.get_int("axis", -1)
    # In terms of y alone: x, as large, need not be kept.
    inner = op.ReduceSum(op.Mul(dy, y), [axis], keepdims=1)
    dx = op.Mul(op.Sub(dy, inner), y)
    if node.metadata_props.get(GRADIENT) == MASKED:
        # One element tells: a row is NaN as a whole or not at all.
        empty = op.IsNaN(op.Slice(y, [0], [1], [axis]))
        dx = op.Where(empty, op.constant_like(0.0, dx), dx)
    return dx


@gradient_rule("LogSoftmax")
def log_softmax(op, node, dy):
    """y = log softmax(x)   ⇒   dx = dy − exp(y)·Σ dy"""
    axis = node.attributes.get_int("axis", -1)
    # Σ dy, and not Σ dy·y: log-probabilities add up to nothing in particular.
    total = op.ReduceSum(dy, [axis], keepdims=1)
    return op.Sub(dy, op.Mul(op.Exp(node.outputs[0]), total))


@gradient_rule("Dropout")
def dropout(op, node, dy, _dmask=None):
    """y = x·mask/(1 − ratio) in training, else x   ⇒   dx = dy·mask/(1 − ratio), else dy

    The mask is the forward node's own output, so both passes drop the same elements.
    """
    if dy is None:
        return None
    _, ratio, training = (*node.inputs, None, None)[:3]
    mode, constant = op.const_value(training), op.const_value(ratio)
    if training is None or (mode is not None and not mode) or (constant is not None and constant == 0):
        return dy
    kind = op.dtype(dy)
    if ratio is None or constant is not None:
        # ONNX's default.
        rate = 0.5 if constant is None else float(np.asarray(constant, np.float64))
        scale = op.constant(np.asarray(1 / (1 - rate) if rate < 1 else 0.0, kind.numpy()))
    else:
        scale = op.CastLike(op.Reciprocal(op.Sub(op.constant_like(1.0, ratio), ratio)), dy)
    if mode is None:
        scale = op.Where(training, scale, op.constant_like(1.0, dy))
    mask = saved_output(op, node, 1, dtype=ir.DataType.BOOL, shape=node.outputs[0].shape)
    return op.Where(mask, op.Mul(dy, scale), op.constant_like(0.0, dy))
