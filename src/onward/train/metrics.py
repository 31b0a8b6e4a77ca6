"""Metrics over a whole evaluation.

A metric is a name (those of `METRICS`) or a function of the outputs and inputs of all batches:
`metric(outputs: dict[str, array], inputs: dict[str, array]) -> float`. The forward model's outputs come first, the
labels last. Batches of different lengths are padded: integers with −1, other numbers with NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from onward.errors import did_you_mean

__all__ = ["METRICS", "Metric", "compute", "confusion", "find_metrics"]

Arrays = Mapping[str, np.ndarray]
Metric = Callable[[Arrays, Arrays], float]
# columns of the history that are not metrics
_TAKEN = frozenset(
    {"epoch", "step", "loss", "eval_loss", "learning_rate", "seconds", "samples_per_second", "gradient_norm"}
)


def find_metrics(metrics: Sequence[str | Metric] | Mapping[str, str | Metric]) -> dict[str, Metric]:
    """Metrics by the name under which they are reported."""
    if isinstance(metrics, str) or callable(metrics):
        metrics = [metrics]
    pairs = metrics.items() if isinstance(metrics, Mapping) else [(_name(item), item) for item in metrics]
    by_name: dict[str, Metric] = {}
    for name, item in pairs:
        if name in _TAKEN:
            raise ValueError(f"a metric cannot be called '{name}': the history has such a column already")
        if name in by_name:
            raise ValueError(f"two metrics are called '{name}': pass a dict with a name for each")
        if isinstance(item, str):
            item = _built_in(item)
        elif not callable(item):
            raise TypeError(f"a metric is a name or a function, got {type(item).__name__}")
        by_name[name] = item
    return by_name


def compute(
    metrics: Mapping[str, Metric], outputs: Arrays, inputs: Arrays, *, ignored: Mapping[str, int]
) -> dict[str, float]:
    """Every metric's value; those that are built in do not see labels that the loss ignores."""
    seen = {
        # not -1: numpy 2.5 refuses it beside bytes
        name: np.where(array == ignored[name], np.int64(-1), array) if name in ignored else array
        for name, array in inputs.items()
    }
    own = set(METRICS.values())
    return {
        name: float(metric(outputs, seen if metric in own else inputs)) for name, metric in metrics.items()
    }


def accuracy(outputs: Arrays, inputs: Arrays) -> float:
    """The share of labels that have the highest score, or the right sign for one score."""
    predicted, labels = _classes(outputs, inputs)
    return float(np.mean(predicted == labels)) if labels.size else math.nan


def f1(outputs: Arrays, inputs: Arrays) -> float:
    """The mean over classes of 2·precision·recall/(precision + recall)."""
    predicted, labels = _classes(outputs, inputs)
    scores = []
    for label in np.unique(np.concatenate([predicted.ravel(), labels.ravel()])):
        hit = np.sum((predicted == label) & (labels == label))
        wrong = np.sum((predicted == label) ^ (labels == label))
        scores.append(2 * hit / (2 * hit + wrong))
    return float(np.mean(scores)) if scores else math.nan


def top3(outputs: Arrays, inputs: Arrays) -> float:
    """The share of labels that are among the three highest scores."""
    return _top(outputs, inputs, 3)


def top5(outputs: Arrays, inputs: Arrays) -> float:
    """The share of labels that are among the five highest scores."""
    return _top(outputs, inputs, 5)


def _top(outputs: Arrays, inputs: Arrays, count: int) -> float:
    scores, labels = _scores(outputs, inputs)
    if not labels.size:
        return math.nan
    # counted, not sorted: how many scores are above the label's own
    own = np.take_along_axis(scores, labels[:, None], axis=1)
    return float(np.mean(np.count_nonzero(scores > own, axis=1) < count))


def auc(outputs: Arrays, inputs: Arrays) -> float:
    """The area under the ROC curve: the mean over classes, each against the rest, that have samples on both sides."""
    first, target = _first(outputs), _target(inputs)
    if first.shape == target.shape or first.ndim == 1 or first.shape[1] == 1:
        pairs = [(first.reshape(-1), target.reshape(-1) > 0.5)]
    else:
        scores, labels = _scores(outputs, inputs)
        # one class's score says nothing by itself: what counts is how far it is above the others
        shifted = scores - scores.max(axis=1, keepdims=True)
        probabilities = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
        classes = range(1, 2) if scores.shape[1] == 2 else range(scores.shape[1])
        pairs = [(probabilities[:, index], labels == index) for index in classes]
    areas = [_area(scores, positive) for scores, positive in pairs if 0 < positive.sum() < len(positive)]
    return float(np.mean(areas)) if areas else math.nan


