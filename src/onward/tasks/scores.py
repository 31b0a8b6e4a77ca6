"""Outputs of a model as scores: probabilities, labels with probabilities."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from onward.tasks.protocol import Arrays


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities over the last axis, in float64.

    >>> softmax(np.zeros(2)).tolist()
    [0.5, 0.5]
    """
    shifted = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + e^−x), in float64."""
    return 1.0 / (1.0 + np.exp(-np.asarray(logits, np.float64)))


FUNCTIONS = {"softmax": softmax, "sigmoid": sigmoid, "none": lambda logits: np.asarray(logits, np.float64)}
"""What turns outputs into scores, under the names of `function_to_apply` in transformers."""


def joint_metrics(
    names: Sequence[str], judge: Callable[[Arrays, Arrays], Mapping[str, float]]
) -> dict[str, Callable[[Arrays, Arrays], float]]:
    """Metrics of these names that `judge` computes together: once for the outputs of an evaluation."""
    last: list[Any] = [None, {}]

    def figure(name: str, outputs: Arrays, inputs: Arrays) -> float:
        if last[0] is not outputs or name not in last[1]:
            figures = judge(outputs, inputs)
            last[:] = outputs, {one: figures[one] for one in names}
        value = float(last[1].pop(name))
        if not last[1]:
            last[0] = None  # outputs may be large, and those of the next evaluation come while these are held
        return value

    return {name: functools.partial(figure, name) for name in names}


def label_scores(
    logits: np.ndarray, labels: Sequence[str], function: str, *, top_k: int | None
) -> list[dict[str, Any]]:
    """The `top_k` likeliest labels with their scores (all for None), best first; `function` is one of `FUNCTIONS`."""
    scores = FUNCTIONS[function](logits)
    order = np.argsort(-scores, kind="stable")
    return [{"label": labels[index], "score": float(scores[index])} for index in order][:top_k]


def resized(planes: np.ndarray, size: tuple[int, int], *, cubic: bool = False) -> np.ndarray:
    """[…, height, width] at another size, between the centres of pixels, the edges repeated."""
    for axis, new in zip((-2, -1), size):
        old = planes.shape[axis]
        positions = (np.arange(new) + 0.5) * old / new - 0.5
        positions = positions if cubic else np.clip(positions, 0, old - 1)
        low = np.floor(positions).astype(int)
        share = positions - low
        total = np.zeros(())
        for offset, weight in _cubic(share) if cubic else ((0, 1 - share), (1, share)):
            weight = weight.astype(planes.dtype)
            part = np.take(planes, np.clip(low + offset, 0, old - 1), axis)
            total = total + part * (weight[:, None] if axis == -2 else weight)
        planes = total
    return planes


def _cubic(share: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """The weights of the four neighbours, as torch's interpolation has them."""
    a = -0.75

    def near(x: np.ndarray) -> np.ndarray:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: np.ndarray) -> np.ndarray:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [(-1, far(share + 1)), (0, near(share)), (1, near(1 - share)), (2, far(2 - share))]
