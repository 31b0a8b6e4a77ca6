"""Integer products that no CPU computes wrongly: what saturates is found, and has an unsigned form that does not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graph.running import MICROSOFT, node_model, run
from onward.graph.dialect.normalize import normalize
from onward.graph.dialect.saturation import integer_products, make_unsigned
from onward.lora import LoRA, apply_lora

RANDOM = np.random.default_rng(0)
K, N = 12, 6


def saturating_kernel(activations: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """u8·s8 as AVX2 computes it: two products added in 16 bits, which saturate, then sums in 32 bits."""
    a = np.concatenate([activations, np.zeros_like(activations[:, : activations.shape[1] % 2])], axis=1)
    w = np.concatenate([weights, np.zeros_like(weights[: len(weights) % 2])])
    terms = a.astype(np.int32)[:, :, None] * w.astype(np.int32)[None]
    pairs = np.clip(terms[:, 0::2] + terms[:, 1::2], -(2**15), 2**15 - 1)
    return pairs.sum(axis=1)


def matrix(
    weights: np.ndarray, activations: np.ndarray | None = None
) -> tuple[onnx.ModelProto, dict[str, Any]]:
    a = np.full((2, len(weights)), 255, np.uint8) if activations is None else activations
    return node_model("MatMulInteger", [a, weights], opset=17, constants=[1])


def optimized(model: onnx.ModelProto, feeds: dict[str, Any], *, threads: int = 1) -> np.ndarray:
    """The first output as the runtime computes it for users: fused into integer products where it can be."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


def found(model: onnx.ModelProto) -> list[bool]:
    return [product.saturates for product in integer_products(ir.from_proto(model))]


def unsigned(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    changed = ir.from_proto(model)
    assert make_unsigned(changed, **options)
    assert integer_products(changed) == []
    return ir.to_proto(changed)


@pytest.mark.parametrize("seed", range(20))
def test_saturation_is_told_from_the_weights_alone(seed: int) -> None:
    """What is called safe is right for the worst activations; what is not, is wrong for some."""
    random = np.random.default_rng(seed)
    weights = random.integers(-70, 71, (2 * random.integers(1, 4) + seed % 2, 3)).astype(np.int8)
    rows = np.array(list(itertools.product([0, 255], repeat=len(weights))), np.uint8)
    right = (saturating_kernel(rows, weights) == rows.astype(np.int64) @ weights.astype(np.int64)).all()
    assert found(matrix(weights)[0]) == [not right]


@pytest.mark.parametrize(
    ("pair", "saturates"),
    [((64, 64), False), ((127, 1), False), ((127, 2), True), ((-64, -64), False), ((-128, 0), False),
     ((-127, -2), True), ((127, -127), False)],
)  # fmt: skip
def test_the_bound_is_128_for_two_of_a_sign(pair: tuple[int, int], saturates: bool) -> None:
    assert found(matrix(np.array(pair, np.int8)[:, None])[0]) == [saturates]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 12, 40])
