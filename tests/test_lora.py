"""Low-rank adapters: nothing changes at first, the base never does, and merged is unmerged."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxblock.networks import model_of, two_layers
from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.checkpoint import load
from onward.errors import OnwardError
from onward.lora import LoRA, apply_lora, extract_lora, load_lora, merge_lora, save_lora

RNG = np.random.default_rng(9)
HIDDEN = 16


def normal(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)


def run(model: onnx.ModelProto | Path, feeds: dict[str, np.ndarray]) -> list[Any]:
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    options = ort.SessionOptions()
    # fused products of quantized weights round their other operand too
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return list(ort.InferenceSession(source, options, providers=["CPUExecutionProvider"]).run(None, feeds))


def encoder() -> onnx.ModelProto:
    """One layer of attention with a head over the first token, as an exporter writes it."""
    text = """(float[N, T, 16] x) => (float[N, 3] y) {
        q0 = MatMul(x, query)  q = Add(q0, query_bias)
        kt = Transpose<perm=[1, 0]>(key)  k = MatMul(x, kt)
        v = MatMul(x, value)
        kk = Transpose<perm=[0, 2, 1]>(k)
        s = MatMul(q, kk)
        p = Softmax<axis=-1>(s)
        c = MatMul(p, v)
        h = Add(x, c)
        n = LayerNormalization<axis=-1>(h, gamma, beta)
        f = Gather<axis=1>(n, first)
        y = Gemm<transB=1>(f, head, head_bias)
    }"""
    weights = {name: normal(HIDDEN, HIDDEN) for name in ("query", "key", "value")}
    weights |= {"query_bias": normal(HIDDEN), "gamma": np.ones(HIDDEN, np.float32)}
    weights |= {"beta": np.zeros(HIDDEN, np.float32), "head": normal(3, HIDDEN), "head_bias": normal(3)}
    model = model_of(text, opset=17, **weights)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(0), "first"))
    return model


ENCODER = encoder()
X = RNG.normal(size=(6, 5, HIDDEN)).astype(np.float32)
LABELS = np.asarray([0, 1, 2, 2, 1, 0])


def quantized(kind: str) -> onnx.ModelProto:
    """x·W, W stored as int8 with a scale for each column, as int4 in blocks, or packed for MatMulNBits."""
    if kind == "int8":
        text = """(float[N, 16] x) => (float[N, 12] y) {
            w = DequantizeLinear<axis=1>(w_quantized, s, z)  y = MatMul(x, w) }"""
        stored = RNG.integers(-127, 127, (16, 12)).astype(np.int8)
        return model_of(
            text, opset=17, w_quantized=stored, s=np.full(12, 0.01, np.float32), z=np.zeros(12, np.int8)
        )
    if kind == "int4":
        text = """(float[N, 16] x) => (float[N, 12] y) {
            w = DequantizeLinear<axis=1, block_size=8>(w_quantized, s)
            t = Transpose<perm=[1, 0]>(w)  y = MatMul(x, t) }"""
        model = model_of(text, opset=21, s=np.full((12, 2), 0.1, np.float32))
        numbers = RNG.integers(-8, 8, 12 * 16)
        model.graph.initializer.append(
            onnx.helper.make_tensor("w_quantized", onnx.TensorProto.INT4, [12, 16], numbers.tolist())
        )
        return model
    node = onnx.helper.make_node(
        "MatMulNBits", ["x", "w_Q4", "s"], ["y"], domain="com.microsoft", K=16, N=12, bits=4, block_size=16
    )
    FLOAT = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [node], "g",
        [onnx.helper.make_tensor_value_info("x", FLOAT, ["N", 16])],
        [onnx.helper.make_tensor_value_info("y", FLOAT, ["N", 12])],
        [
            onnx.numpy_helper.from_array(RNG.integers(0, 256, (12, 1, 8)).astype(np.uint8), "w_Q4"),
            onnx.numpy_helper.from_array(np.full(12, 0.1, np.float32), "s"),
        ],
    )  # fmt: skip
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)


def convolution() -> onnx.ModelProto:
    text = """(float[N, 8, H, W] x) => (float[N, 4, h, w] y) {
        a = Conv<strides=[2, 2], pads=[1, 1, 1, 1]>(x, k, b)  y = Relu(a) }"""
    return model_of(text, opset=17, k=normal(4, 8, 1, 1), b=normal(4))


def scaled() -> onnx.ModelProto:
    text = "(float[16, N] x) => (float[N, 4] y) { y = Gemm<alpha=0.5, beta=2.0, transA=1>(x, w, b) }"
    return model_of(text, opset=17, w=normal(16, 4), b=normal(4))


def branches() -> onnx.ModelProto:
    """A product inside a branch, and one weight that two products share."""
    text = """(float[N, 16] x) => (float[N, 16] y) {
        a = MatMul(x, w)  big = ReduceSum<keepdims=0>(a)  zero = Constant<value = float {0.0}>()
        c = Greater(big, zero)
        y = If(c) <then_branch = t () => (float[N, 16] p) { p = MatMul(a, w) },
                   else_branch = e () => (float[N, 16] q) { q = Neg(a) }>
    }"""
    return model_of(text, opset=17, w=normal(16, 16))


def half() -> onnx.ModelProto:
    return model_of(
        "(float16[N, 16] x) => (float16[N, 4] y) { y = MatMul(x, w) }", w=normal(16, 4).astype(np.float16)
    )


def dims(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    sizes = {"N": 6, "T": 5, "H": 7, "W": 9, "batch": 6}
    feeds = {}
    for value in model.graph.input:
        shape = [dim.dim_value or sizes[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        feeds[value.name] = np.random.default_rng(1).normal(size=shape).astype(kind)
    return feeds


MODELS = {
    "encoder": (lambda: ENCODER, ["query", "key", "value", "head"]),
    "gemm": (two_layers, ["fc1.weight", "fc2.weight"]),
    "gemm with alpha and transA": (scaled, ["w"]),
    "1x1 convolution": (convolution, ["k"]),
    "branches": (branches, ["w"]),
    "float16": (half, ["w"]),
    "int8": (lambda: quantized("int8"), ["w"]),
    "int4 in blocks": (lambda: quantized("int4"), ["w"]),
    "MatMulNBits": (lambda: quantized("nbits"), ["w"]),
}
every_model = pytest.mark.parametrize("name", MODELS)


def randomize(model: onnx.ModelProto) -> onnx.ModelProto:
    """As if trained: B is no longer zero."""
    rng = np.random.default_rng(2)
    for tensor in model.graph.initializer:
        if tensor.name.endswith(".lora_b"):
            data = rng.normal(size=tuple(tensor.dims)).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(data, tensor.name))
    return model


@every_model
def test_outputs_are_unchanged_at_the_start(name: str) -> None:
    make, labels = MODELS[name]
    model = make()
    adapted = apply_lora(model, LoRA(rank=2))
    onnx.checker.check_model(adapted, full_check=True)
    names = [tensor.name for tensor in adapted.graph.initializer if ".lora_" in tensor.name]
    assert sorted(names) == sorted(f"{label}.lora_{part}" for label in labels for part in "ab")
    feeds = dims(model)
    (expected,), (found,) = run(model, feeds), run(adapted, feeds)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 if found.dtype == np.float32 else 1e-2)


@every_model
def test_merged_is_unmerged(name: str) -> None:
    make, _ = MODELS[name]
    adapted = randomize(apply_lora(make(), LoRA(rank=2, alpha=3.0)))
    merged = merge_lora(adapted, dequantize=True)
    onnx.checker.check_model(merged, full_check=True)
    assert not any(".lora_" in tensor.name for tensor in merged.graph.initializer)
    feeds = dims(adapted)
    (expected,), (found,), (base,) = run(adapted, feeds), run(merged, feeds), run(make(), feeds)
    assert not np.allclose(expected, base, atol=0.1)
    tolerance = 1e-2 if expected.dtype == np.float16 else 2e-5
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def test_merging_keeps_the_names_and_the_form_of_the_model() -> None:
    merged = merge_lora(randomize(apply_lora(two_layers(), LoRA(rank=2))))
    assert {t.name for t in merged.graph.initializer} == {t.name for t in two_layers().graph.initializer}
    assert [node.op_type for node in merged.graph.node] == ["Gemm", "Relu", "Gemm"]


@pytest.mark.parametrize("kind", ["int8", "int4", "nbits"])
def test_quantized_weights_stay_quantized_when_merging(kind: str) -> None:
    adapted = randomize(apply_lora(quantized(kind), LoRA(rank=2)))
    merged = merge_lora(adapted)
    assert {t.name for t in merged.graph.initializer} == {t.name for t in adapted.graph.initializer}
    feeds = dims(adapted)
    np.testing.assert_array_equal(run(merged, feeds)[0], run(adapted, feeds)[0])


def test_a_weight_that_others_read_is_left_to_them() -> None:
    text = "(float[N, 4] x) => (float[N, 4] y, float[4, 4] z) { y = MatMul(x, w)  z = Neg(w) }"
    model = model_of(text, w=normal(4, 4))
    adapted = randomize(apply_lora(model, LoRA(rank=1)))
    feeds = {"x": normal(3, 4)}
    for found, expected in zip(run(merge_lora(adapted), feeds), run(adapted, feeds)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


# ---- choosing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("query", ["query"]),
        ("*e*y*", ["key", "query"]),
        (["value", "key"], ["key", "value"]),
        ("fc?.weight", ["fc1.weight", "fc2.weight"]),
        ("/fc2/Gemm", ["fc2.weight"]),
    ],
)
def test_targets_are_names_and_patterns(targets: str | list[str], expected: list[str]) -> None:
    model = two_layers() if "fc" in str(targets) else ENCODER
    adapted = apply_lora(model, LoRA(rank=2, targets=targets))
    names = {t.name.removesuffix(".lora_a") for t in adapted.graph.initializer if t.name.endswith(".lora_a")}
    assert sorted(names) == expected


def test_adapters_are_the_same_in_every_run_and_differ_between_weights() -> None:
    once, again = (apply_lora(ENCODER, LoRA(rank=2)).SerializeToString(deterministic=True) for _ in range(2))
    assert once == again
    values = {
        t.name: onnx.numpy_helper.to_array(t) for t in apply_lora(ENCODER, LoRA(rank=2)).graph.initializer
    }
    assert not np.allclose(values["query.lora_a"], values["key.lora_a"])
    other = {
        t.name: onnx.numpy_helper.to_array(t)
        for t in apply_lora(ENCODER, LoRA(rank=2, seed=1)).graph.initializer
    }
    assert not np.allclose(values["query.lora_a"], other["query.lora_a"])


ERRORS = [
    (
        lambda: apply_lora(ENCODER, LoRA(targets="decoder.*")),
        OnwardError,
        "matches no weight.*head, key, query, value",
    ),
    (lambda: apply_lora(ENCODER, LoRA(targets=["query", "nope"])), OnwardError, "'nope' matches no weight"),
    (
        lambda: apply_lora(apply_lora(ENCODER, LoRA()), LoRA(targets="query")),
        OnwardError,
        "merge its adapters first",
    ),
    (lambda: LoRA(rank=0), ValueError, "rank is 0"),
    (lambda: LoRA(dropout=1.0), ValueError, "dropout is 1.0"),
    (lambda: extract_lora(load_plain()), OnwardError, "the state has no adapters"),
]


def load_plain() -> Any:
    from onward.artifacts import build_artifacts

    return build_artifacts(two_layers(), requires_grad=["fc1.weight"], loss=LossType.MSELoss).checkpoint


@pytest.mark.parametrize(("action", "kind", "message"), ERRORS, ids=[row[2][:30] for row in ERRORS])
def test_errors_say_what_to_do(action: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        action()


# ---- training --------------------------------------------------------------------------------------


def generate(folder: Path, model: onnx.ModelProto = ENCODER, **options: Any) -> None:
    chosen: dict[str, Any] = {"loss": LossType.CrossEntropyLoss, "optimizer": OptimType.AdamW}
    chosen |= {"lora": LoRA(rank=2, targets=["query", "key", "value"]), "additional_output_names": ["y"]}
    generate_artifacts(model, artifact_directory=folder, **{**chosen, **options})


def module_of(folder: Path) -> Module:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    return Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")


def train(
    folder: Path, module: Module, labels: np.ndarray = LABELS, x: np.ndarray = X
) -> tuple[float, float]:
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.02)
    losses = []
    for _ in range(30):
        losses.append(float(module(x, labels)[0]))
        optimizer.step()
        module.lazy_reset_grad()
    return losses[0], losses[-1]


def digest(folder: Path) -> dict[str, str]:
    """Of the weights that training must not touch, wherever they are stored."""
    found = {}
    for file in ("training_model.onnx", "eval_model.onnx"):
        for tensor in onnx.load(folder / file).graph.initializer:
            found[f"{file}/{tensor.name}"] = hashlib.sha256(tensor.SerializeToString()).hexdigest()
    return found


def test_an_encoder_trains_while_its_base_stays_as_it_is(tmp_path: Path) -> None:
    generate(tmp_path, frozen_params=["query", "key", "value", "head"])
    before, files = load(tmp_path / "checkpoint"), digest(tmp_path)
    module = module_of(tmp_path)
    first, last = train(tmp_path, module)
    assert last < first / 2
    CheckpointState.save_checkpoint(module._state, tmp_path / "trained")
    after = load(tmp_path / "trained")
    assert list(after.trainable) == [
        f"{name}.lora_{part}" for name in ("query", "key", "value") for part in "ab"
    ]
    for name, array in before.frozen.items():
        assert np.asarray(array).tobytes() == np.asarray(after.frozen[name]).tobytes()
    for tensor in ENCODER.graph.initializer:
        if tensor.name in after.frozen:
            np.testing.assert_array_equal(after.frozen[tensor.name], onnx.numpy_helper.to_array(tensor))
    assert digest(tmp_path) == files


def test_the_checkpoint_of_adapters_is_small_and_the_base_inside_the_models(tmp_path: Path) -> None:
    generate(tmp_path)
    data = load(tmp_path / "checkpoint")
    assert not data.frozen and all(".lora_" in name for name in data.trainable)
    inside = {tensor.name for tensor in onnx.load(tmp_path / "training_model.onnx").graph.initializer}
    assert {"query", "key", "value", "head"} <= inside


def test_a_head_trains_beside_the_adapters(tmp_path: Path) -> None:
    generate(tmp_path, requires_grad=["head*"], lora=LoRA(rank=2, targets="query"))
    assert list(load(tmp_path / "checkpoint").trainable) == [
        "head",
        "head_bias",
        "query.lora_a",
        "query.lora_b",
    ]


def test_an_exported_model_is_the_same_merged(tmp_path: Path) -> None:
    generate(tmp_path, lora=LoRA(rank=2, dropout=0.2, targets=["query", "key", "value"]))
    module = module_of(tmp_path)
    train(tmp_path, module)
    module.export_model_for_inferencing(tmp_path / "model.onnx", ["y"])
    module.eval()
    expected = module(X, LABELS)[1]
    exported, merged = onnx.load(tmp_path / "model.onnx"), merge_lora(tmp_path / "model.onnx")
    assert any(".lora_" in tensor.name for tensor in exported.graph.initializer)
    assert not any(".lora_" in tensor.name for tensor in merged.graph.initializer)
    for model in (exported, merged):
        np.testing.assert_allclose(run(model, {"x": X})[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "int4", "nbits"])
def test_a_quantized_base_trains(kind: str, tmp_path: Path) -> None:
    generate(tmp_path, quantized(kind), lora=LoRA(rank=2))
    x = RNG.normal(size=(6, 16)).astype(np.float32)
    files = digest(tmp_path)
    first, last = train(tmp_path, module_of(tmp_path), LABELS, x)
    assert last < first / 2
    stored = [
        t for t in onnx.load(tmp_path / "training_model.onnx").graph.initializer if t.name.startswith("w_")
    ]
    assert stored and stored[0].data_type != onnx.TensorProto.FLOAT
    assert digest(tmp_path) == files


@pytest.mark.parametrize("file", ["adapters", "adapters.safetensors"])
def test_adapters_move_to_another_state(file: str, tmp_path: Path) -> None:
    generate(tmp_path)
    trained, fresh = module_of(tmp_path), module_of(tmp_path)
    train(tmp_path, trained)
    save_lora(trained._state, tmp_path / file)
    names = load_lora(fresh._state, tmp_path / file)
    assert len(names) == 6
    for module in (trained, fresh):
        module.eval()
    np.testing.assert_array_equal(trained(X, LABELS)[1], fresh(X, LABELS)[1])


def test_adapters_of_another_rank_or_target_are_refused(tmp_path: Path) -> None:
    for name, lora in (
        ("two", LoRA(2, targets="query")),
        ("three", LoRA(3, targets="query")),
        ("key", LoRA(2, targets="key")),
    ):
        generate(tmp_path / name, lora=lora)
    state = module_of(tmp_path / "two")._state
    with pytest.raises(OnwardError, match="is the rank the same"):
        load_lora(state, tmp_path / "three" / "checkpoint")
    with pytest.raises(OnwardError, match=r"no adapter 'key\.lora_a'"):
        load_lora(state, tmp_path / "key" / "checkpoint")
