"""Data parallel training: every rank has the whole model and a shard of each batch.

One flat vector of gradients is summed over the ranks and divided by the number of samples of all, so that
shards of different sizes are weighted correctly. Gradients are accumulated locally and reduced once.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from onward.api.module import Module
from onward.api.optimizer import Optimizer
from onward.api.state import CheckpointState
from onward.distributed.agreement import same_everywhere
from onward.distributed.comm import Communicator, device_of_rank
from onward.distributed.sharding import ShardedOptimizer, bounds_of

if TYPE_CHECKING:
    from onward.checkpoint.content import CheckpointData
    from onward.distributed.settings import RunnerSettings
    from onward.runtime.memory import ModelMemory
    from onward.runtime.signature import Signature

__all__ = ["DataParallel", "Report", "reconcile", "session_options", "weight_of"]

# Seeds of neighbouring ranks must not meet those of neighbouring steps.
_RANK_STRIDE = 0x5851F42D4C957F2D


@dataclasses.dataclass
class Report:
    """One rank's report after its shard of an update: sums over its samples, or its error."""

    loss: float = 0.0
    weight: float = 0.0
    invalid: str | None = None
    failure: Exception | None = None


class DataParallel:
    """The engine of data-parallel training on one rank; `backward` and `evaluate` do not communicate."""

    def __init__(self, parameters: RunnerSettings, data: CheckpointData, comm: Communicator) -> None:
        self._settings, self._comm = parameters, comm
        sharded = parameters.shard_optimizer and comm.world > 1
        data.extras.setdefault("seed", parameters.seed)
        self.state = CheckpointState(data)
        self.module = Module(
            parameters.training_model,
            self.state,
            parameters.eval_model,
            device_of_rank(parameters.device),
            session_options(parameters),
            on_nonfinite=parameters.on_nonfinite,
            parts=comm.world if sharded else 1,  # buffers that divide into equal shares, one for each rank
        )
        self._base_seed = self.module.run_state.seed
        self.module.run_state.seed = (self._base_seed + comm.rank * _RANK_STRIDE) % (1 << 63)
        self.optimizer: Optimizer = (
            ShardedOptimizer(parameters.optimizer_model, self.module, comm)
            if sharded
            else Optimizer(parameters.optimizer_model, self.module)
        )

    @property
    def input_names(self) -> Sequence[str]:
        """What a batch consists of."""
        return self.module.signature.inputs

    def backward(
        self, batches: Sequence[Sequence[Any]], *, step: int, failure: Exception | None = None
    ) -> Report:
        """Gradients of this rank's share, times its weight, in the module's buffer; never raises."""
        report = Report(failure=failure)
        if failure is not None:
            return report
        module = self.module
        gradients, run = module.memory.gradients.whole, module.run_state
        before = 0.0
        try:
            module.train()
            module.lazy_reset_grad()
            for index, batch in enumerate(batches):
                weight = self._weigh(module.signature, batch)
                if weight == 0:
                    continue
                if before not in (0.0, weight):  # what is there counts in units of the next batch
                    gradients.scale(before / weight)
                before = weight
                run.steps = step + index
                result = module(*batch)
                loss = result[0] if isinstance(result, tuple) else result
                report.loss += float(np.reshape(loss, -1)[0]) * weight
                report.weight += weight
            if before == 0:
                gradients.clear()
            elif before != 1:
                gradients.scale(before)
            report.invalid, run.invalid = run.invalid, None
        except Exception as error:
            report.failure = error
        run.steps = step + len(batches)
        return report

    def update(self, *, weight: float, invalid: str | None) -> bool:
        """Reduce the gradients and apply them; collective. False where the update was skipped."""
        module, settings = self.module, self._settings
        if invalid is not None:
            module.run_state.invalid = invalid
            return module.take_invalid() is None
        vector = module.memory.gradients.whole
        if isinstance(self.optimizer, ShardedOptimizer):
            bounds = bounds_of(vector.shape[0], self._comm.world)
            self._comm.reduce_scatter(vector, bounds, compress=settings.compress)
        else:
            self._comm.all_reduce(vector, compress=settings.compress)
        module.step.gradients_changed()
        self.optimizer.gradient_scale = 1.0 / weight if settings.loss_reduction == "mean" else 1.0
        done = self.optimizer.step()
        module.lazy_reset_grad()
        return done

    def evaluate(self, batches: Iterator[Sequence[Any]]) -> Report:
        """The loss of the evaluation model over this rank's batches; never raises."""
        report, module = Report(), self.module.eval()
        try:
            for batch in batches:
                weight = self._weigh(module.active.signature, batch)
                if weight == 0:
                    continue
                result = module(*batch)
                loss = result[0] if isinstance(result, tuple) else result
                report.loss += float(np.reshape(loss, -1)[0]) * weight
                report.weight += weight
        except Exception as error:
            report.failure = error
        return report

    def reconcile(self) -> None:
        """Synchronize batch-norm statistics and check that parameters are equal; collective."""
        reconcile(self._comm, self.module.memory, how=self._settings.statistics)

    def gather(self, *, include_optimizer_state: bool) -> CheckpointData | None:
        """The whole state on rank 0, None elsewhere; collective. Arrays are not copied."""
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

    def _weigh(self, signature: Signature, batch: Sequence[Any]) -> float:
        if self._settings.loss_reduction == "sum":
            return 1.0 if len(np.atleast_1d(np.asarray(batch[0]))) else 0.0
        return weight_of(signature, batch, self._settings)


def reconcile(comm: Communicator, memory: ModelMemory, *, how: str) -> None:
    """Replace batch-norm statistics by the mean over the ranks, or by rank 0's; make sure of the same parameters.

    Statistics are linear in what each batch adds, so the mean needs to be taken only where it is looked at.
    """
    for part in memory.statistics if comm.world > 1 else ():
        flat = part.whole.read().astype(np.float32)
        if how == "rank0":
            comm.broadcast(flat)
        else:
            comm.all_reduce(flat)
            flat /= np.float32(comm.world)
        part.whole.write(flat)
    same_everywhere(comm, [memory.parameters.whole, *(part.whole for part in memory.statistics)])


def weight_of(signature: Signature, batch: Sequence[Any], parameters: RunnerSettings) -> float:
    """What a mean over a batch counts: labels that are not ignored, else samples; or what the user says."""
    if parameters.count is not None:
        return float(parameters.count(batch))
    for index, _, ignored in signature.labels:
        if index < len(batch) and not isinstance(batch[index], ort.OrtValue):
            labels = np.asarray(batch[index])
            return float(labels.size if ignored is None else np.count_nonzero(labels != ignored))
    first = batch[0]
    shape = first.shape() if isinstance(first, ort.OrtValue) else np.shape(first)
    return float(shape[0]) if shape else 1.0


def session_options(parameters: RunnerSettings) -> ort.SessionOptions:
    """Threads of one rank: launchers set OMP_NUM_THREADS, which the runtime does not read."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = parameters.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    if (os.cpu_count() or 1) > 1 and parameters.threads > 1:
        # ranks share a machine: a thread that spins takes another rank's core
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options
