"""The models of pipeline stages: forward, vector-Jacobian product, evaluation; made from the artifacts.

A stage's backward pass recomputes its forward pass from what the stage received, so that only these
inputs are stored between the two. `Blueprint` assigns parameters to stages; `StageStep` runs one stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from onward import contract
from onward.autodiff.gradient import vector_jacobian
from onward.contract import SEED
from onward.distributed.errors import DistributedError
from onward.distributed.stages.split import Split, follow, split_graph
from onward.graph.dialect.normalize import normalize
from onward.graph.passes.explicit_state import separate_statistics
from onward.graph.proto.device_forms import expand_batch_norm, prefer_device_forms
from onward.graph.prune import extract, prune, values_of
from onward.runtime.bound import inputs_on_host
from onward.runtime.memory import FlatBuffer, ModelMemory, Tensor
from onward.runtime.sessions import make_session, read_model
from onward.runtime.signature import Signature, read_signature

if TYPE_CHECKING:
    from onward.distributed.settings import RunnerSettings
    from onward.runtime.devices import Device


@dataclasses.dataclass(frozen=True)
class StageModel:
    """One stage of a graph: what it is feeds, what it receives and sends (with types), and its model."""

    model: onnx.ModelProto
    received: list[str]
    sent: list[str]
    outputs: list[str]
    types: dict[str, np.dtype]


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """All stages. `parameters` has names by stage; `owner` the one stage that updates a parameter."""

    signature: Signature
    training: list[StageModel]
    evaluation: list[StageModel] | None
    parameters: list[list[str]]
    statistics: list[list[str]]
    owner: dict[str, int]

    @property
    def shared(self) -> list[str]:
        """Trainable parameters that more than one stage has."""
        return [n for n in self.signature.trainable if sum(n in names for names in self.parameters) > 1]

    def signature_of(self, stage: int) -> Signature:
        """The signature of the whole, cut down to a stage's parameters."""
        own = set(self.parameters[stage])
        return dataclasses.replace(
            self.signature,
            parameters=[name for name in self.signature.parameters if name in own],
            trainable=[name for name in self.signature.trainable if name in own],
            statistics=self.statistics[stage],
        )


def draw_blueprint(settings: RunnerSettings) -> Blueprint:
    """Split the training model's forward part, and the evaluation model along with it."""
    stages = settings.pipeline_parallel_size
    path = str(settings.training_model)
    proto = read_model(settings.training_model, "training")
    signature = read_signature(proto, path, "training")
    if signature.input_gradients:
        raise DistributedError(
            f"gradients of inputs ({signature.input_gradients[0]}) cannot be had from a pipeline"
        )
    loss = signature.outputs[0]
    following = [f"{name}{contract.NEXT}" for name in signature.statistics]
    forward = prune(normalize(path), [loss, *following])
    separate_statistics(forward, following)
    forward = prune(forward, [loss, *following])
    inputs = [*signature.inputs, SEED]
    split = split_graph(
        forward.graph, loss, stages=stages, inputs=inputs, cuts=settings.cuts, by_name=settings.stages
    )
    statistics = _statistics_by_stage(forward, signature, split)
    results = [[f"{name}{contract.NEXT}" for name in names] for names in statistics]
    results[-1] = [loss, *results[-1]]
    training = _stage_models(forward, split, results)
    evaluation = None
    if settings.eval_model is not None:
        whole = prune(normalize(str(settings.eval_model)), [loss])
        final: list[list[str]] = [[] for _ in range(stages - 1)]
        evaluation = _stage_models(whole, follow(whole.graph, split, inputs=inputs), [*final, [loss]])
    parameters = _parameters_by_stage(signature, training, evaluation)
    owner = {name: s for s in reversed(range(stages)) for name in parameters[s]}
    owner |= {name: stage for stage, names in enumerate(statistics) for name in names}
    return Blueprint(signature, training, evaluation, parameters, statistics, owner)


