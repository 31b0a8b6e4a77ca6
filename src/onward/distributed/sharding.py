"""Sharded optimizer state (ZeRO stage 1): each rank stores and updates one shard of the flat buffers.

Gradients are reduced to the rank that needs them, parameters gathered after the update: the same volume as
one all-reduce, and 1/N of the optimizer's memory. The result equals the unsharded one, bit-exactly where the
reduction adds in the same order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from onward.api.optimizer import Optimizer
from onward.checkpoint.content import CheckpointData, OptimizerGroup
from onward.distributed.errors import DistributedError
from onward.runtime.memory import FlatBuffer
from onward.runtime.optimizers import make_updater
from onward.runtime.optimizers.updater import ElementwiseUpdater

if TYPE_CHECKING:
    from onward.api.module import Module
    from onward.distributed.comm import Communicator
    from onward.runtime.optimizers.updater import Slots, Updater
    from onward.runtime.sessions import ModelFile

__all__ = ["ShardedOptimizer", "bounds_of"]


def bounds_of(size: int, world: int) -> list[int]:
    """Where each rank's equal part of a flat buffer begins, and the end."""
    share, rest = divmod(size, world)
    if rest:
        raise AssertionError(f"{size} does not divide into {world} equal parts")
    return [rank * share for rank in range(world + 1)]


class ShardedOptimizer(Optimizer):
    """An optimizer that holds this rank's share of the state; `step` is collective."""

    def __init__(self, optimizer_uri: ModelFile, module: Module, comm: Communicator) -> None:
        self._comm = comm
        self._bounds = bounds_of(math.prod(module.memory.parameters.whole.shape), comm.world)
        super().__init__(optimizer_uri, module)

    def step(self) -> bool:
        """Update this rank's share, then exchange the parameters."""
        done = super().step()
        if done:
            self._comm.all_gather(self._module.memory.parameters.whole, self._bounds)
        return done

    def gather_slots(self) -> Slots | None:
        """The whole state, on rank 0 (None elsewhere); collective."""
        updater = self._updater
        assert isinstance(updater, ElementwiseUpdater)
        shapes = self._module.memory.parameters.shapes
        whole = {slot: FlatBuffer(shapes, parts=self._comm.world) for slot in updater.slot_vectors()}
        for slot, own in updater.slot_vectors().items():
            for source in range(self._comm.world):
                target = whole[slot].vector[self._bounds[source] : self._bounds[source + 1]]
                if source == self._comm.rank:
                    target[: own.size] = own
                if source != 0 and self._comm.rank == source:
                    self._comm.send(target, to=0)
                elif source != 0 and self._comm.rank == 0:
                    self._comm.receive(target, source=source)
        if self._comm.rank != 0:
            return None
        return {name: {slot: flat.views[name] for slot, flat in whole.items()} for name in shapes}

    def _make_updater(self, uri: ModelFile) -> Updater:
        start, stop = self._bounds[self._comm.rank : self._comm.rank + 2]
        memory = self._module.memory
        parameters, gradients = (flat.part(start, stop) for flat in (memory.parameters, memory.gradients))
        updater = make_updater(uri, parameters, gradients, threads=self._module.threads)
        if not isinstance(updater, ElementwiseUpdater):
            raise DistributedError(
                "shard_optimizer needs an optimizer that treats each number alone (AdamW, SGD, …); this one looks "
                "at whole parameters: use shard_optimizer=False"
            )
        return updater

    def _norm(self) -> float:
        start, stop = self._bounds[self._comm.rank : self._comm.rank + 2]
        own = self._module.memory.gradients.whole.view(start, [stop - start])
        square = np.array([own.squared_norm()], np.float64)
        self._comm.all_reduce(square)
        return float(np.sqrt(square[0]))

    def _restore(self, data: CheckpointData) -> None:
        groups = []
        for group in data.optimizer:
            slots = {
                name: {slot: self._share(name, array) for slot, array in state.items()}
                for name, state in group.slots.items()
            }
            groups.append(OptimizerGroup(group.name, group.step, group.initial_learning_rate, slots))
        super()._restore(CheckpointData(optimizer=groups, extras=data.extras))

    def _share(self, name: str, array: np.ndarray) -> np.ndarray:
        """What this rank keeps of a parameter's state."""
        start, stop = self._bounds[self._comm.rank : self._comm.rank + 2]
        first, last = self._module.memory.parameters.spans.get(name, (0, 0))
        return np.ravel(array)[max(first, start) - first : max(min(last, stop) - first, 0)]
