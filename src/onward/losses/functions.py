"""Losses as functions from values to a value, in standard operators.

Each takes a builder first and follows the torch function of its name: the same arguments, reductions and
numbers, for values and gradients alike.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.losses.ctc import ctc

if TYPE_CHECKING:
    from onward.graph.builder import Builder

Weights = np.ndarray | ir.Value | None
_REDUCTIONS = ("mean", "sum", "none")


def reduce(op: Builder, loss: ir.Value, reduction: str = "mean") -> ir.Value:
    """The mean or sum of a loss over all its elements, or the loss as it is for 'none'."""
    _check_reduction(reduction)
    if reduction == "none":
        return loss
    return op.ReduceMean(loss, keepdims=0) if reduction == "mean" else op.ReduceSum(loss, keepdims=0)


def _check_reduction(reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction is '{reduction}': choose one of {', '.join(_REDUCTIONS)}")


def mse(op: Builder, prediction: ir.Value, target: ir.Value, *, reduction: str = "mean") -> ir.Value:
    """(prediction − target)²"""
    difference = op.Sub(prediction, target)
    return reduce(op, op.Mul(difference, difference), reduction)


def l1(op: Builder, prediction: ir.Value, target: ir.Value, *, reduction: str = "mean") -> ir.Value:
    """|prediction − target|"""
    return reduce(op, op.Abs(op.Sub(prediction, target)), reduction)


def huber(
    op: Builder, prediction: ir.Value, target: ir.Value, *, delta: float = 1.0, reduction: str = "mean"
) -> ir.Value:
    """½d² where |d| ≤ δ, else δ(|d| − ½δ); written as c·(|d| − ½c) with c = min(|d|, δ)"""
    if delta <= 0:
        raise ValueError(f"delta is {delta}: it must be positive")
    distance = op.Abs(op.Sub(prediction, target))
    capped = op.Min(distance, delta)
    return reduce(op, op.Mul(capped, op.Sub(distance, op.Mul(capped, 0.5))), reduction)


def smooth_l1(
    op: Builder, prediction: ir.Value, target: ir.Value, *, beta: float = 1.0, reduction: str = "mean"
) -> ir.Value:
    """huber(δ = β) / β; l1 for β = 0"""
    if beta < 0:
        raise ValueError(f"beta is {beta}: it must not be negative")
    if beta == 0:
        return l1(op, prediction, target, reduction=reduction)
    return op.Div(huber(op, prediction, target, delta=beta, reduction=reduction), beta)


def cross_entropy(
    op: Builder,
    scores: ir.Value,
    labels: ir.Value,
    *,
    weight: Weights = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> ir.Value:
    """−log softmax(scores)[label], classes on axis 1 (axis 0 of a single sample)

    Labels are class numbers, or probabilities where they are floating and shaped like the scores.
    """
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}: it must lie between 0 and 1")
    if op.rank(scores) == 1:
        scores, labels = op.Unsqueeze(scores, [0]), op.Unsqueeze(labels, [0])
        loss = cross_entropy(
            op, scores, labels, weight=weight, reduction=reduction, ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )  # fmt: skip
        return op.Squeeze(loss, [0]) if reduction == "none" else loss
    if labels.dtype is not None and labels.dtype.is_floating_point():
        return _soft_cross_entropy(op, scores, labels, weight, reduction, label_smoothing)
    labels = _class_numbers(op, labels)
    weights = _as_value(op, weight, scores)
    _check_reduction(reduction)
    hard, _ = op.SoftmaxCrossEntropyLoss(
        scores, labels, weights, ignore_index=ignore_index, reduction=reduction, outputs=2
    )
    if label_smoothing == 0.0:
        return hard
    smooth = _smooth_part(op, scores, labels, weights, reduction, ignore_index)
    return op.Add(op.Mul(hard, 1.0 - label_smoothing), op.Mul(smooth, label_smoothing))


def _class_numbers(op: Builder, labels: ir.Value) -> ir.Value:
    """Labels in a type that the loss operators take, whatever integers they are."""
    taken = (None, ir.DataType.INT64, ir.DataType.INT32)
    return labels if labels.dtype in taken else op.Cast(labels, to=ir.DataType.INT64)


def _smooth_part(
    op: Builder,
    scores: ir.Value,
    labels: ir.Value,
    weights: ir.Value | None,
    reduction: str,
    ignore_index: int | None,
) -> ir.Value:
    """The uniform half of a smoothed loss: −Σ_c w_c·log p_c / C, over the labels that count."""
    logs = op.LogSoftmax(scores, axis=1)
    classes = op.Cast(op.Squeeze(op.dim(scores, 1), [0]), to=op.dtype(scores))
    shaped = None if weights is None else op.Reshape(weights, _class_shape(op, scores))
    each = op.Neg(op.ReduceSum(logs if shaped is None else op.Mul(logs, shaped), [1], keepdims=0))
    counted = op.constant_like(1.0, scores)
    if ignore_index is not None:
        ignored = op.Equal(labels, ignore_index)
        each = op.Where(ignored, 0.0, each)
        counted = op.Cast(op.Not(ignored), to=op.dtype(scores))
    if reduction == "none":
        return op.Div(each, classes)
    total = op.ReduceSum(each, keepdims=0)
    if reduction == "mean":
        if weights is not None:
            safe = labels if ignore_index is None else op.Where(op.Equal(labels, ignore_index), 0, labels)
            counted = op.Mul(op.Gather(weights, safe, axis=0), counted)
        share = op.ReduceSum(op.Expand(counted, op.shape(each)), keepdims=0)
        total = op.Div(total, share)
    return op.Div(total, classes)


def _soft_cross_entropy(
    op: Builder, scores: ir.Value, target: ir.Value, weight: Weights, reduction: str, label_smoothing: float
) -> ir.Value:
    logs = op.LogSoftmax(scores, axis=1)
    if label_smoothing:
        classes = op.Cast(op.Squeeze(op.dim(scores, 1), [0]), to=op.dtype(scores))
        uniform = op.Div(op.constant_like(label_smoothing, scores), classes)
        target = op.Add(op.Mul(target, 1.0 - label_smoothing), uniform)
    weights = _as_value(op, weight, scores)
    product = op.Mul(logs, target)
    if weights is not None:
        product = op.Mul(product, op.Reshape(weights, _class_shape(op, scores)))
    each = op.Neg(op.ReduceSum(product, [1], keepdims=0))
    return reduce(op, each, reduction)


def nll(
    op: Builder,
    log_probabilities: ir.Value,
    labels: ir.Value,
    *,
    weight: Weights = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
) -> ir.Value:
    """−log_probabilities[label], classes on axis 1"""
    _check_reduction(reduction)
    return op.NegativeLogLikelihoodLoss(
        log_probabilities,
        _class_numbers(op, labels),
        _as_value(op, weight, log_probabilities),
        ignore_index=ignore_index,
        reduction=reduction,
    )


def bce_with_logits(
    op: Builder,
    logits: ir.Value,
    target: ir.Value,
    *,
    weight: Weights = None,
    pos_weight: Weights = None,
    reduction: str = "mean",
) -> ir.Value:
    """softplus(−x) + (1 − t)·x, with the first term scaled by 1 + (pos_weight − 1)·t

    The runtime's Softplus overflows for no logit, and has a gradient at 0 too, where new models start.
    """
    softplus = op.Softplus(op.Neg(logits))
    positive = _as_value(op, pos_weight, logits)
    if positive is not None:
        softplus = op.Mul(softplus, op.Add(op.Mul(op.Sub(positive, 1.0), target), 1.0))
    each = op.Add(softplus, op.Mul(op.Sub(1.0, target), logits))
    weights = _as_value(op, weight, logits)
    return reduce(op, each if weights is None else op.Mul(each, weights), reduction)


def kl_div(
    op: Builder,
    log_prediction: ir.Value,
    target: ir.Value,
    *,
    reduction: str = "mean",
    log_target: bool = False,
) -> ir.Value:
    """target·(log target − log_prediction), 0 where the target is 0; 'batchmean' divides by the batch"""
    if log_target:
        each = op.Mul(op.Exp(target), op.Sub(target, log_prediction))
    else:
        present = op.Greater(target, 0.0)
        logs = op.Log(op.Where(present, target, 1.0))
        each = op.Sub(op.Mul(target, logs), op.Mul(target, log_prediction))
    if reduction == "batchmean":
        batch = op.Cast(op.Squeeze(op.dim(log_prediction, 0), [0]), to=op.dtype(log_prediction))
        return op.Div(op.ReduceSum(each, keepdims=0), batch)
    return reduce(op, each, reduction)


def gaussian_nll(
    op: Builder,
    mean: ir.Value,
    target: ir.Value,
    variance: ir.Value,
    *,
    eps: float = 1e-6,
    full: bool = False,
    reduction: str = "mean",
) -> ir.Value:
    """½(log v + (mean − target)²/v), v at least eps"""
    safe = op.Max(variance, eps)
    difference = op.Sub(mean, target)
    each = op.Mul(op.Add(op.Log(safe), op.Div(op.Mul(difference, difference), safe)), 0.5)
    if full:
        each = op.Add(each, 0.5 * float(np.log(2 * np.pi)))
    return reduce(op, each, reduction)


def cosine_embedding(
    op: Builder, x: ir.Value, y: ir.Value, labels: ir.Value, *, margin: float = 0.0, reduction: str = "mean"
) -> ir.Value:
    """1 − cos(x, y) where the label is 1, max(0, cos(x, y) − margin) where it is −1"""
    eps = 1e-12
    xx = op.Add(op.ReduceSum(op.Mul(x, x), [-1], keepdims=0), eps)
    yy = op.Add(op.ReduceSum(op.Mul(y, y), [-1], keepdims=0), eps)
    cosine = op.Div(op.ReduceSum(op.Mul(x, y), [-1], keepdims=0), op.Sqrt(op.Mul(xx, yy)))
    positive = op.Greater(labels, 0)
    each = op.Where(positive, op.Sub(1.0, cosine), op.Relu(op.Sub(cosine, margin)))
    return reduce(op, each, reduction)


def triplet_margin(
    op: Builder,
    anchor: ir.Value,
    positive: ir.Value,
    negative: ir.Value,
    *,
    margin: float = 1.0,
    p: float = 2.0,
    swap: bool = False,
    reduction: str = "mean",
) -> ir.Value:
    """max(0, ‖anchor − positive‖ₚ − ‖anchor − negative‖ₚ + margin)"""
    near = _distance(op, anchor, positive, p)
    far = _distance(op, anchor, negative, p)
    if swap:
        far = op.Min(far, _distance(op, positive, negative, p))
    return reduce(op, op.Relu(op.Add(op.Sub(near, far), margin)), reduction)


def multiple_negatives(
    op: Builder, anchors: ir.Value, positives: ir.Value, *, scale: float = 20.0, reduction: str = "mean"
) -> ir.Value:
    """Cross entropy of scale·cos(anchor_i, positive_j) with label i: the other pairs are the negatives"""
    similarity = op.MatMul(_unit(op, anchors), op.Transpose(_unit(op, positives), perm=[1, 0]))
    scores = op.Mul(similarity, scale)
    count = op.Squeeze(op.dim(anchors, 0), [0])
    labels = op.Range(np.int64(0), count, np.int64(1))
    return cross_entropy(op, scores, labels, reduction=reduction)


def _unit(op: Builder, x: ir.Value) -> ir.Value:
    length = op.Sqrt(op.Add(op.ReduceSum(op.Mul(x, x), [-1], keepdims=1), 1e-12))
    return op.Div(x, length)


def _distance(op: Builder, x: ir.Value, y: ir.Value, p: float) -> ir.Value:
    # torch adds its eps to the difference, which also keeps the root differentiable at zero
    difference = op.Add(op.Sub(x, y), 1e-6)
    if p == 2.0:
        return op.Sqrt(op.ReduceSum(op.Mul(difference, difference), [-1], keepdims=0))
    return op.Pow(op.ReduceSum(op.Pow(op.Abs(difference), p), [-1], keepdims=0), 1.0 / p)


def _class_shape(op: Builder, scores: ir.Value) -> list[int]:
    """Broadcasts a vector of classes along axis 1."""
    return [1, -1] + [1] * (op.rank(scores) - 2)


def _as_value(op: Builder, weight: Weights, like: ir.Value) -> ir.Value | None:
    if weight is None or isinstance(weight, ir.Value):
        return weight
    return op.constant(np.asarray(weight, dtype=op.dtype(like).numpy()), name="weight")


LossFunction = Callable[..., ir.Value]


def target_inputs(loss: LossFunction, given: Sequence[ir.Value]) -> list[ir.Value]:
    """The inputs that a loss needs besides the `given` values: one for each parameter that is left, by its name.

    `labels` are class numbers (int64) and have the shape of the scores without the class axis. Any other target
    has the type and shape of the first value given.

    >>> scores = ir.Value(name="scores", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n", 10]))
    >>> target_inputs(cross_entropy, [scores])
    [Value(name='labels', type=Tensor(INT64), shape=Shape([SymbolicDim('n')]))]
    """
    required = [
        parameter.name
        for parameter in inspect.signature(loss).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
    ][1:]
    if len(given) > len(required):
        name = getattr(loss, "__name__", str(loss))
        raise ModelError(
            f"the loss '{name}' takes {', '.join(required)}: {len(required)} values, but {len(given)} are given; "
            "choose the model's outputs that it reads with loss_input_names"
        )
    first = given[0]
    dims = list(first.shape) if first.shape is not None else []
    function = loss.func if isinstance(loss, functools.partial) else loss
    made = []
    for name in required[len(given) :]:
        shape: Sequence[int | ir.SymbolicDim | str]
        dtype: ir.DataType | None = ir.DataType.INT64
        if function is ctc:
            shape = [dims[1], f"{name}_longest"] if name == "targets" else [dims[1]]
        elif name == "labels":
            shape = (
                dims[:-1] if function is cosine_embedding else dims[:1] + dims[2:] if len(dims) > 1 else []
            )
        else:
            dtype, shape = first.dtype, dims
        kind = ir.TensorType(dtype) if dtype is not None else None
        made.append(
            ir.Value(name=name, type=kind, shape=ir.Shape(shape) if first.shape is not None else None)
        )
    return made
