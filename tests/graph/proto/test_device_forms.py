"""Forms for devices give the numbers of the operators that they replace."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from onward.graph.proto.device_forms import prefer_device_forms

MASK = "<bool[3, 3] b = {1, 0, 0, 1, 1, 0, 1, 1, 1}, float low = {-1e38}>"
CASES = {
    "a mean over axes apart": (
        "float[2, 3, 4, 5] x", "<int64[3] a = {0, 2, 3}> { y = ReduceMean <keepdims = 0> (x, a) }",
        ["ReduceSum", "ReduceSum", "Mul"],
    ),
    "a mean over axes apart, kept": (
        "float[2, 3, 4, 5] x", "<int64[2] a = {0, 2}> { y = ReduceMean (x, a) }", ["ReduceSum", "ReduceSum", "Mul"],
    ),
    "a mean of a size that is not known": (
        "float[n, 3, 4, 5] x", "<int64[2] a = {0, 2}> { y = ReduceMean (x, a) }", ["ReduceMean"] * 2,
    ),
    "a mean of float64": (
        "float[2, 3, 4] x",
        "<int64[2] a = {0, 2}> { d = Cast <to = 11> (x)  m = ReduceMean (d, a)  y = Cast <to = 1> (m) }",
        ["Cast", "ReduceMean", "ReduceMean", "Cast"],
    ),
    "a sum over axes apart, kept": (
        "float[2, 3, 4, 5] x", "<int64[2] a = {0, 2}> { y = ReduceSum (x, a) }", ["ReduceSum"] * 2,
    ),
    "a mean over axes together": (
        "float[2, 3, 4, 5] x", "<int64[2] a = {2, 3}> { y = ReduceMean (x, a) }", ["ReduceMean"],
    ),
    "a pad of a transposed image": (
        "float[2, 3, 4, 5] x",
        "<int64[8] p = {0, 1, 2, 0, 0, 3, 4, 0}> { t = Transpose <perm = [0, 2, 3, 1]> (x)  y = Pad (t, p) }",
        ["Pad", "Transpose"],
    ),
    "a pad of channels": (
        "float[2, 3, 4, 5] x",
        "<int64[8] p = {0, 0, 0, 1, 0, 0, 0, 1}> { t = Transpose <perm = [0, 2, 3, 1]> (x)  y = Pad (t, p) }",
        ["Transpose", "Pad"],
    ),
    "windows apart": (
        "float[2, 12, 6] x", "<int64[2] s = {4, 6}, int64[2] k = {2, 2}> { y = Col2Im <strides = [2, 2]> (x, s, k) }",
        ["Reshape", "ConvTranspose"],
    ),
    "windows that overlap, pads and a rest": (
        "float[2, 18, 12] x",
        "<int64[2] s = {6, 8}, int64[2] k = {3, 3}> "
        "{ y = Col2Im <strides = [2, 2], pads = [1, 1, 1, 0]> (x, s, k) }",
        ["Reshape", "ConvTranspose"],
    ),
    "a half of erf and a half": (
        "float[2, 3] x",
        "<float h = {0.5}> { e = Erf (x)  a = Mul (e, h)  r = Exp (x)  b = Add (r, h)  y = Add (a, b) }",
        ["Erf", "HardSigmoid", "Exp", "Add"],
    ),
    "sums of products": (
        "float[3, 3] x",
        "{ p = MatMul (x, x)  q = Exp (x)  a = Add (q, p)  b = Add (a, q)  y = Add (b, p) }",
        ["MatMul", "Exp", "Sum"],
    ),
    "sums of which one is read twice": (
        "float[3, 3] x",
        "{ p = MatMul (x, x)  a = Add (x, p)  b = Add (a, p)  y = Add (b, a) }",
        ["MatMul", "Add", "Sum"],
    ),
    "a product with a bias": (
        "float[3, 3] x", "{ p = MatMul (x, x)  q = Exp (x)  a = Add (p, x)  y = Add (a, q) }",
        ["MatMul", "Exp", "Add", "Add"],
    ),
    "scores that a mask lets through": (
        "float[2, 3, 3] x", f"{MASK} {{ m = Where (b, x, low)  y = Softmax (m) }}", ["Add", "Softmax"],
    ),
    "scores that a mask takes away": (
        "float[2, 3, 3] x",
        "<bool[3, 3] b = {0, 1, 1, 0, 0, 1, 0, 0, 0}, float low = {-1e38}> { m = Where (b, low, x)  y = Softmax (m) }",
        ["Add", "Softmax"],
    ),
    "a mask of which a row is empty": (
        "float[2, 3, 3] x",
        "<bool[3, 3] b = {0, 0, 0, 1, 1, 0, 1, 1, 1}, float low = {-1e38}> { m = Where (b, x, low)  y = Softmax (m) }",
        ["Where", "Softmax"],
    ),
    "a mask of which a column is empty": (
        "float[2, 3, 3] x",
        "<bool[3, 3] b = {0, 1, 1, 0, 1, 0, 0, 1, 1}, float low = {-1e38}> "
        "{ m = Where (b, x, low)  y = Softmax <axis = 1> (m) }",
        ["Where", "Softmax"],
    ),
    "a mask that only lowers": (
        "float[2, 3, 3] x", f"{MASK.replace('-1e38', '-9')} {{ m = Where (b, x, low)  y = Softmax (m) }}",
        ["Where", "Softmax"],
    ),
    "masked scores that another node reads": (
        "float[2, 3, 3] x",
        f"{MASK} {{ m = Where (b, x, low)  s = Softmax (m)  e = Exp (m)  y = Add (s, e) }}",
        ["Where", "Softmax", "Exp", "Add"],
    ),
    "a mask that is computed": (
        "float[2, 3, 3] x",
        "<float low = {-1e38}> { z = Sub (x, x)  b = Equal (z, z)  m = Where (b, x, low)  y = Softmax (m) }",
        ["Sub", "Equal", "Where", "Softmax"],
    ),
    "sums that may be of integers": (
        "float[3, 3] x", "{ q = Exp (x)  a = Add (q, q)  b = Add (a, q)  y = Add (b, q) }", ["Exp"] + ["Add"] * 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_form_gives_the_same_numbers(name):
    given, body, expected = CASES[name]
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> g ({given}) => (float y) {body}'
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    prefer_device_forms(changed)
    assert [node.op_type for node in changed.graph.node] == expected
    shape = [dim.dim_value or 2 for dim in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    first, second = (
        ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for m in (model, changed)
    )
    np.testing.assert_allclose(second, first, rtol=1e-5, atol=1e-6)
