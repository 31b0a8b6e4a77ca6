"""Learning-rate range test: a short run on a copy of the model, with a rate that grows at every step.

The loss falls while the rate is useful and rises when it is too high. The rate suggested is a tenth of the one at
which the loss was lowest, where training is still fast and safe.
"""

from __future__ import annotations

import itertools
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
        # single batches are noisy; the division makes up for a mean that begins at zero, as in Adam
        mean = 0.9 * mean + 0.1 * loss
        smooth = mean / (1 - 0.9 ** (step + 1))
        rows.append({"step": step + 1, "learning_rate": rate, "loss": smooth})
        best = min(best, smooth)
        # it has diverged: at higher rates nothing can be learned
        if not math.isfinite(loss) or smooth > best + 3 * abs(best) + 1e-6:
            break
    # too few to tell a fall from noise
    if len(rows) < 5:
        return None, rows
    lowest = int(np.argmin([row["loss"] for row in rows]))
    fell = rows[0]["loss"] - rows[lowest]["loss"]
    if lowest < 3 or fell <= 1e-3 * abs(rows[0]["loss"]):
        return None, rows
    rate = rows[lowest]["learning_rate"] / 10
    return float(f"{rate:.1e}"), rows


def _endless(batches: Batches, count: int) -> Iterator[Batch]:
    """So many batches, of as many epochs as that takes; fewer where an epoch has none, or there is only one."""
    epoch = taken = 0
    while taken < count:
        before = taken
        for batch in itertools.islice(batches.epoch(epoch), count - taken):
            yield batch
            taken += 1
        epoch += 1
        if taken == before or batches.once:
            return
