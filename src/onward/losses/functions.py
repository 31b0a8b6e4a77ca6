"""Losses as functions from values to a value, in standard operators.

Each takes a builder first and follows the torch function of its name: the same arguments, reductions and
numbers, for values and gradients alike.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError

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
    # without a Where, which is slow on the CPU, and with the right slope on both sides
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
    # torch takes a single sample without its batch axis; ONNX's operator does not.
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
    # Two outputs: the log probabilities are what its gradient reads.
    hard, _ = op.SoftmaxCrossEntropyLoss(
        scores, labels, weights, ignore_index=ignore_index, reduction=reduction, outputs=2
    )
    if label_smoothing == 0.0:
        return hard
    # ONNX's operator has no label smoothing: the loss is linear in the target, so the uniform half is added.
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
    # classes are on axis 1, not last: a vector must be turned there
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
    # not log σ(x): for very negative logits σ underflows to 0, and its logarithm is −∞
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
        # 0·log 0 is 0 here, and would be NaN: the zero is replaced before the logarithm, not after.
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
    # a variance of 0 would divide by zero
    safe = op.Max(variance, eps)
    difference = op.Sub(mean, target)
    each = op.Mul(op.Add(op.Log(safe), op.Div(op.Mul(difference, difference), safe)), 0.5)
    if full:
        # a constant: it changes the number that is shown, not a gradient
        each = op.Add(each, 0.5 * float(np.log(2 * np.pi)))
    return reduce(op, each, reduction)


def cosine_embedding(
    op: Builder, x: ir.Value, y: ir.Value, labels: ir.Value, *, margin: float = 0.0, reduction: str = "mean"
) -> ir.Value:
    """1 − cos(x, y) where the label is 1, max(0, cos(x, y) − margin) where it is −1"""
    # torch's own: it keeps vectors of zeros from dividing by zero.
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
    if swap:  # Balntas et al. 2016
        far = op.Min(far, _distance(op, positive, negative, p))
    return reduce(op, op.Relu(op.Add(op.Sub(near, far), margin)), reduction)


def multiple_negatives(
    op: Builder,
    anchors: ir.Value,
    positives: ir.Value | None = None,
    *,
    scale: float = 20.0,
    reduction: str = "mean",
) -> ir.Value:
    """Cross entropy of scale·cos(anchor_i, candidate_j) with label i: what belongs to the others is the negatives

    `positives` [candidates, size] begin with those of the anchors, and may go on with hard negatives. Without them
    `anchors` has both of each pair, one row after the other: the output of one encoder for a batch of pairs, so that
    gradients flow through both.
    """
    if positives is None:
        if anchors.shape is not None and anchors.shape.rank() != 2:
            raise ModelError(
                f"'{anchors.name}' has shape {anchors.shape}, and embeddings are [texts, size]",
                hint="pool it first: onward finetune --task embeddings does",
            )
        anchors, positives = split_rows(op, anchors, 2)
    similarity = op.MatMul(unit(op, anchors), op.Transpose(unit(op, positives), perm=[1, 0]))
    scores = op.Mul(similarity, scale)
    count = op.Squeeze(op.dim(anchors, 0), [0])
    # pair i's own positive is column i
    labels = op.Range(np.int64(0), count, np.int64(1))
    return cross_entropy(op, scores, labels, reduction=reduction)


def split_rows(op: Builder, vectors: ir.Value, views: int) -> list[ir.Value]:
    """[samples·views, size] as `views` values [samples, size]: row i·views + v is view v of sample i"""
    grouped = op.Reshape(vectors, op.Concat([-1, views], op.dim(vectors, 1), axis=0))
    return [op.Gather(grouped, view, axis=1) for view in range(views)]


def unit(op: Builder, x: ir.Value) -> ir.Value:
    """x / ‖x‖ of each row"""
    # The small number is under the root, whose slope at 0 is infinite.
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


@dataclasses.dataclass(frozen=True)
class LossWithTargets:
    """A loss that says itself which inputs it takes besides the model's values: boxes of an image, say.

    `targets` are names, types and dimensions, of which None is the batch. `compute` is called with the builder, the
    model's values that the loss reads, and the targets.

    >>> loss = LossWithTargets(mse, [("wanted", ir.DataType.FLOAT, [None, 3])])
    >>> target_inputs(loss, [ir.Value(name="y", shape=ir.Shape(["n", 3]))])
    [Value(name='wanted', type=Tensor(FLOAT), shape=Shape([SymbolicDim('n'), 3]))]
    """

    compute: LossFunction
    targets: Sequence[tuple[str, ir.DataType, Sequence[int | str | None]]]

    def __call__(self, op: Builder, *values: ir.Value) -> ir.Value:
        return self.compute(op, *values)

    def target_inputs(self, batch: int | ir.SymbolicDim | str) -> list[ir.Value]:
        """The inputs, for a batch of this size."""
        return [
            ir.Value(
                name=name,
                type=ir.TensorType(dtype),
                shape=ir.Shape([batch if d is None else d for d in dims]),
            )
            for name, dtype, dims in self.targets
        ]


def target_inputs(loss: LossFunction, predictions: Sequence[ir.Value]) -> list[ir.Value]:
    """The inputs that a loss needs besides the predictions: one for each parameter that is left, by its name.

    `labels` are class numbers (int64) and have the shape of the scores without the class axis. Any other target
    has the type and shape of the first prediction.

    >>> scores = ir.Value(name="scores", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n", 10]))
    >>> target_inputs(cross_entropy, [scores])
    [Value(name='labels', type=Tensor(INT64), shape=Shape([SymbolicDim('n')]))]
    """
    if isinstance(loss, LossWithTargets):
        dims = predictions[0].shape
        return loss.target_inputs(dims[0] if dims is not None and len(dims) else "batch")
    positional = [
        parameter
        for parameter in inspect.signature(loss).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ][1:]
    required = [parameter.name for parameter in positional if parameter.default is parameter.empty]
    if len(predictions) > len(positional):
        name = getattr(loss, "__name__", str(loss))
        raise ModelError(
            f"the loss '{name}' takes {', '.join(required)}: {len(required)} values, but {len(predictions)} are given; "
            "choose the model's outputs that it reads with loss_input_names"
        )
    first = predictions[0]
    dims = list(first.shape) if first.shape is not None else []
    # Blocks bind options with partial: the shapes of targets depend on the function below.
    function = loss.func if isinstance(loss, functools.partial) else loss
    targets = []
    for name in required[len(predictions) :]:
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
        targets.append(
            ir.Value(name=name, type=kind, shape=ir.Shape(shape) if first.shape is not None else None)
        )
    return targets


# --- Connectionist temporal classification: the loss of speech and handwriting models, in standard operators.
#
# The forward recursion in log space is a Scan over time; its gradient is that of the Scan. Probabilities of
# zero are a very small finite number inside, so that nothing becomes NaN on the way.


# not −∞, whose difference with itself is NaN; its exponential is 0 all the same
_NEVER = -1e30


def ctc(
    op: Builder,
    log_probabilities: ir.Value,
    targets: ir.Value,
    input_lengths: ir.Value,
    target_lengths: ir.Value,
    *,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> ir.Value:
    """−log Σ p(alignment) over all alignments of the target, as torch.nn.functional.ctc_loss

    `log_probabilities` are [time, batch, classes], `targets` [batch, longest target] class numbers of which
    the first `target_lengths` count. 'mean' divides each loss by its target's length first. A target that
    no alignment fits costs infinity (0 with `zero_infinity`) and has no gradient.
    """
    _check_reduction(reduction)
    lengths = op.Cast(target_lengths, to=ir.DataType.INT64)
    states = _states(op, targets, lengths, blank)
    last = _scan(op, log_probabilities, states, input_lengths, blank)
    each = op.Neg(_readout(op, last, lengths))
    # A tenth: sums of a few real log probabilities are added to it on the way.
    possible = op.Less(each, -_NEVER / 10)
    each = op.Where(possible, each, 0.0 if zero_infinity else float("inf"))
    if reduction == "mean":
        each = op.Div(each, op.Cast(op.Max(lengths, np.int64(1)), to=op.dtype(log_probabilities)))
    return reduce(op, each, reduction)


def _states(op: Builder, targets: ir.Value, lengths: ir.Value, blank: int) -> ir.Value:
    """[batch, 2·longest + 1]: the target's classes with blanks around each."""
    targets = op.Cast(targets, to=ir.DataType.INT64)
    longest = op.Squeeze(op.dim(targets, 1), [0])
    counts = op.Less(op.Range(np.int64(0), longest, np.int64(1)), op.Unsqueeze(lengths, [1]))
    safe = op.Where(counts, targets, np.int64(blank))  # what stands behind a target's end may be anything
    pairs = op.Concat(
        op.Expand(np.int64(blank), op.shape(op.Unsqueeze(safe, [2]))), op.Unsqueeze(safe, [2]), axis=2
    )
    flat = op.Reshape(pairs, op.Concat(op.dim(targets, 0), op.Mul(op.dim(targets, 1), np.int64(2)), axis=0))
    ends = op.Expand(np.int64(blank), op.Concat(op.dim(targets, 0), [1], axis=0))
    return op.Concat(flat, ends, axis=1)


def _scan(op: Builder, logs: ir.Value, states: ir.Value, input_lengths: ir.Value, blank: int) -> ir.Value:
    """[batch, states]: the log probability of being in each state when a sequence ends."""
    dtype = op.dtype(logs)
    time = op.dim(logs, 0)
    indices = op.Expand(op.Unsqueeze(states, [0]), op.Concat(time, op.Shape(states), axis=0))
    # All emissions are picked before the loop: one gather instead of one in each step.
    emitted = op.GatherElements(logs, indices, axis=2)
    steps = op.Range(np.int64(0), op.Squeeze(time, [0]), np.int64(1))
    running = op.Less(
        op.Unsqueeze(steps, [1, 2]), op.Unsqueeze(op.Cast(input_lengths, to=ir.DataType.INT64), [0, 2])
    )
    never = op.constant_like(_NEVER, logs)
    before = op.Pad(states, [0, 2, 0, 0], np.int64(blank))
    two_back = op.Slice(before, [0], [-2], [1])
    # a blank may be skipped between two different classes
    skips = op.And(op.Not(op.Equal(states, np.int64(blank))), op.Not(op.Equal(states, two_back)))
    penalty = op.Where(skips, op.constant_like(0.0, logs), never)
    width = op.Squeeze(op.dim(states, 1), [0])
    first = op.Equal(op.Range(np.int64(0), width, np.int64(1)), np.int64(0))
    start = op.Expand(op.Where(first, op.constant_like(0.0, logs), never), op.Shape(states))

    body = op.subgraph("ctc_step")
    dims = [None, None]
    alpha = body.input("alpha", dtype, dims)
    emission = body.input("emission", dtype, dims)
    going = body.input("running", ir.DataType.BOOL, [None, 1])
    padded = body.Pad(alpha, [0, 2, 0, 0], never)
    one = body.Slice(padded, [1], [-1], [1])
    two = body.Add(body.Slice(padded, [0], [-2], [1]), penalty)
    ways = body.Concat(*(body.Unsqueeze(way, [2]) for way in (alpha, one, two)), axis=2)
    moved = body.Add(body.ReduceLogSumExp(ways, [2], keepdims=0), emission)
    # A sequence that has ended keeps its state: batches hold sequences of many lengths.
    body.graph.outputs.append(body.Where(going, moved, alpha))
    last = op.Scan(start, emitted, running, body=body.graph, num_scan_inputs=2)
    last.type, last.shape = ir.TensorType(dtype), states.shape
    return last


def _readout(op: Builder, last: ir.Value, lengths: ir.Value) -> ir.Value:
    """[batch]: an alignment ends in the last class or in the blank behind it."""
    end = op.Unsqueeze(op.Mul(lengths, np.int64(2)), [1])
    class_state = op.Max(op.Sub(end, np.int64(1)), np.int64(0))
    chosen = op.GatherElements(last, op.Concat(end, class_state, axis=1), axis=1)
    # without a target there is no last class
    empty = op.Equal(end, np.int64(0))
    missing = op.Concat(op.Expand(False, op.Shape(empty)), empty, axis=1)
    chosen = op.Where(missing, op.constant_like(_NEVER, last), chosen)
    return op.ReduceLogSumExp(chosen, [1], keepdims=0)


# --- Losses of embeddings, which sentence-transformers has and torch has not. The vectors of a batch
# are rows of one value, those of a sample one after the other (`split_rows`): both sides go through the same encoder in
# one graph, and gradients flow through both.

# exp of it is 0 in float32, and it is far from its limits
_NO_PAIR = -1e12


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
    wrong = op.Where(ordered, difference, op.constant_like(_NO_PAIR, difference))
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
