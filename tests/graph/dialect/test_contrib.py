"""Each fused operator of com.microsoft means the same after it is written in standard operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from graph.running import MICROSOFT, assert_same, in_dialect, node_model, run
from onward.errors import ModelError
from onward.graph.dialect.contrib import contrib_operators
from onward.graph.dialect.normalize import normalize

RANDOM = np.random.default_rng(0)


def f(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def i(high: int, *shape: int, dtype: Any = np.int32) -> np.ndarray:
    return RANDOM.integers(0, high, shape).astype(dtype)


@dataclasses.dataclass
class Case:
    op: str
    inputs: Sequence[np.ndarray | None]
    label: str = ""
    outputs: int | Sequence[str] = 1
    constants: Sequence[int] = ()
    domain: str = MICROSOFT
    tolerance: float = 2e-5
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.op} {self.label}".strip()


def case(op: str, *inputs: np.ndarray | None, label: str = "", **rest: Any) -> Case:
    own = {k: rest.pop(k) for k in ("outputs", "constants", "domain", "tolerance") if k in rest}
    return Case(op, inputs, label, attributes=rest, **own)


B, S, N, H = 2, 5, 4, 16
W = N * H
COS, SIN = np.cos(f(16, H // 2)), np.sin(f(16, H // 2))
PADDING = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
QKV = [f(B, S, W), f(B, S, W), f(B, S, W)]
PAST = [f(B, N, 3, H), f(B, N, 3, H)]
EMBED = [i(10, B, S), i(2, B, S), f(10, W), f(16, W), f(2, W), f(W), f(W)]

CASES = [
    case("Gelu", f(3, 4)),
    case("BiasGelu", f(3, 4), f(4)),
    case("FastGelu", f(3, 4)),
    case("FastGelu", f(3, 4), f(4), label="bias"),
    case("QuickGelu", f(3, 4)),
    case("QuickGelu", f(3, 4), label="alpha", alpha=0.7),
    case("Trilu", f(4, 5), np.array(1), upper=0),
    case("ExpandDims", f(4, 5), np.array(1, np.int32)),
    case("Range", np.array(1, np.float32), np.array(6, np.float32)),
    case("GatherND", f(3, 4), i(3, 5, 1, dtype=np.int64)),
    case("GridSample", f(1, 2, 4, 5), np.tanh(f(1, 3, 3, 2)), mode="bicubic", align_corners=1),
    case("FusedMatMul", f(2, 3, 4), f(2, 3, 5), label="transA", transA=1, alpha=0.5),
    case("FusedMatMul", f(2, 3, 4), f(2, 5, 4), label="transB", transB=1),
    case("FusedMatMul", f(3, 2, 4), f(4, 2, 5), label="batches", transBatchA=1, transBatchB=1),
    case(
        "FusedMatMul", f(4, 2, 3), f(5, 2, 4), label="all", transBatchA=1, transBatchB=1, transA=1, transB=1
    ),
    case("TransposeMatMul", f(3, 4), f(5, 4), transB=1, alpha=2.0),
    case("FusedGemm", f(3, 4), f(5, 4), f(5), label="Relu", transB=1, activation="Relu"),
    case("FusedGemm", f(3, 4), f(4, 5), label="LeakyRelu", activation="LeakyRelu", activation_alpha=0.2),
    case("FusedConv", f(1, 2, 5, 5), f(3, 2, 3, 3), f(3), label="Relu", activation="Relu", pads=[1, 1, 1, 1]),
    case("FusedConv", f(1, 2, 5, 5), f(3, 2, 3, 3), f(3), f(1, 3, 3, 3), label="sum", activation="Relu"),
    case(
        "FusedConv",
        f(1, 2, 5, 5),
        f(3, 2, 3, 3),
        label="Clip",
        activation="Clip",
        activation_params=[-0.5, 0.5],
    ),
    case(
        "FusedConv",
        *[f(1, 2, 5, 5), f(3, 2, 3, 3)],
        label="HardSigmoid",
        activation="HardSigmoid",
        activation_params=[0.3, 0.4],
    ),
    case("SkipLayerNormalization", f(B, S, W), f(B, S, W), f(W), f(W), f(W), outputs=["y", "", "", "sum"]),
    case("SkipLayerNormalization", f(B, S, W), f(S, W), f(W), label="broadcast", epsilon=1e-5),
    case(
        "SkipSimplifiedLayerNormalization", f(B, S, W), f(B, S, W), f(W), f(W), outputs=["y", "", "", "sum"]
    ),
    case("SimplifiedLayerNormalization", f(B, S, W), f(W), domain="", epsilon=1e-6, axis=-1),
    case("EmbedLayerNormalization", *EMBED, outputs=2),
    case("EmbedLayerNormalization", *EMBED, PADDING, label="mask", outputs=3),
    case("EmbedLayerNormalization", *EMBED, None, i(16, B, S), label="positions", outputs=2),
    case(
        "EmbedLayerNormalization",
        EMBED[0],
        None,
        *EMBED[2:4],
        None,
        *EMBED[5:],
        label="no segments",
        outputs=2,
    ),
    case("Attention", f(B, S, 6), f(6, 3 * W), f(3 * W), num_heads=N),
    case("Attention", f(B, S, 6), f(6, 3 * W), f(3 * W), PADDING, label="mask", num_heads=N),
    case(
        "Attention",
        f(B, S, 6),
        f(6, 3 * W),
        f(3 * W),
        np.array([3, 5], np.int32),
        label="lengths",
        num_heads=N,
    ),
    case(
        "Attention",
        *[f(B, S, 6), f(6, 3 * W), f(3 * W), np.array([4, 5, 1, 0], np.int32)],
        label="bounds",
        num_heads=N,
    ),
    case(
        "Attention",
        f(B, S, 6),
        f(6, 3 * W),
        f(3 * W),
        label="causal",
        num_heads=N,
        unidirectional=1,
        scale=0.3,
    ),
    case(
        "Attention",
        *[f(B, S, 6), f(6, 2 * W + 2 * N), f(2 * W + 2 * N)],
        label="narrow values",
        num_heads=N,
        qkv_hidden_sizes=[W, W, 2 * N],
    ),
    case(
        "Attention",
        *[f(B, S, 6), f(6, 3 * W), f(3 * W), None, f(2, B, N, 3, H)],
        label="past",
        num_heads=N,
        unidirectional=1,
        outputs=2,
    ),
    case(
        "Attention",
        *[f(B, S, 6), f(6, 3 * W), f(3 * W), None, None, f(1, N, S, S)],
        label="bias",
        num_heads=N,
    ),
    case("MultiHeadAttention", *QKV, num_heads=N),
    case("MultiHeadAttention", *QKV, f(3 * W), label="bias", num_heads=N, scale=0.2),
    case("MultiHeadAttention", *QKV, None, PADDING, label="padding", num_heads=N),
    case("MultiHeadAttention", *QKV, None, np.array([2, 5], np.int32), label="lengths", num_heads=N),
    case("MultiHeadAttention", *QKV, None, None, f(1, N, S, S), label="attention bias", num_heads=N),
    case("MultiHeadAttention", *QKV, label="causal", num_heads=N, unidirectional=1),
    case("MultiHeadAttention", *QKV, None, None, None, *PAST, label="past", num_heads=N, outputs=3),
    case("MultiHeadAttention", f(B, S, W), f(B, 7, W), f(B, 7, 2 * W), label="cross", num_heads=N),
    case("MultiHeadAttention", f(B, S, W), f(B, N, 7, H), f(B, N, 7, H), label="cached keys", num_heads=N),
    case("RotaryEmbedding", f(B, S, W), np.array([2], np.int64), COS, SIN, label="start"),
    case(
        "RotaryEmbedding",
        f(B, S, W),
        i(16, B, S, dtype=np.int64),
        COS,
        SIN,
        label="interleaved",
        interleaved=1,
    ),
    case("RotaryEmbedding", f(B, N, S, H), i(16, B, S, dtype=np.int64), COS, SIN, label="4-D"),
    case(
        "RotaryEmbedding",
        *[f(B, S, 2 * W), i(16, B, S, dtype=np.int64), COS, SIN],
        label="part",
        rotary_embedding_dim=H,
        num_heads=N,
    ),
    case(
        "GroupQueryAttention",
        *[f(B, S, W), f(B, S, 2 * H), f(B, S, 2 * H), None, None],
        *[np.full(B, S - 1, np.int32), np.array(S, np.int32)],
        num_heads=N,
        kv_num_heads=2,
        outputs=3,
    ),
    case(
        "GroupQueryAttention",
        *[f(B, S, W + 4 * H), None, None, None, None],
        *[np.full(B, S - 1, np.int32), np.array(S, np.int32), COS, SIN],
        label="packed, rotary",
        num_heads=N,
        kv_num_heads=2,
        do_rotary=1,
        outputs=3,
    ),
    case(
        "GroupQueryAttention",
        *[f(B, S, W), f(B, S, 2 * H), f(B, S, 2 * H), None, None],
        *[np.full(B, S - 1, np.int32), np.array(S, np.int32)],
        label="window, softcap",
        num_heads=N,
        kv_num_heads=2,
        local_window_size=2,
        softcap=1.5,
        outputs=3,
    ),
    case(
        "GroupQueryAttention",
        *[f(B, 1, W), f(B, 1, 2 * H), f(B, 1, 2 * H), f(B, 2, 3, H), f(B, 2, 3, H)],
        *[np.full(B, 3, np.int32), np.array(4, np.int32), COS, SIN],
        label="one more token",
        num_heads=N,
        kv_num_heads=2,
        do_rotary=1,
        rotary_interleaved=1,
        outputs=3,
    ),
    case(
        "MatMulNBits",
        f(3, 32),
        i(256, 6, 2, 8, dtype=np.uint8),
        f(12),
        constants=[1, 2],
        K=32,
        N=6,
        block_size=16,
        bits=4,
    ),
    case(
        "MatMulNBits",
        *[f(2, 3, 40), i(256, 6, 3, 8, dtype=np.uint8), f(18), i(256, 12, dtype=np.uint8), None, f(6)],
        label="ragged, zero points, bias",
        constants=[1, 2, 3],
        K=40,
        N=6,
        block_size=16,
        bits=4,
    ),
    case(
        "MatMulNBits",
        *[f(3, 32), i(256, 6, 2, 16, dtype=np.uint8), f(12), i(256, 12, dtype=np.uint8)],
        label="8 bits",
        constants=[1, 2, 3],
        K=32,
        N=6,
        block_size=16,
        bits=8,
        tolerance=1e-4,
    ),
    case(
        "MatMulNBits",
        *[f(3, 32), i(256, 6, 2, 8, dtype=np.uint8), f(6, 2), f(6, 2)],
        label="float zero points",
        constants=[1, 2, 3],
        K=32,
        N=6,
        block_size=16,
        bits=4,
    ),
    *(
        case("GatherBlockQuantized", *inputs, label=label, constants=constants, block_size=16, bits=bits)
        for label, bits, constants, inputs in (
            ("4 bits", 4, [0, 2], [i(256, 6, 16, dtype=np.uint8), i(6, 2, 3, dtype=np.int64), f(6, 2)]),
            *(
                (
                    label,
                    bits,
                    [0, 2, 3],
                    [
                        i(256, 6, width, dtype=np.uint8),
                        i(6, 3, dtype=np.int64),
                        f(6, blocks),
                        i(256, 6, 2, dtype=np.uint8),
                    ],
                )
                for label, bits, width, blocks in (("ragged, zero points", 4, 20, 3), ("8 bits", 8, 32, 2))
            ),
        )
    ),
    case(
        "DynamicQuantizeMatMul",
        *[f(3, 8), i(256, 8, 5, dtype=np.uint8), np.array(0.1, np.float32), np.array(128, np.uint8), f(5)],
        constants=[1, 2, 3],
    ),
    case(
        "DynamicQuantizeMatMul",
        # up to 64: larger ones saturate in the runtime's own kernel on CPUs without 8-bit dot products
        *[f(3, 8), i(65, 8, 5, dtype=np.int8), np.abs(f(5)), i(9, 5, dtype=np.int8)],
        label="columns",
        constants=[1, 2, 3],
    ),
    case(
        "MatMulIntegerToFloat",
        *[i(256, 3, 8, dtype=np.uint8), i(256, 8, 5, dtype=np.uint8), np.array(0.1, np.float32)],
        *[np.array(0.2, np.float32), np.array(120, np.uint8), np.array(130, np.uint8), f(5)],
        tolerance=1e-4,
    ),
    case("QuantizeLinear", f(3, 4), np.array(0.1, np.float32), np.array(3, np.int16)),
    case("DequantizeLinear", i(200, 3, 4, dtype=np.uint8), np.abs(f(4)), i(9, 4, dtype=np.uint8), axis=1),
]

# No CPU kernel to compare with; their meaning is checked below.
ELSEWHERE = {
    "BiasAdd",
    "BiasDropout",
    "BitmaskBiasDropout",
    "BitmaskDropout",
    "FusedMatMulActivation",
    "GemmFastGelu",
    *("ConcatTraining", "ScaledSum", "BatchNormInternal", "PadAndUnflatten", "SoftmaxCrossEntropy"),
    *("SparseSoftmaxCrossEntropy", "DynamicQuantizeLSTM"),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fused_operator_keeps_its_meaning(case: Case) -> None:
    model, feeds = node_model(
        case.op,
        case.inputs,
        opset=17,
        domain=case.domain,
        outputs=case.outputs,
        constants=case.constants,
        **case.attributes,
    )
    assert_same(run(model, feeds), run(in_dialect(model), feeds), tolerance=case.tolerance)


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.op in ("Attention", "MultiHeadAttention", "SkipLayerNormalization")],
    ids=str,
)
def test_symbolic_shapes_are_enough(case: Case) -> None:
    if case.label == "bounds":
        pytest.skip("the form of this mask is told by its length")
    inputs = list(case.inputs)
    model, feeds = node_model(
        case.op, inputs, opset=17, domain=case.domain, outputs=case.outputs, dynamic=True, **case.attributes
    )
    assert_same(run(model, feeds), run(in_dialect(model), feeds), tolerance=case.tolerance)


def test_every_expansion_has_a_case() -> None:
    covered = {case.op for case in CASES} | ELSEWHERE
    assert {op for _, op in contrib_operators()} <= covered
    assert all(line for line in contrib_operators().values())


x, w, bias, rest = f(3, 4), f(4, 5), f(4), f(3, 4)


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "expected"),
    [
        ("BiasAdd", [x, bias, rest], {}, x + bias + rest),
        ("BiasDropout", [x, bias, rest, np.array(0.5, np.float32), np.array(False)], {}, x + bias + rest),
        ("BitmaskBiasDropout", [x, bias], {}, x + bias),
        ("BitmaskDropout", [x], {}, x),
        ("FusedMatMulActivation", [x, w], {"activation": "Relu", "alpha": 0.5}, np.maximum(x @ w / 2, 0)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_operators_without_a_kernel_mean_what_they_say(
    op: str, inputs: list[np.ndarray], attributes: dict[str, Any], expected: np.ndarray
) -> None:
    model, feeds = node_model(op, inputs, opset=17, domain=MICROSOFT, **attributes)
    assert_same([expected], run(in_dialect(model), feeds))


scores, classes = f(2, 3, 5), i(5, 2, 3, dtype=np.int64)
log_prob = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
picked = np.take_along_axis(log_prob, classes[..., None], -1)[..., 0]
shares = np.exp(f(2, 3, 5))
images, scale, shift = f(4, 3, 2, 2), f(3), f(3)
mean, variance = images.mean((0, 2, 3)), images.var((0, 2, 3))
normal = (images - mean[:, None, None]) / np.sqrt(variance + 1e-5)[:, None, None]
placed = np.zeros((6, 5), np.float32)
placed[[4, 0, 3]] = scores[0]


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "expected"),
    [
        ("ConcatTraining", [x, rest], {"axis": 1}, [np.concatenate([x, rest], 1), np.asarray([4, 4])]),
        ("ScaledSum", [x, rest], {"scale_0": 2.0, "scale_1": -0.5}, [2 * x - 0.5 * rest]),
        ("ScaledSum", [x, x, rest], {"scale_0": 1.0, "scale_1": 2.0, "scale_2": 3.0}, [3 * x + 3 * rest]),
        (
            "BatchNormInternal",
            [images, scale, shift, np.zeros(3, np.float32), np.ones(3, np.float32)],
            {"training_mode": 1, "momentum": 0.9},
            [
                normal * scale[:, None, None] + shift[:, None, None],
                0.1 * mean,
                0.9 + 0.1 * variance,
                mean,
                1 / np.sqrt(variance + 1e-5),
            ],
        ),
        (
            "PadAndUnflatten",
            [scores[0], np.asarray([4, 0, 3]), np.asarray([2, 3])],
            {},
            [placed.reshape(2, 3, 5)],
        ),
        ("SoftmaxCrossEntropy", [scores, shares], {}, [-(shares * log_prob).sum(-1).mean(), log_prob]),
        (
            "SoftmaxCrossEntropy",
            [scores, shares],
            {"reduction": "sum"},
            [-(shares * log_prob).sum(-1).sum(), log_prob],
        ),
        ("SparseSoftmaxCrossEntropy", [scores, classes], {}, [-picked.mean(), log_prob]),
        ("SparseSoftmaxCrossEntropy", [scores, classes], {"reduction": "none"}, [-picked, log_prob]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_operators_of_training_builds_mean_what_they_say(
    op: str, inputs: list[np.ndarray], attributes: dict[str, Any], expected: list[np.ndarray]
) -> None:
    model, feeds = node_model(
        op, inputs, opset=17, domain=MICROSOFT, outputs=[f"o{k}" for k in range(len(expected))], **attributes
    )
    assert_same([np.asarray(e) for e in expected], run(in_dialect(model), feeds))


def test_a_quantized_lstm_is_one_with_dequantized_weights() -> None:
    """One step of numbers that 8 bits hold: the operator rounds its activations, the dequantized one does not."""
    batch, hidden, width = 2, 3, 4
    scale = np.asarray([0.01], np.float32)
    stored = [(i(200, 1, n, 4 * hidden) - 100).astype(np.int8) for n in (width, hidden)]
    # a range of 255 steps, so that the operator's own scale is 1/64, and nothing is rounded
    exact = [i(256, 1, batch, n) - 128 for n in (width, hidden)]
    for array in exact:
        array[0, 0, :2] = -128, 127
    sequence, start = (array.astype(np.float32) / 64 for array in exact)
    model, feeds = node_model(
        "DynamicQuantizeLSTM",
        [sequence, *stored, f(1, 8 * hidden), None, start, f(1, batch, hidden), None, scale, np.zeros(1, np.int8),
         scale, np.zeros(1, np.int8)],
        opset=17, domain=MICROSOFT, outputs=["y", "h", "c"], hidden_size=hidden,
    )  # fmt: skip
    assert_same(run(model, feeds), run(in_dialect(model), feeds))


def test_gemm_with_gelu_is_gelu_of_the_product() -> None:
    model, feeds = node_model("GemmFastGelu", [x, w], opset=17, domain=MICROSOFT)
    plain, product = node_model("FastGelu", [x @ w], opset=17, domain=MICROSOFT)
    assert_same(run(plain, product), run(in_dialect(model), feeds))


@pytest.mark.parametrize("packed", ["keys and values", "all"])
def test_packed_attention_is_attention_of_its_parts(packed: str) -> None:
    """The runtime's CPU kernel does not take packed inputs, but takes their parts."""
    plain, feeds = node_model("MultiHeadAttention", QKV, opset=17, domain=MICROSOFT, num_heads=N)
    parts = [part.reshape(B, S, N, H) for part in QKV]
    inputs = [np.stack(parts, axis=3)] if packed == "all" else [QKV[0], np.stack(parts[1:], axis=3)]
    model, packed_feeds = node_model("MultiHeadAttention", inputs, opset=17, domain=MICROSOFT, num_heads=N)
    assert_same(run(plain, feeds), run(in_dialect(model), packed_feeds))


