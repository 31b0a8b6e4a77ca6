"""Where a derivative does not exist or is delicate (kinks, ties, zeros, infinities), torch's choice is ours."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnxruntime
import pytest
import torch
import torch.nn.functional as F

from onward.autodiff.gradient import gradient

AROUND_ZERO = [-2.0, -1.0, 0.0, 1.0, 2.0]
INF = float("inf")

# label: (nodes from x to y, the same in torch, points)
CASES = {
    "Abs at 0": ("y = Abs(x)", torch.abs, AROUND_ZERO),
    "Relu at 0": ("y = Relu(x)", torch.relu, AROUND_ZERO),
    "LeakyRelu at 0": ("y = LeakyRelu<alpha=0.25>(x)", lambda x: F.leaky_relu(x, 0.25), AROUND_ZERO),
    "PRelu at 0": (
        "s = Constant<value_floats=[0.25]>() y = PRelu(x, s)",
        lambda x: F.leaky_relu(x, 0.25),
        AROUND_ZERO,
    ),
    "Elu at 0": ("y = Elu<alpha=0.5>(x)", lambda x: F.elu(x, 0.5), AROUND_ZERO),
    "Selu at 0": ("y = Selu(x)", F.selu, AROUND_ZERO),
    "Celu at 0": ("y = Celu<alpha=2.0>(x)", lambda x: F.celu(x, 2.0), AROUND_ZERO),
    "HardSwish at ±3": ("y = HardSwish(x)", F.hardswish, [-4.0, -2.9, 0.0, 2.9, 4.0]),
    "HardSigmoid at ±3": (
        "y = HardSigmoid<alpha=0.16666667, beta=0.5>(x)",
        F.hardsigmoid,
        [-4.0, -3.0, -1.0, 0.0, 3.0, 4.0],
    ),
    "Shrink at ±λ": ("y = Shrink<lambd=1.0>(x)", lambda x: F.hardshrink(x, 1.0), AROUND_ZERO),
    "Softplus far out": ("y = Softplus(x)", F.softplus, [-90.0, 0.0, 90.0]),
    "Mish far out": ("y = Mish(x)", F.mish, [-60.0, -3.0, 0.0, 3.0, 60.0]),
    "Gelu far out": ("y = Gelu(x)", F.gelu, [-30.0, -3.0, 0.0, 3.0, 30.0]),
    "Gelu (tanh) far out": (
        'y = Gelu<approximate="tanh">(x)',
        lambda x: F.gelu(x, approximate="tanh"),
        [-30.0, -3.0, 0.0, 3.0, 30.0],
    ),
    "Clip at its bounds": (
        "a = Constant<value_float=-1.0>() b = Constant<value_float=1.0>() y = Clip(x, a, b)",
        lambda x: x.clamp(-1, 1),
        AROUND_ZERO,
    ),
    "Max at a tie": ("z = Neg(x) y = Max(x, z)", lambda x: torch.maximum(x, -x), AROUND_ZERO),
    "Pow at 0": ("p = Constant<value_float=2.0>() y = Pow(x, p)", lambda x: x**2, AROUND_ZERO),
    "Pow to 0 at 0": ("p = Constant<value_float=0.0>() y = Pow(x, p)", lambda x: x**0.0, AROUND_ZERO),
    "Sqrt at 0": ("y = Sqrt(x)", torch.sqrt, [0.0, 1.0]),
    "Sqrt of Relu below 0": ("r = Relu(x) y = Sqrt(r)", lambda x: torch.relu(x).sqrt(), [-1.0, 4.0]),
    "Sqrt of Clip below 0": (
        "a = Constant<value_float=0.0>() r = Clip(x, a) y = Sqrt(r)",
        lambda x: x.clamp(min=0).sqrt(),
        [-1.0, 4.0],
    ),
    "Sqrt of Where below 0": (
        "a = Constant<value_float=0.0>() c = Greater(x, a) r = Where(c, x, a) y = Sqrt(r)",
        lambda x: torch.where(x > 0, x, torch.zeros_like(x)).sqrt(),
        [-1.0, 4.0],
    ),
    "ReduceMax at ties": ("y = ReduceMax(x)", lambda x: x.amax(0, keepdim=True), [1.0, 3.0, 3.0, 2.0]),
    "ReduceMin at ties": ("y = ReduceMin(x)", lambda x: x.amin(0, keepdim=True), [1.0, 1.0, 3.0, 2.0]),
    "ReduceL1 at 0": ("y = ReduceL1(x)", lambda x: x.norm(1).reshape(1), [0.0, -2.0, 3.0]),
    "ReduceL2 of zeros": ("y = ReduceL2(x)", lambda x: x.norm(2).reshape(1), [0.0, 0.0]),
    "ReduceProd with a zero": ("y = ReduceProd(x)", lambda x: x.prod().reshape(1), [2.0, 0.0, 3.0]),
    "ReduceProd with zeros": ("y = ReduceProd(x)", lambda x: x.prod().reshape(1), [2.0, 0.0, 0.0]),
    "ReduceLogSumExp with −∞": (
        "y = ReduceLogSumExp(x)",
        lambda x: x.logsumexp(0, keepdim=True),
        [-INF, 1.0, 2.0],
    ),
}


def gradient_of(nodes: str, points: np.ndarray) -> np.ndarray:
    text = f'<ir_version: 10, opset_import: ["": 21]> g (float[N] x) => (float[M] y) {{ {nodes} }}'
    derived = gradient(onnx.parser.parse_model(text), of="y", wrt=["x"], cotangent="dy")
    session = onnxruntime.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    scalar = "Reduce" in nodes
    return session.run(["x_grad"], {"x": points, "dy": np.ones(1 if scalar else points.shape, np.float32)})[0]


@pytest.mark.parametrize("label", CASES)
def test_gradient_is_torchs(label):
    nodes, function, points = CASES[label]
    x = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    found = gradient_of(nodes, np.array(points, np.float32))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6, atol=5e-7)


def test_logarithm_of_no_probability_has_no_gradient():
    """ln Σ eˣ where every x is −∞, as in a row that is masked wholly: zeros; torch has NaN there."""
    found = gradient_of("y = ReduceLogSumExp(x)", np.array([-INF, -INF], np.float32))
    np.testing.assert_array_equal(found, [0, 0])


def test_rows_that_are_picked_often_get_every_gradient():
    """With several threads too: the provider's ScatterND would lose some."""
    text = """<ir_version: 10, opset_import: ["": 21]>
    g (float[200,64] x, int64[4000] i) => (float[4000,64] y) { y = Gather(x, i) }"""
    derived = gradient(onnx.parser.parse_model(text), of="y", wrt=["x"], cotangent="dy")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 4
    session = onnxruntime.InferenceSession(
        derived.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    index = np.random.default_rng(0).integers(0, 3, 4000)
    feeds = {"x": np.zeros((200, 64), np.float32), "i": index, "dy": np.ones((4000, 64), np.float32)}
    expected = np.repeat(np.bincount(index, minlength=200)[:, None], 64, axis=1)
    np.testing.assert_array_equal(session.run(["x_grad"], feeds)[0], expected)
