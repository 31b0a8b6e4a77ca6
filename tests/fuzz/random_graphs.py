"""Random small graphs over the differentiable operators, built node by node and evaluated on the way.

A recipe appends one operator, with random shapes and attributes, to a graph; what it needs of its input (a rank,
numbers in a range) it arranges with other operators. `check` compares the gradient of a graph with central
differences in float64, and onnxruntime's in float32 with that. Where a graph has a kink or a jump at its inputs,
there is no derivative to compare with; `check` says so instead.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onward.autodiff.check import (
    IMAGE_OPS,
    Erf,
    Loop,
    Optional,
    Scan,
    SequenceInsert,
    SequenceMap,
    to_double,
)
from onward.autodiff.gradient import vector_jacobian
from onward.errors import ModelError

OPSET = 23
Shape = tuple[int, ...]


class Unusable(Exception):
    """A graph whose numbers leave the range in which differences mean something."""


# ---- evaluation in float64 ---------------------------------------------------------------------------------


def _on_onnxruntime(op_type: str) -> type[OpRun]:
    """An operator that ONNX's evaluator lacks or has wrong, run in float64 by onnxruntime."""

    def _run(self, *arrays, **attributes):
        names = [f"x{i}" if array is not None else "" for i, array in enumerate(arrays)]
        fed = {name: np.asarray(array) for name, array in zip(names, arrays) if name}
        given = {name: value for name, value in attributes.items() if value is not None}
        node = helper.make_node(op_type, names, ["y"], **given)
        values = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in fed.items()
        ]
        out = [helper.make_tensor_value_info("y", TensorProto.DOUBLE, None)]
        model = helper.make_model(
            helper.make_graph([node], "g", values, out),
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=10,
        )
        return tuple(_session(model).run(None, fed))

    return type(op_type, (OpRun,), {"op_domain": "", "_run": _run})


def _session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


class Mean(OpRun):
    """Mean of operands of any shapes that broadcast."""

    op_domain = ""

    def _run(self, *arrays):  # type: ignore[override]
        return (np.asarray(sum(arrays) / len(arrays)),)


class Softsign(OpRun):
    """Softsign of scalars too."""

    op_domain = ""

    def _run(self, x):  # type: ignore[override]
        return (np.asarray(x / (1 + np.abs(x))),)


_OPS = [
    Mean,
    Softsign,
    *IMAGE_OPS, Erf, Loop, Optional, Scan,
    SequenceInsert, SequenceMap,
    *map(_on_onnxruntime, ["GridSample", "AffineGrid", "DeformConv", "LpNormalization"]),
]  # fmt: skip


def evaluator(model: onnx.ModelProto) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Run a model in float64 on ONNX's reference evaluator."""
    runner = ReferenceEvaluator(to_double(model), new_ops=_OPS)
    names = [value.name for value in model.graph.output]
    known = {value.name for value in model.graph.input}

    def run(feeds: dict[str, Any]) -> dict[str, Any]:
        with np.errstate(all="ignore"):
            return dict(zip(names, runner.run(None, {k: v for k, v in feeds.items() if k in known})))

    return run


# ---- the graph ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Value:
    """A value of the graph and what it is at the graph's inputs; a list is a sequence."""

    name: str
    array: Any

    @property
    def shape(self) -> Shape:
        return tuple(self.array.shape)


