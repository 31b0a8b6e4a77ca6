"""TrainingRunner: the same program on every rank trains one model and rank 0 writes the result.

A front of `Trainer`, whose loop runs over an engine of several ranks (data parallel or pipeline parallel). Every
method is collective: all ranks call it, in the same order.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.checkpoint import codec
from onward.distributed.agreement import (
    all_or_none,
    broadcast_bytes,
    describe_job,
    describe_loader,
    encode_state,
    require_same,
)
from onward.distributed.comm import Buffer, Communicator, TorchCommunicator, connect, device_of_rank
from onward.distributed.data_parallel import DataParallel, session_options
from onward.distributed.errors import DistributedError
from onward.distributed.settings import RunnerSettings, make_grid
from onward.errors import MAKE_ARTIFACTS, ModelError
from onward.runtime.tensors import HostTensor, Tensor
from onward.train.artifact_set import read_artifacts
from onward.train.batches import Batches, StreamBatches
from onward.train.engines import EngineFactory
from onward.train.trainer import Trainer

if TYPE_CHECKING:
    from onward.api.optimizer import Optimizer
    from onward.api.schedulers import LRScheduler
    from onward.checkpoint.content import CheckpointData
    from onward.distributed.settings import Grid
    from onward.train.artifact_set import ArtifactFiles
    from onward.train.engines import Engine, EngineSettings
    from onward.train.history import History

__all__ = ["TrainingRunner"]


class TrainingRunner:
    """Trains on every rank that the launcher started; alone, it trains on one.

    >>> import numpy as np
    >>> from onward.distributed import ShardedArrays
    >>> rng = np.random.default_rng(0)
    >>> x, labels = rng.normal(size=(64, 4)).astype("float32"), rng.integers(0, 3, 64)
    >>> loader = ShardedArrays(x, labels, batch_size=16)
    >>> runner = TrainingRunner(RunnerSettings(artifacts="out"))
    >>> runner.initialize()
    >>> history = runner.run(loader, loader)
    >>> history = runner.end_training(loader)
    >>> exported = runner.export_model_for_inferencing("model.onnx", ["scores"])

    A loader is a `ShardedArrays`, or any iterable of this rank's own batches, tuples or dicts (its
    `set_epoch` is called if it has one, and so is that of its `sampler`).
    """

    def __init__(self, parameters: RunnerSettings, *, communicator: Communicator | None = None) -> None:
        if not isinstance(parameters, RunnerSettings):
            raise TypeError(f"TrainingRunner takes RunnerSettings, got {type(parameters).__name__}")
        self.parameters = parameters
        self._borrowed = communicator
        self._comm: Communicator | None = None
        self._trainer: Trainer | None = None

    # ---- the four calls ----------------------------------------------------------------------------

    def initialize(self) -> None:
        """Join the process group, broadcast rank 0's state (the latest checkpoint, if any), load the models."""
        if self._trainer is not None:
            raise DistributedError("this runner is initialized already")
        settings = self.parameters
        engines = join_ranks(settings, self._borrowed)
        self._comm = comm = engines.comm
        with all_or_none(comm):
            artifacts = read_artifacts(
                settings.training_model, settings.eval_model, settings.optimizer_model, settings.checkpoint
            )
        self._trainer = Trainer(
            artifacts,
            output_directory=settings.checkpoint_directory,
            learning_rate=settings.learning_rate,
            schedule=self._schedule if settings.scheduler is not None else "constant",
            warmup=0,
            gradient_accumulation_steps=settings.gradient_accumulation_steps,
            # none is that of the optimizer model, not what the artifacts recommend
            clip_norm=settings.clip_norm or 0,
            metrics=settings.metrics,
            callbacks=settings.callbacks,
            seed=settings.seed,
            on_nonfinite=settings.on_nonfinite,
            keep=settings.keep_checkpoints,
            progress=False,
            resume=True,
            engines=engines,
        )

    def run(self, train_loader: Any, test_loader: Any = None) -> History:
        """Train for the epochs (or steps) of the parameters, from where a resumed run stopped."""
        trainer, comm = self._ready()
        settings = self.parameters
        require_same(comm, describe_loader(train_loader, "training data"))
        require_same(comm, describe_loader(test_loader, "evaluation data"))
        steps, saves = settings.num_train_steps, settings.checkpoint_directory is not None
        return trainer.fit(
            self._batches(train_loader),
            None if test_loader is None else self._batches(test_loader),
            epochs=settings.epochs,
            max_updates=None if steps is None else steps // settings.gradient_accumulation_steps,
            save_every=settings.checkpoint_every if saves else None,
            evaluate_every=settings.evaluate_every,
            best_metric=settings.best_metric,
        )

    def end_training(self, test_loader: Any = None) -> float | None:
        """Synchronize the state of all ranks, save it if checkpoints are on, evaluate; returns that loss."""
        trainer, _ = self._ready()
        trainer.engine.reconcile()
        if self.parameters.checkpoint_directory is not None:
            self.save_checkpoint()
        return None if test_loader is None else self.evaluate(test_loader)

    def export_model_for_inferencing(
        self, path: str | os.PathLike[str], graph_output_names: Sequence[str]
    ) -> None:
        """Export the trained model for inference on rank 0; training can continue afterwards.

        All ranks wait for the file, and all raise if it could not be written.
        """
        trainer, comm = self._ready()
        with all_or_none(comm):
            if self.parameters.eval_model is None:
                raise ModelError(
                    "Eval model was not provided. Cannot export a model for inferencing.", hint=MAKE_ARTIFACTS
                )
            if isinstance(graph_output_names, str) or not graph_output_names:
                raise ModelError("Expected a non empty vector of graph output names: a list of names.")
        trainer.export(path, graph_output_names, epoch="last")

    # ---- between them ------------------------------------------------------------------------------

    def evaluate(self, loader: Any) -> float:
        """The mean loss of the evaluation model over all ranks' batches."""
        trainer, _ = self._ready()
        return trainer.evaluate(self._batches(loader))["loss"]

    def save_checkpoint(self) -> Path | None:
        """Let rank 0 write a checkpoint of this moment; returns its path there."""
        trainer, comm = self._ready()
        with all_or_none(comm):
            if self.parameters.checkpoint_directory is None:
                raise ValueError("no checkpoint_directory was given")
        return trainer.save_checkpoint()

    @property
    def updates(self) -> int:
        """How many updates were made."""
        return 0 if self._trainer is None else self._trainer.step

    @property
    def rank(self) -> int:
        """This rank's number; 0 writes the files."""
        return self._ready()[1].rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._ready()[1].world

    @property
    def engine(self) -> Engine:
        """What does the updates on this rank."""
        return self._ready()[0].engine

    @property
    def replica(self) -> int:
        """Which share of the data is this rank's: all stages of one pipeline take the same."""
        return self.engine.replica

    @property
    def replicas(self) -> int:
        """How many shares the data has."""
        return self.engine.replicas

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of this rank: its learning rate and its gradient norm."""
        return self.engine.optimizer

    def close(self) -> None:
        """Leave the other ranks."""
        comm, self._comm, self._trainer = self._comm, None, None
        if comm is not None and self._borrowed is None:
            comm.close()

    def __enter__(self) -> TrainingRunner:
        if self._trainer is None:
            self.initialize()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside ------------------------------------------------------------------------------------

    def _ready(self) -> tuple[Trainer, Communicator]:
        if self._trainer is None or self._comm is None:
            raise DistributedError("call initialize() first")
        return self._trainer, self._comm

    def _schedule(self, optimizer: Optimizer, total: int | None) -> LRScheduler:
        assert self.parameters.scheduler is not None
        return self.parameters.scheduler(optimizer)

    def _batches(self, loader: Any) -> Batches:
        if isinstance(loader, Batches):
            return loader
        trainer, comm = self._ready()
        with all_or_none(comm):
            if not isinstance(loader, Iterable):
                raise TypeError(
                    f"a loader must be a ShardedArrays or an iterable of batches, got {type(loader).__name__}"
                )
        return StreamBatches(loader, trainer.module.signature.inputs)


# --- Makes the engines of a run on several ranks: data parallel, with sharded optimizer state, or pipeline
# stages.


class RankEngines(EngineFactory):
    """The engines of one rank of several; every call is collective."""

    # their launcher holds it: a rank that waits for the lock would keep the others waiting
    holds_lock = False

    def __init__(self, settings: RunnerSettings, comm: Communicator, grid: Grid) -> None:
        self.rank, self.comm = comm.rank, comm
        # found once: environment variables may change while the ranks run
        self._device = device_of_rank(settings.device)
        self._session_options = session_options(settings)
        self._settings, self._grid = settings, grid

    def make(self, files: ArtifactFiles, data: CheckpointData, settings: EngineSettings) -> Engine:
        # on this rank's own device and with its own threads
        settings = dataclasses.replace(settings, device=self._device, session_options=self._session_options)
        with all_or_none(self.comm):
            if self._grid.pipeline == 1:
                return DataParallel(files, data, settings, self._settings, self.comm)
            from onward.distributed.stages.pipeline_parallel import PipelineParallel

            return PipelineParallel(data, settings, self._settings, self.comm, self._grid)

    def share(self, read: Callable[[], CheckpointData | None]) -> CheckpointData | None:
        """What rank 0 reads: the others get its bytes, and need no access to its files."""
        comm = self.comm
        data: CheckpointData | None = None
        content: bytes | None = None
        with all_or_none(comm):
            if comm.rank == 0:
                data = read()
                content = b"" if data is None or comm.world == 1 else encode_state(data)
        if comm.world == 1:
            return data
        content = broadcast_bytes(comm, content)
        # verified like a file: bytes that crossed a network
        return data if comm.rank == 0 or not content else codec.decode(content)

    def all_or_none(self) -> AbstractContextManager[None]:
        """For a block that does not communicate: an error in it on one rank is raised on all."""
        return all_or_none(self.comm)

    def close(self) -> None:
        """Leave the other ranks."""
        self.comm.close()


def join_ranks(settings: RunnerSettings, communicator: Communicator | None = None) -> RankEngines:
    """Join the other ranks of a run, which must have the same settings; collective."""
    comm = communicator or connect(timeout=settings.timeout, backend=settings.backend, device=settings.device)
    require_same(comm, describe_job(settings))
    with all_or_none(comm):
        grid = make_grid(settings, rank=comm.rank, world=comm.world)
    return RankEngines(settings, two_level(comm, settings.reduce_group_size, timeout=settings.timeout), grid)


# --- All-reduce in two levels, for many ranks: within a group, across the groups, within the group again.
#
# gloo reduces in a ring, whose 2(N−1) messages in a row are what counts among hundreds of ranks. Rings of G
# and of N/G ranks need 2(G−1) + 2(N/G−1), and move as many bytes as one ring.


# Below this size only latency counts, and two plain reductions have less of it than three steps.
_SMALL = 1 << 14


class TwoLevelCommunicator(TorchCommunicator):
    """A world whose all-reduce goes through groups; all else is the world's own."""

    def __init__(self, world: TorchCommunicator, inner: TorchCommunicator, outer: TorchCommunicator) -> None:
        super().__init__(
            world.group, nccl=world.nccl, timeout=world.timeout, owned=world.owned, store=world.store
        )
        self._inner, self._outer = inner, outer

    def all_reduce(self, array: Buffer, *, compress: bool = False) -> None:
        """Reduce a part of the array on each rank of a group, across groups, and gather the parts."""
        vector: Tensor = HostTensor(array.reshape(-1)) if isinstance(array, np.ndarray) else array
        size = math.prod(vector.shape)
        # equal parts only; what does not divide goes the short way below
        share = size // self._inner.world if size * vector.dtype.itemsize >= _SMALL else 0
        whole = share * self._inner.world
        if share:
            bounds = [share * rank for rank in range(self._inner.world + 1)]
            large = vector.view(0, [whole])
            # within a machine first, where memory is fast: what crosses machines is then 1/G of it
            self._inner.reduce_scatter(large, bounds, compress=compress)
            own = bounds[self._inner.rank]
            self._outer.all_reduce(vector.view(own, [share]), compress=compress)
            self._inner.all_gather(large, bounds)
        if whole < size:
            remainder = vector.view(whole, [size - whole])
            self._inner.all_reduce(remainder)
            self._outer.all_reduce(remainder)


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
