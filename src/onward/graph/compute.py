"""The one evaluator of operators: small ones with numpy, bit-exact with the runtime, others by ONNX's reference.

For shape arithmetic and what depends on it: integers, booleans, and elementwise float32 and float64. Operators and
types that are not here, and those whose result depends on the order of a sum, are left to `run_reference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

_TYPES = frozenset(map(np.dtype, ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")))
_KNOWN = _TYPES | {np.dtype("bool"), np.dtype("float32"), np.dtype("float64")}

# Numbers that a result may have: lists of places, not tensors that the runtime would rather make itself.
_LARGEST = 1 << 14

Attributes = Mapping[str, Any]
Inputs = Sequence[np.ndarray | None]


class _NotHere(Exception):
    """This case is not evaluated here."""


def compute(op_type: str, attributes: Attributes, inputs: Inputs) -> list[np.ndarray] | None:
    """The outputs of a standard operator, or None where it is not computed here.

    >>> compute("Concat", {"axis": 0}, [np.array([2]), np.array([3, 4])])
    [array([2, 3, 4])]
    """
    # 16-bit floats are left out: the runtime computes many of their operators in float32, and numpy does not.
    rule = _OPERATORS.get(op_type)
    if rule is None or any(value is not None and value.dtype not in _KNOWN for value in inputs):
        return None
    try:
        # Division of floats by zero is defined by IEEE and no warning of ours: the runtime gives the same infinity.
        with np.errstate(all="ignore"):
            outputs = rule(attributes, *inputs)
    except (_NotHere, ValueError, IndexError, KeyError, TypeError, OverflowError, ZeroDivisionError):
        return None  # also where the inputs do not fit: the runtime says what is wrong with them
    arrays = [np.asarray(array) for array in (outputs if isinstance(outputs, list) else [outputs])]
    return arrays if all(array.dtype in _KNOWN for array in arrays) else None


# Operators whose result is made of elements of their first input, whatever these are.
REARRANGED = frozenset({"Identity", "Gather", "Slice", "Unsqueeze", "Squeeze", "ConstantOfShape"})


def rearrange(op_type: str, attributes: Attributes, inputs: Inputs) -> np.ndarray | None:
    """What one of `REARRANGED` makes of an array of objects, such as names; None where it cannot be told.

    >>> rearrange("Gather", {}, [np.array(["batch", 3], object), np.array(0)])
    array('batch', dtype=object)
    """
    try:
        places = [value if value is None else value.astype(np.int64) for value in inputs[1:]]
        moved = np.asarray(_OPERATORS[op_type](attributes, *inputs[:1], *places), object)
    except (_NotHere, ValueError, IndexError, KeyError, TypeError, OverflowError):
        return None
    return None if any(isinstance(item, float) for item in moved.ravel()) else moved


def measure(
    op_type: str, dims: Iterable[object], start: int | None = None, end: int | None = None
) -> np.ndarray | None:
    """What Shape or Size gives for a value of these sizes; None where one that counts is no number.

    >>> measure("Shape", ["batch", 3, 4], 1)
    array([3, 4])
    """
    counted = list(dims)[start:end] if op_type == "Shape" else list(dims)
    sizes = [size for size in counted if isinstance(size, int)]
    # Only the sizes that are asked for have to be known: Shape(x)[1:] of an open batch is a constant.
    if len(sizes) != len(counted):
        return None
    return np.asarray(sizes if op_type == "Shape" else math.prod(sizes), np.int64)


def run_reference(node: onnx.NodeProto, feeds: Inputs, opset: int | None = None) -> list[np.ndarray] | None:
    """The outputs by ONNX's reference evaluator; None where it fails: the run will report the problem."""
    # Its import takes a third of a second, and few models come this far.
    from onnx.reference import ReferenceEvaluator

    own = onnx.NodeProto()
    own.CopyFrom(node)
    # The evaluator knows no operator under "ai.onnx".
    own.domain = ""
    arrays = {name: array for name, array in zip(own.input, feeds) if array is not None}
    inputs = [
        onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )
        for name, array in arrays.items()
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in own.output if name]
    graph = onnx.helper.make_graph([own], "constant", inputs, outputs)
    # In the model's own opset: Softmax, ReduceSum and others changed their meaning.
    version = onnx.helper.make_opsetid("", opset or onnx.defs.onnx_opset_version())
    try:
        results = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=[version])).run(None, arrays)
    except Exception:
        return None
    if not all(isinstance(array, np.ndarray | np.generic) for array in results):
        return None
    named = dict(zip([output.name for output in outputs], results))
    return [np.asarray(named[name]) if name else np.zeros(0) for name in own.output]