@pytest.mark.parametrize("inner", [1, 2, 3, 7, 16, 33, 130, 257, 385])
def test_the_runtime_pairs_neighbours(rows: int, inner: int) -> None:
    """Neighbours add up to 128 here, any other two to as much as 254: right on this CPU, whatever it has."""
    column = np.tile(np.array([127, 1, 1, 127], np.int8), inner // 4 + 1)[:inner, None]
    weights = column * np.resize(np.array([1, -1], np.int8), 19)
    activations = np.full((rows, inner), 255, np.uint8)
    model, feeds = matrix(weights, activations)
    assert found(model) == [False]
    expected = activations.astype(np.int64) @ weights.astype(np.int64)
    for threads in (1, 2):
        np.testing.assert_array_equal(optimized(model, feeds, threads=threads), expected)


def small(*shape: int) -> np.ndarray:
    """Weights that are right on every CPU, so that the runtime's own kernel is the reference."""
    return RANDOM.integers(-64, 65, shape).astype(np.int8)


def bytes_(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, shape).astype(np.uint8)


def f(*values: float) -> np.ndarray:
    return np.array(values[0] if len(values) == 1 else values, np.float32)


ZERO, ZEROS = np.array(3, np.int8), np.arange(N).astype(np.int8)
SCALES = np.linspace(0.01, 0.02, N).astype(np.float32)
LSTM_SCALE, LSTM_ZERO = np.array([0.001], np.float32), np.array([2], np.int8)
MIDDLE = np.array(120, np.uint8)
IMAGE = bytes_(1, 4, 5, 5)
OPERATORS: list[tuple[str, str, Sequence[np.ndarray | None], dict[str, Any]]] = [
    ("MatMulInteger", "", [bytes_(3, K), small(K, N)], {}),
    ("MatMulInteger", "", [bytes_(3, K), small(K, N), MIDDLE, ZEROS], {}),
    ("MatMulInteger", "", [bytes_(2, 3, K), small(2, K, N), MIDDLE, ZERO], {}),
    ("ConvInteger", "", [IMAGE, small(N, 4, 3, 3), MIDDLE], {}),
    ("QLinearMatMul", "", [bytes_(3, K), f(0.1), MIDDLE, small(K, N), f(0.1), ZERO, f(9), MIDDLE], {}),
    ("QLinearConv", "", [IMAGE, f(0.1), MIDDLE, small(N, 4, 3, 3), SCALES, 0 * ZEROS, f(9), MIDDLE], {}),
    ("DynamicQuantizeMatMul", MICROSOFT, [RANDOM.normal(size=(3, K)).astype(np.float32), small(K, N), SCALES], {}),
    ("MatMulIntegerToFloat", MICROSOFT, [bytes_(3, K), small(K, N), f(0.1), SCALES, MIDDLE, ZEROS], {}),
    ("QGemm", MICROSOFT, [bytes_(3, K), f(0.1), MIDDLE, small(N, K), SCALES, 0 * ZEROS], {"transB": 1}),
    ("QAttention", MICROSOFT,
     [bytes_(2, 3, K), small(K, 3 * K), np.zeros(3 * K, np.float32), f(0.01), f(0.01), None, MIDDLE, ZERO],
     {"num_heads": 2}),
    ("DynamicQuantizeLSTM", MICROSOFT,
     [RANDOM.normal(size=(4, 2, K)).astype(np.float32), small(1, K, 4 * N), small(1, N, 4 * N), *[None] * 5,
      LSTM_SCALE, LSTM_ZERO, LSTM_SCALE, LSTM_ZERO], {"hidden_size": N}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "domain", "inputs", "attributes"), OPERATORS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_unsigned_weights_give_the_same_products(
    op: str, domain: str, inputs: Sequence[np.ndarray | None], attributes: dict[str, Any]
) -> None:
    constants = range(1, len(inputs))
    model, feeds = node_model(op, inputs, opset=17, domain=domain, constants=list(constants), **attributes)
    np.testing.assert_array_equal(
        run(unsigned(model, saturating_only=False), feeds)[0], run(model, feeds)[0], strict=True
    )


QUANTIZED_PAIR = """<ir_version: 9, opset_import: ["": 17]> g (float[M, 8] x) => (float[M, 3] y)
    <float s = {{0.02}}, {kind} z = {{{zero}}}, float[3] ws = {{0.01, 0.02, 0.03}}>
    {{ q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)
       w = DequantizeLinear<axis={axis}>(weight, ws)  {product} }}"""


@pytest.mark.parametrize(("kind", "zero"), [("uint8", 120), ("int8", -8)])
@pytest.mark.parametrize(
    ("product", "axis"),
    [
        ("y = MatMul(d, w)", 1),
        ("y = Gemm<transB=1>(d, w)", 0),
        ("t = Transpose<perm=[1, 0]>(w)  y = MatMul(d, t)", 0),
    ],
)
def test_quantized_pairs_are_right_in_the_dialect_on_this_cpu(
    kind: str, zero: int, product: str, axis: int
) -> None:
    """The runtime makes integer products of them, so a training step would saturate as well."""
    weight = np.where(np.arange(3) % 2, -127, 127)[None].repeat(8, 0).astype(np.int8)
    weight = weight if axis == 1 else weight.T
    model = onnx.parser.parse_model(QUANTIZED_PAIR.format(kind=kind, zero=zero, product=product, axis=axis))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(weight), "weight"))
    assert found(model) == [True]
    changed = normalize(model)
    assert found(ir.to_proto(changed)) == [] and "weight" in changed.graph.initializers
    x = (RANDOM.normal(size=(5, 8)) + 1).astype(np.float32)
    low, high = (0, 255) if kind == "uint8" else (-128, 127)
    quantized = np.clip(np.rint(x / np.float32(0.02)) + zero, low, high) - zero
    real = weight * (np.array([0.01, 0.02, 0.03]) if axis == 1 else np.array([[0.01], [0.02], [0.03]]))
    expected = quantized * 0.02 @ (real if axis == 1 else real.T)
    np.testing.assert_allclose(optimized(ir.to_proto(changed), {"x": x}), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", ["MatMulInteger", "DynamicQuantizeMatMul"])
def test_integer_products_are_right_in_the_dialect_on_this_cpu(op: str) -> None:
    weights = np.full((K, N), 127, np.int8)
    if op == "MatMulInteger":
        a = np.full((2, K), 255, np.uint8)
        model, feeds = matrix(weights, a)
        expected = a.astype(np.int64) @ weights.astype(np.int64)
    else:
        levels = np.append(255, RANDOM.integers(100, 255, 2 * K - 1)).reshape(2, K)  # a range of 0 to 1
        x = (levels / 255).astype(np.float32)
        model, feeds = node_model(op, [x, weights, SCALES], opset=17, domain=MICROSOFT, constants=[1, 2])
        expected = levels / 255 @ (weights * SCALES)
    np.testing.assert_allclose(optimized(ir.to_proto(normalize(model)), feeds), expected, rtol=1e-5)


def test_only_what_saturates_is_changed() -> None:
    model = normalize(matrix(small(K, N))[0])
    assert [str(value.dtype) for value in model.graph.initializers.values()] == ["INT8"]


def test_weights_without_quantized_activations_are_multiplied_as_floats_and_stay() -> None:
    text = """<ir_version: 9, opset_import: ["": 17]> g (float[M, 2] x) => (float[M, 1] y)
        <int8[2, 1] w = {127, 127}, float s = {0.1}> { f = DequantizeLinear(w, s)  y = MatMul(x, f) }"""
    assert found(onnx.parser.parse_model(text)) == []


def test_signed_activations_take_a_kernel_that_does_not_saturate() -> None:
    a, w = np.full((2, K), -128, np.int8), np.full((K, N), 127, np.int8)
    model, feeds = matrix(w, a)
    assert found(model) == []
    np.testing.assert_array_equal(run(model, feeds)[0], a.astype(np.int64) @ w.astype(np.int64))


def test_a_weight_that_something_else_reads_keeps_its_name_and_type() -> None:
    text = """<ir_version: 9, opset_import: ["": 17]> g (uint8[M, 2] a) => (int32[M, 1] y, int8[2, 1] t)
        <int8[2, 1] w = {127, 126}> { y = MatMulInteger(a, w)  t = Identity(w) }"""
    changed = unsigned(onnx.parser.parse_model(text))
    held = {tensor.name: tensor.data_type for tensor in changed.graph.initializer}
    assert held["w"] == onnx.TensorProto.INT8 and held["w_unsigned"] == onnx.TensorProto.UINT8
    y, t = run(changed, {"a": np.full((1, 2), 255, np.uint8)})
    assert y.tolist() == [[255 * 253]] and t.tolist() == [[127], [126]]


def test_adapters_over_an_int8_base_are_right_on_this_cpu() -> None:
    """As a plain session runs it, this base is wrong by its own size on a CPU without 8-bit dot products."""
    weight = np.full((8, 3), 127, np.int8)
    model = onnx.parser.parse_model(
        QUANTIZED_PAIR.format(kind="uint8", zero=120, product="y = MatMul(d, w)", axis=1)
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    adapted = apply_lora(model, LoRA(rank=2))  # B starts at zero: the base's own outputs
    assert {"weight", "weight.lora_a", "weight.lora_b"} <= {
        tensor.name for tensor in adapted.graph.initializer
    }
    x = np.full((2, 8), 2.0, np.float32)
    expected = np.full((2, 8), 2.0) @ (weight * np.array([0.01, 0.02, 0.03]))
    np.testing.assert_allclose(optimized(adapted, {"x": x}), expected, rtol=1e-5)
