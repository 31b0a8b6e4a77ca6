"""Builds the training graph and the evaluation graph from a forward model with a loss.

The inputs of the training graph are the user's, the labels, every parameter, a gradient buffer for each trainable,
a flag that says whether gradients are accumulated or overwritten, and a seed where the model is random. Its outputs
are the loss, the additional outputs, the gradients, and the next value of each batch-norm statistic and of each other
buffer that the model's forward pass changes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onward import contract
from onward.autodiff.engine import DifferentiableBuilder
from onward.autodiff.gradient import add_gradients, untrainable
from onward.autodiff.prepare import fuse_gelu
from onward.autodiff.recompute.segments import Recompute, recompute_activations
from onward.contract import BUFFER, FIRST_SCALE, LOSS_SCALE, OUT, RESET, SEED
from onward.errors import ModelError
from onward.graph.nodes import is_differentiable
from onward.graph.passes.explicit_state import Statistic, make_random_explicit, make_statistics_explicit
from onward.graph.passes.finish import finish, order_gradients
from onward.graph.passes.inference_mode import to_inference
from onward.graph.passes.precision import Precision, lower_precision
from onward.graph.prune import find_value, values_of
from onward.model_metadata import producer, read_names


@dataclasses.dataclass
class TrainingGraphs:
    """The step, its evaluation, and the values that both read as inputs."""

    training: ir.Model
    evaluation: ir.Model
    trainable: dict[str, ir.TensorProtocol]
    frozen: dict[str, ir.TensorProtocol]


def build_training_graphs(
    model: ir.Model,
    loss: str,
    *,
    trainable: Sequence[str],
    frozen: Sequence[str] = (),
    outputs: Sequence[str] = (),
    recompute: Recompute = None,
    precision: Precision = "fp32",
) -> TrainingGraphs:
    """Differentiate `loss` with respect to the trainables; takes over `model`, which must be in the dialect."""
    graph = model.graph
    _refuse_reserved(graph, [loss, *outputs])
    results = [value.name or "" for value in plain_outputs(model) if value.name != loss]
    state = _moved_state(model)
    _choose_outputs(graph, [loss, *outputs])
    _check_loss(find_value(graph, loss))
    trained = set(trainable)
    frozen_names = {*frozen, *(name for name in [*_statistics(graph), *state] if name not in trained)}
    frozen = [name for name in graph.initializers if name in frozen_names]
    order = [name for name in graph.initializers if name in trained or name in frozen_names]
    tensors = {name: _tensor(graph.initializers[name]) for name in order}
    # read while the loss operators are still there: gradients write them out
    labels = _label_ranges(graph)
    # before gradients are added: it shares nothing with the step but the parameters' names
    evaluation = model.clone()
    _turn_into_inputs(evaluation.graph, order)
    differentiated = [name for name in order if name in trained]
    differentiated += [
        value.name or "" for value in graph.inputs if value.name in trained
    ]  # gradients of inputs
    scale = _build_step(model, loss, differentiated, order, recompute, precision, state)
    if scale is not None:  # state that checkpoints keep, like what is frozen
        # 2¹⁶ as in torch: too large at first, and halved until it fits
        tensors[scale] = ir.tensor(np.full(1, FIRST_SCALE, np.float32), name=scale)
        order, frozen = [*order, scale], [*frozen, scale]
    about = {
        contract.VERSION: producer()[1],
        contract.LOSS: loss,
        contract.OUTPUTS: json.dumps(results),
        contract.TRAINABLE: json.dumps([name for name in order if name in trained]),
        contract.FROZEN: json.dumps(frozen),
        contract.LABELS: json.dumps(labels),
    }
    for built, role in ((model, "training"), (evaluation, "eval")):
        built.producer_name, built.producer_version = producer()
        built.metadata_props.update({**about, contract.ROLE: role})
    finish(model)
    order_gradients(model.graph, flag=RESET)
    _finish_evaluation(evaluation, results)
    _spell_out_inference(evaluation.graph)
    identity = _identity(model)
    for built in (model, evaluation):
        built.metadata_props[contract.ARTIFACTS] = identity
    return TrainingGraphs(
        training=model,
        evaluation=evaluation,
        trainable={name: tensors[name] for name in order if name in trained},
        frozen={name: tensors[name] for name in order if name not in trained},
    )


_DRAWS = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
)


def _finish_evaluation(model: ir.Model, results: Sequence[str]) -> None:
    """Turn it to inference and tidy up; what the forward model's own outputs need stays: exports may ask for them."""
    graph = model.graph
    requested = list(graph.outputs)
    values = {output.name: output for node in graph for output in node.outputs}
    graph.outputs.extend(values[name] for name in results if name in values and values[name] not in requested)
    # Dropout stays visible: users look for it
    # onnxruntime removes it when it loads the file
    to_inference(model, keep_dropout=True)
    finish(model)
    while len(graph.outputs) > len(requested):  # a slice that is deleted leaves its values marked as outputs
        graph.outputs.pop()
    drawing = [node for node in graph if node.op_type in _DRAWS]
    if drawing:
        warnings.warn(
            f"the eval model draws random numbers too ({drawing[0].op_type} '{drawing[0].name}'): the forward model "
            "says what training does, not what eval mode would do instead. To deploy, export the module for inference",
            stacklevel=2,
        )


