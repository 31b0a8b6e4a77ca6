"""Pipeline parallel: every rank has one stage of the model, and micro-batches flow through the stages.

torch.distributed.pipelining does the scheduling (GPipe, 1F1B). To it, a stage is a function of one vector:
everything that crosses a cut is packed into it. Replicas of the pipeline train data parallel.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnxruntime as ort
import torch

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
from onward.distributed.stages.models import Layout, StageModel, StageStep, draw_blueprint, layout_of
from onward.errors import MAKE_ARTIFACTS, ModelError, NonFiniteError
from onward.ort_session import array_of
from onward.runtime.device_tensor import DeviceTensor
from onward.runtime.devices import find_device
from onward.runtime.optimizers.updater import ElementwiseUpdater
from onward.runtime.tensors import HostTensor, Tensor
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
            # the same seed forward and in the recomputation of the backward pass: dropout must be the same
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


# --- Runs micro-batches through one stage: by a schedule of torch.distributed.pipelining, or one after the other.
#
# To torch, a stage is a function of one packed vector, in the memory that carries it: a GPU's with NCCL, else the
# host's. Sessions read and write it in place. An error in a stage is raised only after the schedule has
# finished: the messages that other stages wait for are still sent.


class _Run(torch.autograd.Function):
    """Forward and backward by the flow; the anchor makes torch ask for a gradient of the first stage."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, received: torch.Tensor, index: int, flow: Flow
    ) -> torch.Tensor:
        ctx.received, ctx.index, ctx.flow = received.detach().reshape(-1), index, flow
        return flow.run_forward(ctx.received, index)

    @staticmethod
    def backward(ctx: Any, *arriving: torch.Tensor) -> tuple:
        passed = ctx.flow.run_backward(ctx.received, ctx.index, arriving[0].contiguous().reshape(-1))
        return None, passed if ctx.needs_input_grad[1] else None, None, None


