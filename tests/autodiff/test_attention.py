"""The gradient of attention's Softmax is taken through the product behind it, where that is all that reads it."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnxruntime as ort
import pytest
import torch

from onward import gradient

HEAD = """<ir_version: 10, opset_import: ["": 21]>
g (float[b, 6, 7] s, float[b, 7, 3] v, float[b, 6, 7] m) => (float y) """
# text, the same in torch, and whether the shortcut fits
CASES = {
    "plain": (
        "{ p = Softmax(s)  z = MatMul(p, v)  q = Mul(z, z)  y = ReduceSum<keepdims=0>(q) }",
        False,
        True,
    ),
    "dropped out": (
        "{ p = Softmax(s)  d = Mul(p, m)  z = MatMul(d, v)  q = Mul(z, z)  y = ReduceSum<keepdims=0>(q) }",
        True,
        True,
    ),
    "mask first": (
        "{ p = Softmax(s)  d = Mul(m, p)  z = MatMul(d, v)  q = Mul(z, z)  y = ReduceSum<keepdims=0>(q) }",
        True,
        True,
    ),
    "read twice": (
        "{ p = Softmax(s)  z = MatMul(p, v)  q = Mul(z, z)  t = ReduceSum<keepdims=0>(q)"
        "  o = Mul(p, m)  u = ReduceSum<keepdims=0>(o)  y = Add(t, u) }",
        None,
        False,
    ),
    "another axis": (
        "{ p = Softmax<axis=1>(s)  z = MatMul(p, v)  q = Mul(z, z)  y = ReduceSum<keepdims=0>(q) }",
        False,
        False,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_torch(case: str) -> None:
    text, masked, short = CASES[case]
    derived = gradient(onnx.parser.parse_model(HEAD + text), wrt=["s", "v"])
    random = np.random.default_rng(0)
    feeds = {
        "s": random.normal(size=(4, 6, 7)).astype(np.float32),
        "v": random.normal(size=(4, 7, 3)).astype(np.float32),
        "m": (random.random((4, 6, 7)) < 0.7).astype(np.float32) / 0.7,
    }
    found = dict(
        zip(
            [value.name for value in derived.graph.output],
            ort.InferenceSession(derived.SerializeToString()).run(None, feeds),
        )
    )
    s, v, m = (torch.tensor(feeds[name].astype(np.float64), requires_grad=name != "m") for name in "svm")
    p = torch.softmax(s, 1 if case == "another axis" else -1)
    z = (p * m if masked else p) @ v
    total = (z * z).sum() + ((p * m).sum() if masked is None else 0)
    total.backward()
    for name, tensor in (("s", s), ("v", v)):
        np.testing.assert_allclose(found[f"{name}_grad"], tensor.grad.numpy(), rtol=1e-5, atol=1e-5)
    rows = {node.output[0]: set(node.input) for node in derived.graph.node if node.op_type == "Mul"}
    sums = [rows[node.input[0]] for node in derived.graph.node if node.op_type == "ReduceSum" and keeps(node)]
    assert any("z" in read for read in sums) == short


def keeps(node: onnx.NodeProto) -> bool:
    return any(attribute.name == "keepdims" and attribute.i == 1 for attribute in node.attribute)