def _refuse_reserved(graph: ir.Graph, outputs: Sequence[str]) -> None:
    """Names that training models give to what they add must be free; so must a key of safetensors files."""
    for name in [*values_of(graph), *graph.initializers]:
        if name in (RESET, SEED, "__metadata__") or name.endswith((BUFFER, OUT)):
            raise _reserved(name)
    statistics = {f"{name}{contract.NEXT}" for name in _statistics(graph)}
    for name in [*(value.name or "" for value in graph.inputs), *graph.initializers]:
        if name in statistics:  # a value between nodes gets another name where the step needs its own
            raise _reserved(name)
    for name in outputs:
        if name.endswith(contract.NEXT):
            raise _reserved(name)


def _reserved(name: str) -> ModelError:
    return ModelError(
        f"the model has a value '{name}', and training models keep such names for themselves: rename it in the "
        "model, or begin with the forward model if this is a training model already",
        hint="rename it in the model, or name the forward model",
    )


def _identity(model: ir.Model) -> str:
    """What the models of one set of artifacts have in common: a digest of the step's nodes, inputs and outputs."""
    digest = hashlib.sha256()
    graph = model.graph
    for value in [*graph.inputs, *graph.outputs]:
        # not the weights: artifacts of one model, made again, are one set
        digest.update(f"{value.name} {value.type} {value.shape}\n".encode())
    for node in graph.all_nodes():
        reads = [None if value is None else value.name for value in node.inputs]
        makes = [value.name for value in node.outputs]
        attributes = sorted(
            (name, attr.value)
            for name, attr in node.attributes.items()
            if attr.type in (ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.INTS)
        )
        digest.update(f"{node.domain} {node.op_type} {reads} {makes} {attributes}\n".encode())
    return digest.hexdigest()[:16]