class _Stage(torch.nn.Module):
    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self._flow = flow
        self.anchor = torch.nn.Parameter(torch.zeros(1))

    def forward(self, received: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return _Run.apply(self.anchor, received, int(index[0]), self._flow)  # type: ignore[return-value]


def make_stage_module(flow: Flow) -> torch.nn.Module:
    """The stage of a flow, for `torch.distributed.pipelining.PipelineStage`."""
    return _Stage(flow)


Arrays = dict[str, np.ndarray]


@dataclasses.dataclass
class Micro:
    """A micro-batch on its way: its inputs of the model, and how much it counts."""

    inputs: Arrays
    weight: float


def key_of(micros: Sequence[Micro]) -> tuple:
    """What a schedule is made for: how many micro-batches, of which shapes."""
    if not micros:
        return (0,)
    return len(micros), tuple((name, array.shape) for name, array in micros[0].inputs.items())


class Flow:
    """Runs the micro-batches of one stage, and sends and receives what crosses its cuts."""

    def __init__(
        self, step: StageStep, pipe: TorchCommunicator, *, schedule: Literal["1f1b", "gpipe"]
    ) -> None:
        self._step, self._pipe, self._kind = step, pipe, schedule
        self._schedules: dict[tuple, tuple[Any, Layout, Layout]] = {}
        self._micros: Sequence[Micro] = []
        self._losses: dict[int, float] = {}
        self._incoming = self._outgoing = layout_of([], [], [])
        device = step.device
        # messages go from a device's memory to another's where NCCL carries them, else by way of the host
        self._in_place = device.memory == "device" and (pipe.nccl or device.kind == "cpu")
        on_gpu = self._in_place and device.kind == "cuda"
        self._place = torch.device("cuda", device.number) if on_gpu else torch.device("cpu")
        self.failure: Exception | None = None

    def run(self, micros: Sequence[Micro]) -> list[float]:
        """Forward and backward of a batch; the losses of its micro-batches on the last stage, else nothing."""
        self._micros, self._losses = micros, {}
        key = key_of(micros)
        if key not in self._schedules:
            layouts = self._probe(micros[0])
            if layouts is None:
                return []
            self._schedules[key] = (self._make_schedule(len(micros), *layouts), *layouts)
        schedule, self._incoming, self._outgoing = self._schedules[key]
        first = (torch.zeros(len(micros), 1, device=self._place),) if self._pipe.rank == 0 else ()
        weights = torch.tensor([micro.weight for micro in micros], dtype=torch.float32, device=self._place)
        last: dict[str, Any] = {"target": weights} if self._step.last else {}
        # newer versions of torch would gather the last stage's outputs
        if "return_outputs" in inspect.signature(schedule.step).parameters:
            last["return_outputs"] = False
        with self._pipe.explained("pipeline"):
            schedule.step(*first, index=torch.arange(len(micros)), **last)
        if not self._step.last or self.failure is not None:
            return []
        return [self._losses[index] for index in range(len(micros))]

    def evaluate(self, inputs: Arrays) -> float | None:
        """A batch through the evaluation model; the loss on the last stage."""
        model = self._step.evaluation
        assert model is not None
        _, received = self._receive(model)
        layout: Layout | None = None
        outputs: Arrays = {}
        try:
            if received is not None:
                outputs = {**received, **self._step.evaluate({**received, **inputs})}
                layout = _layout(model, outputs)
        except Exception as error:
            self.failure = error
        self._send(model, layout, outputs)
        return float(np.reshape(outputs[self._step.loss], -1)[0]) if self._step.last and outputs else None

    def _make_schedule(self, count: int, incoming: Layout, outgoing: Layout) -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        first = self._pipe.rank == 0
        size = 1 if self._step.last else outgoing.size
        place: dict[str, Any] = {"device": self._place}
        received = (
            torch.zeros(1, 1, **place) if first else torch.zeros(incoming.size, requires_grad=True, **place)
        )
        sent = torch.zeros(size, requires_grad=True, **place)
        static: dict[str, Any] = {"input_args": (received,), "output_args": (sent,)}
        if "output_grads" in PipelineStage.__init__.__code__.co_varnames:  # newer ones want those, too
            static["output_grads"] = () if self._step.last else (self._vector(size),)
            static["input_grads"] = (None,) if first else (self._vector(incoming.size),)
        stage = PipelineStage(
            make_stage_module(self).to(self._place),
            self._pipe.rank,
            self._pipe.world,
            self._place,
            group=self._pipe.group,
            **static,
        )
        # 1F1B needs as many micro-batches as stages
        steady = self._kind == "1f1b" and count >= self._pipe.world
        return (Schedule1F1B if steady else ScheduleGPipe)(
            # the loss is weighted already: torch would divide by the number of micro-batches
            stage,
            count,
            loss_fn=lambda output, target: (output * target).sum(),
            scale_grads=False,
        )

    # called by the schedule, through autograd: a failure must not stop the messages that others wait for

    def run_forward(self, received: torch.Tensor, index: int) -> torch.Tensor:
        """A micro-batch forward: the packed vector for the next stage, or the loss."""
        packed = self._vector(1 if self._step.last else self._outgoing.size)
        try:
            if self.failure is None:
                feeds = {**self._incoming.views(self._memory(received)), **self._micros[index].inputs}
                into = {} if self._step.last else self._outgoing.views(self._memory(packed))
                outputs = self._step.forward(feeds, into=into)
                if self._step.last:
                    loss = float(np.reshape(outputs[self._step.loss], -1)[0])
                    # a mean over nothing (all labels ignored) is not a number, and counts nothing
                    self._losses[index] = loss if self._micros[index].weight else 0.0
                    packed.fill_(self._losses[index])
        except Exception as error:
            self.failure = error
            packed.zero_()
        return packed

    def run_backward(self, received: torch.Tensor, index: int, arriving: torch.Tensor) -> torch.Tensor:
        """A micro-batch backward: the packed gradient for the stage before."""
        passed = self._vector(self._incoming.size)
        try:
            if self.failure is None and self._micros[index].weight:
                feeds = {**self._incoming.views(self._memory(received)), **self._micros[index].inputs}
                cotangents: dict[str, Any] = {}
                if self._step.last:
                    shape = self._step.loss_shape
                    cotangents = {self._step.loss: np.full(shape, float(arriving[0]), np.float32)}
                else:
                    cotangents = dict(self._outgoing.views(self._memory(arriving)))
                self._step.backward(feeds, cotangents, into=self._incoming.views(self._memory(passed)))
        except Exception as error:
            self.failure = error
            passed.zero_()
        return passed

    def _vector(self, size: int) -> torch.Tensor:
        return torch.zeros(size, device=self._place)

    def _memory(self, vector: torch.Tensor) -> Tensor:
        """The memory of a vector of torch's, for sessions to read and write in place."""
        if not self._in_place:
            return HostTensor(vector.numpy())
        if vector.is_cuda:  # what torch does with it has to be done
            torch.cuda.current_stream(vector.device).synchronize()
        device = self._step.device
        return DeviceTensor(device, vector, vector.data_ptr(), tuple(vector.shape), np.dtype(np.float32))

    def _probe(self, micro: Micro) -> tuple[Layout, Layout] | None:
        """Learn the shapes that cross the cuts by one forward pass; None where a stage failed."""
        incoming, received = self._receive(self._step.training)
        outgoing: Layout | None = None
        outputs: Arrays = {}
        if received is not None:
            try:
                outputs = {**received, **self._step.forward({**received, **micro.inputs}, move=False)}
                outgoing = _layout(self._step.training, outputs)
            except Exception as error:
                self.failure = error
        else:
            self.failure = OtherStageFailed()
        self._send(self._step.training, outgoing, outputs)
        failed = np.array([self.failure is not None], np.int64)
        self._pipe.all_reduce(failed)
        if failed[0] and self.failure is None:
            self.failure = OtherStageFailed()
        return None if outgoing is None or failed[0] else (incoming, outgoing)

    def _receive(self, model: StageModel) -> tuple[Layout, Arrays | None]:
        """What the stage before sends: first its shapes, then the packed vector."""
        stage = self._pipe.rank
        if stage == 0:
            return layout_of([], [], []), {}
        table = np.zeros((max(1, len(model.received)), 9), np.int64)
        self._pipe.receive(table, source=stage - 1)
        if table[0, 0] < 0:
            return layout_of([], [], []), None
        shapes = [tuple(row[1 : 1 + row[0]].tolist()) for row in table[: len(model.received)]]
        layout = layout_of(model.received, [model.types[name] for name in model.received], shapes)
        vector = np.zeros(layout.size, np.float32)
        self._pipe.receive(vector, source=stage - 1)
        return layout, layout.unpack(vector)

    def _send(self, model: StageModel, layout: Layout | None, outputs: Mapping[str, np.ndarray]) -> None:
        stage = self._pipe.rank
        if stage == self._pipe.world - 1:
            return
        table = np.full((max(1, len(model.sent)), 9), -1, np.int64)
        if layout is not None:
            table[: len(model.sent)] = layout.describe()
        self._pipe.send(table, to=stage + 1)
        if layout is not None:
            self._pipe.send(layout.pack(outputs), to=stage + 1)


def _layout(model: StageModel, outputs: Mapping[str, np.ndarray]) -> Layout:
    names = model.sent
    return layout_of(names, [model.types[name] for name in names], [outputs[name].shape for name in names])
