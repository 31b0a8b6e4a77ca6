"""`onward.check_gradient`: check a model's gradients numerically. For users who add rules, and for the tests.

Compares finite differences of the model, in float64 on ONNX's reference evaluator, with the gradient graph
in float64 there; then both with the gradient graph in its own precision on onnxruntime.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

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
    # The reference evaluator knows no fused operators; their expansions are compared with the runtime elsewhere.
    if any(node.domain not in ("", "ai.onnx") for node in original.graph.all_nodes()):
        original = normalize(original)
    derived, of, wrt = vector_jacobian(original, of=of, wrt=wrt)
    rng = np.random.default_rng(seed)
    base = {name: x if isinstance(x, list) else np.asarray(x) for name, x in inputs.items()}
    # The original, and not the normalized model: a mistake of the conversion would be in both sides otherwise.
    run_forward = _forward(original, wrt, reference)
    precise = {name: _double(x) for name, x in {**_initializers(original, wrt), **base}.items()}
    outputs = run_forward(precise)
    if any(_rank(derived, f"{name}_cotangent") not in (None, outputs[name].ndim) for name in of):
        # A Squeeze without axes removes a batch of one too; in the dialect it says which axes it removes.
        run_forward = _forward(normalize(original), wrt, reference)
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
    # In float16 the weights themselves are rounded, which the comparison's tolerance has to carry.
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


def _forward(
    model: ir.Model, wrt: Sequence[str], reference: str
) -> Callable[[Arrays], dict[str, np.ndarray]]:
    """The model in float64 as a function of its inputs and of `wrt`."""
    return _evaluator(to_double(_with_initializers_as_inputs(ir.to_proto(model), wrt)), reference)


def _rank(model: onnx.ModelProto, name: str) -> int | None:
    """The number of axes that an input is declared to have."""
    kind = next(value for value in model.graph.input if value.name == name).type.tensor_type
    return len(kind.shape.dim) if kind.HasField("shape") else None


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
    # The evaluator takes the standard's body for these, which rounds to float32 inside.
    if any(node.op_type in _WRITTEN_IN_FLOAT for node in model.graph.node):
        chosen = [("", op_type) for op_type in sorted(_WRITTEN_IN_FLOAT)]
        model = _with_declared_initializers(model)
        # Before the types are widened: the bodies hold float32 constants of their own.
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
    # A float64 copy of a float32 constant is that constant: rounding in the file is part of the model.
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
        from onward.autodiff.check import reference_evaluator

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
    # Every element by itself finds a single wrong entry, which a random direction may drown.
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

    # Richardson: the errors of the two differences, of the square of the step, cancel; in float64 digits suffice.
    coarse = (at(2 * _EPSILON) - at(-2 * _EPSILON)) / (4 * _EPSILON)
    fine = (at(_EPSILON) - at(-_EPSILON)) / (2 * _EPSILON)
    return (4 * fine - coarse) / 3


def _show(direction: np.ndarray) -> str:
    if np.count_nonzero(direction) == 1:
        return f"element {tuple(int(i[0]) for i in np.nonzero(direction))}"
    return "random"


# --- ONNX's reference evaluator, corrected where its errors would affect finite differences.
#
# Its Erf rounds to float32; its Loop stacks only vectors and treats an absent condition as false; its Scan
# ignores axes and directions; its SequenceMap sees no captured values; its SequenceInsert cannot insert at the
# end; what its Optional packs, OptionalGetElement does not unpack. They are implemented here by the
# specification, as are operators on images that the evaluator has wrong or lacks.


class _Standard(OpRun):
    op_domain = ""


class ConvTranspose(_Standard):
    """ConvTranspose: each input spreads the kernel over the output; what pads say is cut away."""

    def _run(self, x, w, b=None, **attributes):  # type: ignore[override]
        rank, group = x.ndim - 2, attributes.get("group") or 1
        strides = attributes.get("strides") or [1] * rank
        dilations = attributes.get("dilations") or [1] * rank
        extra = attributes.get("output_padding") or [0] * rank
        kernel = w.shape[2:]
        full = [(n - 1) * s + (k - 1) * d + 1 + e
                for n, s, k, d, e in zip(x.shape[2:], strides, kernel, dilations, extra)]  # fmt: skip
        begin, size = _output_range(full, list(x.shape[2:]), strides, attributes)
        room = [max(f, a + n) for f, a, n in zip(full, begin, size)]
        images = x.reshape(x.shape[0], group, -1, *x.shape[2:])
        weights = w.reshape(group, -1, *w.shape[1:])
        y = np.zeros((x.shape[0], group, w.shape[1], *room), x.dtype)
        for tap in itertools.product(*map(range, kernel)):
            target = tuple(
                slice(t * d, t * d + (n - 1) * s + 1, s)
                for t, d, n, s in zip(tap, dilations, x.shape[2:], strides)
            )
            y[(..., *target)] += np.einsum("ngc...,gco->ngo...", images, weights[(..., *tap)])
        y = y.reshape(x.shape[0], -1, *room)
        y = y[(..., *(slice(a, a + n) for a, n in zip(begin, size)))]
        return (y if b is None else y + b.reshape(-1, *[1] * rank),)


def _output_range(full: list[int], size_in: list[int], strides: Sequence[int], attributes: dict):
    """(where the output begins in the full one, its size)."""
    rank, auto_pad = len(full), attributes.get("auto_pad") or "NOTSET"
    shape = attributes.get("output_shape")
    if not shape and auto_pad in ("NOTSET", "VALID"):
        pads = (attributes.get("pads") if auto_pad == "NOTSET" else None) or [0] * 2 * rank
        return pads[:rank], [f - a - e for f, a, e in zip(full, pads[:rank], pads[rank:])]
    sizes = list(shape)[-rank:] if shape else [n * s for n, s in zip(size_in, strides)]
    totals = [max(f - n, 0) for f, n in zip(full, sizes)]
    begin = [t // 2 if auto_pad == "SAME_UPPER" else t - t // 2 for t in totals]
    return begin, sizes if shape else [f - t for f, t in zip(full, totals)]


class MaxPool(_Standard):
    """MaxPool with the place of each first maximum, counted over the whole input."""

    def _run(self, x, **attributes):  # type: ignore[override]
        kernel = attributes["kernel_shape"]
        rank = len(kernel)
        strides = attributes.get("strides") or [1] * rank
        dilations = attributes.get("dilations") or [1] * rank
        begin, count = _windows(x.shape[2:], kernel, strides, dilations, attributes)
        best = np.full((*x.shape[:2], *count), -np.inf, x.dtype)
        index = np.zeros(best.shape, np.int64)
        order = "F" if attributes.get("storage_order") else "C"
        spatial = np.arange(math.prod(x.shape[2:])).reshape(x.shape[2:], order=order)
        offset = np.arange(math.prod(x.shape[:2])).reshape(*x.shape[:2], *[1] * rank) * spatial.size
        for tap in itertools.product(*map(range, kernel)):
            places = [
                np.arange(c) * s + t * d - a for c, s, t, d, a in zip(count, strides, tap, dilations, begin)
            ]
            inside = np.ones(count, bool)
            for axis, (coordinates, n) in enumerate(zip(places, x.shape[2:])):
                good = (coordinates >= 0) & (coordinates < n)
                inside &= good.reshape([-1 if i == axis else 1 for i in range(rank)])
            where = np.ix_(*[np.clip(coordinates, 0, n - 1) for coordinates, n in zip(places, x.shape[2:])])
            read = x[(slice(None), slice(None), *where)]
            better = inside & (read > best)
            best = np.where(better, read, best)
            index = np.where(better, spatial[where] + offset, index)
        return (best, index)[: len(self.onnx_node.output)]


def _windows(size: Sequence[int], kernel, strides, dilations, attributes: dict):
    """(padding before, number of windows) along each axis."""
    rank, auto_pad = len(kernel), attributes.get("auto_pad") or "NOTSET"
    pads = (attributes.get("pads") if auto_pad == "NOTSET" else None) or [0] * 2 * rank
    begins, counts = [], []
    for i, n in enumerate(size):
        span = (kernel[i] - 1) * dilations[i] + 1
        begin, free = pads[i], n + pads[i] + pads[i + rank] - span
        if auto_pad.startswith("SAME"):
            count = -(-n // strides[i])
            total = max((count - 1) * strides[i] + span - n, 0)
            begin = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
        elif attributes.get("ceil_mode"):
            count = -(-free // strides[i]) + 1
            count -= (count - 1) * strides[i] >= n + begin
        else:
            count = free // strides[i] + 1
        begins.append(begin)
        counts.append(count)
    return begins, counts


class MaxUnpool(_Standard):
    """MaxUnpool: indices count over the whole output."""

    def _run(self, x, indices, shape=None, **attributes):  # type: ignore[override]
        if shape is None:
            kernel = attributes["kernel_shape"]
            rank = len(kernel)
            strides = attributes.get("strides") or [1] * rank
            pads = attributes.get("pads") or [0] * 2 * rank
            shape = [*x.shape[:2]]
            shape += [
                (n - 1) * s + k - a - e
                for n, s, k, a, e in zip(x.shape[2:], strides, kernel, pads[:rank], pads[rank:])
            ]
        y = np.zeros(math.prod(map(int, shape)), x.dtype)
        y[indices.reshape(-1)] = x.reshape(-1)
        return (y.reshape([int(n) for n in shape]),)


class GlobalMaxPool(_Standard):
    """GlobalMaxPool over any number of spatial axes."""

    def _run(self, x):  # type: ignore[override]
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class GlobalLpPool(_Standard):
    """GlobalLpPool: the p-norm of each channel."""

    def _run(self, x, p=None):  # type: ignore[override]
        p = p or 2
        total = np.sum(np.abs(x) ** p, axis=tuple(range(2, x.ndim)), keepdims=True)
        return ((total ** (1 / p)).astype(x.dtype),)


class MaxRoiPool(_Standard):
    """MaxRoiPool: the maximum of each of pooled_shape bins of a region with whole coordinates."""

    def _run(self, x, rois, pooled_shape=None, spatial_scale=None):  # type: ignore[override]
        assert pooled_shape is not None
        y = np.zeros((len(rois), x.shape[1], *pooled_shape), x.dtype)
        for r, (batch, *corners) in enumerate(rois):
            scaled = np.asarray(corners) * (spatial_scale or 1.0)
            left, top, right, bottom = (math.floor(c + 0.5) for c in scaled)
            for bin_ in np.ndindex(*pooled_shape):
                cuts = []
                for axis, (low, high) in enumerate([(top, bottom), (left, right)]):
                    step = max(high - low + 1, 1) / pooled_shape[axis]
                    ends = math.floor(bin_[axis] * step) + low, math.ceil((bin_[axis] + 1) * step) + low
                    cuts.append(slice(*np.clip(ends, 0, x.shape[2 + axis])))
                part = x[int(batch)][:, cuts[0], cuts[1]]
                if part.size:
                    y[(r, slice(None), *bin_)] = part.max(axis=(1, 2))
        return (y,)


IMAGE_OPS = [ConvTranspose, GlobalLpPool, GlobalMaxPool, MaxPool, MaxRoiPool, MaxUnpool]


def reference_evaluator(model: onnx.ModelProto) -> ReferenceEvaluator:
    """An evaluator of a model in numpy."""
    return ReferenceEvaluator(
        model, new_ops=[*IMAGE_OPS, Erf, Loop, Optional, Scan, SequenceInsert, SequenceMap]
    )


class Erf(_Standard):
    """Erf in the precision of its input."""

    def _run(self, x):  # type: ignore[override]
        return (np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x)).astype(x.dtype),)


class SequenceInsert(_Standard):
    """SequenceInsert at any position from −n to n."""

    def _run(self, sequence, tensor, position=None):  # type: ignore[override]
        longer = list(sequence)
        longer.insert(len(longer) if position is None else int(np.asarray(position).item()), tensor)
        return (longer,)


class Optional(_Standard):
    """Optional: numpy needs no wrapper around what is there."""

    def _run(self, value=None, type=None):  # type: ignore[override]
        return (value,)


class _WithBody(_Standard):
    def need_context(self) -> bool:
        return True

    def _turn(self, context: dict[str, Any], arguments: list[Any]) -> list[Any]:
        require_time()  # a loop may never end
        body: Any = self.body  # type: ignore[attr-defined]
        return body.run(None, {**context, **dict(zip(body.input_names, arguments))})


class Loop(_WithBody):
    """Loop: trip count and condition, states, and the scan outputs of each iteration, stacked."""

    def _run(self, trips=None, going=None, *states, context=None, **_):  # type: ignore[override]
        limit = None if trips is None else int(np.asarray(trips).item())
        proceed = True if going is None else bool(np.asarray(going).item())
        current, emitted, turn = list(states), [], 0
        while proceed and (limit is None or turn < limit):
            flag, *results = self._turn(
                context or {}, [np.asarray(turn, np.int64), np.asarray(True), *current]
            )
            current = results[: len(states)]
            emitted.append(results[len(states) :])
            proceed = bool(np.asarray(flag).item())
            turn += 1
        return (*current, *_stacks(self, emitted, 1 + len(states), [], []))


class Scan(_WithBody):
    """Scan: states and slices of inputs, along any axis in either direction."""

    def _run(self, *inputs, context=None, **attributes):  # type: ignore[override]
        scanned = attributes["num_scan_inputs"]
        states, stacked = list(inputs[: len(inputs) - scanned]), inputs[len(inputs) - scanned :]
        axes = attributes.get("scan_input_axes") or [0] * scanned
        ways = attributes.get("scan_input_directions") or [0] * scanned
        length = stacked[0].shape[axes[0]]
        count, emitted = len(states), []
        for turn in range(length):
            slices = [
                np.take(x, length - 1 - turn if way else turn, axis=axis)
                for x, axis, way in zip(stacked, axes, ways)
            ]
            results = self._turn(context or {}, [*states, *slices])
            states = results[:count]
            emitted.append(results[count:])
        axes_out = attributes.get("scan_output_axes") or []
        ways_out = attributes.get("scan_output_directions") or []
        return (*states, *_stacks(self, emitted, count, list(axes_out), list(ways_out)))


class SequenceMap(_WithBody):
    """SequenceMap: the body on the elements of sequences, beside tensors that stay the same."""

    def _run(self, *inputs, context=None, **_):  # type: ignore[override]
        results = [
            self._turn(context or {}, [x[index] if isinstance(x, list) else x for x in inputs])
            for index in range(len(inputs[0]))
        ]
        return tuple([row[i] for row in results] for i in range(len(self.onnx_node.output)))


def _stacks(node: Any, emitted: list[list[Any]], skip: int, axes: list[int], ways: list[int]) -> list[Any]:
    """The scan outputs of all iterations, one array each; without an iteration, an empty one of the declared type."""
    declared = list(node.body.proto_.output)[skip:]
    stacks = []
    for index, value in enumerate(declared):
        axis = axes[index] if axes else 0
        parts = [row[index] for row in emitted]
        if parts:
            stacks.append(np.stack(parts[::-1] if ways and ways[index] else parts, axis=axis))
            continue
        kind = value.type.tensor_type
        dims = [dim.dim_value for dim in kind.shape.dim]
        dims.insert(axis if axis >= 0 else axis + len(dims) + 1, 0)
        stacks.append(np.zeros(dims, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)))
    return stacks
