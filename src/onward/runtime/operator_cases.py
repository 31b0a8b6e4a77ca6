"""A table of operators in the forms that training graphs use, each as a model of a few nodes with inputs.

A runtime's reading of an operator is what counts, not its name: the corners are those on which a gradient or an update
relies. `device_check` runs the table before a device trains; `onward.conformance` differentiates it as well.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import onnx
import onnx.parser

from onward.graph.protobuf import inner_graphs

_HEADER = '<ir_version: 10, opset_import: ["": 21]>'


@dataclasses.dataclass(frozen=True)
class OperatorCase:
    """One operator in one form: `text` is a graph in ONNX's textual syntax.

    `integers` bounds its whole-number inputs; `positive` keeps floating ones above zero; `smooth` says that it has a
    gradient to compare.
    """

    operator: str
    corner: str
    text: str
    integers: int = 3
    positive: bool = False
    smooth: bool = True

    def __str__(self) -> str:
        return f"{self.operator} ({self.corner})" if self.corner else self.operator

    @property
    def model(self) -> onnx.ModelProto:
        """The graph as a model."""
        return _parse(self.text)

    def feeds(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Random inputs; a symbolic size is 5."""
        rng = np.random.default_rng(seed)
        feeds: dict[str, np.ndarray] = {}
        for value in self.model.graph.input:
            kind = value.type.tensor_type
            shape = [dim.dim_value or 5 for dim in kind.shape.dim]
            dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
            if dtype.kind == "f":
                array = rng.normal(size=shape).astype(dtype)
                feeds[value.name] = np.abs(array) + dtype.type(0.2) if self.positive else array
            elif dtype.kind == "b":
                feeds[value.name] = rng.random(shape) < 0.5
            else:
                feeds[value.name] = rng.integers(0, self.integers, shape).astype(dtype)
        return feeds


@functools.cache
def _parse(text: str) -> onnx.ModelProto:
    # the shapes of outputs are inferred: the table leaves them out
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(f"{_HEADER} case {text}"))


