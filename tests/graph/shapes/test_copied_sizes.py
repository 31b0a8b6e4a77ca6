"""Sizes that ONNX's inference copies though they differ: no two values of different sizes share a name."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnxruntime

from onward.autodiff.gradient import vector_jacobian


def _run(text: str, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    made, _, _ = vector_jacobian(onnx.parser.parse_model(text))
    return onnxruntime.InferenceSession(made.SerializeToString()).run(None, feeds)


def test_elements_of_a_sequence_may_differ_in_size() -> None:
    """As torch.export writes the weights of attention over another sequence: 8 rows, then 16."""
    text = """<ir_version: 9, opset_import: ["": 18]> g (float[24,8] w, float[3,8] x) => (float[3,8] q, float[3,16] k) {
        sizes = Constant <value_ints = [8, 16]> ()
        parts = SplitToSequence <axis = 0> (w, sizes)
        zero = Constant <value_int = 0> ()
        one = Constant <value_int = 1> ()
        first = SequenceAt (parts, zero)
        second = SequenceAt (parts, one)
        a = Transpose <perm = [1, 0]> (first)
        b = Transpose <perm = [1, 0]> (second)
        q = MatMul (x, a)
        k = MatMul (x, b)
    }"""
    rng = np.random.default_rng(0)
    w, x, dq, dk = (rng.standard_normal(s).astype(np.float32) for s in ((24, 8), (3, 8), (3, 8), (3, 16)))
    dw, dx = _run(text, {"w": w, "x": x, "q_cotangent": dq, "k_cotangent": dk})
    np.testing.assert_allclose(dw, np.concatenate([dq.T @ x, dk.T @ x]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, dq @ w[:8] + dk @ w[8:], rtol=1e-5, atol=1e-5)


def test_a_transform_may_change_the_size_of_its_axis() -> None:
    """There and back again, with lengths known at run time: the gradient of the identity."""
    text = """<ir_version: 9, opset_import: ["": 20]> g (float[4,N,1] x) => (float[4,M,1] y) {
        axis = Constant <value_int = 1> ()
        shape = Shape <start = 1, end = 2> (x)
        zero = Constant <value_ints = [0]> ()
        length = Squeeze (shape, zero)
        bins = DFT <onesided = 1> (x, length, axis)
        y = DFT <inverse = 1, onesided = 1> (bins, length, axis)
    }"""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 4, 8, 1)).astype(np.float32)
    (dx,) = _run(text, {"x": x, "y_cotangent": dy})
    np.testing.assert_allclose(dx, dy, rtol=1e-5, atol=1e-5)