def _area(scores: np.ndarray, positive: np.ndarray) -> float:
    """How often a positive sample is above a negative one; equal scores count half."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    ones = int(positive.sum())
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * (len(positive) - ones)))


def confusion(outputs: Arrays, inputs: Arrays, *, most: int = 100) -> np.ndarray | None:
    """How many samples of each class (row) were taken for which (column); None without classes, or with too many."""
    scores = _first(outputs)
    predicted, labels = _classes(outputs, inputs)
    count = 2 if scores.shape == _target(inputs).shape else scores.shape[1]
    if labels.dtype.kind not in "iu" or not 1 < count <= most or not labels.size or labels.max() >= count:
        return None
    return np.bincount(labels.astype(np.int64) * count + predicted, minlength=count * count).reshape(
        count, count
    )


def r2(outputs: Arrays, inputs: Arrays) -> float:
    """The share of the target's variance that the first output explains: 1 is all, 0 no better than the mean."""
    differences = _differences(outputs, inputs)
    target = _target(inputs).astype(np.float64).reshape(-1)
    target = target[~np.isnan(target)]
    # of a constant target there is no variance to explain
    total = float(np.sum(np.square(target - target.mean()))) if target.size else 0.0
    return math.nan if total == 0 else 1.0 - float(np.sum(np.square(differences))) / total


def mse(outputs: Arrays, inputs: Arrays) -> float:
    """The mean squared difference of the first output and the target."""
    return float(np.mean(np.square(_differences(outputs, inputs))))


def mae(outputs: Arrays, inputs: Arrays) -> float:
    """The mean absolute difference of the first output and the target."""
    return float(np.mean(np.abs(_differences(outputs, inputs))))


def perplexity(outputs: Arrays, inputs: Arrays) -> float:
    """e to the loss."""
    # e to more is beyond float64
    return math.exp(min(float(outputs["loss"]), 700.0))


METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "top3": top3,
    "top5": top5,
    "f1": f1,
    "auc": auc,
    "mse": mse,
    "mae": mae,
    "r2": r2,
    "perplexity": perplexity,
}


def _classes(outputs: Arrays, inputs: Arrays) -> tuple[np.ndarray, np.ndarray]:
    scores, labels = _first(outputs), _target(inputs)
    if scores.shape == labels.shape:  # one score for each label
        predicted = (scores > 0).astype(labels.dtype)
    else:
        predicted = np.argmax(scores, axis=_class_axis(scores, labels))
    counted = labels >= 0  # negative labels are those that the loss ignores
    return predicted[counted], labels[counted]


def _scores(outputs: Arrays, inputs: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Scores as [labels, classes] and the labels that count."""
    scores, labels = _first(outputs), _target(inputs)
    axis = _class_axis(scores, labels)
    if labels.dtype.kind not in "iu":
        raise ValueError(f"labels are class numbers, and '{list(inputs)[-1]}' is {labels.dtype}")
    flat = np.moveaxis(scores, axis, -1).reshape(-1, scores.shape[axis]).astype(np.float64)
    counted = labels.reshape(-1) >= 0
    return flat[counted], labels.reshape(-1)[counted]


def _class_axis(scores: np.ndarray, labels: np.ndarray) -> int:
    """The axis of the classes: 1, as in losses, or the last, as in the outputs of many language models."""
    for axis in (1, scores.ndim - 1):
        if scores.shape[:axis] + scores.shape[axis + 1 :] == labels.shape:
            return axis
    raise ValueError(f"scores of shape {scores.shape} and labels of shape {labels.shape} do not fit")


def _differences(outputs: Arrays, inputs: Arrays) -> np.ndarray:
    output, target = _first(outputs), _target(inputs)
    if output.shape != target.shape:
        if output.size != target.size:
            raise ValueError(
                f"an output of shape {output.shape} and a target of shape {target.shape} do not fit"
            )
        target = target.reshape(output.shape)  # (n, 1) and (n,): broadcasting would compare all with all
    counted = ~np.isnan(target) if target.dtype.kind == "f" else np.ones(target.shape, bool)
    return output[counted].astype(np.float64) - target[counted]


def _first(outputs: Arrays) -> np.ndarray:
    for name, array in outputs.items():
        if name != "loss":
            return array
    raise ValueError("the model has no output but the loss, so there is nothing that this metric could judge")


def _target(inputs: Arrays) -> np.ndarray:
    return list(inputs.values())[-1]


def _name(item: str | Metric) -> str:
    return item if isinstance(item, str) else getattr(item, "__name__", "metric")


def _built_in(name: str) -> Metric:
    if name not in METRICS:
        hint = did_you_mean(name, METRICS)
        raise ValueError(f"no metric '{name}': there are {', '.join(METRICS)}{hint}")
    return METRICS[name]
