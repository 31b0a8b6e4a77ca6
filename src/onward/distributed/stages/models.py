"""The models of pipeline stages: forward, vector-Jacobian product, evaluation; made from the artifacts.

A stage's backward pass recomputes its forward pass from what the stage received, so that only these
inputs are stored between the two. `Blueprint` assigns parameters to stages; `StageStep` runs one stage.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from onward import contract
from onward.autodiff.gradient import vector_jacobian
from onward.contract import SEED
from onward.distributed.errors import DistributedError
from onward.graph.dialect.normalize import normalize
from onward.graph.nodes import captured_values
from onward.graph.passes.explicit_state import separate_statistics
from onward.graph.proto.device_forms import expand_batch_norm, prefer_device_forms
from onward.graph.prune import extract, find_value, prune, values_of
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
        # what only passes through a stage is no input of its model
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
        # of the stage alone: no gradient graph of the whole is ever made
        backward, _, _ = vector_jacobian(self.training.model, of=of, wrt=wrt)
        self._backward = self._session(backward)

    def attach(self, memory: ModelMemory) -> None:
        """Give the stage its memory."""
        if memory.parameters.whole.dtype != np.float32:
            raise DistributedError(
                "pipeline stages hand on float32, and the parameters are float64: call model.float() before the "
                "export, or train without stages"
            )
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


# --- Assigns the nodes of a forward graph to pipeline stages, and finds the values that cross the cuts.
#
# By a list of cuts, by a map from names, or balanced by cost. A cut carries every live value: skip connections,
# integers, values for later stages. What depends on parameters alone is computed wherever it is needed.


@dataclasses.dataclass(frozen=True)
class Split:
    """Nodes by stage, and for each stage what it receives from the one before and sends to the next."""

    stage_of: dict[str, int]
    received: list[list[str]]
    sent: list[list[str]]
    stages: int


def split_graph(
    graph: ir.Graph,
    loss: str,
    *,
    stages: int,
    inputs: Iterable[str],
    cuts: Sequence[str | Sequence[str]] | None = None,
    by_name: Mapping[str, int] | None = None,
) -> Split:
    """Assign every node that depends on the inputs of a call to a stage."""
    flow = _Flow(graph, set(inputs))
    main = flow.ancestors([find_value(graph, loss)])
    if cuts is not None:
        chosen = _by_cuts(flow, graph, cuts, main)
    elif by_name is not None:
        chosen = _by_map(flow, by_name, main, stages)
    else:
        chosen = balance(flow, [node for node in flow.nodes if node in main], stages)
    for stage in range(stages):
        if stage not in chosen.values():
            raise DistributedError(f"Stage {stage} was not assigned to any node.")
    for node in flow.nodes:  # what the loss does not need (statistics) stays where its inputs are
        if node not in main:
            chosen[node] = flow.latest(node, chosen)
    return _with_crossings(flow, chosen, stages)


def follow(graph: ir.Graph, split: Split, *, inputs: Iterable[str]) -> Split:
    """Split a related graph (the evaluation model) the same way: values of the same name, the same stage."""
    flow = _Flow(graph, set(inputs))
    chosen: dict[ir.Node, int] = {}
    for node in flow.nodes:
        same_names = [split.stage_of[v.name] for v in node.outputs if v.name in split.stage_of]
        chosen[node] = max([flow.latest(node, chosen), *same_names])
    return _with_crossings(flow, chosen, split.stages)


class _Flow:
    """The nodes of a graph that depend on the inputs of a call, in order, and what they read."""

    def __init__(self, graph: ir.Graph, inputs: set[str]) -> None:
        self.reads: dict[ir.Node, list[ir.Value]] = {}
        depends = {value for value in graph.inputs if value.name in inputs}
        for node in graph:
            read = [value for value in node.inputs if value is not None] + captured_values(node)
            moving = [value for value in read if value in depends]
            if moving:
                self.reads[node] = moving
                depends.update(node.outputs)
        self.nodes = list(self.reads)

    def ancestors(self, values: Iterable[ir.Value]) -> set[ir.Node]:
        """The nodes that some values need."""
        nodes: set[ir.Node] = set()
        waiting = list(values)
        while waiting:
            node = waiting.pop().producer()
            if node is not None and node in self.reads and node not in nodes:
                nodes.add(node)
                waiting += self.reads[node]
        return nodes

    def latest(self, node: ir.Node, chosen: Mapping[ir.Node, int]) -> int:
        """The latest stage that a node reads from."""
        producers = [value.producer() for value in self.reads[node]]
        return max((chosen[node] for node in producers if node is not None and node in chosen), default=0)


def _by_cuts(
    flow: _Flow, graph: ir.Graph, cuts: Sequence[str | Sequence[str]], main: set[ir.Node]
) -> dict[ir.Node, int]:
    values = values_of(graph)
    before: list[set[ir.Node]] = []
    for cut in cuts:
        names = [cut] if isinstance(cut, str) else list(cut)
        for name in names:
            if name not in values or values[name].producer() not in main:
                why = "no value has that name" if name not in values else "the loss does not depend on it"
                raise DistributedError(f"Invalid cut point. '{name}': {why}")
        before.append(flow.ancestors([values[name] for name in names]))
    return {
        node: next((stage for stage, nodes in enumerate(before) if node in nodes), len(cuts))
        for node in flow.nodes
        if node in main
    }


def _by_map(flow: _Flow, by_name: Mapping[str, int], main: set[ir.Node], stages: int) -> dict[ir.Node, int]:
    chosen: dict[ir.Node, int] = {}
    unused = set(by_name)
    for node in flow.nodes:
        if node not in main:
            continue
        names = [name for name in [node.name, *(v.name for v in node.outputs)] if name in by_name]
        unused.difference_update(name for name in names if name is not None)
        least = flow.latest(node, chosen)
        stage = by_name[names[0]] if names and names[0] is not None else least
        if not 0 <= stage < stages:
            raise DistributedError(f"'{names[0]}' is assigned to stage {stage}: stages are 0 to {stages - 1}")
        if stage < least:
            raise DistributedError(
                f"Invalid cut point. '{names[0]}' is assigned to stage {stage} but reads a value of stage {least}"
            )
        chosen[node] = stage
    if unused:
        raise DistributedError(f"Invalid cut point. '{min(unused)}': no node or value has that name")
    return chosen


# How far a balanced cut may move from its ideal place, as a share of a stage, to carry less.
_SLACK = 0.15


def balance(flow: _Flow, nodes: Sequence[ir.Node], stages: int) -> dict[ir.Node, int]:
    """Cut the order of the nodes into stages of about equal cost, each cut where little is alive."""
    if len(nodes) < stages:
        raise DistributedError(
            f"Stage {len(nodes)} was not assigned to any node: the model has {len(nodes)} nodes"
        )
    costs = [cost_of(node) for node in nodes]
    total, reached, prefix = sum(costs), 0.0, []
    for cost in costs:
        reached += cost
        prefix.append(reached)
    alive = _alive_after(flow, nodes)
    ends: list[int] = []
    for cut in range(1, stages):
        first = ends[-1] + 1 if ends else 0
        possible = range(first, len(nodes) - (stages - cut))
        ideal = total * cut / stages
        near = [k for k in possible if abs(prefix[k] - ideal) <= _SLACK * total / stages]
        # close to equal costs, where the least crosses; where no cut is close, cost alone decides
        best = min(near or possible, key=lambda k: (alive[k] if near else 0, abs(prefix[k] - ideal)))
        ends.append(best)
    return {node: sum(position > end for end in ends) for position, node in enumerate(nodes)}


def cost_of(node: ir.Node) -> float:
    """About how many operations a node does; dimensions that are not known count once."""
    # elementwise operators are bound by memory: about what they write
    size = max((_size(value) for value in node.outputs), default=1.0)
    if node.op_type in ("MatMul", "Gemm") and node.inputs[0] is not None:
        shape = node.inputs[0].shape
        across = 0 if node.op_type == "Gemm" and node.attributes.get_int("transA", 0) else -1
        return size * 2 * _dim(shape[across]) if shape is not None and len(shape) else size
    if node.op_type in ("Conv", "ConvTranspose") and node.inputs[1] is not None:
        kernel = node.inputs[1].shape
        return size * 2 * math.prod(_dim(d) for d in kernel[1:]) if kernel is not None else size
    return size


def _alive_after(flow: _Flow, nodes: Sequence[ir.Node]) -> list[float]:
    """The size of what is made up to each node and read after it."""
    position = {node: index for index, node in enumerate(nodes)}
    last: dict[ir.Value, int] = {}
    for node in nodes:
        for value in flow.reads[node]:
            last[value] = position[node]
    change = [0.0] * (len(nodes) + 1)
    for value, end in last.items():
        producer = value.producer()
        if producer in position:
            change[position[producer]] += _size(value)
            change[end] -= _size(value)
    alive, now = [], 0.0
    for step in change[:-1]:
        now += step
        alive.append(now)
    return alive


def _with_crossings(flow: _Flow, chosen: dict[ir.Node, int], stages: int) -> Split:
    until: dict[ir.Value, int] = {}
    for node in flow.nodes:
        for value in flow.reads[node]:
            until[value] = max(until.get(value, 0), chosen[node])
    sent: list[list[str]] = [[] for _ in range(stages)]
    for node in flow.nodes:
        for value in node.outputs:
            # through all stages between: each knows its neighbours only
            for stage in range(chosen[node], until.get(value, -1)):
                if not isinstance(value.type, ir.TensorType):
                    raise DistributedError(
                        f"Invalid cut point. '{value.name}' crosses it and is {value.type}"
                    )
                sent[stage].append(value.name or "")
    return Split(
        stage_of={v.name or "": stage for node, stage in chosen.items() for v in node.outputs if v.name},
        received=[[], *sent[:-1]],
        sent=sent,
        stages=stages,
    )


def _size(value: ir.Value) -> float:
    return math.prod(_dim(d) for d in value.shape) if value.shape is not None else 1.0


def _dim(dim: object) -> float:
    return float(dim) if isinstance(dim, int) and dim > 0 else 1.0


# --- Packs what crosses a cut into one float32 vector: one message for each cut.
#
# Integers and booleans are sent as their bytes; every tensor begins at a multiple of 64 bytes.

_ALIGN = 16


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each tensor is in the vector."""

    names: tuple[str, ...]
    dtypes: tuple[np.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    size: int

    def pack(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """A new vector with these tensors; those that are missing are zero."""
        vector = np.zeros(self.size, np.float32)
        for name, view in self.unpack(vector).items():
            if name in arrays:
                np.copyto(view, arrays[name])
        return vector

    def unpack(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Views of the tensors in a vector."""
        views = {}
        for name, dtype, shape, start in zip(self.names, self.dtypes, self.shapes, self.starts):
            count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            views[name] = vector[start:].view(np.uint8)[:count].view(dtype).reshape(shape)
        return views

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The tensors in a vector of training's memory, on the host or a device."""
        parts = zip(self.names, self.dtypes, self.shapes, self.starts)
        return {name: vector.view(start, shape, dtype) for name, dtype, shape, start in parts}

    def describe(self) -> np.ndarray:
        """Ranks and dimensions as numbers, for a receiver that knows names and types."""
        # the number of dimensions, and room for eight: a receiver must know the size of the message
        table = np.zeros((len(self.names), 9), np.int64)
        for row, shape in zip(table, self.shapes):
            row[0] = len(shape)
            row[1 : 1 + len(shape)] = shape
        return table


def layout_of(names: Sequence[str], dtypes: Sequence[np.dtype], shapes: Sequence[Sequence[int]]) -> Layout:
    """Place tensors one after the other.

    >>> layout = layout_of(["x", "n"], [np.dtype("float32"), np.dtype("int64")], [(2, 3), (1,)])
    >>> layout.unpack(layout.pack({"n": np.array([7])}))["n"]
    array([7])
    """
    starts, end = [], 0
    for dtype, shape in zip(dtypes, shapes):
        starts.append(end)
        floats = -(-int(np.prod(shape, dtype=np.int64)) * dtype.itemsize // 4)
        end += -(-floats // _ALIGN) * _ALIGN
    return Layout(
        tuple(names),
        tuple(dtypes),
        tuple(tuple(map(int, s)) for s in shapes),
        tuple(starts),
        max(end, _ALIGN),
    )