def _build_step(
    model: ir.Model,
    loss: str,
    differentiated: Sequence[str],
    order: Sequence[str],
    recompute: Recompute,
    precision: Precision,
    state: dict[str, ir.Value],
) -> str | None:
    """Turn the forward model into the step; the name of the loss's scale, where it has one."""
    graph = model.graph
    # before differentiation: both passes must see the same random numbers, and a resumed run, too
    seed = make_random_explicit(model)
    # one operator has one gradient rule; written out it has a dozen nodes, each with its own
    fuse_gelu(model)
    target = find_value(graph, loss)
    op = DifferentiableBuilder(graph)
    # A graph cannot write its inputs: the next values are outputs.
    statistics = [s for s in make_statistics_explicit(op) if s.current.name not in state]
    values = values_of(graph)
    statistics += [Statistic(values[name], following) for name, following in state.items()]
    sources = [values[name] for name in differentiated]
    forward = list(graph)
    for line in untrainable(graph, target, sources):
        warnings.warn(line, stacklevel=2)
    scale = op.input(LOSS_SCALE, ir.DataType.FLOAT, [1]) if precision == "fp16" and sources else None
    start = _start(op, target, scale)
    gradients = add_gradients(op, {target: start}, sources) if sources else {}
    for value in (seed, scale):
        if value is not None:
            graph.inputs.remove(value)
    _turn_into_inputs(graph, order)
    if scale is not None:
        graph.inputs.append(scale)
    buffers = [op.input(f"{value.name}{BUFFER}", value.dtype, value.shape) for value in gradients]
    reset = op.input(RESET, ir.DataType.BOOL, [1])
    if seed is not None:
        graph.inputs.append(seed)
    results = _accumulated(op, gradients, buffers, reset)
    for value, out in zip(gradients, results):
        _name_output(op, out, f"{value.name}{OUT}", value)
    # after accumulation: what ends a gradient's computation may be moved
    recompute_activations(op, forward, recompute, results=results)
    for statistic in statistics:
        _name_output(
            op,
            op.Identity(statistic.following),
            f"{statistic.current.name}{contract.NEXT}",
            statistic.current,
        )
    model.metadata_props[contract.STATISTICS] = json.dumps([s.current.name for s in statistics])
    model.metadata_props[contract.RANDOM] = json.dumps(SEED if seed is not None else None)
    # last: gradients are derived in float32, and casts go where the products are
    lower_precision(model, order, precision)
    model.metadata_props[contract.PRECISION] = precision
    model.metadata_props.pop(contract.SCALE, None)  # what the forward model says of one is not ours
    if scale is None:
        return None
    model.metadata_props[contract.SCALE] = scale.name or ""
    return scale.name


def _accumulated(
    op: DifferentiableBuilder, gradients: dict[ir.Value, ir.Value], buffers: list[ir.Value], reset: ir.Value
) -> list[ir.Value]:
    """reset ? gradient : buffer + gradient for each; at once for those that are pieces of one vector.

    Batch norms' gradients are such pieces: 75 nodes less of a ResNet-18's 670.
    """

    def accumulate(gradient: ir.Value, buffer: ir.Value) -> ir.Value:
        return op.Where(reset, gradient, op.Add(buffer, gradient))

    sums: dict[int, ir.Value] = {}
    places: dict[ir.Value, list[int]] = {}
    for index, gradient in enumerate(gradients.values()):
        places.setdefault(gradient, []).append(index)
    for split in dict.fromkeys(gradient.producer() for gradient in places):
        if split is None or split.op_type != "Split" or split.graph is not op.graph or len(split.inputs) != 2:
            continue
        vector, lengths = split.inputs
        if vector is None or lengths is None or op.rank(vector) != 1:
            continue
        if any(len(places.get(piece, ())) != 1 or piece.uses() for piece in split.outputs):
            continue
        order = [places[piece][0] for piece in split.outputs]
        # one sum for all batch norms
        joined = accumulate(vector, op.Concat(*(buffers[index] for index in order), axis=0))
        sums.update(zip(order, op.Split(joined, lengths, axis=0, outputs=len(order))))
    return [
        sums[index] if index in sums else accumulate(gradient, buffers[index])
        for index, gradient in enumerate(gradients.values())
    ]


def _start(op: DifferentiableBuilder, loss: ir.Value, scale: ir.Value | None) -> ir.Value:
    """The gradient of the loss itself: one, or the scale by which all gradients are multiplied."""
    shape, kind = op.static_shape(loss) or (), op.dtype(loss)
    if scale is None:
        return op.constant(np.ones(shape, kind.numpy()), name="one")
    # Scaling the seed scales every gradient: small ones then do not vanish in float16.
    start: ir.Value = op.Reshape(scale, np.array(shape, np.int64))
    return start if kind == ir.DataType.FLOAT else op.Cast(start, to=kind)


