"""`onward.check_gradient`: check a model's gradients numerically. For users who add rules, and for the tests.

Compares finite differences of the model, in float64 on ONNX's reference evaluator, with the gradient graph
in float64 there; then both with the gradient graph in its own precision on onnxruntime.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir

from onward.autodiff.gradient import find_value, vector_jacobian
from onward.errors import LimitError, ModelError, OnwardError
from onward.graph.dialect.normalize import normalize
from onward.graph.load import ModelSource, load_model
from onward.graph.nodes import is_differentiable
from onward.graph.protobuf import copy_of
from onward.run_limits import require_time, run_limited, watched

__all__ = ["GradientCheck", "GradientMismatch", "check_gradient", "to_double"]

Arrays = Mapping[str, np.ndarray]
_CPU = "CPUExecutionProvider"
_EPSILON = 1e-5
# Above this many elements, random directions replace one difference per element.
_EXHAUSTIVE = 48
_DIRECTIONS = 6


class GradientMismatch(OnwardError):
    """A gradient that differs from finite differences, or between evaluators."""


@dataclasses.dataclass(frozen=True)
class GradientCheck:
    """What a successful check measured: the largest relative differences, and the model that it checked."""

    finite_difference: float
    onnxruntime: float
    wrt: tuple[str, ...]
    model: onnx.ModelProto = dataclasses.field(repr=False)


@watched("check", "the gradient check")
def check_gradient(
    model: ModelSource,
    inputs: Arrays,
    *,
    of: Sequence[str] | None = None,
    wrt: Sequence[str] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    runtime_rtol: float = 1e-4,
    runtime_atol: float = 1e-5,
    reference: Literal["onnx", "onnxruntime"] = "onnx",
    providers: Sequence[Any] = (_CPU,),
    seed: int = 0,
) -> GradientCheck:
    """Check the gradients of a model's outputs at the given inputs; raises `GradientMismatch`.

    `of` names outputs (default: every floating one), `wrt` inputs or initializers (default: every floating
    input). `reference` chooses what evaluates in float64, `providers` where onnxruntime evaluates the gradients
    in their own precision, as for `onnxruntime.InferenceSession`.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["": 21]> g (float[N] x) => (float[N] y) { y = Mul(x, x) }')
    >>> check_gradient(model, {"x": np.array([1.0, -2.0], np.float32)}).wrt
    ('x',)
    """
    original = load_model(source=model) if not isinstance(model, ir.Model) else model
    if any(isinstance(v.const_value, ir.ExternalTensor) for v in original.graph.initializers.values()):
        original = original.clone()
        ir.external_data.load_to_model(original)  # the evaluators read one file
    _require_feeds(original.graph, inputs)
    if wrt is None:
        wrt = [v.name or "" for v in original.graph.inputs if is_differentiable(v) and _is_tensor(v)]
    _require_movable(original.graph, wrt)
    if any(node.domain not in ("", "ai.onnx") for node in original.graph.all_nodes()):
        original = normalize(original)
    derived, of, wrt = vector_jacobian(original, of=of, wrt=wrt)
    rng = np.random.default_rng(seed)
    base = {name: x if isinstance(x, list) else np.asarray(x) for name, x in inputs.items()}
    forward = to_double(_with_initializers_as_inputs(ir.to_proto(original), wrt))
    run_forward = _evaluator(forward, reference)
    precise = {name: _double(x) for name, x in {**_initializers(original, wrt), **base}.items()}
    outputs = run_forward(precise)
    # not ones: sums over a softmax or a normalization would be constant, and every gradient zero
    weights = {name: rng.uniform(0.5, 1.5, outputs[name].shape) for name in of}
    cotangents = {f"{name}_cotangent": weight for name, weight in weights.items()}
    exact = _evaluator(to_double(derived), reference)(
        {**{name: _double(x) for name, x in base.items()}, **cotangents}
    )
    worst = 0.0
    for name in wrt:
        for direction in _directions(precise[name], rng):
            measured = _difference(run_forward, precise, name, direction, weights)
            expected = float(np.sum(exact[f"{name}_grad"] * direction))
            error = abs(measured - expected) / (atol + rtol * max(abs(measured), abs(expected)))
            worst = max(worst, error * rtol)
            if not error <= 1:  # not `error > 1`: a NaN is a mismatch too
                raise GradientMismatch(
                    f"gradient with respect to '{name}' is {expected:.8g}, finite differences give "
                    f"{measured:.8g} (direction {_show(direction)})"
                )
    fed = {name: array.astype(values_dtype(derived, name)) for name, array in cotangents.items()}
    ran = _evaluator(derived, "onnxruntime", providers)({**base, **fed})
    drift = 0.0
    for name in wrt:
        got, want = ran[f"{name}_grad"].astype(np.float64), exact[f"{name}_grad"]
        if not got.shape == want.shape == precise[name].shape:
            raise GradientMismatch(
                f"gradient of '{name}' has shape {got.shape} on onnxruntime and {want.shape} on the "
                f"reference evaluator, '{name}' itself {precise[name].shape}"
            )
        drift = max(drift, _require_close(name, got, want, rtol=runtime_rtol, atol=runtime_atol))
    return GradientCheck(worst, drift, tuple(wrt), derived)


def _require_close(name: str, got: np.ndarray, want: np.ndarray, *, rtol: float, atol: float) -> float:
    """Compare the runtime's gradient with the exact one; returns their largest relative difference."""
    error = np.abs(got - want)
    # a hundredth of the largest: float32 sums of numbers that cancel have no more digits than that in small results
    limit = atol + rtol * np.maximum(np.abs(want), np.max(np.abs(want), initial=0.0) * 0.01)
    if not np.all(error <= limit):
        worst_at = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), got.shape)
        raise GradientMismatch(
            f"gradient of '{name}' on onnxruntime is {got[worst_at]:.8g} at {tuple(map(int, worst_at))}, "
            f"the reference evaluator gives {want[worst_at]:.8g}"
        )
    return float(np.max(error / (np.abs(want) + 1e-3), initial=0.0))


