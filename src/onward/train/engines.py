"""Engines: where an update happens. The training loop is written once, over this interface.

`LocalEngine` is one process. Those of `onward.distributed` are one rank of several (data parallel, sharded
optimizer state, pipeline stages): every rank runs the same loop, and what is marked collective meets the others.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from onward.api.convert_inputs import check_labels, prepare
from onward.api.module import Module
from onward.api.optimizer import Optimizer
from onward.api.state import CheckpointState
from onward.errors import MAKE_ARTIFACTS, ModelError
from onward.ort_session import array_of
from onward.runtime.step import EvaluationStep
from onward.train.batches import batch_weight, sample_count

if TYPE_CHECKING:
    import onnxruntime as ort

    from onward.api.module import NonFinitePolicy
    from onward.checkpoint.content import CheckpointData
    from onward.runtime.devices import DeviceLike
    from onward.runtime.sessions import ModelFile
    from onward.runtime.signature import Signature
    from onward.train.artifact_set import ArtifactFiles
    from onward.train.batches import Batch
    from onward.train.window import Window


Table = dict[str, np.ndarray]


@dataclasses.dataclass
class Report:
    """What one rank says after its share of an update: why it is not to be applied, or its error."""

    invalid: str | None = None
    failure: Exception | None = None


@dataclasses.dataclass
class Evaluated:
    """One rank's share of an evaluation: sums over its samples, and what metrics judge, one table for each batch.

    A batch of which this rank has no sample has an empty table, so that the tables of all ranks line up.
    """

    loss: float = 0.0
    weight: float = 0.0
    tables: list[Table] = dataclasses.field(default_factory=list)
    signature: Signature | None = None
    failure: Exception | None = None


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """How an engine runs its models; the same for every engine of a run."""

    seed: int | None = 0  # None: that of the checkpoint
    device: DeviceLike = "cpu"
    session_options: ort.SessionOptions | None = None
    on_nonfinite: NonFinitePolicy = "raise"
    clip_norm: float | None = None
    # values of the eval model that metrics judge, besides its own outputs
    outputs: Sequence[str] = ()


class Engine(abc.ABC):
    """One rank of several, or the only process: what is not abstract here is what one process does.

    Collective: all methods but `backward` and `evaluate` of data parallel.
    """

    module: Module
    optimizer: Optimizer
    state: CheckpointState
    rank, world = 0, 1
    # which share of the data is this rank's: all stages of one pipeline take the same
    replica, replicas = 0, 1
    # whether the loss is a sum over a batch, not a mean
    sums_loss = False

    @abc.abstractmethod
    def backward(self, window: Window) -> Report:
        """Gradients of this rank's share of an update, added up in the window; never raises."""

    @abc.abstractmethod
    def update(self, *, weight: float, unit: float, invalid: str | None) -> bool:
        """Apply the gradients, which count in units of `unit`; False where the update was skipped."""

    @abc.abstractmethod
    def evaluate(self, batches: Iterable[Batch], *, tables: bool) -> Evaluated:
        """The loss of this rank's share in evaluation, and with `tables` what metrics judge; never raises."""

    @abc.abstractmethod
    def gather(self, *, include_optimizer_state: bool) -> CheckpointData | None:
        """The whole state on rank 0, None elsewhere; arrays are not copied."""

    def reconcile(self) -> None:  # noqa: B027 - one process agrees with itself
        """The same state on all ranks."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value's sum over the ranks."""
        return list(values)

    def collect(self, tables: Sequence[Table]) -> list[list[Table]] | None:
        """The tables of all ranks, in their order, on rank 0; None elsewhere."""
        return [list(tables)]

    def all_or_none(self) -> AbstractContextManager[None]:
        """For a block that does not communicate: an error in it on one rank is raised on all."""
        return nullcontext()

    def raise_together(self, failure: Exception | None) -> NoReturn:
        """Raise the error of the first rank that has one, on all ranks."""
        raise failure or AssertionError("there is no failure to raise")


class EngineFactory:
    """Makes the engines of a run: of one process, or in a subclass those of one of its ranks."""

    rank = 0
    # whether a run holds the lock of its folder itself; ranks cannot, their launcher does
    holds_lock = True

    def make(self, files: ArtifactFiles, data: CheckpointData, settings: EngineSettings) -> Engine:
        """An engine that begins with this state; collective."""
        return LocalEngine(files, data, settings)

    def share(self, read: Callable[[], CheckpointData | None]) -> CheckpointData | None:
        """What rank 0 reads, on every rank; collective."""
        return read()