def test_quantized_weights_stay_quantized() -> None:
    weight = i(256, 64, 4, 16, dtype=np.uint8)
    model, _ = node_model(
        "MatMulNBits",
        [f(3, 128), weight, f(256)],
        opset=17,
        domain=MICROSOFT,
        constants=[1, 2],
        K=128,
        N=64,
        block_size=32,
        bits=4,
    )
    held = [t for t in normalize(model).graph.initializers.values() if t.name.startswith("x1_as_4bit")]
    assert [t.const_value.tobytes() for t in held] == [weight.tobytes()]


@pytest.mark.parametrize("kind", ["UINT4", "INT4"])
@pytest.mark.parametrize("columns", [32, 33])
def test_rows_of_a_table_of_four_bits_are_looked_up(kind: str, columns: int) -> None:
    low = 0 if kind == "UINT4" else -8
    blocks = -(-columns // 16)
    table, zeros = (RANDOM.integers(low, low + 16, (6, size)) for size in (columns, blocks))
    scales, rows = f(6, blocks), i(6, 2, 3, dtype=np.int64)
    model, feeds = node_model(
        "GatherBlockQuantized", [table, rows, scales, zeros], opset=21, domain=MICROSOFT, constants=[0, 2, 3],
        block_size=16,
    )  # fmt: skip
    for index, array in ((0, table), (3, zeros)):
        held = next(t for t in model.graph.initializer if t.name == f"x{index}")
        numbers = array.flatten().tolist()
        held.CopyFrom(helper.make_tensor(held.name, getattr(TensorProto, kind), array.shape, numbers))
    wide = np.repeat(scales, 16, axis=1)[:, :columns]
    shift = np.repeat(zeros, 16, axis=1)[:, :columns]
    expected = ((table - shift) * wide)[rows].astype(np.float32)
    assert_same([expected], run(in_dialect(model), feeds))


def test_what_has_no_standard_form_is_refused_with_its_name() -> None:
    model, _ = node_model(
        "GroupQueryAttention",
        [f(B, S, W), f(B, S, W), f(B, S, W), None, None, np.full(B, 4, np.int32), np.array(5, np.int32)],
        opset=17,
        domain=MICROSOFT,
        num_heads=N,
        kv_num_heads=N,
        smooth_softmax=1,
    )
    with pytest.raises(ModelError, match=r"GroupQueryAttention 'the_node'.*smooth_softmax"):
        normalize(model)
