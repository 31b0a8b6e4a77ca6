"""Loss blocks: a value of the model against a target, which becomes an input where no value has its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onward import losses
from onward.onnxblock.base import Block
from onward.onnxblock.emit import add_input, emit, find_type, has_name

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


class _TargetLoss(Block):
    """A loss against a target of the prediction's own type and shape."""

    _function: losses.LossFunction
    _options: dict[str, Any]

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """The loss of a value; `target_name` becomes an input if the model has no such value."""
        if not has_name(target_name):
            kind = find_type(loss_input_name)
            add_input(target_name, kind.tensor_type.elem_type, _dims(kind))
        function, options = type(self)._function, self._options
        return emit(
            [loss_input_name, target_name], lambda op, x, t: function(op, x, t, **options), scope="loss"
        )[0]


class MSELoss(_TargetLoss):
    """Mean squared error."""

    _function = staticmethod(losses.mse)

    def __init__(self, reduction: str = "mean") -> None:
        self._options = {"reduction": _reduction(reduction)}


class L1Loss(_TargetLoss):
    """Mean absolute error."""

    _function = staticmethod(losses.l1)

    def __init__(self, reduction: str = "mean") -> None:
        self._options = {"reduction": _reduction(reduction)}


class HuberLoss(_TargetLoss):
    """Squared near zero, absolute beyond `delta`."""

    _function = staticmethod(losses.huber)

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        self._options = {"reduction": _reduction(reduction), "delta": delta}


class SmoothL1Loss(_TargetLoss):
    """Huber's loss divided by `beta`."""

    _function = staticmethod(losses.smooth_l1)

    def __init__(self, reduction: str = "mean", beta: float = 1.0) -> None:
        self._options = {"reduction": _reduction(reduction), "beta": beta}


class KLDivLoss(_TargetLoss):
    """Kullback-Leibler divergence of log probabilities from a target distribution."""

    _function = staticmethod(losses.kl_div)

    def __init__(self, reduction: str = "mean", log_target: bool = False) -> None:
        if reduction != "batchmean":
            _reduction(reduction)
        self._options = {"reduction": reduction, "log_target": log_target}


class BCEWithLogitsLoss(_TargetLoss):
    """Binary cross entropy of logits, stable for logits of any size."""

    _function = staticmethod(losses.bce_with_logits)

    def __init__(
        self,
        weight: np.ndarray | None = None,
        reduction: str = "mean",
        pos_weight: np.ndarray | None = None,
    ) -> None:
        self._options = {"weight": weight, "reduction": _reduction(reduction), "pos_weight": pos_weight}


class _LabelLoss(Block):
    """A loss against class numbers."""

    _function: losses.LossFunction
    _options: dict[str, Any]

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """The loss of scores; `labels_name` becomes an int64 input if the model has no such value."""
        if not has_name(labels_name):
            dims = _dims(find_type(scores_input_name))
            add_input(labels_name, onnx.TensorProto.INT64, dims[:1] + dims[2:] if len(dims) > 1 else [])
        function, options = type(self)._function, self._options
        return emit(
            [scores_input_name, labels_name], lambda op, x, t: function(op, x, t, **options), scope="loss"
        )[0]


class CrossEntropyLoss(_LabelLoss):
    """Softmax cross entropy, classes on axis 1."""

    _function = staticmethod(losses.cross_entropy)

    def __init__(
        self,
        weight: np.ndarray | None = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        self._options = {
            "weight": weight,
            "reduction": _reduction(reduction),
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
        }


class NLLLoss(_LabelLoss):
    """Negative log likelihood of log probabilities, classes on axis 1."""

    _function = staticmethod(losses.nll)

    def __init__(
        self, weight: np.ndarray | None = None, reduction: str = "mean", ignore_index: int | None = None
    ) -> None:
        self._options = {"weight": weight, "reduction": _reduction(reduction), "ignore_index": ignore_index}


class CTCLoss(Block):
    """Connectionist temporal classification of log probabilities [time, batch, classes]."""

    def __init__(self, blank: int = 0, reduction: str = "mean", zero_infinity: bool = False) -> None:
        self._options = {
            "blank": blank,
            "reduction": _reduction(reduction),
            "zero_infinity": zero_infinity,
        }

    def build(
        self,
        log_probs_name: str,
        targets_name: str = "targets",
        input_lengths_name: str = "input_lengths",
        target_lengths_name: str = "target_lengths",
    ) -> str:
        """The loss; targets [batch, longest] and both lengths [batch] become int64 inputs where missing."""
        dims = _dims(find_type(log_probs_name))
        batch = dims[1] if len(dims) > 1 else None
        wanted = {targets_name: [batch, f"{targets_name}_longest"], input_lengths_name: [batch]}
        wanted[target_lengths_name] = [batch]
        for name, shape in wanted.items():
            if not has_name(name):
                add_input(name, onnx.TensorProto.INT64, shape)
        return emit(
            [log_probs_name, *wanted],
            lambda op, *values: losses.ctc(op, *values, **self._options),
            scope="loss",
        )[0]


class CosineEmbeddingLoss(Block):
    """Pulls pairs labelled 1 together and pushes pairs labelled −1 apart."""

    def __init__(self, margin: float = 0.0, reduction: str = "mean") -> None:
        self._options = {"margin": margin, "reduction": _reduction(reduction)}

    def build(self, first: str, second: str, labels_name: str = "labels") -> str:
        if not has_name(labels_name):
            add_input(labels_name, onnx.TensorProto.INT64, _dims(find_type(first))[:-1])
        return emit(
            [first, second, labels_name],
            lambda op, x, y, t: losses.cosine_embedding(op, x, y, t, **self._options),
            scope="loss",
        )[0]


class TripletMarginLoss(Block):
    """An anchor nearer to its positive than to its negative, by a margin."""

    def __init__(
        self, margin: float = 1.0, p: float = 2.0, swap: bool = False, reduction: str = "mean"
    ) -> None:
        self._options = {"margin": margin, "p": p, "swap": swap, "reduction": _reduction(reduction)}

    def build(self, anchor: str, positive: str, negative: str) -> str:
        return emit(
            [anchor, positive, negative],
            lambda op, a, b, c: losses.triplet_margin(op, a, b, c, **self._options),
            scope="loss",
        )[0]


class MultipleNegativesRankingLoss(Block):
    """Pairs of embeddings, each pair's negatives being the rest of the batch."""

    def __init__(self, scale: float = 20.0, reduction: str = "mean") -> None:
        self._options = {"scale": scale, "reduction": _reduction(reduction)}

    def build(self, anchors: str, positives: str) -> str:
        return emit(
            [anchors, positives],
            lambda op, a, b: losses.multiple_negatives(op, a, b, **self._options),
            scope="loss",
        )[0]


def _reduction(reduction: str) -> str:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"Reduction {reduction} not supported: choose mean, sum or none.")
    return reduction


def _dims(kind: onnx.TypeProto) -> list[int | str | None]:
    shape = ir.serde.deserialize_type_proto_for_shape(kind)
    if shape is None:
        return []
    return [dim if isinstance(dim, int) else dim.value for dim in shape]