class Graph:
    """A graph in the making."""

    def __init__(self, source: random.Random) -> None:
        self.random = source
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[Value] = []
        self.constants: list[Value] = []
        self.values: list[Value] = []
        self._numbers = np.random.default_rng(source.randrange(2**31))

    def input(self, shape: Shape) -> Value:
        sign = self._numbers.choice([-1.0, 1.0], shape)
        made = Value(
            f"x{len(self.inputs)}", np.asarray(self._numbers.uniform(0.1, 1.6, shape) * sign, np.float32)
        )
        self.inputs.append(made)
        self.values.append(made)
        return made

    def constant(self, array: Any, dtype: Any = None) -> Value:
        made = Value(f"c{len(self.constants)}", np.asarray(array, dtype))
        self.constants.append(made)
        return made

    def ints(self, *numbers: int) -> Value:
        return self.constant(np.array(numbers, np.int64))

    def floats(self, shape: Shape, low: float = -1.5, high: float = 1.5) -> Value:
        return self.constant(self._numbers.uniform(low, high, shape), np.float32)

    def op(self, op_type: str, *inputs: Value | None, **attributes: Any) -> Value:
        return self.ops(op_type, 1, *inputs, **attributes)[0]

    def ops(self, op_type: str, outputs: int, *inputs: Value | None, **attributes: Any) -> list[Value]:
        """Append a node and compute what it gives; raises `Unusable` where that is not finite."""
        captured: dict[str, Value] = {}
        for key, given in attributes.items():
            if isinstance(given, tuple):  # a body, and the values that it captures
                attributes[key], more = given
                captured |= {value.name: value for value in more}
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        fed = [value.name if value is not None else "" for value in inputs]
        node = helper.make_node(op_type, fed, names, name=f"n{len(self.nodes)}", **attributes)
        around = {value.name: value for value in inputs if value is not None} | captured
        outs = [helper.make_empty_tensor_value_info(name) for name in names]
        values = [_declare(value, value.array) for value in around.values()]
        run = evaluator(_model([node], values, outs))
        results = run({name: _double(value.array) for name, value in around.items()})
        self.nodes.append(node)
        made = [Value(name, results[name]) for name in names]
        for value in made:
            for array in map(np.asarray, value.array if isinstance(value.array, list) else [value.array]):
                if array.dtype.kind == "f" and not np.all(np.abs(array) <= 1e4):
                    raise Unusable(op_type)
        return made

    # what recipes need of their inputs

    def pick(self) -> Value:
        return self.random.choice(self.values)

    def shaped(self, value: Value, shape: Shape) -> Value:
        """A value of this shape made of another's numbers."""
        if value.shape == shape:
            return value
        if prod(shape) == value.array.size:
            return self.op("Reshape", value, self.ints(*shape))
        flat = self.op("Reshape", value, self.ints(-1))
        chosen = [self.random.randrange(flat.array.size) for _ in range(prod(shape))]
        return self.op("Reshape", self.op("Gather", flat, self.ints(*chosen)), self.ints(*shape))

    def of_rank(self, value: Value, low: int, high: int = 0) -> Value:
        if low <= value.array.ndim <= (high or low):
            return value
        rank = self.random.randint(low, high or low)
        return self.shaped(value, tuple(self.random.randint(1, 3) for _ in range(rank)))

    def other(self, shape: Shape) -> Value:
        """A second operand: an input, a constant, or another value of the graph."""
        match self.random.randrange(3):
            case 0:
                return self.input(shape)
            case 1:
                return self.floats(shape)
            case _:
                return self.shaped(self.pick(), shape)

    def unit(self, value: Value) -> Value:
        """Inside (−0.9, 0.9)."""
        squashed = self.op(self.random.choice(["Tanh", "Softsign", "Sin", "Erf"]), value)
        return self.op("Mul", squashed, self.constant(0.9, np.float32))

    def positive(self, value: Value, least: float = 0.2) -> Value:
        squashed = self.op(self.random.choice(["Sigmoid", "Softplus"]), value)
        return self.op("Add", squashed, self.constant(least, np.float32))

    def axis(self, value: Value) -> int:
        return self.random.randrange(-value.array.ndim, value.array.ndim)

    def flag(self) -> int:
        return self.random.randint(0, 1)

    def tame(self, value: Value) -> Value:
        """Small numbers and few of them, so that graphs can grow."""
        if value.array.size > 48:
            axes = range(value.array.ndim)
            ends = self.ints(*[max(1, min(n, 3)) for n in value.shape])
            value = self.op("Slice", value, self.ints(*[0 for _ in axes]), ends, self.ints(*axes))
        if value.array.ndim > 4 or value.array.size > 48:
            value = self.shaped(value, (2, 3))
        largest = float(np.max(np.abs(value.array), initial=0))
        if largest > 8:
            value = self.op("Mul", value, self.constant(4 / largest, np.float32))
        return value

    def model(self, *, symbolic: bool = False) -> onnx.ModelProto:
        """The whole model; its outputs are the values that nothing reads."""
        read = {name for node in self.nodes for name in node.input}
        for node in self.nodes:
            for attribute in node.attribute:
                read |= {name for inner in attribute.g.node for name in inner.input}
        outs = [value for value in self.values if value.name not in read and value not in self.inputs]
        if not outs:
            raise Unusable("nothing is left over")
        return _model(
            self.nodes,
            [_declare(value, value.array, symbolic=symbolic) for value in self.inputs],
            [_declare(value, value.array, symbolic=symbolic) for value in outs],
            [onnx.numpy_helper.from_array(value.array, value.name) for value in self.constants],
        )


def _model(nodes, inputs, outputs, initializers=()) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "random", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=11)


def _declare(value: Value, array: Any, *, symbolic: bool = False) -> onnx.ValueInfoProto:
    if isinstance(array, list):
        return helper.make_tensor_sequence_value_info(value.name, TensorProto.FLOAT, None)
    array = np.asarray(array)
    kind = TensorProto.FLOAT if array.dtype.kind == "f" else helper.np_dtype_to_tensor_dtype(array.dtype)
    dims = [f"{value.name}_{i}" for i in range(array.ndim)] if symbolic else array.shape
    return helper.make_tensor_value_info(value.name, kind, dims)


def _double(array: Any) -> Any:
    if isinstance(array, list):
        return [_double(element) for element in array]
    array = np.asarray(array)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


# ---- recipes -----------------------------------------------------------------------------------------------

Recipe = Callable[[Graph, Value], Value]
RECIPES: dict[str, Recipe] = {}


def recipe(*op_types: str) -> Callable[[Any], Any]:
    """Register a recipe; one for several operators takes the operator's name as its third argument."""

    def register(function: Any) -> Any:
        for op_type in op_types:
            RECIPES[op_type] = (
                function if len(op_types) == 1 else lambda g, x, chosen=op_type: function(g, x, chosen)
            )
        return function

    return register


@recipe("Abs", "Asinh", "Atan", "Cos", "Erf", "HardSwish", "Identity", "Mish", "Neg", "Relu", "Sigmoid", "Sin",
        "Softplus", "Softsign", "Tanh", "Celu", "Elu", "HardSigmoid", "LeakyRelu", "Selu", "Shrink",
        "ThresholdedRelu", "Gelu")  # fmt: skip
def unary(g: Graph, x: Value, op_type: str) -> Value:
    names = {
        "Celu": ["alpha"], "Elu": ["alpha"], "HardSigmoid": ["alpha", "beta"], "LeakyRelu": ["alpha"],
        "Selu": ["alpha", "gamma"], "Shrink": ["bias", "lambd"], "ThresholdedRelu": ["alpha"],
    }  # fmt: skip
    attributes: dict[str, Any] = {
        name: round(g.random.uniform(0.1, 1.5), 2) for name in names.get(op_type, []) if g.flag()
    }
    if op_type == "Gelu" and g.flag():
        attributes["approximate"] = "tanh"
    return g.op(op_type, x, **attributes)


@recipe("Acos", "Asin", "Atanh", "Cosh", "Exp", "Sinh", "Tan")
def of_unit(g: Graph, x: Value, op_type: str) -> Value:
    return g.op(op_type, g.unit(x))


@recipe("Log", "Sqrt", "Reciprocal")
def of_positive(g: Graph, x: Value, op_type: str) -> Value:
    return g.op(op_type, g.positive(x))