def _name_output(op: DifferentiableBuilder, value: ir.Value, name: str, like: ir.Value) -> None:
    values = {} if op.namer.is_free(name) else values_of(op.graph)
    for other in [v for v in values.values() if v.name == name and v is not value]:
        if other.is_graph_input() or other.is_graph_output() or other.is_initializer():
            raise ModelError(
                f"the model has a '{name}', a name that the training step needs for its own output: rename it"
            )
        other.name = op.namer(f"{name}.inner")  # what reads it reads the value, not the name
    op.namer.take(name)
    value.name = name
    value.type, value.shape = like.type, like.shape
    op.graph.outputs.append(value)


def _choose_outputs(graph: ir.Graph, names: Sequence[str]) -> None:
    values = [find_value(graph, name) for name in dict.fromkeys(names)]
    graph.outputs.clear()
    graph.outputs.extend(values)


def _check_loss(loss: ir.Value) -> None:
    dims = None if loss.shape is None else list(loss.shape)
    if not is_differentiable(loss):
        raise ModelError(f"the loss '{loss.name}' is {loss.dtype}, not a floating number")
    if dims is None or any(dim != 1 for dim in dims):
        shown = "of unknown shape" if dims is None else f"of shape {[str(dim) for dim in dims]}"
        raise ModelError(
            f"the loss '{loss.name}' is {shown}: training needs a single number; "
            "give a loss (loss=…), or make the model's first output a scalar",
            hint="choose a loss with --loss",
        )


def _turn_into_inputs(graph: ir.Graph, names: Sequence[str]) -> None:
    """Parameters are inputs of the file, in the order of the model's initializers."""
    for name in names:
        value = graph.initializers.pop(name)
        value.const_value = None
        if not value.is_graph_input():
            graph.inputs.append(value)


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    if value.const_value is None:
        raise ModelError(f"'{value.name}' has no value in the model")
    return value.const_value


def plain_outputs(model: ir.Model) -> list[ir.Value]:
    """A forward model's outputs without the next values of its buffers, which come after them."""
    following = set(_moved_state(model).values())
    return [value for value in model.graph.outputs if value not in following]


def _moved_state(model: ir.Model) -> dict[str, ir.Value]:
    """By the name of each buffer that the forward pass changes, the output that is its next value."""
    outputs = {value.name: value for value in model.graph.outputs}
    names = read_names(model.metadata_props, contract.BUFFERS)
    return {
        name: outputs[f"{name}{contract.NEXT}"]
        for name in names
        if f"{name}{contract.NEXT}" in outputs and name in model.graph.initializers
    }


def _statistics(graph: ir.Graph) -> list[str]:
    """The running statistics of batch norms in training mode, by name."""
    names: list[str] = []
    for node in graph:
        if node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode", 0):
            names += [v.name or "" for v in node.inputs[3:5] if v is not None and v.is_initializer()]
    return names


def _spell_out_inference(graph: ir.Graph) -> None:
    """Dropout with an empty `training_mode` and batch norm with 0: defaults, but what users look for."""
    for node in graph:
        if node.op_type == "Dropout":
            node.resize_inputs(3)
        elif node.op_type == "BatchNormalization":
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 0)


def _label_ranges(graph: ir.Graph) -> dict[str, dict[str, int]]:
    """Inputs that hold class indices, and the number of classes, so that labels out of range can be rejected."""
    ranges: dict[str, dict[str, int]] = {}
    for node in graph:
        if node.op_type not in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
            continue
        scores, labels = node.inputs[0], node.inputs[1]
        while (
            labels is not None
            and (producing := labels.producer()) is not None
            and producing.op_type in _RESHAPING
        ):
            labels = producing.inputs[0]
        if labels is None or not labels.is_graph_input() or scores is None or scores.shape is None:
            continue
        classes = scores.shape[1]
        if isinstance(classes, int):
            ranges[labels.name or ""] = {"classes": classes}
            ignored = node.attributes.get_int("ignore_index", None)
            if ignored is not None:
                ranges[labels.name or ""]["ignore_index"] = ignored
    return ranges


_RESHAPING = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Cast", "Identity")
