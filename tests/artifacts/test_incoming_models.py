"""Models as exporters and the predecessor's users write them: constants not folded, scalars, any integer labels."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from onward import check_gradient, gradient
from onward.api import CheckpointState, Module
from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.artifacts.generate import build_artifacts
from onward.errors import ModelError
from onward.graph.dialect.normalize import normalize

HEADER = '<ir_version: 10, opset_import: ["": 17]>'
RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 4)).astype(np.float32)
LABELS = np.asarray([0, 1, 2, 1, 0])


def parsed(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEADER + text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in weights.items())
    return model


def module_of(folder: Path) -> Module:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    return Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")


# ---- constants that nobody folded ------------------------------------------------------------------


# the exporter's own: it is the one that people call
@pytest.mark.filterwarnings("ignore")
def test_the_training_call_of_torchs_own_exporter(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2)
    file = io.BytesIO()
    torch.onnx.export(
        encoder, (torch.randn(2, 5, 8),), file, dynamo=False, input_names=["x"], output_names=["y"],
        training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False,
        dynamic_axes={"x": {0: "batch", 1: "sequence"}},
    )  # fmt: skip
    names = [name for name, _ in encoder.named_parameters()]
    generate_artifacts(
        onnx.load_from_string(file.getvalue()), requires_grad=names, loss=LossType.MSELoss,
        optimizer=OptimType.AdamW, artifact_directory=tmp_path,
    )  # fmt: skip
    x, target = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    module = module_of(tmp_path)
    loss = torch.nn.functional.mse_loss(encoder(x), target)
    np.testing.assert_allclose(module(x.numpy(), target.numpy()), loss.detach().numpy(), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Exporting a model while it is in training mode")
@pytest.mark.parametrize("norm", ["folded", "whole", "none"])
def test_batch_norms_that_torchs_dynamo_exporter_folds_are_named(
    norm: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")

    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 2)]
    module = torch.nn.Sequential(*(layers if norm != "none" else [layers[0], *layers[2:]]))
    program = torch.onnx.export(
        module.train(), (torch.randn(2, 3, 8, 8),), dynamo=True, verbose=False, optimize=norm == "folded"
    )
    note = r"torch.onnx.export folded 1 batch norms .*onward.export.from_torch of the module keeps them"
    modes: tuple[Literal["train", "frozen"] | None, ...] = (None, "train", "frozen")
    for mode in modes:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="onward"):
            build_artifacts(program.model_proto, loss="mse", batch_norm=mode)
        assert bool(re.search(note, caplog.text)) == (norm == "folded" and mode != "frozen")


@pytest.mark.parametrize("chain", [
    "m = Mod (five, three)  axes = Unsqueeze (m, zero)",  # numpy computes it
    'n = BitShift<direction = "RIGHT"> (u, v)  m = Cast<to = 7> (n)  axes = Reshape (m, one)',
    "r = Round (half)  m = Cast<to = 7> (r)  axes = Reshape (m, one)",  # over real constants
])  # fmt: skip
def test_axes_that_are_computed_from_constants(chain: str) -> None:
    text = """net (float[N, 4, 1] x) => (float[N, 4] y) {
        five = Constant <value = int64 {5}> ()  three = Constant <value = int64 {3}> ()
        zero = Constant <value = int64[1] {0}> ()  one = Constant <value = int64[1] {1}> ()
        u = Constant <value = uint8 {8}> ()  v = Constant <value = uint8 {2}> ()
        half = Constant <value = float {1.7}> ()""" + chain + """
        y = Squeeze (x, axes)  }"""  # fmt: skip
    (node,) = [n for n in normalize(parsed(text)).graph if n.op_type == "Squeeze"]
    assert node.outputs[0].shape is not None and node.outputs[0].shape.rank() == 2


def test_parameters_are_not_folded() -> None:
    text = "net (float[N, 4] x) => (float[N, 4] y) { v = Mul (w, w)  y = Mul (x, v) }"
    model = normalize(parsed(text, w=np.ones(4, np.float32)))
    assert [node.op_type for node in model.graph] == ["Mul", "Mul"]


def test_a_rank_that_stays_unknown_is_named_with_its_node() -> None:
    text = """net (float[N, 4] x, int64[M] shape) => (float y) {
        r = Reshape (x, shape)  t = MatMul (r, r)  y = ReduceSum <keepdims = 0> (t) }"""
    with pytest.raises(ModelError, match=r"'\w+', which \w+ '.*' gives, is unknown; declare a shape"):
        gradient(parsed(text), of="y", wrt=["x"])


@pytest.mark.parametrize("declared", [
    "", "<float[N, 1, 4] s>", "<float[N] s>", "<float[1, 4] s>", "<float[N, 4] s>", "<float[K, L] s>",
    "<float[N, 1, 4] s, float[N, 1, 3] y>",
])  # fmt: skip
def test_a_squeeze_without_axes_has_the_shape_that_is_left_whatever_the_file_declares(
    declared: str, tmp_path: Path
) -> None:
    body = "{ s = Squeeze (x)  y = MatMul (s, w)  z = Relu (y) }"
    text = f"net (float[N, 1, 4] x) => (float[N, 3] z) {declared} {body}"
    w = RNG.normal(size=(4, 3)).astype(np.float32)
    generate_artifacts(parsed(text, w=w), loss="mse", artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    target = np.zeros((5, 3), np.float32)
    scores = np.maximum(X @ w, 0)
    np.testing.assert_allclose(module(X[:, None], target), (scores**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(state.parameters["w"].grad, X.T @ scores * 2 / 15, rtol=1e-4, atol=1e-6)


def test_a_batch_of_one_may_be_squeezed_away_where_the_file_declares_it() -> None:
    text = "net (float[N, 1, 4] x) => (float[3] y) <float[4] s> { s = Squeeze (x)  y = MatMul (s, w) }"
    model = normalize(parsed(text, w=np.ones((4, 3), np.float32)))
    assert [str(node.outputs[0].shape) for node in model.graph] == ["[4]", "[3]"]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_batch_of_one_stays_an_axis_where_the_file_declares_nothing(batch: int) -> None:
    text = "net (float[N, 1, B, 4] x, float[4, 3] w) => (float[K, M, 3] y) { s = Squeeze (x)  y = MatMul (s, w) }"
    feeds = {"x": RNG.normal(size=(batch, 1, 2, 4)), "w": RNG.normal(size=(4, 3))}
    check_gradient(parsed(text), {name: array.astype(np.float32) for name, array in feeds.items()})


def test_a_squeeze_of_no_axis_is_none() -> None:
    model = normalize(parsed("net (float[N, 4] x) => (float[N, 4] y) { s = Squeeze (x)  y = Relu (s) }"))
    assert [node.op_type for node in model.graph] == ["Identity", "Relu"]


def test_a_sum_over_a_value_of_unknown_rank_needs_no_rank() -> None:
    text = """net (float[N, 4] x, int64[M] shape) => (float y) {
        r = Reshape (x, shape)  s = Mul (r, r)  y = ReduceSum<keepdims = 0> (s) }"""
    session = ort.InferenceSession(gradient(parsed(text), of="y", wrt=["x"]).SerializeToString())
    got = session.run(["x_grad"], {"x": X, "shape": np.asarray([2, 5, 2])})[0]
    np.testing.assert_allclose(got, 2 * X, rtol=1e-6)


# ---- scalars ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op", ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceProd", "ReduceL2", "ReduceLogSumExp"]
)
def test_reductions_over_a_scalar(op: str) -> None:
    text = f"net (float x) => (float y) {{ s = Mul (x, x)  y = {op}<keepdims = 0> (s) }}"
    session = ort.InferenceSession(gradient(parsed(text), of="y", wrt=["x"]).SerializeToString())
    got = session.run(None, {"x": np.asarray(1.5, np.float32)})
    np.testing.assert_allclose(got, [2.25, 3.0], rtol=1e-5)


# ---- bodies ----------------------------------------------------------------------------------------


def test_a_body_that_returns_its_own_initializer() -> None:
    text = """net (float[N, 4] x, bool c) => (float[N, 4] y) {
        s = If (c) <then_branch = t () => (float[4] a) <float[4] a = {1, 2, 3, 4}> { },
                    else_branch = e () => (float[4] b) { b = Mul (v, v) }>
        y = Mul (x, s) }"""
    model = parsed(text, v=np.ones(4, np.float32))
    session = ort.InferenceSession(gradient(model, of="y", wrt=["v"], cotangent="d").SerializeToString())
    for c, expected in ((True, 0 * X.sum(0)), (False, 2 * X.sum(0))):
        got = session.run(["v_grad"], {"x": X, "c": np.asarray(c), "d": np.ones_like(X)})[0]
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_body_that_returns_a_value_of_the_graph_around_it_is_refused() -> None:
    text = """net (float[4] x, bool c) => (float[4] y) {
        y = If (c) <then_branch = t () => (float[4] x) { }, else_branch = e () => (float[4] b) { b = Neg (x) }> }"""
    with pytest.raises(ModelError, match="a body returns 'x' of the graph around it"):
        normalize(parsed(text))


def test_weights_inside_branches_train(tmp_path: Path) -> None:
    text = """net (float[N, 4] x, bool c) => (float[N, 1] y) {
        y = If (c) <then_branch = t () => (float[N, 1] a) <float[4, 1] wt = {1, 2, 3, 4}> { a = MatMul (x, wt) },
                    else_branch = e () => (float[N, 1] b) <float[4, 1] we = {1, 2, 3, 4}> { b = MatMul (x, we) }> }"""
    generate_artifacts(
        parsed(text), requires_grad=["wt", "we"], loss=LossType.MSELoss, artifact_directory=tmp_path
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    target = np.zeros((5, 1), np.float32)
    module(X, np.asarray(True), target)
    weights = np.asarray([[1], [2], [3], [4]], np.float32)
    np.testing.assert_allclose(state.parameters["wt"].grad, 2 / 5 * X.T @ (X @ weights), rtol=1e-4)
    assert not state.parameters["we"].grad.any()


# ---- labels ----------------------------------------------------------------------------------------

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize("classes", [3, 100])
@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize("op", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_a_models_own_loss_takes_labels_of_any_integer_type(
    op: str, kind: str, classes: int, tmp_path: Path
) -> None:
    text = f"""net (float[N, 4] x, {kind}[N] labels) => (float loss) {{
        y = MatMul (x, w)  s = LogSoftmax (y)  loss = {op} (s, labels) }}"""
    w = RNG.normal(size=(4, classes)).astype(np.float32)
    generate_artifacts(parsed(text, w=w), requires_grad=["w"], artifact_directory=tmp_path)
    module = module_of(tmp_path)
    scores = X @ w
    expected = (np.log(np.exp(scores).sum(1)) - scores[np.arange(5), LABELS]).mean()
    for given in INTEGERS:
        np.testing.assert_allclose(module(X, LABELS.astype(given)), expected, rtol=1e-5)


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("loss", [LossType.CrossEntropyLoss, LossType.NLLLoss], ids=lambda loss: loss.name)
def test_a_models_label_input_may_have_any_integer_type(loss: Any, kind: str, tmp_path: Path) -> None:
    text = f"net (float[N, 4] x, {kind}[N] labels) => (float[N, 3] s) {{ y = MatMul (x, w)  s = LogSoftmax (y) }}"
    w = RNG.normal(size=(4, 3)).astype(np.float32)
    generate_artifacts(parsed(text, w=w), requires_grad=["w"], loss=loss, artifact_directory=tmp_path)
    scores = X @ w
    expected = (np.log(np.exp(scores).sum(1)) - scores[np.arange(5), LABELS]).mean()
    np.testing.assert_allclose(module_of(tmp_path)(X, LABELS), expected, rtol=1e-5)


def test_initial_states_that_are_constant_nodes_do_not_train() -> None:
    model = parsed(
        """net (float[2, N, 3] x) => (float[1, N, 4] h) {
            zero = Constant <value = float[1, 1, 4] {0, 0, 0, 0}> ()
            one = Constant <value = int64[1] {1}> ()
            rows = Shape <start = 1, end = 2> (x)
            sizes = Concat <axis = 0> (one, rows, one)
            start = Expand (zero, sizes)
            y, h = RNN <hidden_size = 4> (x, w, r, , , start) }""",
        w=RNG.normal(size=(1, 4, 3)).astype(np.float32),
        r=RNG.normal(size=(1, 4, 4)).astype(np.float32),
    )
    assert sorted(build_artifacts(model, loss="mse").checkpoint.trainable) == ["r", "w"]


def test_weights_and_biases_that_are_constant_nodes_train() -> None:
    """Paddle's exporter writes every weight as a Constant node."""
    model = parsed(
        """net (float[N, 3] x) => (float[N, 2] y) {
            w = Constant <value = float[3, 2] {1, 2, 3, 4, 5, 6}> ()
            b = Constant <value = float[2] {0, 0}> ()
            limits = Constant <value = float[2] {9, 8}> ()
            m = MatMul (x, w)
            s = Add (m, b)
            y = Min (s, limits) }"""
    )
    assert sorted(build_artifacts(model, loss="mse").checkpoint.trainable) == ["b", "w"]
