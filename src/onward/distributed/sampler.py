"""Distributed sampler: disjoint samples per rank, a new order in every epoch, the same for any number of ranks.

The order of an epoch is split into global batches and each of those into one shard per rank. So 1, 2 and 4
ranks train on the same global batches, and a run may be resumed on another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from onward.train.batches import ArrayBatches

__all__ = ["ShardedArrays", "ShardedSampler"]


class ShardedSampler:
    """Indices of samples by epoch, global batch and rank.

    >>> sampler = ShardedSampler(5, batch_size=4, shuffle=False)
    >>> [indices.tolist() for indices in sampler.epoch(0, rank=1, world=2)]
    [[2, 3], [4]]
    """

    def __init__(
        self, samples: int, *, batch_size: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        if batch_size <= 0:
            raise ValueError(
                f"batch_size is {batch_size}: it must be positive (it is that of all ranks together)"
            )
        if samples <= 0:
            raise ValueError("there are no samples to train on")
        if drop_last and samples < batch_size:
            raise ValueError(f"{samples} samples make no batch of {batch_size}: do not drop the last batch")
        self.samples, self.batch_size = samples, batch_size
        # batches of the row numbers themselves: shuffled and shared as `ArrayBatches` does it
        self._rows = ArrayBatches(
            [np.arange(samples)], batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        self.batches = self._rows.count or 0

    def __len__(self) -> int:
        return self.batches

    def description(self) -> dict[str, Any]:
        """What must be the same on all ranks, by name."""
        return self._rows.description() | {"batch size": self.batch_size}

    def epoch(self, number: int, *, rank: int, world: int, skip: int = 0) -> Iterator[np.ndarray]:
        """This rank's indices of each global batch, from batch `skip` on; a share may be empty."""
        return (rows for (rows,) in self._rows.epoch(number, skip=skip, rank=rank, world=world))


class ShardedArrays(ArrayBatches):
    """Batches of arrays that have one row for each sample, shared among the ranks.

    `batch_size` is that of all ranks together.

    >>> loader = ShardedArrays(np.arange(6).reshape(6, 1), batch_size=4, shuffle=False)
    >>> [batch[0].ravel().tolist() for batch in loader.epoch(0, rank=0, world=2)]
    [[0, 1], [4]]
    """

    def __init__(
        self,
        *arrays: np.ndarray,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not arrays or any(isinstance(array, list | tuple | dict) for array in arrays):
            raise TypeError(
                "ShardedArrays takes the arrays themselves: ShardedArrays(x, labels, batch_size=…)"
            )
        super().__init__(arrays, batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def __len__(self) -> int:
        return self.count or 0
