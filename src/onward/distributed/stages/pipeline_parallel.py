"""Pipeline parallel: every rank has one stage of the model, and micro-batches flow through the stages.

torch.distributed.pipelining does the scheduling (GPipe, 1F1B). To it, a stage is a function of one vector:
everything that crosses a cut is packed into it. Replicas of the pipeline train data parallel.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.api.convert_inputs import check_labels, prepare
from onward.api.module import Module
from onward.api.optimizer import Optimizer
from onward.api.state import CheckpointState
from onward.checkpoint.content import CheckpointData, NominalTensor
from onward.contract import SEED
from onward.distributed.comm import Communicator, LocalCommunicator, TorchCommunicator, device_of_rank
from onward.distributed.data_parallel import Report, reconcile, session_options, weight_of
from onward.distributed.errors import DistributedError, OtherStageFailed
from onward.distributed.stages.models import Blueprint, StageStep, draw_blueprint
from onward.distributed.stages.packing import Layout, layout_of
from onward.distributed.stages.schedule import Flow, Micro, key_of
from onward.errors import MAKE_ARTIFACTS, ModelError, NonFiniteError, OnwardError
from onward.runtime.devices import find_device
from onward.runtime.optimizers.updater import ElementwiseUpdater

if TYPE_CHECKING:
    from onward.distributed.settings import Grid, RunnerSettings
    from onward.runtime.optimizers.updater import Updater
    from onward.runtime.sessions import ModelFile

__all__ = ["PipelineParallel", "gather_state"]


def gather_state(
    comm: Communicator, grid: Grid, blueprint: Blueprint, own: CheckpointData
) -> CheckpointData | None:
    """What all stages have, on rank 0; None elsewhere. `own` is the state of this rank's stage."""
    if grid.replica != 0:
        return None
    slots = _slot_names(own)
    if grid.stage != 0:
        layout = _layout(blueprint, grid.stage, slots)
        comm.send(layout.pack(_flatten(own)), to=0)
        return None
    whole = dataclasses.replace(own, trainable=dict(own.trainable), frozen=dict(own.frozen))
    state = dict(own.optimizer[0].slots) if own.optimizer else {}
    for stage in range(1, grid.pipeline):
        layout = _layout(blueprint, stage, slots)
        vector = np.zeros(layout.size, np.float32)
        comm.receive(vector, source=stage * grid.data)
        for (kind, _, name), array in zip(
            (n.partition(":") for n in layout.names), layout.unpack(vector).values()
        ):
            if kind:
                state.setdefault(name, {})[kind] = array
            elif name in blueprint.signature.trainable:
                whole.trainable[name] = array
            else:
                whole.frozen[name] = array
    if own.optimizer:
        whole.optimizer = [dataclasses.replace(own.optimizer[0], slots=state), *own.optimizer[1:]]
    return whole


def _layout(blueprint: Blueprint, stage: int, slots: list[str]) -> Layout:
    """What a stage owns: `:name` for parameters, `slot:name` for the optimizer's state."""
    signature = blueprint.signature
    owned = [name for name in blueprint.parameters[stage] if blueprint.owner[name] == stage]
    entries = [(f":{name}", signature.dtypes[name], signature.shapes[name]) for name in owned]
    for slot in slots:
        entries += [
            (f"{slot}:{name}", np.dtype(np.float32), signature.shapes[name])
            for name in owned
            if name in signature.trainable
        ]
    return layout_of([e[0] for e in entries], [e[1] for e in entries], [e[2] for e in entries])


def _flatten(data: CheckpointData) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, value in data.parameters().items():
        if not isinstance(value, NominalTensor):
            found[f":{name}"] = value
    for group in data.optimizer[:1]:
        for name, state in group.slots.items():
            found.update({f"{slot}:{name}": array for slot, array in state.items()})
    return found


def _slot_names(data: CheckpointData) -> list[str]:
    names: dict[str, None] = {}
    for group in data.optimizer[:1]:
        for state in group.slots.values():
            names.update(dict.fromkeys(state))
    return list(names)


class _StageOptimizer(Optimizer):
    """Updates a stage's parameters; the norm is that of all stages' gradients."""

    def __init__(self, uri: ModelFile, module: Module, pipe: Communicator, owned: Sequence[str]) -> None:
        self._pipe, self._owned = pipe, owned
        super().__init__(uri, module)

    def _make_updater(self, uri: ModelFile) -> Updater:
        updater = super()._make_updater(uri)
        if not isinstance(updater, ElementwiseUpdater):
            raise DistributedError(
                "a pipeline needs an optimizer that treats each number alone (AdamW, SGD, …): this one looks at "
                "whole parameters of all stages"
            )
        return updater

    def _norm(self) -> float:
        tensors = self._module.memory.gradients.tensors
        square = np.array([sum(tensors[name].squared_norm() for name in self._owned)], np.float64)
        self._pipe.all_reduce(square)
        return float(np.sqrt(square[0]))


