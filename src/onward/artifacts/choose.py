"""Chooses the trainable parameters: by names and patterns, else by the model's metadata, else every weight.

A weight is a float32 initializer (float64 where there is none) with more than one element that is read as data and
reaches the loss: running statistics, bounds, rates and other settings are not weights.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
import warnings
from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from onward import contract
from onward.errors import SEE_NAMES, ModelError, did_you_mean
from onward.graph.nodes import ancestors, attribute
from onward.model_metadata import read_names

_log = logging.getLogger("onward")
# Inputs that set an operator up; a float initializer there is no weight.
_SETTINGS = {
    "BatchNormalization": (3, 4),
    "Clip": (1, 2),
    "Dropout": (1,),
    "Resize": (1, 2),
    "Pad": (2,),
    "Range": (0, 1, 2),
    "OneHot": (2,),
    "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
    "NonMaxSuppression": (3, 4),
    "STFT": (2,),
}
# Types of indices, sizes and masks: an initializer of another type is a weight, or part of one.
_DATA = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL, ir.DataType.STRING)


# Types that parameters may have.
_TRAINABLE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


class UnknownParameterWarning(UserWarning):
    """A name to freeze that the model does not have."""

    def __init__(self, name: str, hint: str) -> None:
        self.name, self.hint = name, hint
        super().__init__(f"frozen_params: the model has no parameter '{name}'{hint}")


@dataclasses.dataclass(frozen=True)
class Choice:
    """Names to train, names to keep as parameters that do not train, and whether no one had said which."""

    trainable: list[str]
    frozen: list[str]
    by_default: bool = False
    # what stays out of a default choice, and why
    notes: list[str] = dataclasses.field(default_factory=list)


def choose(
    model: ir.Model,
    requires_grad: Sequence[str] | None,
    frozen_params: Sequence[str] | None,
    *,
    loss: str,
    initializers: Collection[str],
    adapters: Sequence[str] = (),
    vectors: Collection[str] = (),
) -> Choice:
    """The trainable and frozen names, patterns resolved, in the order of the model.

    `initializers` are those of the model without its loss, `vectors` those that were Constant nodes.
    """
    graph = model.graph
    # The loss brings constants of its own, which are nobody's parameters.
    base = [name for name in graph.initializers if name in initializers and name not in set(adapters)]
    frozen = resolve(_drop_unknown(frozen_params or [], base), base, "frozen_params")
    by_default, notes = False, []
    if requires_grad is None and adapters:
        # with adapters, all of the base is frozen: that is what they are for
        requires_grad = []
    elif requires_grad is None and contract.REQUIRES_GRAD in model.metadata_props:
        recorded = read_names(model.metadata_props, contract.REQUIRES_GRAD)
        requires_grad = [name for name in recorded if name not in frozen]
        if frozen_params is None:
            recorded_frozen = read_names(model.metadata_props, contract.FROZEN_PARAMS)
            frozen = resolve(
                [name for name in recorded_frozen if name in graph.initializers], base, "frozen_params"
            )
    elif requires_grad is None:
        by_default = True
        weights = _weights(graph, loss, base, set(vectors))
        # A spectrogram is part of the data, though exporters write its filters as weights.
        weights = _without_spectrum(graph, loss, weights, notes)
        requires_grad = [name for name in weights if name not in frozen]
        if not requires_grad:
            notes.append(_explain_nothing_to_train(graph, loss, frozen, base, vectors))
        statistics = _statistics(graph)
        frozen = [name for name in base if name in frozen or name in statistics]
    # an input is trained where it is named, never by a pattern; nor are whole numbers
    inputs = [value.name or "" for value in graph.inputs]
    # `*` must not train token ids or the inputs of a quantized layer
    hidden = {*inputs, *(name for name in base if graph.initializers[name].dtype not in _TRAINABLE)}
    chosen = resolve(requires_grad, [*base, *inputs], "requires_grad", by_name_only=hidden)
    # adapters first: they are what a checkpoint of adapters alone has
    trainable = [*adapters, *chosen]
    both = sorted(set(trainable) & set(frozen))
    if both:
        raise ModelError(
            f"A parameter cannot be frozen and require gradient computation at the same time {both}",
            hint="leave it out of --train, or out of --freeze",
        )
    types = {value.name: value.dtype for value in [*graph.initializers.values(), *graph.inputs]}
    kinds = {types[name] for name in trainable}
    for name in trainable:
        # one type for all: the optimizer updates one vector
        if (dtype := types[name]) != ir.DataType.FLOAT and kinds != {ir.DataType.DOUBLE}:
            convert = (
                "call model.float() before the export, or " if dtype and dtype.is_floating_point() else ""
            )
            raise ModelError(
                f"'{name}' is {dtype}: trainable parameters must be float32, or all of them float64; {convert}"
                "freeze it (frozen_params=…)"
            )
    return Choice(trainable, frozen, by_default, notes)


def _explain_nothing_to_train(
    graph: ir.Graph, loss: str, frozen: Sequence[str], base: Sequence[str], vectors: Collection[str]
) -> str:
    """A note that a model without weights trains nothing; an error where it has weights that cannot train."""
    if frozen:
        raise ModelError(
            "frozen_params leaves no weight to train",
            hint="freeze fewer parameters; requires_grad=[] makes artifacts that train nothing",
        )
    needed = _needed(graph, loss)
    arrays = [
        v for n in base if (v := graph.initializers[n]).const_value is not None and v.const_value.size > 1
    ]
    for value in arrays:
        if value in needed and value.dtype not in (*_TRAINABLE, *_DATA):
            raise ModelError(
                f"the model has no weight to train: '{value.name}' is {value.dtype}, and trainable parameters must be "
                "float32; begin with the model in float32 (model.float() before its export)"
            )
    if any(v not in needed and v.dtype == ir.DataType.FLOAT and v.name not in vectors for v in arrays):
        raise ModelError(
            "the model has no weight to train: its parameters must be float32 initializers that reach the loss "
            f"'{loss}'"
        )
    return "the model has no weight: its artifacts compute the loss and train nothing"


def _drop_unknown(names: Sequence[str], candidates: Collection[str]) -> Sequence[str]:
    """The names and patterns that a model has; others are warned of, as there is nothing to freeze."""
    if isinstance(names, str):
        return names  # refused by `resolve`
    lost = [
        n for n in names if n not in candidates and not any(fnmatch.fnmatchcase(c, n) for c in candidates)
    ]
    for name in lost:
        hint = did_you_mean(name, candidates, most=3)
        warnings.warn(UnknownParameterWarning(name, hint), stacklevel=4)
    return [name for name in names if name not in lost]


def resolve(
    patterns: Sequence[str], candidates: Sequence[str], argument: str, *, by_name_only: Collection[str] = ()
) -> list[str]:
    """Resolve names and patterns to names, in the order of the candidates; an error if one matches nothing."""
    if isinstance(patterns, str):
        raise TypeError(
            f"{argument} takes a list of names; got the string {patterns!r}: write [{patterns!r}]"
        )
    names = set(candidates)
    chosen: dict[str, None] = {}
    for name in patterns:
        if name in names:
            chosen[name] = None
            continue
        is_pattern = bool(set(name) & set("*?["))
        open_to_patterns = [key for key in candidates if key not in by_name_only] if is_pattern else []
        matches = [key for key in open_to_patterns if fnmatch.fnmatchcase(key, name)]
        if not matches:
            hint = did_you_mean(name, candidates, most=3)
            kind = "no parameter matches" if is_pattern else "no parameter has that name"
            raise ModelError(
                f"Node arg {name} is not found in the graph ({argument}: {kind}{hint})", hint=SEE_NAMES
            )
        _log.info("%s: '%s' matches %d: %s", argument, name, len(matches), ", ".join(matches))
        chosen.update(dict.fromkeys(matches))
    return [name for name in candidates if name in chosen]


def constant_vectors(model: ir.Model) -> set[str]:
    """Constant nodes that hold no matrix, or one number again and again: settings and initial states, not weights.

    Exporters write those as Constant nodes and weights as initializers, but some (Paddle's) write all weights so:
    what a layer reads as its weight or bias is one.
    """
    names = set()
    for node in model.graph:
        if node.op_type == "Constant" and node.outputs[0].name and not _is_layers_weight(node.outputs[0]):
            # of Constant's attributes the one that holds a matrix
            tensor = attribute(node, "value")  # its other attributes hold numbers and vectors
            if tensor is None or len(tensor.shape) < 2 or _is_filled(tensor):
                names.add(node.outputs[0].name)
    return names


# the inputs of layers that are weights and biases, whatever they hold
_WEIGHTS: Mapping[str, Collection[int]] = {
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm"), (1, 2)),
    **dict.fromkeys(
        ("BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization"), (1, 2)
    ),
    "PRelu": (1,),
}


def _is_layers_weight(value: ir.Value) -> bool:
    return any(
        index in _WEIGHTS.get(node.op_type, ())
        or (node.op_type == "Add" and _is_product(node.inputs[1 - index]))
        for node, index in value.uses()
    )


def _is_product(value: ir.Value | None) -> bool:
    """Whether what is added to a value is the bias of a fully connected layer."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "MatMul" or node.inputs[1] is None:
        return False
    return ir.convenience.get_const_tensor(node.inputs[1]) is not None


def _is_filled(tensor: ir.TensorProtocol) -> bool:
    array = tensor.numpy().ravel()
    return array.size > 0 and bool((array == array[0]).all())


def _weights(graph: ir.Graph, loss: str, base: Sequence[str], vectors: Collection[str]) -> list[str]:
    settings = {
        node.inputs[index]
        for node in graph.all_nodes()
        for index in _SETTINGS.get(node.op_type, ())
        if index < len(node.inputs)
    }
    # what does not reach the loss would have a gradient of zero, and cost memory
    needed = _needed(graph, loss)
    weights = [
        name
        for name in base
        if (value := graph.initializers[name]) in needed
        and value not in settings
        and name not in vectors
        and value.dtype in _TRAINABLE
        and value.const_value is not None
        # A single number is a scale, an epsilon or a bound far more often than a weight, but in a weight's place:
        # the bias of one output.
        and (value.const_value.size > 1 or (len(value.const_value.shape) > 0 and _is_layers_weight(value)))
    ]
    # of a float32 model, float64 tensors are tables of constants
    single = [name for name in weights if graph.initializers[name].dtype == ir.DataType.FLOAT]
    return single or weights


# What computes a spectrogram of a wave, up to the root or logarithm of its power.
_SPECTRUM = {
    "Conv", "MatMul", "Gemm", "STFT", "DFT", "Mul", "Pow", "Abs", "Neg", "Add", "Sub", "ReduceSum", "Sqrt", "Log",
    "Reshape", "Transpose", "Slice", "Pad", "Concat", "Unsqueeze", "Squeeze", "Split", "Gather", "Expand",
    "Identity", "Cast", "Shape", "Constant", "Max", "Clip", "Flatten",
}  # fmt: skip


def _without_spectrum(graph: ir.Graph, loss: str, weights: list[str], notes: list[str]) -> list[str]:
    """The weights without the filters of a spectrogram, which are fixed: at silence, their gradients are infinite.

    These are the weights that reach the loss through a root or a logarithm only, with nothing but linear operators,
    squares and sums between the model's input and it, where weights come after it too.
    """
    gates = {
        node
        for node in graph
        if node.op_type in ("Sqrt", "Log") and node.domain == "" and _is_spectrum(node.inputs[0], graph)
    }
    if not gates:
        return weights
    # A filter that reaches the loss on another way as well is a weight after all.
    beyond = _needed(graph, loss, stop=gates)
    filters = [name for name in weights if graph.initializers[name] not in beyond]
    if not filters or len(filters) == len(weights):
        return weights
    gate = next(node for node in graph if node in gates)
    notes.append(
        f"{len(filters)} weights before {gate.op_type} '{gate.outputs[0].name}' do not train: they are "
        "the filters of a spectrogram, whose gradient is infinite at silence; requires_grad (--train) trains them"
    )
    return [name for name in weights if name not in set(filters)]


def _is_spectrum(power: ir.Value | None, graph: ir.Graph) -> bool:
    """Whether a value is a sum of squares of filtered inputs."""
    if power is None:
        return False
    values = ancestors([power])
    makers = {node for value in values if (node := value.producer()) is not None}
    kinds = {node.op_type for node in makers}
    taken = [value for value in graph.inputs if value in values]
    return (
        kinds <= _SPECTRUM
        and bool(kinds & {"Conv", "MatMul", "Gemm", "STFT", "DFT"})
        and bool(kinds & {"Mul", "Pow", "Abs"})
        and any(value.dtype is not None and value.dtype.is_floating_point() for value in taken)
    )


def _needed(graph: ir.Graph, loss: str, stop: Collection[ir.Node] = ()) -> set[ir.Value]:
    """Every value that the loss is made of; not what lies before the nodes to stop at."""
    makers = {output.name: node for node in graph for output in node.outputs}
    return ancestors([makers[loss].outputs[0]] if loss in makers else [], stop)


def _statistics(graph: ir.Graph) -> set[str]:
    return {
        value.name or ""
        for node in graph
        if node.op_type == "BatchNormalization"
        for value in node.inputs[3:5]
        if value is not None and value.is_initializer()
    }
