"""What the gradient of SoftmaxCrossEntropyLoss reads: the forward node is written out, so that it is computed once."""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir

from onward.autodiff.saved.optional_outputs import add_output

__all__ = ["by_products", "log_probabilities"]


def by_products(op, node: ir.Node) -> list[ir.Value]:
    """ℓ = log softmax(x), the labels as rows of one 1, and c of loss = c·Σ ℓ·onehot, which the loss becomes.

    Half as many nodes as picking and scattering, which for a small model is half of the loss's time.
    """
    scores = node.inputs[0]
    assert scores is not None
    return op.save(
        node, [scores, scores, ir.Value(type=scores.type, shape=ir.Shape([]))],
        functools.partial(_write_as_product, op, node),
    )  # fmt: skip


def _write_as_product(op, node: ir.Node) -> list[ir.Value]:
    scores, labels = node.inputs
    assert scores is not None and labels is not None
    log_prob = op.LogSoftmax(scores, axis=1)
    ends = op.constant(np.asarray([0, 1], op.dtype(scores).numpy()))
    # int32 has no kernel
    number = labels if op.dtype(labels) == ir.DataType.INT64 else op.Cast(labels, to=7)
    onehot = op.OneHot(number, np.asarray(op.static_dim(scores, 1), np.int64), ends, axis=1)
    total = op.ReduceSum(op.Mul(log_prob, onehot), keepdims=0)
    factor = op.constant_like(-1.0, scores)
    if node.attributes.get_string("reduction", "mean") == "mean":
        factor = op.Div(factor, op.CastLike(op.Size(labels), scores))
    node.resize_outputs(1)
    node.op_type = "Mul"
    node.attributes.clear()
    node.replace_input_with(0, total)
    node.replace_input_with(1, factor)
    return [log_prob, onehot, factor]


def log_probabilities(op, node: ir.Node) -> ir.Value:
    """log softmax(x) of the forward pass."""
    scores = node.inputs[0]
    assert scores is not None
    (log_prob,) = op.save(node, [scores], functools.partial(_write_as_likelihood, op, node))
    return log_prob


def _write_as_likelihood(op, node: ir.Node) -> list[ir.Value]:
    """Runtimes write the operator out with a softmax over an inner axis, half as fast as one over the last.

    So the node becomes LogSoftmax and NegativeLogLikelihoodLoss, unless its second output is the model's own.
    """
    scores = node.inputs[0]
    assert scores is not None
    if any(value.is_graph_output() for value in node.outputs[1:]):
        return [add_output(op, node, 1, scores)]
    log_prob = op.LogSoftmax(scores, axis=1)
    for value in node.outputs[1:]:
        ir.convenience.replace_all_uses_with(value, log_prob)
    node.resize_outputs(1)
    node.replace_input_with(0, log_prob)
    node.op_type = "NegativeLogLikelihoodLoss"
    return [log_prob]
