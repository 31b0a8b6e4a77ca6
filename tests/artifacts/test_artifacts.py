"""generate_artifacts: what it writes, what it refuses, and that it writes all or nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxblock.networks import PARAMETERS, forward, model_of, two_layers, values
from onward import artifacts, losses, onnxblock, optim
from onward import files as staging
from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import Artifacts, LossType, OptimType, build_artifacts, generate_artifacts
from onward.artifacts import write as artifact_files
from onward.checkpoint import load
from onward.errors import CheckpointError, ModelError, UnsupportedOps
from onward.graph import save
from onward.optim.optimizer_model import ParameterGroup
from small_models import classifier

if TYPE_CHECKING:
    from onward.graph.builder import Builder

ALL = list(PARAMETERS)
FOUR = ["checkpoint", "eval_model.onnx", "optimizer_model.onnx", "training_model.onnx"]
RNG = np.random.default_rng(5)
X = RNG.normal(size=(5, 4)).astype(np.float32)
LABELS = np.asarray([0, 1, 2, 1, 0])
TARGET = RNG.normal(size=(5, 3)).astype(np.float32)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def generate(folder: Path, model: Any = None, **options: Any) -> None:
    """The common case, changed by options."""
    chosen = {"requires_grad": ALL, "loss": LossType.CrossEntropyLoss, "optimizer": OptimType.AdamW}
    generate_artifacts(model or two_layers(), artifact_directory=folder, **{**chosen, **options})


def module_of(folder: Path, **options: Any) -> Module:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    return Module(folder / "training_model.onnx", state, folder / "eval_model.onnx", **options)


def names(values: Any) -> list[str]:
    return [value.name for value in values]


# ---- what is written -------------------------------------------------------------------------------


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    onnx.save(two_layers(), tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    artifacts.generate_artifacts(
        model,
        requires_grad=["fc1.weight", "fc1.bias"],
        frozen_params=["fc2.weight", "fc2.bias"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=f"{tmp_path}/output_artifacts/",
    )
    folder = tmp_path / "output_artifacts"
    assert list(files(folder)) == FOUR
    module = module_of(folder)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.05)
    first = last = module(X, LABELS)
    for _ in range(30):
        optimizer.step()
        module.lazy_reset_grad()
        last = module(X, LABELS)
    assert last < first / 2


@pytest.mark.parametrize("source", ["proto", "str", "path", "ir", "bytes"])
def test_models_come_as_paths_protos_or_bytes(source: str, tmp_path: Path) -> None:
    import onnx_ir as ir

    file = tmp_path / "model.onnx"
    onnx.save(two_layers(), file)
    given: dict[str, Any] = {
        "proto": two_layers(),
        "str": str(file),
        "path": file,
        "bytes": file.read_bytes(),
    }
    given["ir"] = ir.from_proto(two_layers())
    generate(tmp_path / "one", given[source])
    generate(tmp_path / "other")
    assert files(tmp_path / "one") == files(tmp_path / "other")


def test_the_model_given_is_not_changed(tmp_path: Path) -> None:
    model = two_layers()
    before = model.SerializeToString(deterministic=True)
    generate(tmp_path, model)
    assert model.SerializeToString(deterministic=True) == before


def test_two_generations_are_identical(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        generate(tmp_path / folder, nominal_checkpoint=True)
    assert files(tmp_path / "one") == files(tmp_path / "other")


LOSSES: list[LossType] = list(LossType)
OPTIMIZERS: list[OptimType] = list(OptimType)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_every_loss_gives_valid_standard_models(loss: LossType, tmp_path: Path) -> None:
    generate(tmp_path, loss=loss)
    assert_standard(tmp_path)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_every_optimizer_trains(optimizer: OptimType, tmp_path: Path) -> None:
    generate(tmp_path, optimizer=optimizer)
    assert_standard(tmp_path)
    module = module_of(tmp_path)
    stepper = Optimizer(tmp_path / "optimizer_model.onnx", module)
    losses = []
    for _ in range(20):
        losses.append(float(module(X, LABELS)))
        stepper.step()
        module.lazy_reset_grad()
    assert losses[-1] < losses[0]


def assert_standard(folder: Path) -> None:
    """Every model passes the full check, has ai.onnx operators only, and loads on the stock runtime."""
    for path in folder.glob("*.onnx"):
        model = onnx.load(path)
        onnx.checker.check_model(model, full_check=True)
        assert {node.domain for node in model.graph.node} <= {""}
        assert [entry.domain for entry in model.opset_import] == [""]
        ort.InferenceSession(path, providers=["CPUExecutionProvider"])


def test_the_files_explain_themselves(tmp_path: Path) -> None:
    generate(tmp_path, requires_grad=ALL[:2], frozen_params=ALL[2:])
    about = {entry.key: entry.value for entry in onnx.load(tmp_path / "training_model.onnx").metadata_props}
    assert about["onward.role"] == "training"
    assert json.loads(about["onward.trainable"]) == ALL[:2]
    assert json.loads(about["onward.frozen"]) == ALL[2:]


def test_a_prefix_names_every_file(tmp_path: Path) -> None:
    generate(tmp_path, prefix="mnist_")
    assert list(files(tmp_path)) == [f"mnist_{name}" for name in FOUR]


def test_without_a_directory_it_writes_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    generate_artifacts(two_layers(), requires_grad=ALL, loss=LossType.MSELoss)
    assert list(files(tmp_path)) == ["checkpoint", "eval_model.onnx", "training_model.onnx"]


def test_ort_twins_load_and_agree(tmp_path: Path) -> None:
    generate(tmp_path, ort_format=True)
    twins = ["eval_model.ort", "optimizer_model.ort", "training_model.ort"]
    assert sorted(files(tmp_path)) == sorted([*FOUR, *twins])
    feeds = {"input-0": X, "labels": LABELS, **values()}
    found = [
        ort.InferenceSession(tmp_path / f"eval_model.{kind}", providers=["CPUExecutionProvider"]).run(
            None, feeds
        )
        for kind in ("onnx", "ort")
    ]
    np.testing.assert_array_equal(found[0][0], found[1][0])


def test_a_nominal_checkpoint_has_names_only(tmp_path: Path) -> None:
    generate(tmp_path, requires_grad=ALL[:2], frozen_params=ALL[2:], nominal_checkpoint=True)
    nominal, full = load(tmp_path / "nominal_checkpoint"), load(tmp_path / "checkpoint")
    assert nominal.nominal and not full.nominal
    assert (list(nominal.trainable), list(nominal.frozen)) == (ALL[:2], ALL[2:])
    assert (tmp_path / "nominal_checkpoint").stat().st_size < (tmp_path / "checkpoint").stat().st_size
    for name, array in values().items():
        np.testing.assert_array_equal({**full.trainable, **full.frozen}[name], array)


# ---- choices ---------------------------------------------------------------------------------------


def test_initializers_in_neither_list_stay_inside(tmp_path: Path) -> None:
    generate(tmp_path, requires_grad=["fc2.bias"])
    model = onnx.load(tmp_path / "training_model.onnx")
    assert {"fc1.weight", "fc1.bias", "fc2.weight"} <= set(names(model.graph.initializer))
    assert names(model.graph.input) == [
        "input-0", "labels", "fc2.bias", "fc2.bias_grad.accumulation.buffer", "lazy_reset_grad",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["fc1.*"], ["fc1.weight", "fc1.bias"]),
        (["*.bias"], ["fc1.bias", "fc2.bias"]),
        (["fc[12].weight", "fc1.bias"], ["fc1.weight", "fc1.bias", "fc2.weight"]),
    ],
)
def test_patterns_choose_parameters_and_say_which(
    patterns: list[str], expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="onward"):
        made = build_artifacts(two_layers(), requires_grad=patterns, loss=LossType.MSELoss)
    assert made.trainable == expected
    assert f"'{patterns[0]}' matches 2" in caplog.text


def test_nothing_trainable_is_allowed_as_ever(tmp_path: Path) -> None:
    generate(tmp_path, requires_grad=[], optimizer=None)
    model = onnx.load(tmp_path / "training_model.onnx")
    assert names(model.graph.input) == ["input-0", "labels", "lazy_reset_grad"]
    assert len(model.graph.output) == 1


def test_a_model_without_weights_has_artifacts_that_compute_the_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(
        "(float[N, 4] x) => (float[N, 4] y) { y = Dropout(x, ratio, on) }",
        ratio=np.asarray(0.5, np.float32), on=np.asarray(True),
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="onward"):
        generate(tmp_path, model, requires_grad=None)
    assert "the model has no weight: its artifacts compute the loss and train nothing" in caplog.text
    module = module_of(tmp_path)
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    assert np.isfinite(module(X, LABELS))
    optimizer.step()
    module.eval()
    shifted = X - X.max(axis=1, keepdims=True)
    scores = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(module(X, LABELS), -scores[np.arange(5), LABELS].mean(), rtol=1e-5)


HELD_BACK: dict[str, tuple[str, dict[str, np.ndarray], dict[str, Any], str]] = {
    "half weights": (
        "(float16[N, 3] x) => (float16 y) { z = MatMul(x, w)  y = ReduceMean<keepdims=0>(z) }",
        {"w": np.ones((3, 2), np.float16)}, {},
        r"'w' is FLOAT16, and .* must be float32; .*model.float\(\) before its export",
    ),
    "a half weight by its name": (
        "(float16[N, 3] x) => (float16 y) { z = MatMul(x, w)  y = ReduceMean<keepdims=0>(z) }",
        {"w": np.ones((3, 2), np.float16)}, {"requires_grad": ["w"]},
        r"'w' is FLOAT16: .*call model.float\(\) before the export",
    ),
    "weights in 8 bits": (
        """(float[N, 3] x) => (float y) { w = DequantizeLinear(q, s)  z = MatMul(x, w)
            y = ReduceMean<keepdims=0>(z) }""",
        {"q": np.ones((3, 2), np.int8), "s": np.asarray(0.1, np.float32)}, {},
        "'q' is INT8, and trainable parameters must be float32",
    ),
    "weights beside the loss": (
        "(float[N, 3] x) => (float y, float[N, 2] z) { z = MatMul(x, w)  y = ReduceMean<keepdims=0>(x) }",
        {"w": np.ones((3, 2), np.float32)}, {}, "float32 initializers that reach the loss 'y'",
    ),
    "all weights frozen": (
        "(float[N, 3] x) => (float y) { z = MatMul(x, w)  y = ReduceMean<keepdims=0>(z) }",
        {"w": np.ones((3, 2), np.float32)}, {"frozen_params": ["w"]}, "frozen_params leaves no weight to train",
    ),
    "a name in a model without weights": (
        "(float[N, 3] x) => (float y) { y = ReduceMean<keepdims=0>(x) }",
        {}, {"requires_grad": ["w"]}, "Node arg w is not found in the graph",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HELD_BACK)
def test_a_model_whose_weights_cannot_train_is_refused(case: str) -> None:
    text, arrays, options, message = HELD_BACK[case]
    with pytest.raises(ModelError, match=message):
        build_artifacts(model_of(text, **arrays), **options)


def test_gradients_of_inputs(tmp_path: Path) -> None:
    generate(tmp_path, requires_grad=["input-0"], loss=LossType.MSELoss, optimizer=None)
    session = ort.InferenceSession(tmp_path / "training_model.onnx", providers=["CPUExecutionProvider"])
    buffer, reset = np.ones_like(X), np.asarray([False])
    feeds = {
        "input-0": X,
        "target": TARGET,
        "input-0_grad.accumulation.buffer": buffer,
        "lazy_reset_grad": reset,
    }
    (gradient,) = session.run(["input-0_grad.accumulation.out"], feeds)
    w = values()
    hidden = X @ w["fc1.weight"].T + w["fc1.bias"]
    expected = 2 * (forward(X) - TARGET) / TARGET.size @ w["fc2.weight"] * (hidden > 0) @ w["fc1.weight"] + 1
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


def test_additional_outputs_follow_the_loss(tmp_path: Path) -> None:
    generate(tmp_path, additional_output_names=["output-0", "/relu"])
    module = module_of(tmp_path)
    assert module.output_names()[1:] == ["output-0", "/relu"]
    for mode in (module.train, module.eval):
        mode()
        _, logits, hidden = module(X, LABELS)
        np.testing.assert_allclose(logits, forward(X), rtol=1e-5, atol=1e-5)
        assert hidden.shape == (5, 6)


def test_without_a_loss_the_first_output_is_it(tmp_path: Path) -> None:
    model = model_of(
        "(float[N, 3] x) => (float total, float[N, 3] y) { y = Mul(x, w)  total = ReduceMean<keepdims=0>(y) }",
        w=np.asarray([1.0, 2.0, 3.0], np.float32),
    )
    generate_artifacts(model, requires_grad=["w"], optimizer=OptimType.SGD, artifact_directory=tmp_path)
    module = module_of(tmp_path)
    x = RNG.normal(size=(4, 3)).astype(np.float32)
    np.testing.assert_allclose(module(x), (x * [1, 2, 3]).mean(), rtol=1e-5)
    grad = module._state.parameters["w"].grad
    assert grad is not None
    np.testing.assert_allclose(grad, x.sum(axis=0) / 12, rtol=1e-5, atol=1e-7)


def test_loss_input_names_choose_what_the_loss_sees(tmp_path: Path) -> None:
    model = two_layers()
    model.graph.output.append(
        onnx.helper.make_tensor_value_info("/relu", onnx.TensorProto.FLOAT, ["batch", 6])
    )
    generate(tmp_path, model, loss_input_names=["/relu"])
    evaluation = onnx.load(tmp_path / "eval_model.onnx")
    (entropy,) = (node for node in evaluation.graph.node if node.op_type == "SoftmaxCrossEntropyLoss")
    assert entropy.input[0] == "/relu"


def test_a_weight_that_is_called_as_the_target_is_no_target(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (float[N, 2] x) => (float[N, 2] y) <float[2, 2] target = {1.0, 2.0, 3.0, 4.0}> { y = MatMul(x, target) }""")
    generate_artifacts(model, loss=LossType.MSELoss, optimizer=OptimType.SGD, artifact_directory=tmp_path)
    module = module_of(tmp_path)
    assert module.input_names() == ["x", "target_input"]
    x = RNG.normal(size=(4, 2)).astype(np.float32)
    np.testing.assert_allclose(module(x, x), np.mean((x @ [[1, 2], [3, 4]] - x) ** 2), rtol=1e-5)


