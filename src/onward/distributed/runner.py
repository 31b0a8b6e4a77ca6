"""TrainingRunner: the same program on every rank trains one model and rank 0 writes the result.

Handles epochs, updates, checkpoints and export; an engine (data parallel or pipeline parallel) runs one update.
Every method is collective: all ranks call it, in the same order.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from onward.checkpoint import codec, store
from onward.distributed.agreement import all_or_none, broadcast_bytes, raise_together
from onward.distributed.comm import Communicator, connect
from onward.distributed.data_parallel import DataParallel, Report
from onward.distributed.errors import DistributedError
from onward.distributed.same_job import describe_job, describe_loader, require_same
from onward.distributed.settings import Grid, RunnerSettings, make_grid
from onward.distributed.two_level import two_level
from onward.errors import MAKE_ARTIFACTS, ModelError, OnwardError
from onward.runtime import inference_model
from onward.train.batches import in_order

if TYPE_CHECKING:
    from onward.api.optimizer import Optimizer
    from onward.api.schedulers import LRScheduler
    from onward.checkpoint.content import CheckpointData

__all__ = ["History", "TrainingRunner"]

_NOMINAL = "The state is nominal: it has no parameter values. Please load the model parameters first."


class Engine(Protocol):
    """What does an update; `update`, `reconcile` and `gather` are collective."""

    optimizer: Optimizer

    @property
    def input_names(self) -> Sequence[str]:
        """What a batch consists of."""
        ...

    def backward(
        self, batches: Sequence[Sequence[Any]], *, step: int, failure: Exception | None = None
    ) -> Report:
        """Gradients of this rank's share; never raises. `failure` is why there are no batches."""
        ...

    def update(self, *, weight: float, invalid: str | None) -> bool:
        """Reduce and apply; False where skipped."""
        ...

    def evaluate(self, batches: Iterator[Sequence[Any]]) -> Report:
        """The loss of this rank's share in evaluation; never raises."""
        ...

    def reconcile(self) -> None:
        """The same state on all ranks."""
        ...

    def gather(self, *, include_optimizer_state: bool) -> CheckpointData | None:
        """The whole state, on rank 0."""
        ...


