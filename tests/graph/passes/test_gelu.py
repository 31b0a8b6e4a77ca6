"""Gelu in every spelling of exporters becomes one operator with the same values; anything else stays."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onward.autodiff.prepare import fuse_gelu
from onward.graph.dialect.normalize import normalize

HEAD = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 4] y)
<float root = {1.4142135}, float inverse = {0.70710677}, float one = {1.0}, float half = {0.5}, float two = {2.0}>"""
SPELLINGS = {
    "torch": "{ a = Div(x, root)  e = Erf(a)  p = Add(e, one)  m = Mul(x, p)  y = Mul(m, half) }",
    "multiplied": "{ a = Mul(x, inverse)  e = Erf(a)  p = Add(one, e)  m = Mul(p, half)  y = Mul(x, m) }",
    "half first": "{ h = Mul(half, x)  a = Div(x, root)  e = Erf(a)  p = Add(e, one)  y = Mul(h, p) }",
    "halved": (
        "{ h = Mul(half, x)  a = Div(x, root)  e = Erf(a)  p = Add(e, one)  m = Mul(h, p)  y = Mul(m, half) }"
    ),
}
CURVE = (
    ", float cube = {3.0}, float small = {0.044715}, float slope = {0.7978846}, float steep = {0.0356774}>"
)
TANH_SPELLINGS = {
    "power": (
        "{ c = Pow(x, cube)  k = Mul(small, c)  s = Add(x, k)  u = Mul(s, slope)  t = Tanh(u)  p = Add(t, one)"
        "  h = Mul(x, half)  y = Mul(h, p) }"
    ),
    "products": (
        "{ q = Mul(x, x)  c = Mul(q, x)  k = Mul(c, small)  s = Add(k, x)  u = Mul(slope, s)  t = Tanh(u)"
        "  p = Add(one, t)  m = Mul(x, p)  y = Mul(m, half) }"
    ),
    "factored": (
        "{ q = Mul(x, small)  r = Mul(q, x)  s = Add(r, one)  v = Mul(x, slope)  u = Mul(v, s)  t = Tanh(u)"
        "  p = Add(t, one)  m = Mul(p, half)  y = Mul(x, m) }"
    ),
    "coefficients": (
        "{ q = Mul(x, x)  r = Mul(q, steep)  s = Add(r, slope)  u = Mul(s, x)  t = Tanh(u)  p = Add(t, one)"
        "  h = Mul(half, x)  y = Mul(h, p) }"
    ),
}
TANH_OTHERS = {
    "another cubic": TANH_SPELLINGS["power"].replace("small", "slope"),
    "another power": TANH_SPELLINGS["power"].replace("Pow(x, cube)", "Pow(x, two)"),
    "no cubic": "{ u = Mul(x, slope)  t = Tanh(u)  p = Add(t, one)  h = Mul(x, half)  y = Mul(h, p) }",
    "a constant term": TANH_SPELLINGS["factored"].replace("v = Mul(x, slope)", "v = Add(x, slope)"),
    "of something else": TANH_SPELLINGS["power"].replace("Pow(x, cube)", "Abs(x)"),
}
OTHERS = {
    "another factor": "{ a = Div(x, two)  e = Erf(a)  p = Add(e, one)  m = Mul(x, p)  y = Mul(m, half) }",
    "another term": "{ a = Div(x, root)  e = Erf(a)  p = Add(e, two)  m = Mul(x, p)  y = Mul(m, half) }",
    "root over x": "{ a = Div(root, x)  e = Erf(a)  p = Add(e, one)  m = Mul(x, p)  y = Mul(m, half) }",
    "parts used elsewhere": (
        "{ a = Div(x, root)  e = Erf(a)  p = Add(e, one)  m = Mul(x, p)  h = Mul(m, half)  y = Add(h, p) }"
    ),
}


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


@pytest.mark.parametrize("text", SPELLINGS.values(), ids=SPELLINGS)
def test_spelled_out_gelu_becomes_one_operator(text):
    model = normalize(onnx.parser.parse_model(HEAD + text))
    x = np.linspace(-4, 4, 20, dtype=np.float32).reshape(5, 4)
    before = run(model, x)
    assert fuse_gelu(model) == 1
    assert "Gelu" in {node.op_type for node in model.graph}
    np.testing.assert_allclose(run(model, x), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", TANH_SPELLINGS.values(), ids=TANH_SPELLINGS)
def test_spelled_out_tanh_gelu_becomes_one_operator(text):
    model = normalize(onnx.parser.parse_model(HEAD[:-1] + CURVE + text))
    x = np.linspace(-6, 6, 40, dtype=np.float32).reshape(10, 4)
    before = run(model, x)
    assert fuse_gelu(model) == 1
    (node,) = (node for node in model.graph if node.op_type == "Gelu")
    assert node.attributes.get_string("approximate") == "tanh"
    np.testing.assert_allclose(run(model, x), before, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("text", TANH_OTHERS.values(), ids=TANH_OTHERS)
def test_other_curves_stay(text):
    model = normalize(onnx.parser.parse_model(HEAD[:-1] + CURVE + text))
    assert fuse_gelu(model) == 0


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_what_is_not_gelu_stays(text):
    model = normalize(onnx.parser.parse_model(HEAD + text))
    assert fuse_gelu(model) == 0
    assert "Gelu" not in {node.op_type for node in model.graph}