class TwoLosses(onnxblock.Block):
    """Returns the loss and its parts, and reads an input of its own."""

    def __init__(self) -> None:
        self._squares = onnxblock.loss.MSELoss()
        self._logits = onnxblock.loss.BCEWithLogitsLoss()
        self._add, self._mul = onnxblock.blocks.Add(), onnxblock.blocks.Mul()

    def build(self, output: str) -> tuple[str, str, str]:
        first = self._squares(output, target_name="target1")
        second = self._logits(output, target_name="target2")
        weight = onnxblock.blocks.InputLike(first)("weight")
        return self._add(first, self._mul(second, weight)), first, second


def test_a_custom_loss_has_several_outputs_and_inputs(tmp_path: Path) -> None:
    generate(tmp_path, loss=TwoLosses(), additional_output_names=["output-0"])
    module = module_of(tmp_path)
    assert module.input_names() == ["input-0", "target1", "target2", "weight"]
    assert len(module.output_names()) == 4
    loss, first, second, output = module(X, TARGET, np.abs(TARGET), np.asarray(2.0, np.float32))
    np.testing.assert_allclose(loss, first + 2.0 * second, rtol=1e-6)
    np.testing.assert_allclose(output, forward(X), rtol=1e-5, atol=1e-5)


def test_a_loss_may_bring_parameters_of_its_own_as_constants(tmp_path: Path) -> None:
    class Projected(onnxblock.Block):
        def __init__(self) -> None:
            self._linear, self._loss = onnxblock.blocks.Linear(3, 2), onnxblock.loss.CrossEntropyLoss()

        def build(self, output: str) -> str:
            return self._loss(self._linear(output))

    generate(tmp_path, loss=Projected())
    assert module_of(tmp_path)(X, LABELS % 2) > 0