def _require_feeds(graph: ir.Graph, feeds: Arrays) -> None:
    """Check that every input has a value, and every value an input."""
    names = [value.name or "" for value in graph.inputs]
    unknown = [name for name in feeds if name not in names]
    if unknown:
        raise ModelError(
            f"{', '.join(map(repr, unknown))} {'is' if len(unknown) == 1 else 'are'} not an input of the model, "
            f"which has {', '.join(map(repr, names)) or 'none'}"
        )
    missing = [name for name in names if name not in feeds and name not in graph.initializers]
    if missing:
        raise ModelError(f"no value is given for the model's input {', '.join(map(repr, missing))}")


def _require_movable(graph: ir.Graph, names: Sequence[str]) -> None:
    """Check that `wrt` names inputs or initializers: finite differences perturb nothing else."""
    values = {value.name or "": value for value in [*graph.inputs, *graph.initializers.values()]}
    for name in names:
        value = find_value(graph, name)
        if name not in values:
            raise ModelError(
                f"'{name}' is computed by the model: finite differences move only inputs and initializers"
            )
        if not _is_tensor(value):
            raise ModelError(f"'{name}' is {value.type}: finite differences move only tensors")


def _is_tensor(value: ir.Value) -> bool:
    return isinstance(value.type, ir.TensorType) or value.const_value is not None


def values_dtype(model: onnx.ModelProto, name: str) -> np.dtype:
    """The numpy type of a model's input."""
    declaration = next(value for value in model.graph.input if value.name == name)
    return onnx.helper.tensor_dtype_to_np_dtype(declaration.type.tensor_type.elem_type)


# Operators that the standard defines by a body with float32 constants or casts inside.
_WRITTEN_IN_FLOAT = frozenset({"Gelu", "GroupNormalization", "MeanVarianceNormalization"})


def to_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model in which every float32 is a float64."""
    if any(node.op_type in _WRITTEN_IN_FLOAT for node in model.graph.node):
        chosen = [("", op_type) for op_type in sorted(_WRITTEN_IN_FLOAT)]
        model = _with_declared_initializers(model)
        model = onnx.inliner.inline_selected_functions(model, chosen, inline_schema_functions=True)
    double = copy_of(model)
    _graph_to_double(double.graph)
    _one_hot_in_float(double.graph)
    return double


def _one_hot_in_float(graph: onnx.GraphProto) -> None:
    """Let OneHot, which has no float64 on onnxruntime, pick from float32 numbers and widen what it picked."""
    doubles = {t.name for t in graph.initializer if t.data_type == onnx.TensorProto.DOUBLE}
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        if node.op_type != "OneHot" or node.input[2] not in doubles:
            graph.node.append(node)
            continue
        values, output = node.input[2], node.output[0]
        node.input[2], node.output[0] = f"{output}.values", f"{output}.picked"
        make = onnx.helper.make_node
        graph.node.extend([
            make("Cast", [values], [node.input[2]], to=onnx.TensorProto.FLOAT),
            node,
            make("Cast", [node.output[0]], [output], to=onnx.TensorProto.DOUBLE),
        ])  # fmt: skip


def _with_declared_initializers(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which initializers have a value_info: ONNX's inliner knows no other types."""
    declared = copy_of(model)
    graph = declared.graph
    declared_names = {value.name for value in [*graph.input, *graph.value_info]}
    graph.value_info.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in graph.initializer
        if tensor.name not in declared_names
    )
    return declared