def _stage_models(model: ir.Model, split: Split, results: Sequence[Sequence[str]]) -> list[StageModel]:
    values = values_of(model.graph)
    models = []
    for stage in range(split.stages):
        received, sent = split.received[stage], split.sent[stage]
        outputs = [*results[stage], *(name for name in sent if name not in received)]
        # an evaluation stage may have nothing to do but to pass on what it received
        part = ir.to_proto(extract(model, inputs=received, outputs=outputs)) if outputs else onnx.ModelProto()
        types = {name: values[name].dtype for name in [*received, *sent]}
        for name, kind in types.items():
            if kind is None:
                raise DistributedError(f"Invalid cut point. '{name}' crosses it and its type is not known")
        models.append(
            StageModel(
                part,
                received,
                sent,
                outputs,
                {name: np.dtype(kind.numpy()) for name, kind in types.items() if kind is not None},
            )
        )
    return models


def _statistics_by_stage(forward: ir.Model, signature: Signature, split: Split) -> list[list[str]]:
    by_stage: list[list[str]] = [[] for _ in range(split.stages)]
    for name in signature.statistics:
        by_stage[split.stage_of[f"{name}{contract.NEXT}"]].append(name)
    return by_stage


def _parameters_by_stage(
    signature: Signature, training: Sequence[StageModel], evaluation: Sequence[StageModel] | None
) -> list[list[str]]:
    read: list[set[str]] = [set() for _ in training]
    for models in (training, evaluation or ()):
        for names, stage in zip(read, models):
            names.update(value.name for value in stage.model.graph.input)
    unread = set(signature.parameters).difference(*read)
    # what no stage reads must still be in checkpoints
    read[0] |= unread
    return [[name for name in signature.parameters if name in names] for names in read]


# What a stage reads of a micro-batch: arrays, or tensors where the stage before put them.
Feeds = Mapping[str, np.ndarray | Tensor]


