"""Gradients of ONNX's two loss operators."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onward.autodiff.registry import gradient_rule
from onward.autodiff.saved.optional_outputs import by_products, log_probabilities
from onward.graph.nodes import optional_input, required_input

# Up to this many classes, a matrix of ones and zeros costs less than picking and scattering.
_FEW = 64


@gradient_rule("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(op, node, dloss, dlog_prob=None):
    """loss = Σ −κᵢ·ℓᵢ[labelᵢ] with ℓ = log softmax(x)   ⇒   dx = κ·(exp ℓ − onehot),

    with κᵢ = weight[labelᵢ] (0 where ignored), over Σ κ for a mean; and from ℓ as a second output
    dx = dℓ − exp(ℓ)·Σ dℓ.
    """
    scores, _, weights = (*node.inputs, None)[:3]
    if dlog_prob is None and _is_plain(op, node):
        return _few_classes(op, node, dloss)
    log_prob = log_probabilities(op, node)
    prob = op.Exp(log_prob)
    dx = dweight = None
    if dloss is not None:
        labels = _Labels.read(op, node)
        share = labels.share(op, dloss)
        column = op.Unsqueeze(share, [1])
        # p − 1 at the label, without a one-hot matrix of all classes.
        dx = op.ScatterElements(op.Mul(prob, column), labels.index, op.Neg(column), axis=1, reduction="add")
        dweight = labels.weight_gradient(op, log_prob, node.outputs[0], dloss)
    # Both outputs may be used: a model that reports its probabilities and trains.
    if dlog_prob is not None:
        direct = op.Sub(dlog_prob, op.Mul(prob, op.ReduceSum(dlog_prob, [1], keepdims=1)))
        dx = direct if dx is None else op.Add(dx, direct)
    return {scores: dx, **({} if weights is None else {weights: dweight})}


def _is_plain(op, node) -> bool:
    """No weights, nothing ignored, one number out, and few classes: the common loss of a classifier."""
    scores = node.inputs[0]
    plain = len(node.inputs) < 3 and "ignore_index" not in node.attributes and op.rank(scores) == 2
    classes = op.static_dim(scores, 1)
    alone = all(not value.name for value in node.outputs[1:])
    reduced = node.attributes.get_string("reduction", "mean") != "none"
    # OneHot has no bfloat16
    if not plain or not reduced or not alone or op.dtype(scores) == ir.DataType.BFLOAT16:
        return False
    return classes is not None and classes <= _FEW


def _few_classes(op, node, dloss):
    """loss = c·Σ ℓ·onehot, c = −1/N or −1   ⇒   dx = c·dloss·(onehot − exp ℓ)"""
    scores = node.inputs[0]
    log_prob, onehot, factor = by_products(op, node)
    return {scores: op.Mul(op.Sub(onehot, op.Exp(log_prob)), op.Mul(factor, dloss))}


@gradient_rule("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(op, node, dloss):
    """loss = Σ −κᵢ·xᵢ[labelᵢ]   ⇒   dx = −κ at the labels, else 0"""
    x = node.inputs[0]
    labels = _Labels.read(op, node)
    column = op.Neg(op.Unsqueeze(labels.share(op, dloss), [1]))
    dx = op.ScatterElements(op.zeros_like(x), labels.index, column, axis=1)
    return dx, None, labels.weight_gradient(op, x, node.outputs[0], dloss)


@dataclasses.dataclass(frozen=True)
class _Labels:
    """What both losses read: labels (0 in place of ignored ones), which count, and with which weight."""

    labels: ir.Value  # [N, d…]
    index: ir.Value  # [N, 1, d…]
    valid: ir.Value | None  # None: all
    weights: ir.Value | None
    reduction: str

    @staticmethod
    def read(op, node: ir.Node) -> _Labels:
        labels, weights = required_input(node, 1), optional_input(node, 2)
        ignore = node.attributes.get("ignore_index")
        valid = None
        if ignore is not None:
            ignored = op.constant_like(ignore.as_int(), labels)
            valid = op.Not(op.Equal(labels, ignored))
            # An ignored label may be out of range, −100 mostly, and would be an error to Gather.
            labels = op.Where(valid, labels, op.constant_like(0, labels))
        reduction = node.attributes.get_string("reduction", "mean")
        return _Labels(labels, op.Unsqueeze(labels, [1]), valid, weights, reduction)

    def share(self, op, dloss: ir.Value) -> ir.Value:
        """κ·dloss of every sample."""
        if self.reduction == "mean":
            dloss = op.Div(dloss, self._divisor(op, dloss))
        share = dloss
        if self.weights is not None:
            share = op.Mul(op.Gather(self.weights, self.labels, axis=0), dloss)
        elif self.valid is None and self.reduction != "none":
            share = op.Expand(dloss, op.shape(self.labels))
        return share if self.valid is None else op.Where(self.valid, share, op.constant_like(0.0, dloss))

    def _divisor(self, op, like: ir.Value) -> ir.Value:
        """Σ κ over the samples that count."""
        if self.weights is None:
            if self.valid is None:
                return op.CastLike(op.Size(self.labels), like)
            return op.ReduceSum(op.CastLike(self.valid, like), keepdims=0)
        picked = op.Gather(self.weights, self.labels, axis=0)
        if self.valid is not None:
            picked = op.Where(self.valid, picked, op.constant_like(0.0, like))
        return op.ReduceSum(picked, keepdims=0)

    def weight_gradient(self, op, log_prob: ir.Value, loss: ir.Value, dloss: ir.Value) -> ir.Value | None:
        """dweight[c] = Σ −ℓᵢ·dloss over the samples of class c; a mean also has −loss, all over Σ κ"""
        if not op.needs_gradient(self.weights):
            return None
        each = op.Neg(op.Squeeze(op.GatherElements(log_prob, self.index, axis=1), [1]))
        if self.reduction == "mean":
            dloss = op.Div(dloss, self._divisor(op, dloss))
            each = op.Sub(each, loss)
        each = op.Mul(each, dloss)
        if self.valid is not None:
            each = op.Where(self.valid, each, op.constant_like(0.0, each))
        return op.ScatterElements(
            op.zeros_like(self.weights),
            op.Reshape(self.labels, [-1]),
            op.Reshape(each, [-1]),
            axis=0,
            reduction="add",
        )