class PipelineParallel:
    """The engine of one rank of a pipeline; all ranks of a pipeline are given the same batches."""

    def __init__(
        self, settings: RunnerSettings, data: CheckpointData, comm: Communicator, grid: Grid
    ) -> None:
        self._settings, self._comm, self._grid = settings, comm, grid
        self._pipe, self._replicas = _groups(grid, settings, comm)
        if settings.shard_optimizer:
            raise DistributedError("shard_optimizer and a pipeline cannot be combined: choose one of them")
        if data.nominal:
            raise OnwardError(
                "The state is nominal: it has no parameter values. Please load the model parameters first."
            )
        self._blueprint = blueprint = draw_blueprint(settings)
        self._base_seed = int(data.extras.setdefault("seed", settings.seed))
        own = set(blueprint.parameters[grid.stage])
        kept = dataclasses.replace(
            data,
            trainable={name: value for name, value in data.trainable.items() if name in own},
            frozen={name: value for name, value in data.frozen.items() if name in own},
            optimizer=list(data.optimizer),
        )
        options, device = session_options(settings), find_device(device_of_rank(settings.device))
        self._step = StageStep(blueprint, grid.stage, device=device, options=options)
        self._state = CheckpointState(kept)
        self.module = Module(
            settings.training_model,
            self._state,
            device=device,
            session_options=options,
            on_nonfinite=settings.on_nonfinite,
            step=self._step,
        )
        owned = [n for n in self._step.signature.trainable if blueprint.owner[n] == grid.stage]
        self.optimizer: Optimizer = _StageOptimizer(settings.optimizer_model, self.module, self._pipe, owned)
        self._order = (list(data.trainable), list(data.frozen))
        self._flow = Flow(self._step, self._pipe, schedule=settings.pipeline_schedule)

    @property
    def input_names(self) -> Sequence[str]:
        """What a batch consists of."""
        return self._step.signature.inputs

    # ---- training ----------------------------------------------------------------------------------

    def backward(
        self, batches: Sequence[Sequence[Any]], *, step: int, failure: Exception | None = None
    ) -> Report:
        """Run every batch through the pipeline; communicates within it, and never raises for one stage alone."""
        report, work = Report(failure=failure), []
        try:
            if failure is None:
                work = [self._cut(batch, step + index) for index, batch in enumerate(batches)]
        except Exception as error:
            report.failure = error
        report.failure = self._differs(report.failure, [key_of(micros) for micros in work])
        if report.failure is not None:
            return report
        self.module.memory.gradients.whole.clear()
        self._step.forget_statistics()
        for micros in work:
            if micros:
                self._take(micros, report)
        self.module.run_state.steps = step + len(batches)
        report.failure, self._flow.failure = self._flow.failure, None
        return report

    def update(self, *, weight: float, invalid: str | None) -> bool:
        """Reduce over copies and over stages that share parameters, and apply; collective."""
        module, settings = self.module, self._settings
        if invalid is not None:
            module.run_state.invalid = invalid
            return module.take_invalid() is None
        self._replicas.all_reduce(module.memory.gradients.whole, compress=settings.compress)
        self._add_shared()
        self._step.commit_statistics()
        self.optimizer.gradient_scale = 1.0 / weight if settings.loss_reduction == "mean" else 1.0
        return self.optimizer.step()

    def _cut(self, batch: Sequence[Any], step: int) -> list[Micro]:
        """The micro-batches of a batch: as many as were asked for, or the next number that divides it."""
        signature = self._step.signature
        feeds, _ = prepare(signature, batch)
        arrays = [feed if isinstance(feed, np.ndarray) else feed.numpy() for feed in feeds]
        check_labels(signature, arrays)
        samples = len(arrays[0]) if arrays[0].ndim else 1
        if samples == 0:
            return []
        wanted = min(self._settings.micro_batches or self._grid.pipeline, samples)
        pieces = next(count for count in range(wanted, 0, -1) if samples % count == 0)
        size = samples // pieces
        micros = []
        for index in range(pieces):
            parts = [
                array[index * size : (index + 1) * size] if array.ndim and len(array) == samples else array
                for array in arrays
            ]
            given = {name: np.ascontiguousarray(part) for name, part in zip(signature.inputs, parts)}
            given[SEED] = np.array([self._seed(step * (wanted + 1) + index)], np.int64)
            total = self._settings.loss_reduction == "sum"
            micros.append(Micro(given, 1.0 if total else weight_of(signature, parts, self._settings)))
        return micros

    def _seed(self, step: int) -> int:
        text = f"{self._base_seed}/{self._grid.replica}/{step}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:7], "little")

    def _differs(self, failure: Exception | None, keys: list[tuple]) -> Exception | None:
        """A failure for all stages if one has one, or if they do not see the same batches."""
        digests = np.zeros(self._pipe.world, np.int64)
        own = int.from_bytes(hashlib.sha256(repr(keys).encode()).digest()[:7], "little")
        digests[self._pipe.rank] = -1 if failure is not None else own
        self._pipe.all_reduce(digests)
        if failure is not None:
            return failure
        if (digests == digests[0]).all():
            return None
        if (digests == -1).any():
            return OtherStageFailed()
        return DistributedError(
            "the stages of a pipeline were given batches of different shapes: shard data by runner.replica of "
            "runner.replicas, not by rank"
        )

    def _take(self, micros: Sequence[Micro], report: Report) -> None:
        """One batch through the pipeline; the last stage reports its loss."""
        for loss, micro in zip(self._flow.run(micros), micros):
            report.loss += loss * micro.weight
            report.weight += micro.weight
            if self._settings.on_nonfinite != "ignore" and not np.isfinite(loss):
                report.invalid = f"the loss is {loss} at training step {self.module.run_state.steps + 1}"
                if self._settings.on_nonfinite == "raise":
                    self._flow.failure = NonFiniteError(f"{report.invalid}; parameters are unchanged")

    def _add_shared(self) -> None:
        """Parameters that several stages have get the sum of the stages' gradients."""
        names = self._blueprint.shared
        if not names:
            return
        shapes = [self._blueprint.signature.shapes[name] for name in names]
        layout = layout_of(names, [np.dtype(np.float32)] * len(names), shapes)
        own = self.module.memory.gradients.tensors
        vector = layout.pack({name: own[name].read() for name in names if name in own})
        self._pipe.all_reduce(vector)
        for name, total in layout.unpack(vector).items():
            if name in own:
                own[name].write(total)

    # ---- evaluation and state ----------------------------------------------------------------------

    def evaluate(self, batches: Iterator[Sequence[Any]]) -> Report:
        """The loss of the evaluation model over batches; communicates within the pipeline."""
        report = Report()
        while True:
            batch, given = None, {}
            try:
                if self._step.evaluation is None:
                    raise ModelError(
                        "Eval model was not provided. Cannot evaluate: give eval_model=….",
                        hint=MAKE_ARTIFACTS,
                    )
                batch = next(batches, None)
                if batch is not None:
                    feeds, _ = prepare(self._step.signature, batch)
                    check_labels(self._step.signature, feeds)
                    given = dict(zip(self._step.signature.inputs, feeds))
            except Exception as error:
                self._flow.failure = error
            state = np.array([self._flow.failure is not None, batch is not None], np.int64)
            self._pipe.all_reduce(state)
            if state[0] == 0 and state[1] not in (0, self._pipe.world):
                self._flow.failure = DistributedError("the stages of a pipeline have different test batches")
            if state[0] or state[1] != self._pipe.world:
                report.failure, self._flow.failure = self._flow.failure, None
                return report
            assert batch is not None
            weight = self._weigh(batch)
            if weight == 0:
                continue
            loss = self._flow.evaluate(given)
            if loss is not None:
                report.loss += loss * weight
                report.weight += weight

    def reconcile(self) -> None:
        """The same statistics and parameters on all copies of a stage; collective."""
        reconcile(self._replicas, self.module.memory, how=self._settings.statistics)

    def gather(self, *, include_optimizer_state: bool) -> CheckpointData | None:
        """The state of all stages on rank 0, None elsewhere; collective."""
        data = gather_state(
            self._comm,
            self._grid,
            self._blueprint,
            self._state.to_data(include_optimizer_state=include_optimizer_state),
        )
        if data is None:
            return None
        trainable, frozen = self._order
        data.trainable = {name: data.trainable[name] for name in trainable if name in data.trainable}
        data.frozen = {name: data.frozen[name] for name in frozen if name in data.frozen}
        if include_optimizer_state:
            data.extras["seed"] = self._base_seed
        return data

    def _weigh(self, batch: Sequence[Any]) -> float:
        if self._settings.loss_reduction == "sum":
            return 1.0 if np.shape(batch[0])[:1] != (0,) else 0.0
        return weight_of(self._step.signature, batch, self._settings)


def _groups(
    grid: Grid, settings: RunnerSettings, comm: Communicator
) -> tuple[TorchCommunicator, Communicator]:
    """This rank's pipeline, and the copies of its stage."""
    import torch.distributed as dist

    span = timedelta(seconds=settings.timeout)
    ranks = np.arange(comm.world).reshape(grid.pipeline, grid.data)
    # every rank makes all groups, in the same order
    nccl = isinstance(comm, TorchCommunicator) and comm.nccl
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    pipe, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=span, backend=backend)
    replicas: Communicator = LocalCommunicator()
    if grid.data > 1:
        group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=span, backend=backend)
        replicas = TorchCommunicator(group, nccl=nccl, timeout=settings.timeout)
    return TorchCommunicator(pipe, nccl=nccl, timeout=settings.timeout), replicas
