"""Distributed sampler: disjoint samples per rank, a new order in every epoch, the same for any number of ranks.

The order of an epoch is split into global batches and each of those into one shard per rank. So 1, 2 and 4
ranks train on the same global batches, and a run may be resumed on another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

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
        self.samples, self.batch_size = samples, batch_size
        self._shuffle, self._seed = shuffle, seed
        whole, rest = divmod(samples, batch_size)
        self.batches = whole + (1 if rest and not drop_last else 0)
        if self.batches == 0:
            raise ValueError(f"{samples} samples make no batch of {batch_size}: do not drop the last batch")

    def __len__(self) -> int:
        return self.batches

    def description(self) -> dict[str, Any]:
        """What must be the same on all ranks, by name."""
        return {
            "samples": self.samples,
            "batch size": self.batch_size,
            "batches": self.batches,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def epoch(self, number: int, *, rank: int, world: int, skip: int = 0) -> Iterator[np.ndarray]:
        """This rank's indices of each global batch, from batch `skip` on; a share may be empty."""
        order = np.arange(self.samples)
        if self._shuffle:
            np.random.default_rng([self._seed, number]).shuffle(order)
        for start in range(skip * self.batch_size, self.batches * self.batch_size, self.batch_size):
            batch = order[start : start + self.batch_size]
            yield batch[len(batch) * rank // world : len(batch) * (rank + 1) // world]


class ShardedArrays:
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
        if any(isinstance(array, list | tuple | dict) for array in arrays):
            raise TypeError(
                "ShardedArrays takes the arrays themselves: ShardedArrays(x, labels, batch_size=…)"
            )
        lengths = [len(array) for array in arrays]
        if not lengths or len(set(lengths)) != 1:
            raise ValueError(f"the arrays must have the same number of samples, not {lengths}")
        self._arrays: Sequence[Any] = arrays
        self.sampler = ShardedSampler(
            lengths[0], batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def description(self) -> dict[str, Any]:
        """What must be the same on all ranks, by name."""
        shapes = [f"{array.dtype}{list(array.shape[1:])}" for array in self._arrays]
        return {**self.sampler.description(), "arrays": shapes}

    def epoch(self, number: int, *, rank: int, world: int, skip: int = 0) -> Iterator[list[np.ndarray]]:
        """This rank's share of each global batch of an epoch, from batch `skip` on."""
        for indices in self.sampler.epoch(number, rank=rank, world=world, skip=skip):
            yield [np.ascontiguousarray(array[indices]) for array in self._arrays]