@recipe("Acosh")
def acosh(g: Graph, x: Value) -> Value:
    return g.op("Acosh", g.positive(x, 1.2))


def broadcast_shape(g: Graph, shape: Shape) -> Shape:
    """A shape that broadcasts with this one."""
    kept = shape[g.random.randint(0, len(shape)) :]
    made = tuple(1 if g.random.random() < 0.3 else n for n in kept)
    return (g.random.randint(1, 2), *made) if len(made) == len(shape) < 4 and g.flag() else made


@recipe("Add", "Sub", "Mul", "Max", "Min", "Sum", "Mean")
def binary(g: Graph, x: Value, op_type: str) -> Value:
    operands = [x, g.other(broadcast_shape(g, x.shape))]
    if op_type in ("Max", "Min", "Sum", "Mean") and g.flag():
        operands.append(g.other(broadcast_shape(g, x.shape)))
    if op_type in ("Sub", "Mul", "Add") and g.flag():
        operands.reverse()
    return g.op(op_type, *operands)


@recipe("Div")
def div(g: Graph, x: Value) -> Value:
    return g.op("Div", x, g.positive(g.other(broadcast_shape(g, x.shape))))


@recipe("Pow")
def power(g: Graph, x: Value) -> Value:
    if g.flag():
        return g.op("Pow", x, g.constant(g.random.choice([1, 2, 3]), np.float32))
    return g.op("Pow", g.positive(x), g.unit(g.other(broadcast_shape(g, x.shape))))


@recipe("Mod")
def modulo(g: Graph, x: Value) -> Value:
    return g.op("Mod", x, g.positive(g.other(broadcast_shape(g, x.shape))), fmod=1)


@recipe("PRelu")
def prelu(g: Graph, x: Value) -> Value:
    slope = x.shape[g.random.randint(0, x.array.ndim) :]
    return g.op("PRelu", x, g.other(slope))


@recipe("Clip")
def clip(g: Graph, x: Value) -> Value:
    low, high = (g.constant(sign * g.random.uniform(0.1, 1.2), np.float32) for sign in (-1, 1))
    return g.op("Clip", x, *g.random.choice([(low, high), (None, high), (low, None)]))


@recipe("Where")
def where(g: Graph, x: Value) -> Value:
    chosen = g.constant(np.array([g.flag() for _ in range(x.array.size)], bool).reshape(x.shape))
    other = g.other(broadcast_shape(g, x.shape))
    return g.op("Where", chosen, *g.random.sample([x, other], 2))


@recipe("Cast")
def cast(g: Graph, x: Value) -> Value:
    return g.op("Cast", x, to=TensorProto.FLOAT)


@recipe("CastLike")
def cast_like(g: Graph, x: Value) -> Value:
    return g.op("CastLike", x, g.floats((1,)))


@recipe("Dropout")
def dropout(g: Graph, x: Value) -> Value:
    if g.flag():  # in training nothing is dropped at a ratio of 0, and anything else is chance
        return g.op("Dropout", x, g.constant(0.0, np.float32), g.constant(True))
    return g.op("Dropout", x, g.constant(0.4, np.float32))


REDUCTIONS = ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"]


@recipe(*(f"Reduce{name}" for name in REDUCTIONS))
def reduce(g: Graph, x: Value, op_type: str) -> Value:
    if op_type == "ReduceLogSum":
        x = g.positive(x)
    if op_type == "ReduceLogSumExp":
        x = g.of_rank(x, 1, 4)  # ONNX's evaluator has none of scalars
    if op_type == "ReduceProd":
        x = g.unit(x)
    axes = g.random.sample(range(x.array.ndim), g.random.randint(0, x.array.ndim))
    axes = [axis - x.array.ndim if g.flag() else axis for axis in axes]
    attributes = {"keepdims": g.flag()}
    if not axes:
        return g.op(op_type, x, **attributes, **({"noop_with_empty_axes": 1} if g.flag() else {}))
    return g.op(op_type, x, g.ints(*axes), **attributes)


@recipe("Softmax", "LogSoftmax")
def softmax(g: Graph, x: Value, op_type: str) -> Value:
    x = g.of_rank(x, 1, 3)
    return g.op(op_type, x, axis=g.axis(x))


@recipe("CumSum")
def cumulative(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 3)
    return g.op("CumSum", x, g.constant(g.axis(x), np.int64), exclusive=g.flag(), reverse=g.flag())


@recipe("TopK")
def top_k(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 3)
    axis = g.axis(x)
    count = g.ints(g.random.randint(1, x.shape[axis]))
    return g.ops("TopK", 2, x, count, axis=axis, largest=g.flag())[0]


@recipe("Unique")
def unique(g: Graph, x: Value) -> Value:
    if len(set(x.array.reshape(-1).tolist())) != x.array.size:
        x = g.input((2, 2))
    return g.op("Unique", x)  # ONNX's evaluator has the unsorted one wrong


# shapes


@recipe("Reshape")
def reshape(g: Graph, x: Value) -> Value:
    sizes = [n for n in range(1, x.array.size + 1) if x.array.size % n == 0]
    first = g.random.choice(sizes)
    rest = x.array.size // first
    return g.op("Reshape", x, g.ints(*g.random.choice([(first, rest), (first, -1), (-1,), (1, rest, first)])))


@recipe("Flatten")
def flatten(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 4)
    return g.op("Flatten", x, axis=g.axis(x))


@recipe("Squeeze")
def squeeze(g: Graph, x: Value) -> Value:
    x = g.shaped(x, (1, *x.shape[:2], 1))
    return g.op("Squeeze", x, *g.random.choice([[g.ints(0)], [g.ints(-1)], [g.ints(0, -1)], []]))


@recipe("Unsqueeze")
def unsqueeze(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 0, 3)
    return g.op("Unsqueeze", x, g.ints(g.random.randint(-x.array.ndim - 1, x.array.ndim)))