class LocalEngine(Engine):
    """Training in this process. Ranks that have the whole model extend it."""

    def __init__(
        self, files: ArtifactFiles, data: CheckpointData, settings: EngineSettings, *, parts: int = 1
    ) -> None:
        self.state = CheckpointState(data)
        self.module = Module(
            files.training,
            self.state,
            files.evaluation,
            device=settings.device,
            session_options=settings.session_options,
            on_nonfinite=settings.on_nonfinite,
            seed=settings.seed,
            parts=parts,
        )
        if files.optimizer is None:
            raise ModelError(
                "the artifacts have no optimizer model: generate them with optimizer=…", hint=MAKE_ARTIFACTS
            )
        self.optimizer = self._make_optimizer(files.optimizer)
        if settings.clip_norm is not None:
            self.optimizer.clip_norm = settings.clip_norm
        self._files, self._settings = files, settings
        self._evaluation: EvaluationStep | None = None

    def _make_optimizer(self, model: ModelFile) -> Optimizer:
        return Optimizer(model, self.module)

    def weigh(self, signature: Signature, batch: Sequence[Any]) -> float:
        """What a mean over a batch counts: labels that are not ignored, else samples."""
        return batch_weight(signature, batch)

    def backward(self, window: Window) -> Report:
        module = self.module.train()
        run = module.run_state
        try:
            for batch in window:
                weight = self.weigh(module.signature, batch)
                if weight == 0:  # no label that counts: no loss and no gradient
                    continue
                if window.unit not in (0.0, weight):
                    # Each sample counts the same: what was added up so far is put into units of this batch.
                    module.memory.gradients.whole.scale(window.unit / weight)
                # By the number of the batch, not of the calls: ranks without a sample of a batch skip it, and
                # must draw the same dropout as the others in the next one.
                run.steps = window.number
                results = module(*batch)
                loss = results[0] if isinstance(results, tuple) else results
                window.add(float(np.reshape(loss, -1)[0]), weight)
            run.steps = window.end
        except Exception as error:
            return Report(failure=error)
        return Report(invalid=run.invalid)

    def update(self, *, weight: float, unit: float, invalid: str | None) -> bool:
        if invalid is not None:
            return self._skip(invalid)
        unit = self.reduce_gradients(unit)
        self.optimizer.gradient_scale = unit if self.sums_loss else unit / weight
        applied = self.optimizer.step()
        self.module.lazy_reset_grad()
        return applied

    def reduce_gradients(self, unit: float) -> float:
        """What is done with gradients before they are applied; returns the unit in which they are then."""
        return unit

    def _skip(self, invalid: str) -> bool:
        self.module.run_state.invalid = invalid
        self.module.lazy_reset_grad()  # what is not finite would stay in every sum that follows
        return self.module.take_invalid() is None

    def evaluate(self, batches: Iterable[Batch], *, tables: bool) -> Evaluated:
        report = Evaluated()
        try:
            step = self.evaluator()
            report.signature = step.signature
            names = [*step.signature.outputs[1:], *step.signature.inputs]
            for batch in batches:
                if not sample_count(batch):  # a share of a batch that is smaller than the number of ranks
                    report.tables.append({})
                    continue
                feeds, _ = prepare(step.signature, batch)
                check_labels(step.signature, feeds)
                results = step.run(feeds)
                weight = self.weigh(step.signature, feeds)
                if weight:  # a batch without a label that counts has no loss
                    report.loss += float(results[0].reshape(-1)[0]) * weight
                    report.weight += weight
                if tables:
                    arrays = [*results[1:], *feeds]
                    report.tables.append({name: array_of(value) for name, value in zip(names, arrays)})
        except Exception as error:
            report.failure = error
        return report

    def evaluator(self) -> EvaluationStep:
        """The eval model over the parameters in training; made when first needed."""
        if self._evaluation is None:
            step = EvaluationStep(
                self._files.require_evaluation(),
                device=self.module.device,
                options=self._settings.session_options,
                outputs=self._settings.outputs,
            )
            step.attach(self.module.memory)
            self._evaluation = step
        return self._evaluation

    def gather(self, *, include_optimizer_state: bool) -> CheckpointData | None:
        return self.state.to_data(include_optimizer_state=include_optimizer_state)