class StageStep:
    """Runs one stage; `Module` sees it as the step of a model that has this stage's parameters."""

    def __init__(
        self, blueprint: Blueprint, stage: int, *, device: Device, options: ort.SessionOptions | None
    ) -> None:
        self.signature = blueprint.signature_of(stage)
        self._options = options
        self.device = device
        self.training = blueprint.training[stage]
        self.evaluation = None if blueprint.evaluation is None else blueprint.evaluation[stage]
        self.last = stage == len(blueprint.training) - 1
        self.loss = blueprint.signature.outputs[0]  # its name
        self.loss_shape: tuple[int, ...] = ()
        self._eval_session: ort.InferenceSession | None = None
        self._forward = self._session(self.training.model)
        own = {value.name for value in self.training.model.graph.input}
        floating = [n for n in self.training.received if self.training.types[n].kind == "f" and n in own]
        wrt = [*(name for name in self.signature.trainable if name in own), *floating]
        of = [self.loss] if self.last else []
        of += [
            n
            for n in self.training.outputs
            if n in self.training.types and self.training.types[n].kind == "f"
        ]
        self._wrt = wrt
        backward, _, _ = vector_jacobian(self.training.model, of=of, wrt=wrt)
        self._backward = self._session(backward)

    def attach(self, memory: ModelMemory) -> None:
        """Give the stage its memory."""
        self._memory = memory
        # where one micro-batch's gradients land, and the statistics after it
        self._gradients = FlatBuffer(memory.gradients.shapes, device=self.device)
        self._next = [
            FlatBuffer(part.shapes, device=self.device, dtype=part.whole.dtype) for part in memory.following
        ]
        self.forget_statistics()

    def run(self, feeds: list[Any], *, reset: bool, seed: int, step: int) -> list[np.ndarray]:
        """Not for a stage alone: micro-batches flow through all of them."""
        raise DistributedError("a stage of a pipeline trains with the others: use TrainingRunner")

    def gradients_changed(self) -> None:
        """Nothing to note: a stage adds to whatever its gradients hold."""

    def forget_statistics(self) -> None:
        """Begin again from the statistics that were committed."""
        for following, committed in zip(self._memory.following, self._memory.statistics):
            following.whole.copy_from(committed.whole)

    def commit_statistics(self) -> None:
        """Take over the statistics that the micro-batches since then have computed."""
        self._memory.commit()

    def forward(
        self, feeds: Feeds, *, into: Mapping[str, Tensor] | None = None, move: bool = True
    ) -> dict[str, np.ndarray]:
        """What the stage makes of a micro-batch (with the loss, if it is the last); statistics move on.

        What `into` has a place for is written there, also what only passes through; the rest comes back.
        """
        into = into or {}
        after = {
            f"{name}{contract.NEXT}": tensor for part in self._next for name, tensor in part.tensors.items()
        }
        results = self._run(self._forward, self.training.outputs, feeds, into={**after, **into})
        for name, tensor in into.items():
            if name not in self.training.outputs:
                _take_over(tensor, feeds[name])
        if self.last:
            self.loss_shape = results[self.loss].shape
        if move:
            for following, new in zip(self._memory.following, self._next):
                following.whole.copy_from(new.whole)
        return results

    def backward(self, feeds: Feeds, cotangents: Feeds, *, into: Mapping[str, Tensor]) -> None:
        """Add a micro-batch's gradients to the stage's; those of what the stage received are written `into`."""
        feeds = {**feeds, **{f"{name}_cotangent": value for name, value in cotangents.items()}}
        own = {f"{name}_grad": tensor for name, tensor in self._gradients.tensors.items()}
        passed = {f"{name}_grad": tensor for name, tensor in into.items() if name in self._wrt}
        self._run(self._backward, [f"{name}_grad" for name in self._wrt], feeds, into={**own, **passed})
        self._memory.gradients.whole.add(self._gradients.whole)
        for name in self.training.sent:  # what only passes through: its gradient does, too
            if name in self.training.received and self.training.types[name].kind == "f":
                if f"{name}_grad" not in passed:
                    _take_over(into[name], cotangents[name])
                else:
                    into[name].write(into[name].read() + _read(cotangents[name]))

    def evaluate(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """The evaluation model's part of this stage."""
        assert self.evaluation is not None
        if not self.evaluation.outputs:
            return {}
        if self._eval_session is None:
            self._eval_session = self._session(self.evaluation.model)
        return self._run(self._eval_session, self.evaluation.outputs, feeds, state=self._memory.tensors())

    def _session(self, model: onnx.ModelProto) -> ort.InferenceSession:
        if self.device.memory == "device":
            expand_batch_norm(model)
            prefer_device_forms(model)
        return make_session(model, device=self.device, options=self._options, what="pipeline stage")

    def _run(
        self,
        session: ort.InferenceSession,
        names: Sequence[str],
        feeds: Feeds,
        *,
        state: Mapping[str, Tensor] | None = None,
        into: Mapping[str, Tensor] | None = None,
    ) -> dict[str, np.ndarray]:
        """Run over the stage's memory, where it lies; what is not to land there comes back."""
        state = state or {**self._memory.tensors(), **self._memory.following_tensors()}
        landing = {name: tensor for name, tensor in (into or {}).items() if name in names}
        returned = [name for name in names if name not in landing]
        if not names:
            return {}
        binding: Any = session.io_binding()
        on_host = inputs_on_host(session, self.device)
        for value in session.get_inputs():
            name = value.name
            source = feeds.get(name, state.get(name))
            if source is None:
                raise DistributedError(f"the stage needs '{name}', which nothing gives it")
            if isinstance(source, np.ndarray) or name in on_host:
                binding.bind_cpu_input(name, np.asarray(_read(source), order="C"))
            else:
                source.bind_input(binding, name)
        for name, tensor in landing.items():
            tensor.bind_output(binding, name)
        for name in returned:
            binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding)
        values = binding.get_outputs()[len(landing) :]
        return {name: value.numpy() for name, value in zip(returned, values)}


def _take_over(target: Tensor, source: np.ndarray | Tensor) -> None:
    if isinstance(source, np.ndarray):
        target.write(source)
    else:
        target.copy_from(source)


def _read(value: np.ndarray | Tensor) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else value.read()
