"""Loss blocks: a value of the model against a target, which becomes an input where no value has its name."""

from __future__ import annotations

import functools

import numpy as np

from onward import losses
from onward.onnxblock.base import Block
from onward.onnxblock.emit import add_input, emit, has_name, value_of

__all__ = [
    "BCEWithLogitsLoss",
    "CTCLoss",
    "CosineEmbeddingLoss",
    "CrossEntropyLoss",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "MSELoss",
    "MultipleNegativesRankingLoss",
    "NLLLoss",
    "SmoothL1Loss",
    "TripletMarginLoss",
]


class LossBlock(Block):
    """A loss function over the values of these names; a name that the model does not have becomes an input."""

    function: losses.LossFunction

    def _loss(self, names: list[str], *, predictions: int = 1) -> str:
        # Types and shapes of the targets follow from the prediction's; the name is the caller's.
        missing = losses.target_inputs(self.function, [value_of(name) for name in names[:predictions]])
        for name, target in zip(names[predictions:], missing):
            if not has_name(name):
                target.name = name
                add_input(target)
        # the scope names the nodes: a report of unsupported operators then says that the loss has them
        return emit(names, self.function, scope="loss")[0]


class _TargetLoss(LossBlock):
    """A loss against a target of the prediction's own type and shape."""

    # scripts pass these by keyword: the names are onnxruntime-training's, as are the default inputs' names
    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """The loss of a value; `target_name` becomes an input if the model has no such value."""
        return self._loss([loss_input_name, target_name])


class MSELoss(_TargetLoss):
    """Mean squared error."""

    def __init__(self, reduction: str = "mean") -> None:
        self.function = functools.partial(losses.mse, reduction=_reduction(reduction))


class L1Loss(_TargetLoss):
    """Mean absolute error."""

    def __init__(self, reduction: str = "mean") -> None:
        self.function = functools.partial(losses.l1, reduction=_reduction(reduction))


class HuberLoss(_TargetLoss):
    """Squared near zero, absolute beyond `delta`."""

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        self.function = functools.partial(losses.huber, reduction=_reduction(reduction), delta=delta)


class SmoothL1Loss(_TargetLoss):
    """Huber's loss divided by `beta`."""

    def __init__(self, reduction: str = "mean", beta: float = 1.0) -> None:
        self.function = functools.partial(losses.smooth_l1, reduction=_reduction(reduction), beta=beta)


class KLDivLoss(_TargetLoss):
    """Kullback-Leibler divergence of log probabilities from a target distribution."""

    def __init__(self, reduction: str = "mean", log_target: bool = False) -> None:
        # torch has this one for KLDivLoss alone
        if reduction != "batchmean":
            _reduction(reduction)
        self.function = functools.partial(losses.kl_div, reduction=reduction, log_target=log_target)


class BCEWithLogitsLoss(_TargetLoss):
    """Binary cross entropy of logits, stable for logits of any size."""

    def __init__(
        self,
        weight: np.ndarray | None = None,
        reduction: str = "mean",
        pos_weight: np.ndarray | None = None,
    ) -> None:
        self.function = functools.partial(
            losses.bce_with_logits, weight=weight, reduction=_reduction(reduction), pos_weight=pos_weight
        )


class _LabelLoss(LossBlock):
    """A loss against class numbers."""

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """The loss of scores; `labels_name` becomes an int64 input if the model has no such value."""
        return self._loss([scores_input_name, labels_name])


class CrossEntropyLoss(_LabelLoss):
    """Softmax cross entropy, classes on axis 1."""

    def __init__(
        self,
        weight: np.ndarray | None = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        self.function = functools.partial(
            losses.cross_entropy,
            weight=weight,
            reduction=_reduction(reduction),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )


class NLLLoss(_LabelLoss):
    """Negative log likelihood of log probabilities, classes on axis 1."""

    def __init__(
        self, weight: np.ndarray | None = None, reduction: str = "mean", ignore_index: int | None = None
    ) -> None:
        self.function = functools.partial(
            losses.nll, weight=weight, reduction=_reduction(reduction), ignore_index=ignore_index
        )


class CTCLoss(LossBlock):
    """Connectionist temporal classification of log probabilities [time, batch, classes]."""

    def __init__(self, blank: int = 0, reduction: str = "mean", zero_infinity: bool = False) -> None:
        self.function = functools.partial(
            losses.ctc, blank=blank, reduction=_reduction(reduction), zero_infinity=zero_infinity
        )

    def build(
        self,
        log_probs_name: str,
        targets_name: str = "targets",
        input_lengths_name: str = "input_lengths",
        target_lengths_name: str = "target_lengths",
    ) -> str:
        """The loss; targets [batch, longest] and both lengths [batch] become int64 inputs where missing."""
        return self._loss([log_probs_name, targets_name, input_lengths_name, target_lengths_name])


class CosineEmbeddingLoss(LossBlock):
    """Pulls pairs labelled 1 together and pushes pairs labelled −1 apart."""

    def __init__(self, margin: float = 0.0, reduction: str = "mean") -> None:
        self.function = functools.partial(
            losses.cosine_embedding, margin=margin, reduction=_reduction(reduction)
        )

    def build(self, first: str, second: str, labels_name: str = "labels") -> str:
        # both vectors are values of the model: only the labels may become an input
        return self._loss([first, second, labels_name], predictions=2)


class TripletMarginLoss(LossBlock):
    """An anchor nearer to its positive than to its negative, by a margin."""

    def __init__(
        self, margin: float = 1.0, p: float = 2.0, swap: bool = False, reduction: str = "mean"
    ) -> None:
        self.function = functools.partial(
            losses.triplet_margin, margin=margin, p=p, swap=swap, reduction=_reduction(reduction)
        )

    def build(self, anchor: str, positive: str, negative: str) -> str:
        return self._loss([anchor, positive, negative], predictions=3)


class MultipleNegativesRankingLoss(LossBlock):
    """Pairs of embeddings, each pair's negatives being the rest of the batch.

    With one value, an encoder's output, its rows are the two texts of each pair, one after the other.
    """

    def __init__(self, scale: float = 20.0, reduction: str = "mean") -> None:
        self.function = functools.partial(
            losses.multiple_negatives, scale=scale, reduction=_reduction(reduction)
        )

    def build(self, anchors: str, positives: str | None = None) -> str:
        names = [anchors] if positives is None else [anchors, positives]
        return self._loss(names, predictions=len(names))


def _reduction(reduction: str) -> str:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"Reduction {reduction} not supported: choose mean, sum or none.")
    return reduction
