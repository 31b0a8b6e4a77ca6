"""Pipeline parallel: every rank has one stage of the model, and micro-batches flow through the stages.

torch.distributed.pipelining does the scheduling (GPipe, 1F1B). To it, a stage is a function of one vector:
everything that crosses a cut is packed into it. Replicas of the pipeline train data parallel.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from onward.api.convert_inputs import check_labels, prepare
from onward.api.module import Module
from onward.api.optimizer import Optimizer
from onward.api.state import CheckpointState
from onward.checkpoint import codec
from onward.contract import SEED
from onward.distributed.agreement import encode_state, receive_bytes, send_bytes
from onward.distributed.comm import Communicator, LocalCommunicator, TorchCommunicator
from onward.distributed.errors import DistributedError, OtherStageFailed
from onward.distributed.rank_engine import RankEngine, reconcile, weight_of
from onward.distributed.stages.models import StageStep, draw_blueprint
from onward.distributed.stages.packing import layout_of
from onward.distributed.stages.schedule import Flow, Micro, key_of
from onward.errors import MAKE_ARTIFACTS, ModelError, NonFiniteError
from onward.ort_session import array_of
from onward.runtime.devices import find_device
from onward.runtime.optimizers.updater import ElementwiseUpdater
from onward.train.engines import Engine, Evaluated, Report

if TYPE_CHECKING:
    from onward.checkpoint.content import CheckpointData
    from onward.distributed.settings import Grid, RunnerSettings
    from onward.runtime.optimizers.updater import Updater
    from onward.runtime.sessions import ModelFile
    from onward.train.engines import EngineSettings
    from onward.train.window import Window


def gather_state(
    comm: Communicator, grid: Grid, owner: Mapping[str, int], own: CheckpointData
) -> CheckpointData | None:
    """What all stages have, on rank 0; None elsewhere. `own` is the state of this rank's stage.

    A parameter that several stages have comes from its `owner`.
    """
    if grid.replica != 0:
        return None
    if grid.stage != 0:
        part = _select(own, {name for name, stage in owner.items() if stage == grid.stage})
        send_bytes(comm, encode_state(part), to=0)
        return None
    whole = dataclasses.replace(own, trainable=dict(own.trainable), frozen=dict(own.frozen))
    slots = [dict(group.slots) for group in own.optimizer]
    for stage in range(1, grid.pipeline):
        part = codec.decode(receive_bytes(comm, source=stage * grid.data))
        whole.trainable |= part.trainable
        whole.frozen |= part.frozen
        for own_slots, group in zip(slots, part.optimizer):
            own_slots |= group.slots
    whole.optimizer = [dataclasses.replace(group, slots=state) for group, state in zip(own.optimizer, slots)]
    return whole


def _select(data: CheckpointData, names: Collection[str]) -> CheckpointData:
    """A state with the parameters of these names only, and their optimizer state."""
    return dataclasses.replace(
        data,
        trainable={name: value for name, value in data.trainable.items() if name in names},
        frozen={name: value for name, value in data.frozen.items() if name in names},
        optimizer=[
            dataclasses.replace(group, slots={n: s for n, s in group.slots.items() if n in names})
            for group in data.optimizer
        ],
    )


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


class PipelineParallel(RankEngine, Engine):
    """The engine of one rank of a pipeline; all ranks of a pipeline are given the same batches."""

    def __init__(
        self,
        data: CheckpointData,
        engine_settings: EngineSettings,
        settings: RunnerSettings,
        comm: Communicator,
        grid: Grid,
    ) -> None:
        self._settings, self._comm, self._grid = settings, comm, grid
        self.rank, self.world, self.replica, self.replicas = comm.rank, comm.world, grid.replica, grid.data
        self.sums_loss = settings.loss_reduction == "sum"
        self._pipe, self._replicas = _groups(grid, settings, comm)
        if settings.shard_optimizer:
            raise DistributedError("shard_optimizer and a pipeline cannot be combined: choose one of them")
        data.require_values()
        self._blueprint = blueprint = draw_blueprint(settings)
        seed = engine_settings.seed
        self._base_seed = int(data.extras.get("seed", 0)) if seed is None else seed
        own = _select(data, blueprint.parameters[grid.stage])
        device = find_device(engine_settings.device)
        self._step = StageStep(
            blueprint,
            grid.stage,
            device=device,
            options=engine_settings.session_options or ort.SessionOptions(),
        )
        self.state = CheckpointState(own)
        self.module = Module(
            settings.training_model,
            self.state,
            device=device,
            session_options=engine_settings.session_options,
            on_nonfinite=settings.on_nonfinite,
            seed=seed,
            step=self._step,
        )
        owned = [n for n in self._step.signature.trainable if blueprint.owner[n] == grid.stage]
        self.optimizer: Optimizer = _StageOptimizer(settings.optimizer_model, self.module, self._pipe, owned)
        if engine_settings.clip_norm is not None:
            self.optimizer.clip_norm = engine_settings.clip_norm
        self._order = (list(data.trainable), list(data.frozen))
        self._flow = Flow(self._step, self._pipe, schedule=settings.pipeline_schedule)

    # ---- training ----------------------------------------------------------------------------------

    def backward(self, window: Window) -> Report:
        """Run every batch through the pipeline; communicates within it, and never raises for one stage alone."""
        report, work = Report(), []
        try:
            # all of the window before the first: its stages must agree on its batches before they exchange any
            work = [self._cut(batch, window.number) for batch in window]
        except Exception as error:
            report.failure = error
        report.failure = self._differs(report.failure, [key_of(micros) for micros in work])
        if report.failure is not None:
            return report
        self.module.memory.gradients.whole.clear()
        self._step.forget_statistics()
        for micros in work:
            if micros:
                self._take(micros, window, report)
        self.module.run_state.steps = window.end
        report.failure, self._flow.failure = self._flow.failure, None
        return report

    def update(self, *, weight: float, unit: float, invalid: str | None) -> bool:
        """Reduce over copies and over stages that share parameters, and apply; collective."""
        module, settings = self.module, self._settings
        if invalid is not None:
            module.run_state.invalid = invalid
            return module.take_invalid() is None
        self._replicas.all_reduce(module.memory.gradients.whole, compress=settings.compress)
        self._add_shared()
        self._step.commit_statistics()
        # micro-batches went backward times their weight: the gradients are sums, whatever the unit
        self.optimizer.gradient_scale = 1.0 if self.sums_loss else 1.0 / weight
        return self.optimizer.step()

    def _cut(self, batch: Sequence[Any], step: int) -> list[Micro]:
        """The micro-batches of a batch: as many as were asked for, or the next number that divides it."""
        signature = self._step.signature
        feeds, _ = prepare(signature, batch)
        arrays = [array_of(feed) for feed in feeds]
        check_labels(signature, arrays)
        samples = len(arrays[0]) if arrays[0].ndim else 1
        if samples == 0:
            return []
        most = min(self._settings.micro_batches or self._grid.pipeline, samples)
        # equal pieces: the schedule has one shape for all micro-batches
        pieces = next(count for count in range(most, 0, -1) if samples % count == 0)
        size = samples // pieces
        micros = []
        for index in range(pieces):
            parts = [
                array[index * size : (index + 1) * size] if array.ndim and len(array) == samples else array
                for array in arrays
            ]
            inputs = {name: np.ascontiguousarray(part) for name, part in zip(signature.inputs, parts)}
            inputs[SEED] = np.array([self._seed(step * (most + 1) + index)], np.int64)
            micros.append(
                Micro(inputs, 1.0 if self.sums_loss else weight_of(signature, parts, self._settings))
            )
        return micros

    def _seed(self, step: int) -> int:
        text = f"{self._base_seed}/{self._grid.replica}/{step}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:7], "little")

    def _differs(self, failure: Exception | None, keys: list[tuple]) -> Exception | None:
        """A failure for all stages if one has one, or if they do not see the same batches."""
        digests = np.zeros(self._pipe.world, np.int64)
        # seven bytes: never −1, which says that a stage has failed
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

    def _take(self, micros: Sequence[Micro], window: Window, report: Report) -> None:
        """One batch through the pipeline; the last stage reports its loss."""
        for loss, micro in zip(self._flow.run(micros), micros):
            window.add(loss, micro.weight)
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

    def evaluate(self, batches: Iterable[Sequence[Any]], *, tables: bool) -> Evaluated:
        """The loss of the evaluation model over batches; communicates within the pipeline."""
        report, stream = Evaluated(), iter(batches)
        while True:
            batch, inputs = None, {}
            try:
                if tables:
                    raise DistributedError(
                        "metrics need the model's outputs, and a pipeline evaluates the loss alone: leave out metrics, "
                        "or train without stages"
                    )
                if self._step.evaluation is None:
                    raise ModelError(
                        "Eval model was not provided. Cannot evaluate: give eval_model=….",
                        hint=MAKE_ARTIFACTS,
                    )
                batch = next(stream, None)
                if batch is not None:
                    feeds, _ = prepare(self._step.signature, batch)
                    check_labels(self._step.signature, feeds)
                    # parts of a batch are cut out and sent as numpy
                    arrays = [array_of(feed) for feed in feeds]
                    inputs = dict(zip(self._step.signature.inputs, arrays))
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
            loss = self._flow.evaluate(inputs)
            if loss is not None:
                report.loss += loss * weight
                report.weight += weight

    def reconcile(self) -> None:
        """The same statistics and parameters on all copies of a stage; collective."""
        reconcile(self._replicas, self.module.memory, how=self._settings.statistics)

    def gather(self, *, include_optimizer_state: bool) -> CheckpointData | None:
        own = self.state.to_data(include_optimizer_state=include_optimizer_state)
        data = gather_state(self._comm, self._grid, self._blueprint.owner, own)
        if data is None:
            return None
        trainable, frozen = self._order
        data.trainable = {name: data.trainable[name] for name in trainable if name in data.trainable}
        data.frozen = {name: data.frozen[name] for name in frozen if name in data.frozen}
        if include_optimizer_state:
            data.extras["seed"] = self._base_seed
        return data

    def _weigh(self, batch: Sequence[Any]) -> float:
        if self.sums_loss:
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