def operators_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node of a graph and of the bodies in it."""
    for node in graph.node:
        yield node
        for body in inner_graphs(node):
            yield from operators_of(body)


def _unary(*operators: str, positive: bool = False, smooth: bool = True) -> list[OperatorCase]:
    return [
        OperatorCase(
            name, "", f"(float[n,7] x) => (float[] y) {{ y = {name} (x) }}", positive=positive, smooth=smooth
        )
        for name in operators
    ]


def _binary(*operators: str, result: str = "float", smooth: bool = True) -> list[OperatorCase]:
    return [
        OperatorCase(
            name,
            "a row broadcast",
            f"(float[n,7] x, float[7] b) => ({result}[] y) {{ y = {name} (x, b) }}",
            smooth=smooth,
        )
        for name in operators
    ]


def _logical(*operators: str) -> list[OperatorCase]:
    text = "(bool[n,7] x, bool[7] b) => (bool[] y) { y = %s (x, b) }"
    return [OperatorCase(name, "", text % name, smooth=False) for name in operators]


def _reductions(*operators: str) -> list[OperatorCase]:
    text = "(float[n,3,4] x) => (float[] y) <int64[%d] axes = {%s}> { y = %s <keepdims=%d> (x, axes) }"
    return [
        OperatorCase(name, corner, text % (count, axes, name, kept))
        for name in operators
        for corner, count, axes, kept in (("last axis", 1, "-1", 1), ("axes apart", 2, "0, 2", 0))
    ]


# ReLU's gradient is y·3e38 cut to [0, 1]: a runtime that reads an explicit beta of 0 as the default 0.5 is wrong
# where y is zero, so the case has zeros.
_MASK = "(float[n,7] x) => (float[] y) { r = Relu (x)  y = HardSigmoid <alpha=3e38, beta=0.0> (r) }"
# The hash that dropout draws from: products of int64 that wrap.
_HASH = """(int64[1] random_seed) => (bool[] y)
    <int64 zero = {0}, int64 one = {1}, int64 count = {40}, int64 position = {-4942790177534073029},
     int64 round = {2685821657736338717}, int64 limit = {-4611686018427387904}> {
    p = Range (zero, count, one)  a = Mul (p, position)  x = Add (a, random_seed)
    b = Mul (x, x)  c = Add (b, round)  d = Mul (c, c)  e = Add (d, x)  y = Less (e, limit) }"""
_SCAN = """(float[2] s, float[n,2] x) => (float[] last, float[] all) {
    last, all = Scan <num_scan_inputs=1%s, body = step (float[2] a, float[2] b) => (float[2] c, float[2] d)
        { t = Tanh (a)  c = Add (t, b)  d = Identity (c) }> (s, x) }"""
_SCAN_OUTSIDE = """(float[2] s, float[n,2] x, float[2,2] w) => (float[] last) {
    last = Scan <num_scan_inputs=1, body = step (float[2] a, float[2] b) => (float[2] c)
        { p = MatMul (a, w)  t = Tanh (p)  c = Add (t, b) }> (s, x) }"""
_LOOP = """(float[2] s) => (float[2] last) <int64 trips = {3}, bool yes = {1}> {
    last = Loop <body = turn (int64 i, bool c, float[2] a) => (bool d, float[2] b)
        { d = Identity (c)  t = Tanh (a)  b = Add (t, a) }> (trips, yes, s) }"""
_IF = """(float[2] x, float[1] flag) => (float[] y) <float[1] zero = {-100}> {
    above = Greater (flag, zero)
    c = Squeeze (above)
    y = If <then_branch = yes () => (float[2] a) { a = Tanh (x) },
            else_branch = no () => (float[2] b) { b = Neg (x) }> (c) }"""

OPERATOR_CASES: tuple[OperatorCase, ...] = (
    # products
    OperatorCase("MatMul", "", "(float[n,4] x, float[4,3] w) => (float[] y) { y = MatMul (x, w) }"),
    OperatorCase("MatMul", "batched", "(float[2,n,4] x, float[2,4,3] w) => (float[] y) { y = MatMul (x, w) }"),
    OperatorCase("MatMul", "row by matrix", "(float[4] x, float[4,3] w) => (float[] y) { y = MatMul (x, w) }"),
    OperatorCase("MatMul", "matrix by column", "(float[n,4] x, float[4] w) => (float[] y) { y = MatMul (x, w) }"),
    OperatorCase("Gemm", "bias", "(float[n,4] x, float[4,3] w, float[3] b) => (float[] y) { y = Gemm (x, w, b) }"),
    OperatorCase("Gemm", "transA", "(float[n,4] x, float[n,3] w) => (float[] y) { y = Gemm <transA=1> (x, w) }"),
    OperatorCase("Gemm", "transB, alpha, beta", "(float[n,4] x, float[3,4] w, float[n,3] c) => (float[] y) "
         "{ y = Gemm <transB=1, alpha=0.5, beta=2.0> (x, w, c) }"),
    OperatorCase("Einsum", "", '(float[2,n,4] x, float[2,4,3] w) => (float[] y) '
         '{ y = Einsum <equation = "bij,bjk->bik"> (x, w) }'),
    # elementwise
    *_unary("Neg", "Abs", "Exp", "Tanh", "Sigmoid", "Erf", "Relu", "LeakyRelu", "Elu", "Selu", "Softplus", "Gelu",
            "Mish", "HardSwish", "Sin", "Cos", "Identity"),
    *_unary("Sqrt", "Log", "Reciprocal", positive=True),
    *_unary("Sign", "Floor", "Ceil", "Round", smooth=False),
    *_binary("Add", "Sub", "Mul", "Min", "Max", "Sum"),
    OperatorCase("Div", "a row broadcast", "(float[n,7] x, float[7] b) => (float[] y) { y = Div (x, b) }",
                 positive=True),
    OperatorCase("Mul", "a number of rank 0", "(float[n,7] x, float s) => (float[] y) { y = Mul (x, s) }"),
    OperatorCase("PRelu", "", "(float[n,7] x, float[7] b) => (float[] y) { y = PRelu (x, b) }"),
    OperatorCase("Pow", "", "(float[n,7] x) => (float[] y) <float two = {2.0}> { y = Pow (x, two) }"),
    OperatorCase("Clip", "", "(float[n,7] x) => (float[] y) <float low = {-0.5}, float high = {0.5}> "
         "{ y = Clip (x, low, high) }"),
    OperatorCase("HardSigmoid", "mask of what is positive", _MASK, smooth=False),
    OperatorCase("HardSigmoid", "", "(float[n,7] x) => (float[] y) { y = HardSigmoid <alpha=0.5, beta=0.5> (x) }"),
    OperatorCase("Mod", "", "(int64[n] x) => (int64[] y) <int64 k = {3}> { y = Mod (x, k) }", 20, smooth=False),
    OperatorCase("CastLike", "", "(float[n,7] x, float[1] b) => (float[] y) { y = CastLike (x, b) }"),
    # comparisons and choices
    *_binary("Less", "Greater", "LessOrEqual", "GreaterOrEqual", result="bool", smooth=False),
    OperatorCase("Equal", "int64", "(int64[n,7] x, int64[7] b) => (bool[] y) { y = Equal (x, b) }", smooth=False),
    *_logical("And", "Or"),
    OperatorCase("Not", "", "(bool[n] x) => (bool[] y) { y = Not (x) }", smooth=False),
    OperatorCase("Where", "", "(bool[n,7] c, float[n,7] x, float[1] b) => (float[] y) { y = Where (c, x, b) }"),
    OperatorCase("IsNaN", "", "(float[n] x, float[n] z) => (bool[] y) { q = Sqrt (x)  y = IsNaN (q) }", smooth=False),
    OperatorCase("IsInf", "", "(float[n] x) => (bool[] y) <float zero = {0}> { q = Div (x, zero)  y = IsInf (q) }",
                 smooth=False),
    OperatorCase("Cast", "bool to float", "(bool[n] x) => (float[] y) { y = Cast <to=1> (x) }", smooth=False),
    OperatorCase("Cast", "int64 to float", "(int64[n] x) => (float[] y) { y = Cast <to=1> (x) }", 99, smooth=False),
    OperatorCase("Cast", "float to int64", "(float[n] x) => (int64[] y) { y = Cast <to=7> (x) }", smooth=False),
    OperatorCase("Cast", "float to int32", "(float[n] x) => (int32[] y) { y = Cast <to=6> (x) }", smooth=False),
    OperatorCase("Mul", "int64 that wraps", _HASH, smooth=False),
    # reductions
    *_reductions("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceL1", "ReduceL2",
                 "ReduceLogSumExp"),
    OperatorCase("ReduceSum", "all axes", "(float[n,3] x) => (float[] y) { y = ReduceSum <keepdims=0> (x) }"),
    OperatorCase("ReduceProd", "of a shape", "(float[n,3] x) => (int64[] y) { s = Shape (x) "
         "y = ReduceProd <keepdims=0> (s) }", smooth=False),
    OperatorCase("ArgMax", "", "(float[n,7] x) => (int64[] y) { y = ArgMax <axis=1, keepdims=0> (x) }", smooth=False),
    OperatorCase("ArgMin", "", "(float[n,7] x) => (int64[] y) { y = ArgMin <axis=1, keepdims=0> (x) }", smooth=False),
    OperatorCase("CumSum", "", "(float[n,7] x) => (float[] y) <int64 axis = {1}> { y = CumSum (x, axis) }"),
    OperatorCase("CumSum", "reverse, exclusive", "(float[n,7] x) => (float[] y) <int64 axis = {1}> "
         "{ y = CumSum <reverse=1, exclusive=1> (x, axis) }"),
    OperatorCase("TopK", "", "(float[n,7] x) => (float[] y, int64[] i) <int64[1] k = {3}> { y, i = TopK (x, k) }"),
    # shapes
    OperatorCase("Shape", "", "(float[n,3] x) => (int64[] y) { y = Shape (x) }", smooth=False),
    OperatorCase("Size", "", "(float[n,3] x) => (int64[] y) { y = Size (x) }", smooth=False),
    OperatorCase("Reshape", "0 and -1", "(float[n,2,3] x) => (float[] y) <int64[2] s = {0, -1}> "
         "{ y = Reshape (x, s) }"),
    OperatorCase("Flatten", "", "(float[n,2,3] x) => (float[] y) { y = Flatten <axis=1> (x) }"),
    OperatorCase("Transpose", "", "(float[n,2,3] x) => (float[] y) { y = Transpose <perm=[2,0,1]> (x) }"),
    OperatorCase("Unsqueeze", "", "(float[n,3] x) => (float[] y) <int64[1] a = {1}> { y = Unsqueeze (x, a) }"),
    OperatorCase("Squeeze", "", "(float[n,1,3] x) => (float[] y) <int64[1] a = {1}> { y = Squeeze (x, a) }"),
    OperatorCase("Expand", "", "(float[n,1,3] x) => (float[] y) <int64[3] s = {1, 4, 1}> { y = Expand (x, s) }"),
    OperatorCase("Expand", "to another's shape", "(float[n,3,4] x, float[n,3,1] z) => (float[] y) "
         "{ s = Shape (x)  y = Expand (z, s) }"),
    OperatorCase("Tile", "", "(float[n,3] x) => (float[] y) <int64[2] r = {2, 1}> { y = Tile (x, r) }"),
    OperatorCase("Concat", "", "(float[n,3] x, float[n,2] z) => (float[] y) { y = Concat <axis=1> (x, z) }"),
    OperatorCase("Concat", "eleven inputs", "(float[n,2] x) => (float[] y) "
         "{ y = Concat <axis=-1> (x, x, x, x, x, x, x, x, x, x, x) }"),
    OperatorCase("Split", "", "(float[n,6] x) => (float[] a, float[] b) <int64[2] s = {2, 4}> "
         "{ a, b = Split <axis=1> (x, s) }"),
    OperatorCase("Split", "twelve parts", "(float[n,12] x) => (float[] y) <int64[12] s = {1,1,1,1,1,1,1,1,1,1,1,1}> "
         "{ a, b, c, d, e, f, g, h, i, j, k, l = Split <axis=1> (x, s) "
         "y = Concat <axis=1> (l, k, j, i, h, g, f, e, d, c, b, a) }"),
    OperatorCase("Slice", "", "(float[n,6] x) => (float[] y) <int64[1] a = {1}, int64[1] b = {5}, int64[1] c = {1}, "
         "int64[1] d = {2}> { y = Slice (x, a, b, c, d) }"),
    OperatorCase("Slice", "backwards", "(float[n,6] x) => (float[] y) <int64[1] a = {-1}, "
         "int64[1] b = {-9223372036854775807}, int64[1] c = {1}, int64[1] d = {-1}> { y = Slice (x, a, b, c, d) }"),
    OperatorCase("Pad", "", "(float[n,3] x) => (float[] y) <int64[4] p = {0, 1, 0, 2}> { y = Pad (x, p) }"),
    OperatorCase("Range", "", "(float[n,3] x) => (int64[] y) <int64 zero = {0}, int64 one = {1}> "
         "{ c = Size (x)  y = Range (zero, c, one) }", smooth=False),
    OperatorCase("ConstantOfShape", "", "(float[n,3] x) => (float[] y) "
         "{ s = Shape (x)  z = ConstantOfShape <value = float[1] {0.5}> (s)  y = Mul (z, x) }"),
    OperatorCase("Trilu", "", "(float[n,5] x) => (float[] y) { y = Trilu <upper=0> (x) }"),
    OperatorCase("EyeLike", "", "(float[n,n] x) => (float[] y) { e = EyeLike (x)  y = Add (x, e) }"),
    OperatorCase("NonZero", "", "(float[n,3] x) => (int64[] y) { r = Relu (x)  y = NonZero (r) }", smooth=False),
    OperatorCase("DepthToSpace", "", "(float[n,8,2,3] x) => (float[] y) { y = DepthToSpace <blocksize=2> (x) }"),
    OperatorCase("SpaceToDepth", "", "(float[n,2,4,6] x) => (float[] y) { y = SpaceToDepth <blocksize=2> (x) }"),
    # lookups
    OperatorCase("Gather", "rows", "(float[3,4] x, int64[n,2] i) => (float[] y) { y = Gather (x, i) }"),
    OperatorCase("Gather", "axis 1", "(float[n,3] x, int64[2] i) => (float[] y) { y = Gather <axis=1> (x, i) }"),
    OperatorCase("GatherElements", "", "(float[n,3] x, int64[n,2] i) => (float[] y) "
         "{ y = GatherElements <axis=1> (x, i) }"),
    OperatorCase("GatherND", "", "(float[3,3,2] x, int64[n,2] i) => (float[] y) { y = GatherND (x, i) }"),
    OperatorCase("ScatterElements", "add, places repeat", "(float[3,2] x, int64[n,2] i, float[n,2] u) => (float[] y) "
         '{ y = ScatterElements <axis=0, reduction="add"> (x, i, u) }'),
    OperatorCase("ScatterElements", "add along rows, below zero", "(float[n,3] x, int64[n,2] i, float[n,2] u) "
         '=> (float[] y) <int64 three = {3}> { j = Sub (i, three) '
         'y = ScatterElements <axis=1, reduction="add"> (x, j, u) }'),
    OperatorCase("ScatterND", "add, places repeat", "(float[3,4] x, int64[n,1] i, float[n,4] u) => (float[] y) "
         '{ y = ScatterND <reduction="add"> (x, i, u) }'),
    OperatorCase("OneHot", "", "(int64[n] i) => (float[] y) <int64 d = {3}, float[2] v = {0.0, 1.0}> "
         "{ y = OneHot (i, d, v) }", smooth=False),
    # normalisation
    OperatorCase("Softmax", "", "(float[n,7] x) => (float[] y) { y = Softmax <axis=-1> (x) }"),
    OperatorCase("LogSoftmax", "", "(float[n,7] x) => (float[] y) { y = LogSoftmax <axis=-1> (x) }"),
    OperatorCase("LayerNormalization", "", "(float[n,3,7] x, float[7] s, float[7] b) => (float[] y) "
         "{ y = LayerNormalization <axis=-1> (x, s, b) }"),
    OperatorCase("LayerNormalization", "saved statistics",
         "(float[n,3,7] x, float[7] s, float[7] b) => (float[] z) "
         "{ y, m, v = LayerNormalization <axis=-1> (x, s, b)  t = Mul (y, v)  z = Sub (t, m) }", smooth=False),
    OperatorCase("BatchNormalization", "inference",
         "(float[n,3,4,4] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[] y) "
         "{ y = BatchNormalization (x, s, b, m, v) }", positive=True),
    OperatorCase("BatchNormalization", "training",
         "(float[n,3,4,4] x, float[3] s, float[3] b, float[3] m, float[3] v) "
         "=> (float[] y, float[] mean, float[] var) "
         "{ y, mean, var = BatchNormalization <training_mode=1> (x, s, b, m, v) }", positive=True, smooth=False),
    OperatorCase("InstanceNormalization", "", "(float[n,3,4,4] x, float[3] s, float[3] b) => (float[] y) "
         "{ y = InstanceNormalization (x, s, b) }"),
    OperatorCase("GroupNormalization", "", "(float[n,4,3,3] x, float[4] s, float[4] b) => (float[n,4,3,3] y) "
         "{ y = GroupNormalization <num_groups=2> (x, s, b) }"),
    # images
    OperatorCase("Conv", "pads", "(float[n,3,6,6] x, float[4,3,3,3] w, float[4] b) => (float[] y) "
         "{ y = Conv <pads=[1,1,1,1]> (x, w, b) }"),
    OperatorCase("Conv", "stride, dilation", "(float[n,3,9,9] x, float[4,3,3,3] w) => (float[] y) "
         "{ y = Conv <strides=[2,2], dilations=[2,2]> (x, w) }"),
    OperatorCase("Conv", "groups", "(float[n,8,5,5] x, float[6,4,3,3] w) => (float[] y) { y = Conv <group=2> (x, w) }"),
    OperatorCase("Conv", "one axis", "(float[n,3,9] x, float[4,3,3] w) => (float[] y) { y = Conv (x, w) }"),
    OperatorCase("Conv", "each channel alone", "(float[n,4,6,6] x, float[4,1,3,3] w) => (float[] y) "
         "{ y = Conv <group=4> (x, w) }"),
    OperatorCase("ConvTranspose", "stride", "(float[n,3,4,4] x, float[3,4,3,3] w) => (float[] y) "
         "{ y = ConvTranspose <strides=[2,2], pads=[1,1,1,1], output_padding=[1,1]> (x, w) }"),
    OperatorCase("ConvTranspose", "groups", "(float[n,8,3,3] x, float[8,1,2,2] w, float[2] b) => (float[] y) "
         "{ y = ConvTranspose <group=2, strides=[2,2]> (x, w, b) }"),
    OperatorCase("MaxPool", "", "(float[n,2,6,6] x) => (float[] y) "
         "{ y = MaxPool <kernel_shape=[2,2], strides=[2,2]> (x) }"),
    OperatorCase("MaxPool", "places of the maxima", "(float[n,2,6,6] x) => (float[] y, int64[] i) "
         "{ y, i = MaxPool <kernel_shape=[2,2], strides=[2,2]> (x) }", smooth=False),
    OperatorCase("AveragePool", "", "(float[n,2,6,6] x) => (float[] y) "
         "{ y = AveragePool <kernel_shape=[3,3], strides=[2,2]> (x) }"),
    OperatorCase("AveragePool", "pads", "(float[n,2,6,6] x) => (float[] y) "
         "{ y = AveragePool <kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1> (x) }"),
    OperatorCase("GlobalAveragePool", "", "(float[n,3,4,4] x) => (float[] y) { y = GlobalAveragePool (x) }"),
    OperatorCase("Resize", "nearest", "(float[n,2,3,3] x) => (float[] y) <float[4] s = {1.0, 1.0, 2.0, 2.0}> "
         '{ y = Resize <mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"> (x, , s) }'),
    OperatorCase("Resize", "linear", "(float[n,2,3,3] x) => (float[] y) <float[4] s = {1.0, 1.0, 2.0, 2.0}> "
         '{ y = Resize <mode="linear", coordinate_transformation_mode="half_pixel"> (x, , s) }'),
    OperatorCase("GridSample", "", "(float[n,2,4,4] x, float[n,3,3,2] g) => (float[] y) "
         '{ y = GridSample <mode="linear"> (x, g) }'),
    OperatorCase("Col2Im", "strides, pads", "(float[n,12,4] x) => (float[] y) "
         "<int64[2] s = {4, 5}, int64[2] k = {2, 2}> { y = Col2Im <strides=[2,3], pads=[0,0,1,1]> (x, s, k) }"),
    OperatorCase("Col2Im", "", "(float[n,8,9] x) => (float[] y) <int64[2] s = {4, 4}, int64[2] k = {2, 2}> "
         "{ y = Col2Im (x, s, k) }"),
    # recurrences and bodies
    OperatorCase("LSTM", "", "(float[n,2,3] x, float[1,16,3] w, float[1,16,4] r, float[1,32] b) => (float[] y) "
         "{ y = LSTM <hidden_size=4> (x, w, r, b) }"),
    OperatorCase("GRU", "", "(float[n,2,3] x, float[1,12,3] w, float[1,12,4] r, float[1,24] b) => (float[] y) "
         "{ y = GRU <hidden_size=4, linear_before_reset=1> (x, w, r, b) }"),
    OperatorCase("Scan", "", _SCAN % ""),
    OperatorCase("Scan", "backwards", _SCAN % ", scan_input_directions=[1], scan_output_directions=[1]"),
    OperatorCase("Scan", "reads a value from outside", _SCAN_OUTSIDE),
    OperatorCase("Loop", "", _LOOP),
    OperatorCase("If", "", _IF),
    # weights of few bits
    OperatorCase("DequantizeLinear", "int8 by column", "(int8[4,3] x, float[3] s) => (float[] y) "
         "{ y = DequantizeLinear <axis=1> (x, s) }", smooth=False),
)  # fmt: skip