def test_a_custom_optimizer_block_builds_the_optimizer(tmp_path: Path) -> None:
    class Plain(onnxblock.optim.OptimizerBlock):
        rule = optim.sgd()

    class Own(onnxblock.Block):
        """Not one of ours: gets the parameters and builds what it likes."""

        def build(self, parameters: Any) -> str:
            return Plain()(parameters)

    generate(tmp_path / "own", optimizer=Own())
    generate(tmp_path / "built in", optimizer=OptimType.SGD)
    found = []
    for folder in ("own", "built in"):
        module = module_of(tmp_path / folder)
        optimizer = Optimizer(tmp_path / folder / "optimizer_model.onnx", module)
        module(X, LABELS)
        optimizer.step()
        found.append(module.get_contiguous_parameters().numpy())
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


def test_options_of_an_optimizer_block_reach_the_file(tmp_path: Path) -> None:
    clip = onnxblock.optim.ClipGradNorm(2.5)
    generate(tmp_path, optimizer=onnxblock.optim.AdamW(weight_decay=123, betas=(0.5, 0.6), clip_grad=clip))
    about = {entry.key: entry.value for entry in onnx.load(tmp_path / "optimizer_model.onnx").metadata_props}
    options = json.loads(about["onward.optimizer"])
    assert (options["weight_decay"], options["clip_norm"]) == (123, 2.5)
    assert options["hyperparameters"]["beta2"] == 0.6


