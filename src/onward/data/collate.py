"""Batches that a function makes of some samples: texts padded to the longest, pictures of like width together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from onward.train.batches import ArrayBatches, Batch

# so many batches are sorted by length at a time: enough for little padding, and the order stays random
_WINDOW = 32


class CollatedBatches(ArrayBatches):
    """Batches of samples that `collate` makes into the model's inputs, from the samples' numbers.

    With `lengths`, samples of like length come together.
    """

    def __init__(
        self,
        samples: int,
        collate: Callable[[np.ndarray], Batch],
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        lengths: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        super().__init__([np.arange(samples)], batch_size=batch_size, shuffle=shuffle, seed=seed)
        self._collate = collate
        self._lengths = None if lengths is None else np.asarray(lengths)

    def epoch(self, number: int, *, skip: int = 0, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        for (rows,) in super().epoch(number, skip=skip, rank=rank, world=world):
            yield self._collate(rows)

    def description(self) -> dict[str, Any]:
        return {**super().description(), "by length": self._lengths is not None}

    def _order(self, number: int) -> np.ndarray:
        rng = np.random.default_rng([self._seed, number])
        order = np.arange(self.samples)
        if self._shuffle:
            rng.shuffle(order)
        if self._lengths is None or not self._shuffle:
            return order
        window = _WINDOW * self._size
        parts = [order[start : start + window] for start in range(0, self.samples, window)]
        order = np.concatenate([part[np.argsort(self._lengths[part], kind="stable")] for part in parts])
        return shuffle_batches(order, self._size, rng)


def shuffle_batches(order: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Batches in another order; the last, which may be smaller, stays last: a batch is a slice of the order."""
    count = len(order) // size * size
    batches = order[:count].reshape(-1, size)
    rng.shuffle(batches)
    return np.concatenate([batches.reshape(-1), order[count:]])