@recipe("Transpose")
def transpose(g: Graph, x: Value) -> Value:
    order = g.random.sample(range(x.array.ndim), x.array.ndim)
    return g.op("Transpose", x, **({"perm": order} if g.flag() and order else {}))


@recipe("Expand")
def expand(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 0, 3)
    target = [g.random.randint(1, 3) if n == 1 else g.random.choice([1, n]) for n in x.shape]
    return g.op("Expand", x, g.ints(*([g.random.randint(1, 2)] if g.flag() or not target else []), *target))


@recipe("Tile")
def tile(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 3)
    return g.op("Tile", x, g.ints(*[g.random.randint(1, 2) for _ in x.shape]))


@recipe("Range")
def numbers(g: Graph, x: Value) -> Value:
    start = g.shaped(g.unit(x), ())
    return g.op("Range", start, g.constant(3.03, np.float32), g.constant(0.71, np.float32))


@recipe("DepthToSpace", "SpaceToDepth")
def blocks(g: Graph, x: Value, op_type: str) -> Value:
    if op_type == "DepthToSpace":
        x = g.shaped(x, (1, 4 * g.random.randint(1, 2), 1, g.random.randint(1, 2)))
        return g.op(op_type, x, blocksize=2, mode=g.random.choice(["DCR", "CRD"]))
    return g.op(op_type, g.shaped(x, (1, g.random.randint(1, 2), 2, 4)), blocksize=2)


@recipe("ReverseSequence")
def reverse_sequence(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 2, 3)
    time = g.flag()
    lengths = [g.random.randint(1, x.shape[time]) for _ in range(x.shape[1 - time])]
    return g.op("ReverseSequence", x, g.ints(*lengths), time_axis=time, batch_axis=1 - time)


@recipe("Trilu")
def trilu(g: Graph, x: Value) -> Value:
    return g.op("Trilu", g.of_rank(x, 2, 3), g.constant(g.random.randint(-1, 1), np.int64), upper=g.flag())


@recipe("Concat")
def concat(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 3)
    axis = g.axis(x)
    shape = list(x.shape)
    shape[axis] = g.random.randint(1, 2)
    return g.op("Concat", *g.random.sample([x, g.other(tuple(shape)), x], 3), axis=axis)