_NARROW = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def _graph_to_double(graph: onnx.GraphProto) -> None:
    for value in [*graph.input, *graph.output, *graph.value_info]:
        _type_to_double(value.type)
    for tensor in graph.initializer:
        _tensor_to_double(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if (
                attribute.name in ("to", "dtype", "stash_type", "softmax_precision")
                and attribute.i in _NARROW
            ) and node.op_type in (
                "Cast",
                "RandomNormal",
                "RandomUniform",
                "EyeLike",
                "Bernoulli",
                "SequenceEmpty",
            ):
                attribute.i = onnx.TensorProto.DOUBLE
            if attribute.HasField("t"):
                _tensor_to_double(attribute.t)
            if attribute.HasField("tp"):
                _type_to_double(attribute.tp)
            if attribute.HasField("g"):
                _graph_to_double(attribute.g)


def _type_to_double(kind: onnx.TypeProto) -> None:
    if kind.HasField("tensor_type") and kind.tensor_type.elem_type in _NARROW:
        kind.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    elif kind.HasField("sequence_type"):
        _type_to_double(kind.sequence_type.elem_type)
    elif kind.HasField("optional_type"):
        _type_to_double(kind.optional_type.elem_type)


def _tensor_to_double(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in _NARROW:
        name = tensor.name
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float64), name)
        )


def _double(array: np.ndarray) -> np.ndarray:
    if isinstance(array, list):
        return [_double(element) for element in array]  # type: ignore[return-value]
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _initializers(model: ir.Model, names: Sequence[str]) -> dict[str, np.ndarray]:
    tensors = {
        name: model.graph.initializers[name].const_value for name in names if name in model.graph.initializers
    }
    return {name: tensor.numpy() for name, tensor in tensors.items() if tensor is not None}


def _with_initializers_as_inputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Initializers that are varied by the check become inputs of the evaluated model."""
    inputs = {value.name for value in model.graph.input}
    for tensor in [t for t in model.graph.initializer if t.name in names]:
        if tensor.name not in inputs:
            model.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
        model.graph.initializer.remove(tensor)
    return model


def _evaluator(model: onnx.ModelProto, kind: str, providers: Sequence[Any] = (_CPU,)):
    names = [value.name for value in model.graph.output]
    if kind == "onnx":
        from onward.autodiff.reference import reference_evaluator

        try:
            session = reference_evaluator(model)
        except Exception as error:  # it checks some attributes when it is made: RandomNormal's shape, for one
            raise ModelError(f"ONNX's reference evaluator does not take the model: {error}") from error
    else:
        from onward.ort_session import create_session, quiet_options

        try:
            session = create_session(model, quiet_options(threads=1), providers=providers)
        except Exception as error:
            raise ModelError(f"onnxruntime cannot load the model: {error}") from error
    input_names = {value.name for value in model.graph.input}

    def run(feeds: Arrays) -> dict[str, np.ndarray]:
        model_feeds = {name: np.asarray(array) for name, array in feeds.items() if name in input_names}
        with np.errstate(all="ignore"):
            require_time()
            if kind == "onnx":
                return dict(zip(names, _evaluate(session, model_feeds)))
            return dict(zip(names, run_limited(session.run, None, model_feeds)))

    return run


def _evaluate(session: Any, feeds: Arrays) -> list[Any]:
    try:
        return session.run(None, feeds)
    except LimitError:
        raise
    except Exception as error:  # of numpy, mostly; an operator of the model does not take what it gets
        raise ModelError(f"the model cannot be evaluated at these inputs: {error}") from error


def _directions(point: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    if point.size == 0:
        return []
    if point.size <= _EXHAUSTIVE:
        basis = np.eye(point.size)
        return [row.reshape(point.shape) for row in basis]
    return [rng.uniform(-1, 1, point.shape) for _ in range(_DIRECTIONS)]


def _difference(
    run, values: dict[str, np.ndarray], name: str, direction: np.ndarray, weights: Arrays
) -> float:
    """Central difference of Σ weight·output along a direction, with one step of Richardson extrapolation."""

    def at(step: float) -> float:
        moved = run({**values, name: values[name] + step * direction})
        return float(sum(np.sum(moved[key] * weight) for key, weight in weights.items()))

    coarse = (at(2 * _EPSILON) - at(-2 * _EPSILON)) / (4 * _EPSILON)
    fine = (at(_EPSILON) - at(-_EPSILON)) / (2 * _EPSILON)
    return (4 * fine - coarse) / 3


def _show(direction: np.ndarray) -> str:
    if np.count_nonzero(direction) == 1:
        return f"element {tuple(int(i[0]) for i in np.nonzero(direction))}"
    return "random"
