"""All-reduce in two levels, for many ranks: within a group, across the groups, within the group again.

gloo reduces in a ring, whose 2(N−1) messages in a row are what counts among hundreds of ranks. Rings of G
and of N/G ranks need 2(G−1) + 2(N/G−1), and move as many bytes as one ring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import numpy as np

from onward.distributed.comm import Buffer, Communicator, TorchCommunicator
from onward.runtime.memory import HostTensor, Tensor

__all__ = ["TwoLevelCommunicator", "two_level"]

# Below this size only latency counts, and two plain reductions have less of it than three steps.
_SMALL = 1 << 14


class TwoLevelCommunicator:
    """A world whose all-reduce goes through groups; all else is the world's own."""

    def __init__(self, world: Communicator, inner: TorchCommunicator, outer: TorchCommunicator) -> None:
        self._world, self._inner, self._outer = world, inner, outer
        self.rank, self.world = world.rank, world.world

    def all_reduce(self, array: Buffer, *, compress: bool = False) -> None:
        """Reduce a part of the array on each rank of a group, across groups, and gather the parts."""
        vector: Tensor = HostTensor(array.reshape(-1)) if isinstance(array, np.ndarray) else array
        size = math.prod(vector.shape)
        share = size // self._inner.world if size * vector.dtype.itemsize >= _SMALL else 0
        whole = share * self._inner.world
        if share:
            bounds = [share * rank for rank in range(self._inner.world + 1)]
            large = vector.view(0, [whole])
            self._inner.reduce_scatter(large, bounds, compress=compress)
            own = bounds[self._inner.rank]
            self._outer.all_reduce(vector.view(own, [share]), compress=compress)
            self._inner.all_gather(large, bounds)
        if whole < size:
            rest = vector.view(whole, [size - whole])
            self._inner.all_reduce(rest)
            self._outer.all_reduce(rest)

    def reduce_scatter(self, array: Buffer, bounds: Sequence[int], *, compress: bool = False) -> None:
        """As the world does it."""
        self._world.reduce_scatter(array, bounds, compress=compress)

    def all_gather(self, array: Buffer, bounds: Sequence[int]) -> None:
        """As the world does it."""
        self._world.all_gather(array, bounds)

    def broadcast(self, array: Buffer, *, root: int = 0) -> None:
        """As the world does it."""
        self._world.broadcast(array, root=root)

    def send(self, array: Buffer, *, to: int) -> None:
        """As the world does it."""
        self._world.send(array, to=to)

    def receive(self, array: Buffer, *, source: int) -> None:
        """As the world does it."""
        self._world.receive(array, source=source)

    def close(self) -> None:
        """Leave the world."""
        self._world.close()


def two_level(world: Communicator, size: int, *, timeout: float) -> Communicator:
    """Groups of `size` neighbouring ranks; collective."""
    if world.world % size:
        raise ValueError(f"world_size({world.world}) is not divisible by reduce_group_size({size})")
    if size in (1, world.world) or not isinstance(world, TorchCommunicator):
        return world
    import torch.distributed as dist

    ranks = np.arange(world.world).reshape(-1, size)
    span = timedelta(seconds=timeout)
    inner, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=span)
    outer, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=span)
    inside, across = (TorchCommunicator(group, nccl=world.nccl, timeout=timeout) for group in (inner, outer))
    return TwoLevelCommunicator(world, inside, across)