def test_the_default_adamw_has_the_originals_options() -> None:
    made = build_artifacts(two_layers(), requires_grad=ALL, loss=LossType.MSELoss, optimizer=OptimType.AdamW)
    assert made.optimizer is not None
    options = json.loads(made.optimizer.metadata_props["onward.optimizer"])
    assert options["weight_decay"] == 0.0
    assert options["hyperparameters"] == {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "bias_correction": True}


def test_parameter_groups_take_patterns(tmp_path: Path) -> None:
    generate(
        tmp_path,
        optimizer=optim.sgd(weight_decay=0.5),
        parameter_groups=[ParameterGroup(("*.bias",), weight_decay=0.0)],
    )
    module = module_of(tmp_path)
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.1)
    module(X, LABELS)
    grads = {name: parameter.grad for name, parameter in module._state.parameters}
    optimizer.step()
    for name, before in values().items():
        decay = 0.0 if name.endswith("bias") else 0.5
        after = module._state.parameters[name].data
        np.testing.assert_allclose(after, before - 0.1 * (grads[name] + decay * before), rtol=1e-5, atol=1e-6)


def test_a_model_of_strings_trains(tmp_path: Path) -> None:
    class Numbers(onnxblock.ForwardBlock):
        def build(self, text: str) -> str:
            return onnxblock.blocks.Linear(4, 2)(onnxblock.blocks.Cast(to=onnx.TensorProto.FLOAT)(text))

    block = Numbers()
    with onnxblock.empty_base() as accessor:
        value = onnx.helper.make_tensor_value_info("text", onnx.TensorProto.STRING, ["N", 4])
        accessor.model.graph.input.append(value)
        block("text")
    generate(tmp_path, block.to_model_proto(), requires_grad=["linear.*"])
    module = module_of(tmp_path)
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    text, labels = np.asarray([["1.0", "2.0", "3.0", "4.0"], ["-1", "0", "1e-1", "5"]]), np.asarray([1, 0])
    first = last = module(text, labels)
    for _ in range(10):
        optimizer.step()
        module.lazy_reset_grad()
        last = module(text, labels)
    assert last < first
    module.eval()
    np.testing.assert_allclose(module(text, labels), last, rtol=1e-5)