@dataclasses.dataclass
class History:
    """Losses over all ranks: of each update, and of each evaluation by the update it came after."""

    losses: list[float] = dataclasses.field(default_factory=list)
    evaluations: dict[int, float] = dataclasses.field(default_factory=dict)
    skipped: int = 0


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
        self.updates = 0
        self._given = communicator
        self._comm: Communicator | None = None
        self._grid: Grid | None = None
        self._engine: Engine | None = None
        self._scheduler: LRScheduler | None = None
        self._epoch = 0
        self._batch = 0
        self._nominal = False

    # ---- the four calls ----------------------------------------------------------------------------

    def initialize(self) -> None:
        """Join the process group, broadcast rank 0's state (the latest checkpoint, if any), load the models."""
        if self._engine is not None:
            raise DistributedError("this runner is initialized already")
        settings = self.parameters
        comm = self._given or connect(
            timeout=settings.timeout, backend=settings.backend, device=settings.device
        )
        require_same(comm, describe_job(settings))
        with all_or_none(comm):
            self._grid = make_grid(settings, rank=comm.rank, world=comm.world)
        self._comm = comm = two_level(comm, settings.reduce_group_size, timeout=settings.timeout)
        data = self._first_state(comm)
        self._nominal = data.nominal
        extras = data.extras
        with all_or_none(comm):
            self._engine = self._make_engine(data, comm)
            fresh = not data.optimizer
            if fresh:
                self._engine.optimizer.set_learning_rate(settings.learning_rate)
            if settings.clip_norm is not None:
                self._engine.optimizer.clip_norm = settings.clip_norm
            if settings.scheduler is not None:
                self._scheduler = settings.scheduler(self._engine.optimizer)
        self.updates = int(extras.get("distributed.updates", 0))
        self._epoch = int(extras.get("distributed.epoch", 0))
        self._batch = int(extras.get("distributed.batch", 0))

    def run(self, train_loader: Any, test_loader: Any = None) -> History:
        """Train for the epochs (or steps) of the parameters, from where a resumed run stopped."""
        _, comm = self._ready()
        require_same(comm, describe_loader(train_loader, "training data"))
        require_same(comm, describe_loader(test_loader, "evaluation data"))
        settings, history = self.parameters, History()
        while self._epoch < settings.epochs and not self._finished():
            self._train_epoch(train_loader, test_loader, history)
            if self._finished():
                break
            self._epoch, self._batch = self._epoch + 1, 0
            if test_loader is not None and settings.evaluate_every is None:
                history.evaluations[self.updates] = self.evaluate(test_loader)
        return history

    def end_training(self, test_loader: Any = None) -> float | None:
        """Synchronize the state of all ranks, save it if checkpoints are on, evaluate; returns that loss."""
        engine, _ = self._ready()
        engine.reconcile()
        if self.parameters.checkpoint_directory is not None:
            self.save_checkpoint()
        return None if test_loader is None else self.evaluate(test_loader)

    def export_model_for_inferencing(
        self, path: str | os.PathLike[str], graph_output_names: Sequence[str]
    ) -> None:
        """Export the trained model for inference on rank 0; training can continue afterwards.

        All ranks wait for the file, and all raise if it could not be written.
        """
        engine, comm = self._ready()
        with all_or_none(comm):
            if self._nominal:
                raise OnwardError(_NOMINAL)
            if self.parameters.eval_model is None:
                raise ModelError(
                    "Eval model was not provided. Cannot export a model for inferencing.", hint=MAKE_ARTIFACTS
                )
            if isinstance(graph_output_names, str) or not graph_output_names:
                raise ModelError("Expected a non empty vector of graph output names: a list of names.")
        engine.reconcile()
        data = engine.gather(include_optimizer_state=False)
        with all_or_none(comm):
            if data is not None:
                inference_model.export(self.parameters.eval_model, data, graph_output_names, path)

    # ---- between them ------------------------------------------------------------------------------

    def evaluate(self, loader: Any) -> float:
        """The mean loss of the evaluation model over all ranks' batches."""
        engine, comm = self._ready()
        engine.reconcile()
        with all_or_none(comm):
            stream = iter(self._batches(loader, 0, 0))
        report = engine.evaluate(stream)
        totals = np.array([report.loss, report.weight, report.failure is not None], np.float64)
        comm.all_reduce(totals)
        if totals[2]:
            raise_together(comm, report.failure)
        if totals[1] == 0:
            raise DistributedError("there is nothing to evaluate: the test loaders of all ranks are empty")
        return float(totals[0] / totals[1])

    def save_checkpoint(self) -> Path | None:
        """Let rank 0 write a checkpoint of this moment; returns its path there."""
        engine, comm = self._ready()
        directory = self.parameters.checkpoint_directory
        with all_or_none(comm):
            if directory is None:
                raise ValueError("no checkpoint_directory was given")
        assert directory is not None
        engine.reconcile()
        data = engine.gather(include_optimizer_state=True)
        path = None
        with all_or_none(comm):
            if data is not None:
                data.extras["distributed.updates"] = self.updates
                data.extras["distributed.epoch"] = self._epoch
                data.extras["distributed.batch"] = self._batch
                path = store.save_step(
                    data, directory, step=self.updates, keep=self.parameters.keep_checkpoints
                )
        return path

    @property
    def rank(self) -> int:
        """This rank's number; 0 writes the files."""
        return self._ready()[1].rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._ready()[1].world

    @property
    def replica(self) -> int:
        """Which share of the data is this rank's: all stages of one pipeline take the same."""
        self._ready()
        assert self._grid is not None
        return self._grid.replica

    @property
    def replicas(self) -> int:
        """How many shares the data has."""
        self._ready()
        assert self._grid is not None
        return self._grid.data

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of this rank: its learning rate and its gradient norm."""
        return self._ready()[0].optimizer

    def close(self) -> None:
        """Leave the other ranks."""
        comm, self._comm, self._engine = self._comm, None, None
        if comm is not None and self._given is None:
            comm.close()

    def __enter__(self) -> TrainingRunner:
        if self._engine is None:
            self.initialize()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside ------------------------------------------------------------------------------------

    def _ready(self) -> tuple[Engine, Communicator]:
        if self._engine is None or self._comm is None:
            raise DistributedError("call initialize() first")
        return self._engine, self._comm

    def _make_engine(self, data: CheckpointData, comm: Communicator) -> Engine:
        grid = self._grid
        assert grid is not None
        if grid.pipeline == 1:
            return DataParallel(self.parameters, data, comm)
        from onward.distributed.stages.pipeline_parallel import PipelineParallel

        return PipelineParallel(self.parameters, data, comm, grid)

    def _first_state(self, comm: Communicator) -> CheckpointData:
        """Rank 0 reads the latest checkpoint, or the first one; the others get its bytes."""
        content: bytes | None = None
        data: CheckpointData | None = None
        with all_or_none(comm):
            if comm.rank == 0:
                data = self._read_state()
                if comm.world > 1:
                    stream = io.BytesIO()
                    codec.encode(data, stream)
                    content = stream.getvalue()
        if comm.world == 1:
            assert data is not None
            return data
        content = broadcast_bytes(comm, content)
        return codec.decode(content) if data is None else data

    def _read_state(self) -> CheckpointData:
        directory = self.parameters.checkpoint_directory
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
            if any(name.startswith("checkpoint-") for name in os.listdir(directory)):
                return store.load_latest(directory).data
        return store.load(self.parameters.checkpoint)

    def _finished(self) -> bool:
        steps = self.parameters.num_train_steps
        return steps is not None and self.updates * self.parameters.gradient_accumulation_steps >= steps

    def _train_epoch(self, train_loader: Any, test_loader: Any, history: History) -> None:
        settings = self.parameters
        with all_or_none(self._ready()[1]):
            stream = iter(self._batches(train_loader, self._epoch, self._batch))
        while not self._finished():
            if not self._update(stream, history):
                return
            self._batch += settings.gradient_accumulation_steps
            if settings.checkpoint_directory is not None and self.updates % settings.checkpoint_every == 0:
                self.save_checkpoint()
            every = settings.evaluate_every
            if test_loader is not None and every is not None and self.updates % every == 0:
                history.evaluations[self.updates] = self.evaluate(test_loader)

    def _update(self, stream: Iterator[Sequence[Any]], history: History) -> bool:
        """One update from the next batches of all ranks; False where no rank has any left."""
        engine, comm = self._ready()
        accumulated = self.parameters.gradient_accumulation_steps
        batches: list[Sequence[Any]] = []
        failure: Exception | None = None
        try:
            batches = list(islice(stream, accumulated))
        except Exception as error:
            failure = error
        report = engine.backward(batches, step=self.updates * accumulated, failure=failure)
        totals = np.array(
            [
                report.failure is not None,
                len(batches),
                report.loss,
                report.weight,
                report.invalid is not None,
            ],
            np.float64,
        )
        comm.all_reduce(totals)
        failed, taken, loss, weight, invalid = totals.tolist()
        if failed:
            raise_together(comm, report.failure)
        if not taken:
            return False
        if not weight:
            raise DistributedError(
                f"update {self.updates}: nothing counts in the batches of all ranks (no samples, or all labels ignored)"
            )
        problem = report.invalid or ("the loss is not finite on another rank" if invalid else None)
        if not engine.update(weight=weight, invalid=problem):
            history.skipped += 1
        if self._scheduler is not None:
            self._scheduler.step()
        self.updates += 1
        history.losses.append(loss / weight if self.parameters.loss_reduction == "mean" else loss)
        return True

    def _batches(self, loader: Any, epoch: int, skip: int) -> Iterable[Sequence[Any]]:
        grid = self._grid
        assert grid is not None
        if hasattr(loader, "epoch"):
            return loader.epoch(epoch, rank=grid.replica, world=grid.data, skip=skip)
        for part in (loader, getattr(loader, "sampler", None)):
            if part is not None and hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        if not isinstance(loader, Iterable):
            raise TypeError(
                f"a loader must be a ShardedArrays or an iterable of batches, got {type(loader).__name__}"
            )
        names = self._ready()[0].input_names
        return (in_order(batch, names) for batch in islice(loader, skip, None))
