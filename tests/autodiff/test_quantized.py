"""Straight-through gradients: rounding passes, saturation stops, and integers in between are no wall."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from onward.autodiff.gradient import vector_jacobian
from onward.errors import UnsupportedOps

HEAD = '<ir_version: 10, opset_import: ["": 21]> g '
SCALES = {
    # name: scale, axis, block_size
    "tensor": (np.float32(0.1), 1, 0),
    "axis": (np.array([0.1, 0.2, 0.05], np.float32), 0, 0),
    "last axis": (np.array([0.1, 0.2, 0.05, 0.3], np.float32), -1, 0),
    "block": (np.array([[0.1, 0.2], [0.05, 0.1], [0.3, 0.02]], np.float32), 1, 2),
    "short block": (np.array([[0.1, 0.2], [0.05, 0.1], [0.3, 0.02]], np.float32), 1, 3),
}
KINDS = {"int8": (-128, 127, 5), "uint8": (0, 255, 128)}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCALES)
def test_a_pair_passes_the_gradient_where_it_does_not_saturate(name, kind, symbolic):
    scale, axis, block = SCALES[name]
    low, high, zero = KINDS[kind]
    dims = "N,M" if symbolic else "3,4"
    size = f"[{','.join(map(str, scale.shape))}]" if scale.shape else ""
    attributes = f"<axis={axis}, block_size={block}>" if block else f"<axis={axis}>"
    text = (
        f"{HEAD} (float[{dims}] x, float{size} s, {kind}{size} z) => (float[{dims}] y) "
        f"{{ q = QuantizeLinear{attributes}(x, s, z) y = DequantizeLinear{attributes}(q, s, z) }}"
    )
    x = np.random.default_rng(0).uniform(-3, 3, (3, 4)).astype(np.float32)
    x[0, 0], x[2, 3] = 1e3, -1e3
    z = np.full(scale.shape, zero, kind)
    cotangent = np.random.default_rng(1).uniform(0.5, 1.5, (3, 4)).astype(np.float32)
    dx, ds = _gradients(text, {"x": x, "s": scale, "z": z, "y_cotangent": cotangent}, ["x", "s"])

    spread = _spread(scale, axis, block)
    level = np.round(x / spread) + zero
    inside = (level >= low) & (level <= high)
    assert inside.any() and not inside.all()
    np.testing.assert_allclose(dx, np.where(inside, cotangent, 0), rtol=1e-6)
    each = cotangent * (np.clip(level, low, high) - zero - np.where(inside, x / spread, 0))
    np.testing.assert_allclose(ds, _collect(each, scale.shape, axis, block), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("between", ["Identity(q)", "Transpose<perm=[1,0]>(q)", "Cast<to=6>(q)"])
def test_operators_between_the_pair_do_not_stop_the_gradient(between):
    kind = "Cast" in between
    back = "c = Cast<to=3>(r)" if kind else "c = Identity(r)"
    text = (
        f"{HEAD} (float[2,2] x) => (float[2,2] y) <float s = {{0.5}}> "
        f"{{ q = QuantizeLinear(x, s, z) r = {between} {back} y = DequantizeLinear(c, s) }}"
    ).replace("<float s", "<int8 z = {0}, float s")
    cotangent = np.array([[1, 2], [3, 4]], np.float32)
    (dx,) = _gradients(text, {"x": np.ones((2, 2), np.float32), "y_cotangent": cotangent}, ["x"])
    np.testing.assert_array_equal(dx, cotangent.T if "Transpose" in between else cotangent)


def test_a_dynamically_quantized_product_has_the_gradient_of_the_product():
    text = (
        f"{HEAD} (float[B,3] x, float bs) => (float[B,2] y) "
        "<int8[3,2] b = {1, -2, 3, 4, -5, 6}, int8 bz = {1}> "
        "{ q, s, z = DynamicQuantizeLinear(x) p = MatMulInteger(q, b, z, bz) f = Cast<to=1>(p)"
        "  m = Mul(s, bs) y = Mul(f, m) }"
    )
    x = np.random.default_rng(0).uniform(-1, 1, (4, 3)).astype(np.float32)
    cotangent = np.random.default_rng(1).uniform(0.5, 1.5, (4, 2)).astype(np.float32)
    feeds = {"x": x, "bs": np.float32(0.1), "y_cotangent": cotangent}
    (dx,) = _gradients(text, feeds, ["x"])
    weight = (np.array([[1, -2], [3, 4], [-5, 6]]) - 1) * 0.1
    np.testing.assert_allclose(dx, cotangent @ weight.T, rtol=1e-5)


def test_a_quantized_operator_without_a_rule_is_reported_not_taken_as_constant():
    text = (
        f"{HEAD} (float[1,1,4,4] x) => (float[1,1,2,2] y) <uint8[1,1,3,3] w = {{1,2,3,4,5,6,7,8,9}}> "
        "{ q, s, z = DynamicQuantizeLinear(x) p = ConvInteger(q, w, z) y = Cast<to=1>(p) }"
    )
    with pytest.raises(UnsupportedOps, match="ConvInteger"):
        vector_jacobian(onnx.parser.parse_model(text))


def _gradients(text: str, feeds: dict[str, np.ndarray], wrt: list[str]) -> list[np.ndarray]:
    derived, _, _ = vector_jacobian(onnx.parser.parse_model(text), wrt=wrt)
    onnx.checker.check_model(derived, full_check=True)
    session = onnxruntime.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {value.name: np.asarray(feeds[value.name]) for value in session.get_inputs()})


def _spread(scale: np.ndarray, axis: int, block: int) -> np.ndarray:
    if block:
        return np.repeat(scale, block, axis=axis)[:, :4]
    return scale[:, None] if scale.shape and axis == 0 else scale


def _collect(each: np.ndarray, shape: tuple[int, ...], axis: int, block: int) -> np.ndarray:
    if block:
        edges = range(0, 4, block)
        return np.stack([each[:, i : i + block].sum(1) for i in edges], axis=1)
    return each.sum() if not shape else each.sum(axis=1 if axis == 0 else 0)