# ---- what is refused -------------------------------------------------------------------------------


def too_large(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("onward.artifacts.generate._LARGEST_PROTO", 100)


def unsupported() -> onnx.ModelProto:
    text = """(float[N, 3] x) => (float[N, 3] y) {
        a = MatMul(x, w)  e = my.domain.Odd(a)  b = Add(e, v)  y = my.domain.Strange(b) }"""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17, "my.domain": 1]> net {text.replace("my.domain.", "")}'
    )
    for node in model.graph.node:
        if node.op_type in ("Odd", "Strange"):
            node.domain = "my.domain"
    for name in ("e", "y"):
        model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, 1, ["N", 3]))
    arrays = {"w": np.eye(3, dtype=np.float32), "v": np.ones(3, np.float32)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in arrays.items())
    return model


REFUSED: list[tuple[str, dict[str, Any], type[Exception], list[str]]] = [
    ("a model of another type", {"model": 3}, RuntimeError,
     ["Please pass in either a string or an ONNX ModelProto for the model."]),
    ("no model file", {"model": "nowhere.onnx"}, RuntimeError, ["no model file at 'nowhere.onnx'"]),
    ("a loss of another type", {"loss": 3}, RuntimeError, ["Unknown loss provided", "int"]),
    ("a loss class", {"loss": onnxblock.loss.MSELoss}, RuntimeError, ["Unknown loss provided"]),
    ("an optimizer of another type", {"optimizer": 3}, TypeError, ["Unknown optimizer provided", "int"]),
    ("a loss of no name", {"loss": "cross_entropie"}, ValueError,
     ["no loss is called 'cross_entropie'", "mse, cross-entropy", "did you mean 'cross-entropy'?"]),
    ("an optimizer of no name", {"optimizer": "adamw2"}, ValueError,
     ["no optimizer is called 'adamw2'", "adamw, sgd", "did you mean 'adamw'?"]),
    ("batch norm in a third way", {"batch_norm": "eval"}, ValueError, ["batch_norm is 'eval'", "'train', 'frozen'"]),
    ("a name in both lists", {"requires_grad": ALL, "frozen_params": ["fc1.bias"]}, RuntimeError,
     ["cannot be frozen and require gradient computation at the same time", "fc1.bias"]),
    ("outputs not in a list", {"additional_output_names": "output-0"}, RuntimeError,
     ["Unknown type provided for additional output names"]),
    ("an output that is not there", {"additional_output_names": ["output-1"]}, RuntimeError,
     ["'output-1' is not found", "did you mean 'output-0'"]),
    ("an unknown trainable", {"requires_grad": ["nope"]}, RuntimeError,
     ["Node arg nope is not found in the graph"]),
    ("a mistyped trainable", {"requires_grad": ["fc1.wieght"]}, RuntimeError, ["did you mean 'fc1.weight'"]),
    ("a pattern without a match", {"requires_grad": ["decoder.*"]}, RuntimeError, ["no parameter matches"]),
    ("a string for a list", {"requires_grad": "fc1.weight"}, TypeError, ["write ['fc1.weight']"]),
    ("no loss for a large output", {"loss": None}, RuntimeError, ["'output-0'", "single number"]),
    ("a loss without reduction", {"loss": onnxblock.loss.MSELoss("none")}, RuntimeError, ["single number"]),
    ("a missing library", {"custom_op_library": "nowhere.so"}, RuntimeError, ["nowhere.so does not exist"]),
    ("a group of nothing", {"parameter_groups": [ParameterGroup(("x.*",))]}, RuntimeError, ["parameter_groups"]),
    ("two groups", {"parameter_groups": [ParameterGroup(("*.bias",)), ParameterGroup(("fc1.*",))]},
     RuntimeError, ["in two groups", "fc1.bias"]),
    ("another clipping", {"optimizer": onnxblock.optim.SGD(clip_grad=onnxblock.blocks.Neg())},  # type: ignore[arg-type]
     TypeError, ["clip_grad must be"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "kind", "texts"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_refused_before_anything_is_written(
    options: dict[str, Any], kind: type[Exception], texts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(kind) as caught:
        generate(tmp_path / "new" / "folder", **options)
    for text in texts:
        assert text in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_proto_over_2_gb_is_asked_for_as_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    too_large(monkeypatch)
    with pytest.raises(RuntimeError, match="This model is > 2GB"):
        generate(tmp_path)
    assert not list(tmp_path.iterdir())


def test_all_unsupported_operators_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOps) as caught:
        generate(tmp_path, unsupported(), requires_grad=["w", "v"], loss=LossType.MSELoss)
    assert "my.domain.Odd" in str(caught.value) and "my.domain.Strange" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_integers_cannot_be_trained() -> None:
    model = model_of("(float[N, 3] x) => (float[N] y) { y = Gather<axis=1>(x, i) }", i=np.asarray(1))
    with pytest.raises(RuntimeError, match="'i' is INT64: trainable parameters must be float32"):
        build_artifacts(model, requires_grad=["i"], loss=LossType.MSELoss)


# ---- all or nothing --------------------------------------------------------------------------------


def fails_at(number: int, function: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """Like `function`, but call `number` (from 0) fails."""
    count = iter(range(1000))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(count) == number:
            raise error
        return function(*args, **kwargs)

    return call


FAILURES: list[tuple[str, int, BaseException]] = [
    *(("write_model", index, OSError(28, "No space left on device")) for index in range(3)),
    ("save", 0, OSError(5, "Input/output error")),
    *(("move", index, OSError(13, "Permission denied")) for index in range(4)),
]


@pytest.mark.parametrize(
    ("where", "number", "error"), FAILURES, ids=[f"{w} {n} {e!r}" for w, n, e in FAILURES]
)
def test_a_failed_write_leaves_the_old_set(
    where: str, number: int, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    before = files(tmp_path)
    if where == "move":
        failing = fails_at(number, staging.rename, error)
        monkeypatch.setattr(staging, "rename", failing)
    else:
        failing = fails_at(number, getattr(artifact_files, where), error)
        monkeypatch.setattr(artifact_files, where, failing)
    with pytest.raises(RuntimeError, match="nothing was written or changed"):
        generate(tmp_path, two_layers(seed=1))
    assert files(tmp_path) == before


def test_a_failed_write_removes_the_directory_that_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = fails_at(1, artifact_files.write_model, OSError(28, "No space left on device"))
    monkeypatch.setattr(artifact_files, "write_model", failing)
    with pytest.raises(RuntimeError, match="No space left on device"):
        generate(tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(RuntimeError, match="nothing was written"):
        generate(tmp_path / "taken")
    assert files(tmp_path) == {"taken": b"a file"}


def test_a_new_set_replaces_the_old_one(tmp_path: Path) -> None:
    generate(tmp_path)
    generate(tmp_path, two_layers(seed=1))
    generate(tmp_path / "fresh", two_layers(seed=1))
    assert {name: (tmp_path / name).read_bytes() for name in FOUR} == files(tmp_path / "fresh")


def test_an_unknown_frozen_name_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"frozen_params: the model has no parameter 'fc2.bais'; did you mean 'fc2.b"
    ):
        generate(tmp_path, requires_grad=["fc1.weight"], frozen_params=["fc2.bais", "fc1.bias"])
    assert list(load(tmp_path / "checkpoint").frozen) == ["fc1.bias"]


def test_an_operator_that_nothing_trains_through_is_named(tmp_path: Path) -> None:
    text = "(float[N, 4] x) => (float[N, 3] y) { h = MatMul(x, a)  r = Round(h)  y = MatMul(r, b) }"
    model = model_of(text, a=np.ones((4, 4), np.float32), b=np.ones((4, 3), np.float32))
    with pytest.warns(
        UserWarning, match=r"'a' gets no gradient: Round '.*' between it and the loss is constant"
    ):
        generate(tmp_path, model, requires_grad=["a", "b"])


def test_ort_files_and_checkpoint_bytes_are_taken(tmp_path: Path) -> None:
    generate(tmp_path, ort_format=True)
    state = CheckpointState.load_checkpoint((tmp_path / "checkpoint").read_bytes())
    module = Module(tmp_path / "training_model.ort", state, tmp_path / "eval_model.ort")
    optimizer = Optimizer(tmp_path / "optimizer_model.ort", module)
    plain = module_of(tmp_path)
    assert module(X, LABELS) == plain(X, LABELS)
    optimizer.step()
    (tmp_path / "training_model.onnx").unlink()
    with pytest.raises(RuntimeError, match=r"ORT format.*keep the .onnx file beside it"):
        Module(tmp_path / "training_model.ort", CheckpointState.load_checkpoint(tmp_path / "checkpoint"))


@pytest.mark.parametrize("cut", [0, 10, 200])
def test_damaged_checkpoint_bytes_are_refused(tmp_path: Path, cut: int) -> None:
    generate(tmp_path)
    with pytest.raises(CheckpointError, match="given as bytes"):
        CheckpointState.load_checkpoint((tmp_path / "checkpoint").read_bytes()[:cut])


class WrappedOptimizer(onnxblock.ForwardBlock):
    def __init__(self) -> None:
        self.optimizer = onnxblock.optim.AdamW(weight_decay=0.1)

    def build(self, parameters: Any) -> str:
        return self.optimizer(parameters)


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_optimizer_block_of_its_own_is_taken_by_the_optimizer(tmp_path: Path, wrapped: bool) -> None:
    generate(tmp_path, optimizer=onnxblock.optim.AdamW(weight_decay=0.1))
    trainable = [onnx.numpy_helper.from_array(array, name) for name, array in values().items()]
    block = WrappedOptimizer() if wrapped else onnxblock.optim.AdamW(weight_decay=0.1)
    with onnxblock.empty_base():
        block((trainable, []))
        onnx.save(block.to_model_proto(), tmp_path / "own.onnx")
    results = []
    for name in ("optimizer_model.onnx", "own.onnx"):
        module = module_of(tmp_path)
        optimizer = Optimizer(tmp_path / name, module)
        for _ in range(3):
            module(X, LABELS)
            optimizer.step()
            module.lazy_reset_grad()
        results.append(module.get_contiguous_parameters().numpy())
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-7)


# ---- external data ---------------------------------------------------------------------------------


def test_external_data_gives_the_same_artifacts(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    onnx.save(two_layers(), file, save_as_external_data=True, location="weights.bin", size_threshold=0)
    generate(tmp_path / "external", file)
    generate(tmp_path / "inside")
    assert files(tmp_path / "external") == files(tmp_path / "inside")


def test_constants_in_external_data_are_written_beside_the_artifacts_once(tmp_path: Path) -> None:
    table = RNG.normal(size=(500, 4)).astype(np.float32)
    text = "(int64[N] ids) => (float[N, 3] y) { e = Gather(table, ids)  f = Mul(e, small)  y = MatMul(f, w) }"
    model = model_of(text, table=table, small=np.ones(4, np.float32), w=np.ones((4, 3), np.float32))
    source = tmp_path / "source"
    source.mkdir()
    onnx.save(model, source / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    folder = tmp_path / "artifacts"
    generate(folder, source / "m.onnx", requires_grad=["w"], prefix="p_")
    (constants,) = folder.glob("p_constants.*.data")
    assert sorted(files(folder)) == sorted([*(f"p_{name}" for name in FOUR), constants.name])
    assert constants.stat().st_size == table.nbytes
    (source / "m.bin").unlink()
    state = CheckpointState.load_checkpoint(folder / "p_checkpoint")
    module = Module(folder / "p_training_model.onnx", state, folder / "p_eval_model.onnx")
    ids = np.asarray([3, 499, 7, 0, 12])
    trained = module(ids, LABELS)
    np.testing.assert_allclose(module.eval()(ids, LABELS), trained, rtol=1e-6)
    module.export_model_for_inferencing(tmp_path / "inference.onnx", ["y"])
    (got,) = ort.InferenceSession(tmp_path / "inference.onnx").run(None, {"ids": ids})
    np.testing.assert_allclose(got, table[ids] @ np.ones((4, 3)), rtol=1e-5)


def test_models_past_the_limit_of_protobuf_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is lowered: constants of 2000 numbers stand for two gigabytes."""
    monkeypatch.setattr(save, "EXTERNAL_THRESHOLD", 4000)
    table = RNG.normal(size=(500, 4)).astype(np.float32)
    text = "(int64[N] ids) => (float[N, 3] y) { e = Gather(table, ids)  y = MatMul(e, w) }"
    model = model_of(text, table=table, w=np.ones((4, 3), np.float32))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    folder = tmp_path / "artifacts"
    generate(folder, tmp_path / "m.onnx", requires_grad=["w"])
    (constants,) = folder.glob("constants.*.data")
    assert sorted(files(folder)) == sorted([*FOUR, constants.name])
    module = module_of(folder)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    ids = np.asarray([3, 499, 7, 0, 12])
    first = last = module(ids, LABELS)
    for _ in range(20):
        optimizer.step()
        module.lazy_reset_grad()
        last = module(ids, LABELS)
    assert last < first
    module.eval()
    np.testing.assert_allclose(module(ids, LABELS), last, rtol=1e-5)


def test_values_handed_out_have_memory_of_their_own(tmp_path: Path) -> None:
    generate(tmp_path)
    module = module_of(tmp_path)
    expected = np.concatenate([array.ravel() for array in values().values()])
    given = [ort.OrtValue.ortvalue_from_numpy(array) for array in (X, LABELS)]
    parameters, loss = module.get_contiguous_parameters().numpy(), module(*given).numpy()
    first = float(loss)
    for _ in range(50):  # whatever was freed is overwritten
        np.full(expected.shape, -1.0, np.float32)
        module(*given)
        module.copy_buffer_to_parameters(np.zeros_like(expected), trainable_only=False)
    np.testing.assert_array_equal(parameters, expected)
    assert float(loss) == first


def serialized(made: Artifacts) -> list[bytes]:
    return [ir.to_proto(model).SerializeToString() for model in (made.training, made.evaluation)]


@pytest.mark.parametrize("loss", ["mse", "cross_entropy", "bce_with_logits", "l1", "huber", "kl_div"])
def test_a_loss_function_gives_the_files_of_its_type(loss: str) -> None:
    kinds = {"mse": "MSELoss", "cross_entropy": "CrossEntropyLoss", "bce_with_logits": "BCEWithLogitsLoss"}
    kinds |= {"l1": "L1Loss", "huber": "HuberLoss", "kl_div": "KLDivLoss"}
    by_type = build_artifacts(classifier(), requires_grad=["w1"], loss=LossType[kinds[loss]])
    by_value = build_artifacts(classifier(), requires_grad=["w1"], loss=getattr(losses, loss))
    assert serialized(by_type) == serialized(by_value)


def test_a_loss_of_ones_own_names_its_target() -> None:
    def scaled(op: Builder, output: ir.Value, wanted: ir.Value) -> ir.Value:
        return op.Mul(losses.mse(op, output, wanted), 3.0)

    made = build_artifacts(classifier(), requires_grad=["w1"], loss=scaled)
    wanted = next(value for value in made.training.graph.inputs if value.name == "wanted")
    assert (wanted.dtype, wanted.shape) == (ir.DataType.FLOAT, ir.Shape(["n", 3]))


def test_a_loss_function_that_is_given_too_many_values_says_what_it_takes() -> None:
    with pytest.raises(ModelError, match=r"'mse' takes prediction, target: 2 values, but 3 are given"):
        build_artifacts(
            classifier(), requires_grad=["w1"], loss=losses.mse, loss_input_names=["scores", "x", "x"]
        )
