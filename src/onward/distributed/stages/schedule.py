"""Runs micro-batches through one stage: by a schedule of torch.distributed.pipelining, or one after the other.

To torch, a stage is a function of one packed vector, in the memory that carries it: a GPU's with NCCL, else the
host's. Sessions read and write it in place. An error in a stage is raised only after the schedule has
finished: the messages that other stages wait for are still sent.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from onward.distributed.errors import OtherStageFailed
from onward.distributed.stages.packing import Layout, layout_of
from onward.runtime.device_tensor import DeviceTensor
from onward.runtime.tensors import HostTensor, Tensor

if TYPE_CHECKING:
    from onward.distributed.comm import TorchCommunicator
    from onward.distributed.stages.models import StageModel, StageStep
    from onward.distributed.stages.schedule import Flow


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
