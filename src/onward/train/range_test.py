"""Learning-rate range test: a short run on a copy of the model, with a rate that grows at every step.

The loss falls while the rate is useful and rises when it is too high. The rate suggested is a tenth of the one at
which the loss was lowest, where training is still fast and safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.errors import NonFiniteError

if TYPE_CHECKING:
    from onward.train.batches import Batch, Batches

__all__ = ["range_test"]

_LOW, _HIGH, _STEPS = 1e-6, 1.0, 100


def range_test(
    learn: Callable[[Batch, float], float], batches: Batches, *, steps: int = _STEPS
) -> tuple[float | None, list[dict[str, Any]]]:
    """The rate found (None where the loss never fell) and the curve; `learn` updates by a batch at a rate."""
    rows: list[dict[str, Any]] = []
    mean, best = 0.0, math.inf
    for step, batch in enumerate(_endless(batches, steps)):
        rate = _LOW * (_HIGH / _LOW) ** (step / (steps - 1))
        try:
            loss = learn(batch, rate)
        except NonFiniteError:
            break
        mean = 0.9 * mean + 0.1 * loss
        smooth = mean / (1 - 0.9 ** (step + 1))
        rows.append({"step": step + 1, "learning_rate": rate, "loss": smooth})
        best = min(best, smooth)
        if not math.isfinite(loss) or smooth > best + 3 * abs(best) + 1e-6:
            break
    if len(rows) < 5:
        return None, rows
    lowest = int(np.argmin([row["loss"] for row in rows]))
    fell = rows[0]["loss"] - rows[lowest]["loss"]
    if lowest < 3 or fell <= 1e-3 * abs(rows[0]["loss"]):
        return None, rows
    rate = rows[lowest]["learning_rate"] / 10
    return float(f"{rate:.1e}"), rows


def _endless(batches: Batches, count: int) -> Iterator[Batch]:
    epoch = given = 0
    while given < count:
        before = given
        for batch in batches.epoch(epoch):
            yield batch
            given += 1
            if given == count:
                return
        epoch += 1
        if given == before or batches.once:
            return