@recipe("Split")
def split(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 3)
    axis = g.axis(x)
    size = x.shape[axis]
    if size == 1 or g.flag():
        parts = g.random.randint(1, min(size, 3))
        whole = -(-size // parts)
        if whole * (parts - 1) >= size:  # a part would be empty
            parts = 1
        return g.random.choice(g.ops("Split", parts, x, axis=axis, num_outputs=parts))
    at = g.random.randint(1, size - 1)
    return g.random.choice(g.ops("Split", 2, x, g.ints(at, size - at), axis=axis))


@recipe("Slice")
def cut(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 3)
    axis = g.axis(x)
    size = x.shape[axis]
    if g.flag():  # from the end
        return g.op("Slice", x, g.ints(-1), g.ints(-size - 1), g.ints(axis), g.ints(-g.random.randint(1, 2)))
    start = g.random.randint(-size, size - 1)
    steps = [g.ints(g.random.randint(1, 3))] if g.flag() else []
    return g.op("Slice", x, g.ints(start), g.ints(2**31), g.ints(axis), *steps)


@recipe("CenterCropPad")
def center(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 3)
    return g.op("CenterCropPad", x, g.ints(*[g.random.randint(1, 4) for _ in x.shape]))


@recipe("Pad")
def pad(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 3)
    mode = g.random.choice(["constant", "reflect", "edge", "wrap"])
    most = [min(n - 1, 2) if mode == "reflect" else 2 for n in x.shape]
    pads = [g.random.randint(0, n) for n in most * 2]
    value = [g.constant(0.5, np.float32)] if mode == "constant" and g.flag() else []
    return g.op("Pad", x, g.ints(*pads), *value, mode=mode)


# indices


def indices(g: Graph, shape: Shape, size: int) -> Value:
    picked = [g.random.randrange(-size, size) for _ in range(prod(shape))]
    return g.constant(np.array(picked, np.int64).reshape(shape))


@recipe("Gather")
def gather(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 3)
    axis = g.axis(x)
    shape = g.random.choice([(), (3,), (2, 2), (1,)])
    return g.op("Gather", x, indices(g, shape, x.shape[axis]), axis=axis)


@recipe("GatherElements")
def gather_elements(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 3)
    axis = g.random.randrange(x.array.ndim)
    shape = list(x.shape)
    shape[axis] = g.random.randint(1, 3)
    return g.op("GatherElements", x, indices(g, tuple(shape), x.shape[axis]), axis=axis)


def places(g: Graph, shape: Shape, count: int, depth: int, *, repeat: bool = True) -> Value:
    """Rows of `depth` indices each."""
    every = list(np.ndindex(*shape[:depth]))
    rows = g.random.choices(every, k=count) if repeat else g.random.sample(every, min(count, len(every)))
    return g.constant(np.array(rows, np.int64).reshape(len(rows), depth))


@recipe("GatherND")
def gather_nd(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 3)
    return g.op("GatherND", x, places(g, x.shape, g.random.randint(1, 3), g.random.randint(1, x.array.ndim)))


@recipe("ScatterND")
def scatter_nd(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 3)
    reduction = g.random.choice(["none", "add", "mul", "max", "min"])
    depth = g.random.randint(1, x.array.ndim)
    at = places(g, x.shape, g.random.randint(1, 3), depth, repeat=reduction in ("add", "mul"))
    updates = g.other((at.shape[0], *x.shape[depth:]))
    return g.op("ScatterND", x, at, updates, reduction=reduction)


@recipe("ScatterElements")
def scatter_elements(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 2)
    reduction = g.random.choice(["none", "add", "mul", "max", "min"])
    size = x.shape[0]
    count = g.random.randint(1, size)
    columns = prod(x.shape[1:])
    rows = np.array([g.random.sample(range(size), count) for _ in range(columns)], np.int64).T
    at = g.constant(rows.reshape(count, *x.shape[1:]))
    return g.op("ScatterElements", x, at, g.other(at.shape), axis=0, reduction=reduction)


@recipe("Compress")
def compress(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 3)
    axis = g.axis(x)
    kept = [True, *(bool(g.flag()) for _ in range(x.shape[axis] - 1))]
    return g.op("Compress", x, g.constant(np.array(kept)), axis=axis)


@recipe("OneHot")
def one_hot(g: Graph, x: Value) -> Value:
    pair = g.shaped(x, (2,))
    return g.op("OneHot", g.ints(*[g.random.randint(-1, 3) for _ in range(3)]), g.constant(4, np.int64), pair)


# products


@recipe("MatMul")
def matmul(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 3)
    size, columns = x.shape[-1], g.random.randint(1, 3)
    shapes: list[Shape] = [(size,), (size, columns)]
    if x.array.ndim > 1:
        shapes += [(*x.shape[:-2], size, columns), (2, *[1] * (x.array.ndim - 2), size, columns)]
    return g.op("MatMul", x, g.other(g.random.choice(shapes)))


@recipe("Gemm")
def gemm(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 2)
    first, second = g.flag(), g.flag()
    rows, size = x.shape[::-1] if first else x.shape
    columns = g.random.randint(1, 3)
    bias = g.random.choice([(), (columns,), (rows, 1), (1, columns), None])
    operands = [x, g.other((columns, size) if second else (size, columns))]
    if bias is not None:
        operands.append(g.other(bias))
    return g.op("Gemm", *operands, transA=first, transB=second, alpha=0.7, beta=g.random.choice([1.0, 0.5]))


@recipe("Einsum")
def einsum(g: Graph, x: Value) -> Value:
    equation, mine, theirs = g.random.choice([
        ("ij,jk->ik", (2, 3), (3, 2)), ("bij,bjk->bik", (2, 2, 3), (2, 3, 1)), ("ij->ji", (2, 3), None),
        ("ii->i", (3, 3), None), ("i,j->ij", (2,), (3,)), ("ij,kj->i", (2, 3), (2, 3)), ("ij->", (2, 2), None),
        ("bhqd,bhkd->bhqk", (1, 2, 2, 2), (1, 2, 3, 2)), ("...j->...", (2, 2, 2), None),
    ])  # fmt: skip
    operands = [g.shaped(x, mine), *([g.other(theirs)] if theirs else [])]
    return g.op("Einsum", *operands, equation=equation)


@recipe("Det")
def determinant(g: Graph, x: Value) -> Value:
    size = g.random.randint(1, 3)
    return g.op("Det", g.shaped(x, g.random.choice([(size, size), (2, size, size)])))


# images


def image(g: Graph, x: Value, dims: int, *, channels: int = 2, low: int = 3, high: int = 5) -> Value:
    sizes = tuple(g.random.randint(low, high) for _ in range(dims))
    return g.shaped(x, (1, channels, *sizes))


def windows(g: Graph, dims: int, *, dilated: bool = True) -> dict[str, Any]:
    """Random strides, dilations and pads for kernels of 2."""
    how: dict[str, Any] = {"kernel_shape": [2] * dims}
    if g.flag():
        how["strides"] = [g.random.randint(1, 2) for _ in range(dims)]
    if g.flag() and dilated:
        how["dilations"] = [g.random.randint(1, 2) for _ in range(dims)]
    match g.random.randrange(3):
        case 0:
            how["pads"] = [g.random.randint(0, 1) for _ in range(2 * dims)]
        case 1 if "dilations" not in how:
            how["auto_pad"] = g.random.choice(["SAME_UPPER", "SAME_LOWER", "VALID"])
    return how


@recipe("Conv")
def conv(g: Graph, x: Value) -> Value:
    dims, group = g.random.randint(1, 2), g.random.randint(1, 2)
    x = image(g, x, dims)
    weight = g.other((2, 2 // group, *[2] * dims))
    bias = [g.other((2,))] if g.flag() else []
    return g.op("Conv", x, weight, *bias, group=group, **windows(g, dims))


@recipe("ConvTranspose")
def conv_transpose(g: Graph, x: Value) -> Value:
    dims, group = g.random.randint(1, 2), g.random.randint(1, 2)
    x = image(g, x, dims, low=2, high=3)
    how = windows(g, dims)
    return g.op("ConvTranspose", x, g.other((2, 2 // group, *[2] * dims)), group=group, **how)


@recipe("DeformConv")
def deform_conv(g: Graph, x: Value) -> Value:
    x = g.shaped(x, (1, 2, 3, 3))
    offset = g.unit(g.other((1, 8, 2, 2)))
    mask = [None, g.other((1, 4, 2, 2))] if g.flag() else []
    return g.op("DeformConv", x, g.other((1, 2, 2, 2)), offset, *mask, kernel_shape=[2, 2])


@recipe("Col2Im")
def col2im(g: Graph, x: Value) -> Value:
    strides = [g.random.randint(1, 2) for _ in range(2)]
    count = prod((4 - 2) // stride + 1 for stride in strides)
    return g.op("Col2Im", g.shaped(x, (1, 4, count)), g.ints(4, 4), g.ints(2, 2), strides=strides)


@recipe("MaxPool", "LpPool", "AveragePool")
def pool(g: Graph, x: Value, op_type: str) -> Value:
    dims = g.random.randint(1, 2)
    x = image(g, x, dims)
    more: dict[str, Any] = {}
    if op_type == "LpPool":
        x, more = g.positive(x), {"p": g.random.randint(1, 3)}
    if op_type == "AveragePool" and g.flag():
        more["count_include_pad"] = 1
    return g.op(op_type, x, **windows(g, dims, dilated=op_type == "MaxPool"), **more)


@recipe("MaxUnpool")
def max_unpool(g: Graph, x: Value) -> Value:
    x = g.shaped(x, (1, 1, 2, 2))
    at = g.constant(np.array(g.random.sample(range(16), 4), np.int64).reshape(1, 1, 2, 2))
    return g.op("MaxUnpool", x, at, kernel_shape=[2, 2], strides=[2, 2])


@recipe("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(g: Graph, x: Value, op_type: str) -> Value:
    x = image(g, x, g.random.randint(1, 2), low=1, high=3)
    if op_type == "GlobalLpPool":
        return g.op(op_type, g.positive(x), p=g.random.randint(1, 3))
    return g.op(op_type, x)


@recipe("Resize")
def resize(g: Graph, x: Value) -> Value:
    x = g.shaped(x, (1, 1, 2, 3))
    mode = g.random.choice(["nearest", "linear", "cubic"])
    how = g.random.choice(["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"])
    least = 2 if how == "pytorch_half_pixel" else 1  # ONNX's evaluator and onnxruntime disagree there
    sizes = g.ints(1, 1, g.random.randint(least, 4), g.random.randint(least, 4))
    return g.op("Resize", x, None, None, sizes, mode=mode, coordinate_transformation_mode=how)


@recipe("GridSample")
def grid_sample(g: Graph, x: Value) -> Value:
    return g.op(
        "GridSample",
        g.shaped(x, (1, 1, 3, 3)),
        g.unit(g.other((1, 2, 2, 2))),
        mode=g.random.choice(["linear", "cubic", "nearest"]),
        padding_mode=g.random.choice(["zeros", "border", "reflection"]),
        align_corners=g.flag(),
    )


@recipe("AffineGrid")
def affine_grid(g: Graph, x: Value) -> Value:
    return g.op("AffineGrid", g.shaped(x, (1, 2, 3)), g.ints(1, 1, 2, 3), align_corners=g.flag())


@recipe("RoiAlign")
def roi_align(g: Graph, x: Value) -> Value:
    regions = g.constant([[0.31, 0.73, 3.17, 2.97], [-1.41, 0.21, 2.67, 4.13]], np.float32)
    return g.op(
        "RoiAlign", g.shaped(x, (1, 2, 4, 4)), regions, g.ints(0, 0),
        mode=g.random.choice(["avg", "max"]), output_height=2, output_width=2, sampling_ratio=2,
    )  # fmt: skip


@recipe("MaxRoiPool")
def max_roi_pool(g: Graph, x: Value) -> Value:
    regions = g.constant([[0, 0, 0, 3, 3], [0, 1, 2, 3, 3]], np.float32)
    return g.op("MaxRoiPool", g.shaped(x, (1, 2, 4, 4)), regions, pooled_shape=[2, g.random.randint(1, 2)])


# normalizations


@recipe("BatchNormalization")
def batch_norm(g: Graph, x: Value) -> Value:
    x = g.shaped(x, g.random.choice([(3, 2), (2, 2, 2), (2, 2, 1, 3)]))
    scale, bias, mean = g.other((2,)), g.other((2,)), g.floats((2,))
    spread = g.floats((2,), 0.4, 1.5)
    if g.flag():
        made = g.ops("BatchNormalization", 3, x, scale, bias, mean, spread, training_mode=1, epsilon=0.1)
        return made[0]
    return g.op("BatchNormalization", x, scale, bias, mean, spread, epsilon=0.01)


@recipe("InstanceNormalization")
def instance_norm(g: Graph, x: Value) -> Value:
    x = g.shaped(x, (2, 2, 3))
    return g.op("InstanceNormalization", x, g.other((2,)), g.other((2,)), epsilon=0.1)


@recipe("GroupNormalization")
def group_norm(g: Graph, x: Value) -> Value:
    x = g.shaped(x, (2, 4, 2))
    groups = g.random.choice([1, 2, 4])
    return g.op("GroupNormalization", x, g.other((4,)), g.other((4,)), num_groups=groups, epsilon=0.1)


@recipe("LayerNormalization")
def layer_norm(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 3)
    axis = g.axis(x)
    scale = x.shape[axis:]
    bias = [g.other(scale)] if g.flag() else []
    return g.op("LayerNormalization", x, g.other(scale), *bias, axis=axis, epsilon=0.1)


@recipe("LpNormalization")
def lp_norm(g: Graph, x: Value) -> Value:
    x = g.positive(g.of_rank(x, 1, 3))
    return g.op("LpNormalization", x, axis=g.axis(x), p=g.random.randint(1, 2))


@recipe("LRN")
def lrn(g: Graph, x: Value) -> Value:
    size = g.random.choice([1, 3])  # odd for onnxruntime; ONNX has it right with as many images as channels
    return g.op("LRN", g.shaped(x, (3, 3, 1, 2)), size=size, alpha=0.3, beta=0.6)


@recipe("MeanVarianceNormalization")
def mean_variance(g: Graph, x: Value) -> Value:
    x = g.shaped(x, (2, 2, 2, 2))
    axes = g.random.choice([[0, 2, 3], [1], [0, 1]])
    if (
        np.min(np.std(x.array, axis=tuple(axes))) < 0.05
    ):  # onnxruntime's variance of equal numbers may be below 0
        raise Unusable("MeanVarianceNormalization")
    return g.op("MeanVarianceNormalization", x, axes=axes)


# losses, signals, recurrence


@recipe("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def loss(g: Graph, x: Value, op_type: str) -> Value:
    x = g.of_rank(x, 2, 3)
    labels = np.random.default_rng(0).integers(0, x.shape[1], (x.shape[0], *x.shape[2:]))
    weights = [g.floats((x.shape[1],), 0.3, 1.5)] if g.flag() else []
    reduction = g.random.choice(["mean", "sum", "none"])
    return g.op(op_type, x, g.constant(labels, np.int64), *weights, reduction=reduction)


@recipe("DFT")
def dft(g: Graph, x: Value) -> Value:
    parts, inverse = g.random.randint(1, 2), g.flag()
    x = g.shaped(x, (2, g.random.randint(2, 4), 2 if inverse else parts))
    one_sided = {"onesided": 1} if x.shape[-1] == 1 and g.flag() else {}
    return g.op("DFT", x, None, g.constant(1, np.int64), inverse=inverse, **one_sided)


@recipe("STFT")
def stft(g: Graph, x: Value) -> Value:
    step = g.constant(g.random.randint(1, 3), np.int64)
    return g.op("STFT", g.shaped(x, (1, 6, 1)), step, g.other((4,)), onesided=g.flag())


@recipe("RNN", "GRU", "LSTM")
def recurrent(g: Graph, x: Value, op_type: str) -> Value:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op_type]
    x = g.shaped(x, (g.random.randint(1, 3), g.random.randint(1, 2), 2))
    weights = [g.other((1, gates * 2, 2)), g.other((1, gates * 2, 2))]
    more = {"linear_before_reset": 1} if op_type == "GRU" and g.flag() else {}
    return g.random.choice(g.ops(op_type, 2, x, *weights, hidden_size=2, **more))


# sequences, optionals, control flow


@recipe("SequenceConstruct", "SequenceAt", "SequenceInsert", "SequenceErase", "ConcatFromSequence")
def sequence(g: Graph, x: Value, op_type: str) -> Value:
    x = g.of_rank(x, 1, 2)
    several = g.op("SequenceConstruct", *g.random.sample([x, g.other(x.shape), x], 3))
    at = g.constant(g.random.randint(-2, 1), np.int64)
    if op_type == "SequenceInsert" or g.flag():
        several = g.op("SequenceInsert", several, g.other(x.shape), at)
    if op_type == "SequenceErase" or g.flag():
        several = g.op("SequenceErase", several, at)
    if op_type == "ConcatFromSequence" or (op_type != "SequenceAt" and g.flag()):
        new_axis = g.flag()
        rank = x.array.ndim + new_axis
        return g.op("ConcatFromSequence", several, axis=g.random.randrange(-rank, rank), new_axis=new_axis)
    return g.op("SequenceAt", several, at)


@recipe("SplitToSequence")
def split_to_sequence(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 3)
    axis = g.axis(x)
    parts = g.op("SplitToSequence", x, axis=axis, keepdims=g.flag())
    return g.op("SequenceAt", parts, g.constant(g.random.randrange(-1, 1), np.int64))


@recipe("Optional", "OptionalGetElement")
def optional(g: Graph, x: Value, op_type: str) -> Value:
    return g.op("OptionalGetElement", g.op("Optional", x))


def dims(value: Value) -> str:
    return "float[" + ", ".join(map(str, value.shape)) + "]" if value.shape else "float"


def body(text: str) -> onnx.GraphProto:
    return onnx.parser.parse_graph(text)


def step(g: Graph) -> str:
    """One of a few smooth functions of s and c, in the text form."""
    return g.random.choice(
        [
            "t = Mul(s, c)",
            "u = Sin(s) t = Add(u, c)",
            "u = Tanh(s) t = Sub(c, u)",
            "u = Mul(s, s) t = Mul(u, c)",
        ]
    )


@recipe("If")
def branch(g: Graph, x: Value) -> Value:
    chosen = g.constant(np.array(bool(g.flag())))
    other = g.other(x.shape)
    first = f"then () => ({dims(x)} t) {{ t = Mul({x.name}, {other.name}) }}"
    second = f"other () => ({dims(x)} t) {{ s = Neg({x.name}) t = Add(s, {other.name}) }}"
    captured = (x, other)
    return g.op("If", chosen, then_branch=(body(first), captured), else_branch=(body(second), captured))


@recipe("Loop")
def loop(g: Graph, x: Value) -> Value:
    c = g.unit(g.other(x.shape))
    text = (
        f"body (int64 i, bool on, {dims(x)} s) => (bool more, {dims(x)} t, {dims(x)} e) "
        f"{{ more = Identity(on) {step(g).replace('c', c.name)} e = Mul(t, s) }}"
    )
    trips = g.constant(g.random.randint(1, 3), np.int64)
    state, emitted = g.ops("Loop", 2, trips, None, g.unit(x), body=(body(text), (c,)))
    return g.random.choice([state, emitted])


@recipe("Scan")
def scan(g: Graph, x: Value) -> Value:
    x = g.unit(g.of_rank(x, 1, 3))
    inner = Value("", x.array[0])
    text = (
        f"body ({dims(inner)} s, {dims(inner)} c) => ({dims(inner)} t, {dims(inner)} e) "
        f"{{ {step(g)} e = Sub(t, c) }}"
    )
    directions = {"scan_input_directions": [1]} if g.flag() else {}
    made = g.ops(
        "Scan", 2, g.unit(g.other(inner.shape)), x, body=(body(text), ()), num_scan_inputs=1, **directions
    )
    return g.random.choice(made)


@recipe("SequenceMap")
def sequence_map(g: Graph, x: Value) -> Value:
    several = g.op("SequenceConstruct", x, g.other(x.shape))
    c = g.other(x.shape)
    text = f"body ({dims(x)} s) => ({dims(x)} t) {{ {step(g).replace('c', c.name)} }}"
    mapped = g.op("SequenceMap", several, body=(body(text), (c,)))
    return g.op("SequenceAt", mapped, g.constant(g.flag(), np.int64))


# what newer opsets add, written in older operators before it is differentiated


@recipe("Attention")
def attention(g: Graph, x: Value) -> Value:
    x = g.shaped(x, (1, 2, 2, 2))
    keys = g.random.choice([(1, 2, 3, 2), (1, 1, 3, 2)])
    how = g.random.choice([{}, {"is_causal": 1}, {"scale": 0.7}, {"softcap": 1.5}])
    return g.op("Attention", x, g.other(keys), g.other(keys), **how)


@recipe("RMSNormalization")
def rms_norm(g: Graph, x: Value) -> Value:
    x = g.of_rank(x, 1, 3)
    axis = g.axis(x)
    return g.op("RMSNormalization", x, g.other(x.shape[axis:]), axis=axis, epsilon=0.1)


@recipe("RotaryEmbedding")
def rotary(g: Graph, x: Value) -> Value:
    x = g.shaped(x, (1, 2, 2, 4))
    return g.op("RotaryEmbedding", x, g.other((1, 2, 2)), g.other((1, 2, 2)), interleaved=g.flag())


# ---- graphs and their check --------------------------------------------------------------------------------


def build(source: random.Random, wanted: Sequence[str] = (), *, length: int = 4) -> Graph:
    """A graph with the wanted operators, and others by chance."""
    g = Graph(source)
    for _ in range(source.randint(1, 2)):
        g.input(tuple(source.randint(1, 3) for _ in range(source.randint(1, 3))))
    chosen = [*wanted, *source.choices(sorted(RECIPES), k=source.randint(0, length - len(wanted)))]
    for op_type in chosen:
        # what is newest is read most often, so that operators stand behind each other
        x = g.values[-1] if source.random() < 0.7 else g.pick()
        g.values.append(g.tame(RECIPES[op_type](g, x)))
    return g


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a check found: "right"; "kink" where there is no derivative at the inputs; "sizes" where the graph
    is refused with symbolic sizes, and right with known ones."""

    verdict: str
    operators: frozenset[str]


def check(g: Graph, *, symbolic: bool = False) -> Outcome:
    """Compare the gradient of a graph with differences; raises AssertionError where they disagree."""
    model = g.model(symbolic=symbolic)
    operators = frozenset(node.op_type for node in model.graph.node)
    feeds = {value.name: value.array for value in g.inputs}
    try:
        derived, of, wrt = vector_jacobian(model, wrt=[value.name for value in g.inputs])
    except ModelError:
        if not symbolic:
            raise
        outcome = check(g)
        return dataclasses.replace(outcome, verdict="sizes") if outcome.verdict == "right" else outcome
    run = evaluator(model)
    precise = {name: np.asarray(array, np.float64) for name, array in feeds.items()}
    rng = np.random.default_rng(5)
    outputs = run(precise)
    weights = {name: rng.uniform(0.5, 1.5, outputs[name].shape) for name in of}
    cotangents = {f"{name}_cotangent": weight for name, weight in weights.items()}
    gradients = evaluator(derived)
    exact = gradients({**precise, **cotangents})
    direction = {name: rng.uniform(-1, 1, array.shape) for name, array in precise.items()}
    expected = float(sum(np.sum(exact[f"{name}_grad"] * direction[name]) for name in wrt))

    def along(size: float) -> float:
        moved = run({name: precise[name] + size * direction[name] for name in precise})
        return float(sum(np.sum(moved[name] * weight) for name, weight in weights.items()))

    slopes = [(along(size) - along(-size)) / (2 * size) for size in (2e-5, 1e-5)]
    measured = (4 * slopes[1] - slopes[0]) / 3
    scale = max(abs(measured), abs(expected), 1e-3)
    if not abs(measured - expected) <= 2e-4 * scale:
        if _kink(along):
            return Outcome("kink", operators)
        raise AssertionError(
            f"the gradient along a direction is {expected:.9g}, differences give {measured:.9g}"
        )
    _check_on_onnxruntime(derived, feeds, cotangents, exact, gradients, wrt)
    return Outcome("right", operators)


def _kink(along: Callable[[float], float]) -> bool:
    """Whether slopes to both sides, or of two sizes, differ as they never do where a function is smooth."""
    middle = along(0.0)
    for size in (1e-5, 1e-6, 2e-5):
        left, right = (middle - along(-size)) / size, (along(size) - middle) / size
        if abs(left - right) > 1e-3 * max(abs(left), abs(right), 1e-3):
            return True
    return False


def _check_on_onnxruntime(derived, feeds, cotangents, exact, gradients, wrt) -> None:
    single = {name: np.asarray(array, np.float32) for name, array in {**feeds, **cotangents}.items()}
    known = {value.name for value in derived.graph.input}
    names = [value.name for value in derived.graph.output]
    ran = dict(zip(names, _session(derived).run(None, {k: v for k, v in single.items() if k in known})))
    largest = max((float(np.max(np.abs(exact[f"{name}_grad"]), initial=0)) for name in wrt), default=0)
    for name in wrt:
        got, want = ran[f"{name}_grad"], exact[f"{name}_grad"]
        assert got.shape == want.shape == feeds[name].shape, f"the gradient of {name} has shape {got.shape}"
        limit = 1e-3 * max(largest, 0.05)  # sums that should cancel leave what float32 rounds
        if not np.max(np.abs(got - want), initial=0) <= limit:
            # how far the gradient itself moves when inputs move by what float32 rounds away
            nudged = {key: array * (1 + 3e-7) for key, array in {**feeds, **cotangents}.items()}
            moved = gradients({key: np.asarray(array, np.float64) for key, array in nudged.items()})[
                f"{name}_grad"
            ]
            limit += 100 * np.max(np.abs(moved - want), initial=0)
            found = np.max(np.abs(got - want), initial=0)
            assert found <= limit, f"onnxruntime's gradient of {name} is {got}, it should be {want}"