def _elementwise(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda _attributes, *values: function(*values)


def _divide(_: Attributes, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype not in _TYPES:
        return np.divide(a, b)
    if not np.all(b):
        raise _NotHere  # the run fails there, if it comes to it
    quotient = np.abs(a) // np.abs(b)  # towards zero, as in C
    return np.where((a < 0) == (b < 0), quotient, -quotient).astype(a.dtype)


def _modulo(attributes: Attributes, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype not in _TYPES or not np.all(b):
        raise _NotHere  # of floats, rounding decides; by zero, the run fails
    return np.fmod(a, b) if attributes.get("fmod", 0) else np.mod(a, b)


def _cast(attributes: Attributes, x: np.ndarray) -> np.ndarray:
    return _to(x, onnx.helper.tensor_dtype_to_np_dtype(attributes["to"]))


def _cast_like(_: Attributes, x: np.ndarray, like: np.ndarray) -> np.ndarray:
    return _to(x, like.dtype)


def _to(x: np.ndarray, kind: np.dtype) -> np.ndarray:
    # what NaN becomes as an integer differs between processors
    if kind not in _KNOWN or (x.dtype.kind == "f" and kind in _TYPES and not np.all(np.isfinite(x))):
        raise _NotHere
    return x.astype(kind)


def _gather(attributes: Attributes, x: np.ndarray, index: np.ndarray) -> np.ndarray:
    return np.take(x, index, axis=attributes.get("axis", 0))


def _slice(
    _: Attributes,
    x: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    axes: np.ndarray | None = None,
    steps: np.ndarray | None = None,
) -> np.ndarray:
    # ONNX clamps bounds as Python does, but for a negative step: its end may be before the first element.
    cuts = [slice(None)] * x.ndim
    order = range(len(starts)) if axes is None else axes.tolist()
    for index, axis in enumerate(order):
        size, step = x.shape[axis], 1 if steps is None else int(steps[index])
        start, end = (int(bound[index]) for bound in (starts, ends))
        start, end = (bound + size if bound < 0 else bound for bound in (start, end))
        if step > 0:
            cuts[axis] = slice(min(max(start, 0), size), min(max(end, 0), size), step)
        else:
            start, end = min(max(start, 0), size - 1), min(max(end, -1), size - 1)
            cuts[axis] = slice(start, None if end < 0 else end, step)
    return x[tuple(cuts)]


def _range(_: Attributes, start: np.ndarray, limit: np.ndarray, step: np.ndarray) -> np.ndarray:
    if start.dtype not in _TYPES:
        raise _NotHere  # rounding decides how many steps there are
    _check_size([max(0, (limit.item() - start.item()) // step.item())])
    return np.arange(start.item(), limit.item(), step.item(), dtype=start.dtype)


def _reshape(attributes: Attributes, x: np.ndarray, shape: np.ndarray) -> np.ndarray:
    dims = shape.tolist()
    # A zero is the size that the input has in that place.
    if not attributes.get("allowzero", 0):
        dims = [x.shape[axis] if dim == 0 else dim for axis, dim in enumerate(dims)]
    return x.reshape(dims)


def _squeeze(attributes: Attributes, x: np.ndarray, axes: np.ndarray | None = None) -> np.ndarray:
    chosen = attributes.get("axes", None if axes is None else axes.tolist())
    return np.squeeze(x, None if chosen is None else tuple(chosen))


def _unsqueeze(attributes: Attributes, x: np.ndarray, axes: np.ndarray | None = None) -> np.ndarray:
    chosen = attributes["axes"] if axes is None else axes.tolist()
    return np.expand_dims(x, tuple(chosen))


def _flatten(attributes: Attributes, x: np.ndarray) -> np.ndarray:
    axis = attributes.get("axis", 1)
    # Flatten at the rank itself is legal: the second size is then 1.
    axis += x.ndim if axis < 0 else 0
    return x.reshape(int(np.prod(x.shape[:axis])), -1)


def _expand(_: Attributes, x: np.ndarray, shape: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x, _check_size(np.broadcast_shapes(x.shape, tuple(shape.tolist()))))


def _tile(_: Attributes, x: np.ndarray, times: np.ndarray) -> np.ndarray:
    # Before it is made: a file of 100 bytes may ask for terabytes.
    _check_size([x.size, *times.tolist()])
    return np.tile(x, times.tolist())


def _check_size(shape: Sequence[int]) -> Sequence[int]:
    if math.prod(shape) > _LARGEST:
        raise _NotHere
    return shape


def _constant_of_shape(attributes: Attributes, shape: np.ndarray) -> np.ndarray:
    value = np.zeros(1, np.float32) if "value" not in attributes else _array(attributes["value"])
    if value.dtype not in _KNOWN:
        raise _NotHere
    return np.full(tuple(_check_size(shape.tolist())), value.reshape(()), value.dtype)


def _array(tensor: Any) -> np.ndarray:
    return onnx.numpy_helper.to_array(tensor) if isinstance(tensor, onnx.TensorProto) else tensor.numpy()


def _constant(attributes: Attributes) -> np.ndarray:
    if "value" in attributes:
        return _array(attributes["value"])
    for name, kind in (("value_int", np.int64), ("value_ints", np.int64), ("value_float", np.float32)):
        if name in attributes:
            return np.asarray(attributes[name], kind)
    raise _NotHere


def _reduction(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def reduce(attributes: Attributes, x: np.ndarray, axes: np.ndarray | None = None) -> np.ndarray:
        if x.dtype not in _TYPES:
            raise _NotHere  # a sum of floats depends on the runtime's order
        chosen = attributes.get("axes", None if axes is None or not axes.size else axes.tolist())
        if chosen is None and attributes.get("noop_with_empty_axes", 0):
            return x
        along = None if chosen is None else tuple(chosen)
        return function(x, axis=along, keepdims=bool(attributes.get("keepdims", 1))).astype(x.dtype)

    return reduce


def _split(attributes: Attributes, x: np.ndarray, sizes: np.ndarray | None = None) -> list[np.ndarray]:
    if sizes is None:
        raise _NotHere  # equal parts: how many there are, attributes do not say
    return np.split(x, np.cumsum(sizes)[:-1].tolist(), axis=attributes.get("axis", 0))


def _nonzero(_: Attributes, x: np.ndarray) -> np.ndarray:
    if not x.ndim:
        raise _NotHere
    return np.stack(np.nonzero(x)).astype(np.int64)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "Abs": _elementwise(np.abs),
    "Add": _elementwise(np.add),
    "And": _elementwise(np.logical_and),
    "Cast": _cast,
    "CastLike": _cast_like,
    "Ceil": _elementwise(np.ceil),
    "Concat": lambda attributes, *parts: np.concatenate(parts, axis=attributes["axis"]),
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Div": _divide,
    "Equal": _elementwise(np.equal),
    "Expand": _expand,
    "Flatten": _flatten,
    "Floor": _elementwise(np.floor),
    "Gather": _gather,
    "GatherElements": lambda a, x, index: np.take_along_axis(
        x, np.where(index < 0, index + x.shape[a.get("axis", 0)], index), a.get("axis", 0)
    ),
    "Greater": _elementwise(np.greater),
    "GreaterOrEqual": _elementwise(np.greater_equal),
    "Identity": _elementwise(np.asarray),
    "Less": _elementwise(np.less),
    "LessOrEqual": _elementwise(np.less_equal),
    "Max": lambda _, *values: _fold(np.maximum, values),
    "Min": lambda _, *values: _fold(np.minimum, values),
    "Mod": _modulo,
    "Mul": _elementwise(np.multiply),
    "Neg": _elementwise(np.negative),
    "NonZero": _nonzero,
    "Not": _elementwise(np.logical_not),
    "Or": _elementwise(np.logical_or),
    "Range": _range,
    "ReduceMax": _reduction(np.max),
    "ReduceMin": _reduction(np.min),
    "ReduceProd": _reduction(np.prod),
    "ReduceSum": _reduction(np.sum),
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split,
    "Sqrt": _elementwise(np.sqrt),
    "Squeeze": _squeeze,
    "Sub": _elementwise(np.subtract),
    "Tile": _tile,
    "Transpose": lambda a, x: np.transpose(x, a.get("perm")),
    "Unsqueeze": _unsqueeze,
    "Where": _elementwise(np.where),
}
# Operators that `compute` knows, some with restrictions.
COMPUTABLE = frozenset(_OPERATORS)


def _fold(function: Callable[..., np.ndarray], values: Sequence[np.ndarray]) -> np.ndarray:
    first, *others = values
    for value in others:
        first = function(first, value)
    return first
