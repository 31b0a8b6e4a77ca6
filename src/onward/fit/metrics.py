"""Metrics over a whole evaluation, computed batch by batch.

A metric is a name ("accuracy", "f1", "mse", "mae", "perplexity") or a function of the outputs and inputs of all
batches: `metric(outputs: dict[str, array], inputs: dict[str, array]) -> float`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

__all__ = ["METRICS", "Metric", "find_metrics"]

Arrays = Mapping[str, np.ndarray]
Metric = Callable[[Arrays, Arrays], float]


def find_metrics(wanted: Sequence[str | Metric] | Mapping[str, str | Metric]) -> dict[str, Metric]:
    """Metrics by the name under which they are reported."""
    if isinstance(wanted, str):
        wanted = [wanted]
    pairs = wanted.items() if isinstance(wanted, Mapping) else [(_name(item), item) for item in wanted]
    return {name: METRICS[_known(item)] if isinstance(item, str) else item for name, item in pairs}


def accuracy(outputs: Arrays, inputs: Arrays) -> float:
    """The share of labels that have the highest score (classes on axis 1), or the right sign for one score."""
    predicted, labels = _classes(outputs, inputs)
    return float(np.mean(predicted == labels)) if labels.size else math.nan


def f1(outputs: Arrays, inputs: Arrays) -> float:
    """The mean over classes of 2·precision·recall/(precision + recall)."""
    predicted, labels = _classes(outputs, inputs)
    scores = []
    for label in np.unique(np.concatenate([predicted.ravel(), labels.ravel()])):
        hit = np.sum((predicted == label) & (labels == label))
        wrong = np.sum((predicted == label) ^ (labels == label))
        scores.append(2 * hit / (2 * hit + wrong) if hit or wrong else 0.0)
    return float(np.mean(scores)) if scores else math.nan


def mse(outputs: Arrays, inputs: Arrays) -> float:
    """The mean squared difference of the first output and the target."""
    return float(np.mean(np.square(_first(outputs).astype(np.float64) - _target(inputs))))


def mae(outputs: Arrays, inputs: Arrays) -> float:
    """The mean absolute difference of the first output and the target."""
    return float(np.mean(np.abs(_first(outputs).astype(np.float64) - _target(inputs))))


def perplexity(outputs: Arrays, inputs: Arrays) -> float:
    """e to the loss."""
    return math.exp(min(float(outputs["loss"]), 700.0))


METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "f1": f1,
    "mse": mse,
    "mae": mae,
    "perplexity": perplexity,
}


def _classes(outputs: Arrays, inputs: Arrays) -> tuple[np.ndarray, np.ndarray]:
    scores, labels = _first(outputs), _target(inputs)
    if scores.ndim == labels.ndim:  # one score for each label
        predicted = (scores > 0).astype(labels.dtype)
    else:
        predicted = np.argmax(scores, axis=1)
    counted = labels >= 0  # negative labels are those that the loss ignores
    return predicted[counted], labels[counted]


def _first(outputs: Arrays) -> np.ndarray:
    return next(array for name, array in outputs.items() if name != "loss")


def _target(inputs: Arrays) -> np.ndarray:
    return list(inputs.values())[-1]


def _name(item: str | Metric) -> str:
    return item if isinstance(item, str) else getattr(item, "__name__", "metric")


def _known(name: str) -> str:
    if name not in METRICS:
        near = difflib.get_close_matches(name, METRICS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"no metric '{name}': there are {', '.join(METRICS)}{hint}")
    return name
