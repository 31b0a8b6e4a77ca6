"""Data parallel training: every rank has the whole model and a shard of each batch.

One flat vector of gradients is summed over the ranks and divided by the number of samples of all, so that
shards of different sizes are weighted correctly. Gradients are accumulated locally and reduced once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from onward.api.optimizer import Optimizer
from onward.checkpoint.content import CheckpointData, OptimizerGroup
from onward.distributed.errors import DistributedError
from onward.distributed.rank_engine import RankEngine, reconcile, weight_of
from onward.runtime.memory import FlatBuffer
from onward.runtime.optimizers.updater import ElementwiseUpdater
from onward.runtime.optimizers.vector import make_updater
from onward.train.batches import ArrayBatches
from onward.train.engines import LocalEngine

if TYPE_CHECKING:
    from onward.api.module import Module
    from onward.distributed.comm import Communicator
    from onward.distributed.settings import RunnerSettings
    from onward.runtime.optimizers.updater import Slots, Updater
    from onward.runtime.sessions import ModelFile
    from onward.runtime.signature import Signature
    from onward.train.artifact_set import ArtifactFiles
    from onward.train.engines import EngineSettings

# Seeds of neighbouring ranks must not meet those of neighbouring steps.
_RANK_STRIDE = 0x5851F42D4C957F2D


class DataParallel(RankEngine, LocalEngine):
    """The engine of data-parallel training on one rank; `backward` and `evaluate` do not communicate."""

    def __init__(
        self,
        files: ArtifactFiles,
        data: CheckpointData,
        settings: EngineSettings,
        parameters: RunnerSettings,
        comm: Communicator,
    ) -> None:
        self._parameters, self._comm = parameters, comm
        self.rank = self.replica = comm.rank
        self.world = self.replicas = comm.world
        self.sums_loss = parameters.loss_reduction == "sum"
        self._sharded = parameters.shard_optimizer and comm.world > 1
        # buffers that divide into equal shares, one for each rank
        super().__init__(files, data, settings, parts=comm.world if self._sharded else 1)
        self._base_seed = self.module.run_state.seed
        # each rank has other samples, and needs other dropout
        self.module.run_state.seed = (self._base_seed + comm.rank * _RANK_STRIDE) % (1 << 63)

    def _make_optimizer(self, model: ModelFile) -> Optimizer:
        if self._sharded:
            return ShardedOptimizer(model, self.module, self._comm)
        return super()._make_optimizer(model)

    def weigh(self, signature: Signature, batch: Sequence[Any]) -> float:
        """What a mean over a batch counts; a sum counts once where it has samples."""
        if self.sums_loss:
            return 1.0 if len(np.atleast_1d(np.asarray(batch[0]))) else 0.0
        return weight_of(signature, batch, self._parameters)

    def reduce_gradients(self, unit: float) -> float:
        """Sum the gradients of all ranks."""
        module, comm = self.module, self._comm
        if comm.world == 1:
            return unit
        vector = module.memory.gradients.whole
        # Ranks have seen different numbers of samples: sums are what adds up, not means. A rank without any has
        # the gradients of an earlier update in its buffer.
        if not unit:
            vector.clear()
        elif unit != 1:
            vector.scale(unit)
        if self._sharded:
            bounds = bounds_of(vector.shape[0], comm.world)
            comm.reduce_scatter(vector, bounds, compress=self._parameters.compress)
        else:
            comm.all_reduce(vector, compress=self._parameters.compress)
        module.step.gradients_changed()
        return 1.0

    def reconcile(self) -> None:
        """Synchronize batch-norm statistics and check that parameters are equal; collective."""
        reconcile(self._comm, self.module.memory, how=self._parameters.statistics)

    def gather(self, *, include_optimizer_state: bool) -> CheckpointData | None:
        slots = None
        if include_optimizer_state and isinstance(self.optimizer, ShardedOptimizer):
            slots = self.optimizer.gather_slots()
        if self._comm.rank != 0:
            return None
        data = self.state.to_data(include_optimizer_state=include_optimizer_state)
        if include_optimizer_state:
            data.extras["seed"] = self._base_seed
            if slots is not None:
                data.optimizer[0].slots = slots
        return data


def session_options(parameters: RunnerSettings) -> ort.SessionOptions:
    """Threads of one rank: launchers set OMP_NUM_THREADS, which the runtime does not read."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = parameters.threads
    options.inter_op_num_threads = 1
    # every rank would print the same warnings
    options.log_severity_level = 4
    if (os.cpu_count() or 1) > 1 and parameters.threads > 1:
        # ranks share a machine: a thread that spins takes another rank's core
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


# --- Sharded optimizer state (ZeRO stage 1): each rank stores and updates one shard of the flat buffers.
#
# Gradients are reduced to the rank that needs them, parameters gathered after the update: the same volume as
# one all-reduce, and 1/N of the optimizer's memory. The result equals the unsharded one, bit-exactly where
# the reduction adds in the same order.


def bounds_of(size: int, world: int) -> list[int]:
    """Where each rank's equal part of a flat buffer begins, and the end."""
    share, remainder = divmod(size, world)
    if remainder:
        raise AssertionError(f"{size} does not divide into {world} equal parts")
    return [rank * share for rank in range(world + 1)]


class ShardedOptimizer(Optimizer):
    """An optimizer that holds this rank's share of the state; `step` is collective."""

    def __init__(self, optimizer_uri: ModelFile, module: Module, comm: Communicator) -> None:
        self._comm = comm
        self._bounds = bounds_of(module.memory.parameters.whole.shape[0], comm.world)
        # this rank's part
        self._start, self._stop = self._bounds[comm.rank : comm.rank + 2]
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
        parameters, world = self._module.memory.parameters, self._comm.world
        shapes, kind = parameters.shapes, parameters.whole.dtype
        whole = {slot: FlatBuffer(shapes, parts=world, dtype=kind) for slot in updater.slot_vectors()}
        for slot, own in updater.slot_vectors().items():
            for source in range(self._comm.world):
                # part by part: rank 0 never holds two copies of the state
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
        memory = self._module.memory
        parameters, gradients = (
            flat.part(self._start, self._stop) for flat in (memory.parameters, memory.gradients)
        )
        updater = make_updater(uri, parameters, gradients, threads=self._module.threads)
        if not isinstance(updater, ElementwiseUpdater):
            raise DistributedError(
                "shard_optimizer needs an optimizer that treats each number alone (AdamW, SGD, …); this one looks "
                "at whole parameters: use shard_optimizer=False"
            )
        return updater

    def _norm(self) -> float:
        own = self._module.memory.gradients.whole.view(self._start, [self._stop - self._start])
        # float64: the norm decides on clipping, and must be the same on any number of ranks
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
        first, last = self._module.memory.parameters.spans.get(name, (0, 0))
        return np.ravel(array)[max(first, self._start) - first : max(min(last, self._stop) - first, 0)]


# --- Shards of the data: disjoint samples per rank, a new order in every epoch, the same for any number of ranks.
#
# The order of an epoch is split into global batches and each of those into one shard per rank. So 1, 2 and 4
# ranks train on the same global batches, and a run may be resumed on another number of ranks.


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
