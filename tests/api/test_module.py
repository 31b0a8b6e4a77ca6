"""Module: what it takes, what it gives, and how gradients accumulate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
import torch

from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import LossType, OptimType, build_artifacts, generate_artifacts
from onward.errors import ModelError, OnwardError
from onward.onnxblock import loss as losses
from small_models import batch, classifier, load, regression, start, with_weights, write_classifier


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("artifacts"), nominal_checkpoint=True)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts whose step returns the loss alone."""
    return write_classifier(tmp_path_factory.mktemp("single"), additional_output_names=None)


def ortvalue(array: np.ndarray) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(array)


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_numpy_in_gives_numpy_out_and_ortvalues_give_ortvalues(folder: Path, training: bool) -> None:
    _, module = load(folder)
    module.train(training)
    x, labels = batch()
    arrays = module(x, labels)
    module.lazy_reset_grad()
    values = module(ortvalue(x), ortvalue(labels))
    assert isinstance(arrays, tuple) and isinstance(values, tuple)
    assert [type(a) for a in arrays] == [np.ndarray] * 2
    assert [type(v) for v in values] == [ort.OrtValue] * 2
    for array, value in zip(arrays, values):
        np.testing.assert_array_equal(array, value.numpy())


def test_any_numpy_among_the_inputs_gives_numpy(folder: Path) -> None:
    _, module = load(folder)
    x, labels = batch()
    loss, scores = module(ortvalue(x), labels)
    assert isinstance(loss, np.ndarray) and isinstance(scores, np.ndarray)


def test_one_output_comes_bare(single: Path) -> None:
    _, module = load(single)
    loss = module(*batch())
    assert isinstance(loss, np.ndarray) and loss.dtype == np.float32 and loss.size == 1
    module.eval()
    np.testing.assert_allclose(module(*batch()), loss, rtol=1e-6)


def test_a_result_stays_as_it_is_when_the_next_step_runs(folder: Path) -> None:
    _, module = load(folder)
    x, labels = batch()
    first = module(x, labels)
    kept = [array.copy() for array in first]
    values = module(ortvalue(2 * x), ortvalue(labels))
    kept_values = [value.numpy().copy() for value in values]
    module(*batch(1))
    for array, copy in zip(first, kept):
        np.testing.assert_array_equal(array, copy)
    for value, copy in zip(values, kept_values):
        np.testing.assert_array_equal(value.numpy(), copy)


def test_batches_may_have_any_size(folder: Path) -> None:
    _, module = load(folder)
    for size in (1, 7, 2, 64):
        loss, scores = module(*batch(size=size))
        assert scores.shape == (size, 3) and np.isfinite(loss)


def test_names_are_the_users_only_with_the_loss_first(folder: Path) -> None:
    _, module = load(folder)
    for mode in (module.train, module.eval):
        mode()
        assert module.input_names() == ["x", "labels"]
        assert module.output_names()[1:] == ["scores"]
        assert len(module.output_names()) == 2


def test_modes_return_the_module(folder: Path) -> None:
    _, module = load(folder)
    assert module.training and module.eval() is module and not module.training
    assert module.train() is module and module.training
    assert not module.train(False).training


X, LABELS = batch()
ACCEPTED = {
    "from another process": (X.astype(np.dtype("float32").newbyteorder("=")), LABELS),
    "float64": (X.astype(np.float64), LABELS),
    "list": (X.tolist(), LABELS.tolist()),
    "torch": (torch.tensor(X), torch.tensor(LABELS)),
    "torch with gradient": (torch.tensor(X, requires_grad=True), torch.tensor(LABELS)),
    "Fortran order": (np.asfortranarray(X), LABELS),
    "strided": (np.repeat(X, 2, axis=0)[::2], np.repeat(LABELS, 2)[::2]),
    "int32 labels": (X, LABELS.astype(np.int32)),
    "uint8 labels": (X, LABELS.astype(np.uint8)),
    "big endian": (X.astype(">f4"), LABELS),
}


@pytest.mark.parametrize("inputs", ACCEPTED.values(), ids=ACCEPTED)
def test_inputs_that_lose_nothing_are_converted(folder: Path, inputs: tuple) -> None:
    _, module = load(folder)
    expected = module(X, LABELS)
    module.lazy_reset_grad()
    for found, wanted in zip(module(*inputs), expected):
        np.testing.assert_array_equal(found, wanted)


REFUSED: dict[str, tuple[tuple, type[Exception], str]] = {
    "too few": ((X,), ValueError, r"takes 2 inputs \(x, labels\), got 1"),
    "too many": ((X, LABELS, X), ValueError, "takes 2 inputs .*, got 3"),
    "integers for floats": ((LABELS, LABELS), TypeError, "'x' is int64, the model takes float32"),
    "floats for integers": ((X, LABELS.astype(np.float32)), TypeError, "'labels' is float32"),
    "strings": ((np.array([["a"] * 4] * 6), LABELS), TypeError, "'x' is <U1"),
    "ragged list": (([[1.0], [1.0, 2.0]], LABELS), TypeError, "'x' is a list that is not an array"),
    "none": ((None, LABELS), TypeError, "'x' is object"),
    "rank": ((X[0], LABELS), ValueError, r"x'? \[4\].*labels'? \[6\]"),
    "width": ((X[:, :3], LABELS), ValueError, r"x \[6, 3\]"),
    "length": ((X, LABELS[:3]), ValueError, r"'x' \[6, 4\] and 'labels' \[3\] belong together"),
    "ortvalue of another type": ((ortvalue(X.astype(np.float64)), LABELS), ValueError, "x"),
    "ortvalue of another shape": ((ortvalue(X[:, :2].copy()), LABELS), ValueError, r"x \[6, 2\]"),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("inputs", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_inputs_are_refused_and_change_nothing(
    folder: Path, inputs: tuple, error: type[Exception], message: str, training: bool
) -> None:
    state, module = load(folder)
    module(X, LABELS)
    gradient = state.parameters["w1"].grad
    assert gradient is not None
    module.train(training)
    with pytest.raises(error, match=message):
        module(*inputs)
    module.train()
    np.testing.assert_array_equal(state.parameters["w1"].grad, gradient)
    module(X, LABELS)  # still accumulates
    np.testing.assert_allclose(state.parameters["w1"].grad, 2 * gradient, rtol=1e-6)


def test_integers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    text = """net (int32[n] i) => (float[n, 2] y) { y = Gather (w, i) }"""
    generate_artifacts(
        with_weights(text, w=(5, 2)), requires_grad=["w"], loss=LossType.MSELoss, artifact_directory=tmp_path
    )
    _, module = load(tmp_path)
    target = np.zeros((1, 2), np.float32)
    assert np.isfinite(module(np.array([4], np.int64), target))
    with pytest.raises(ValueError, match="'i' has values from 4294967296 to 4294967296: int32"):
        module(np.array([2**32], np.int64), target)


# ---- labels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("wrap", [np.asarray, ortvalue], ids=["numpy", "OrtValue"])
@pytest.mark.parametrize("label", [-1, 3, 99, 10_000_000, -(2**63), 2**63 - 1])
def test_labels_without_a_class_are_refused(folder: Path, label: int, wrap: Any, training: bool) -> None:
    _, module = load(folder)
    module.train(training)
    labels = LABELS.copy()
    labels[4] = label
    with pytest.raises(ValueError, match=rf"'labels' has label {label} at \(4,\).*labels are 0 to 2"):
        module(X, wrap(labels))


@pytest.mark.parametrize("wrap", [np.asarray, ortvalue], ids=["numpy", "OrtValue"])
def test_an_ignored_label_is_honoured(tmp_path: Path, wrap: Any) -> None:
    write_classifier(tmp_path, loss=losses.CrossEntropyLoss(ignore_index=-100))
    _, module = load(tmp_path)
    labels = LABELS.copy()
    labels[1] = -100
    loss, scores = module(X, wrap(labels))
    reference = torch.nn.functional.cross_entropy(torch.tensor(np.asarray(scores if isinstance(scores, np.ndarray)
        else scores.numpy())), torch.tensor(labels), ignore_index=-100)  # fmt: skip
    np.testing.assert_allclose(np.asarray(loss), reference.item(), rtol=1e-6)
    labels[1] = -99
    with pytest.raises(ValueError, match="or -100, which is ignored"):
        module(X, wrap(labels))


# ---- gradients -----------------------------------------------------------------------------------


def test_gradients_accumulate_until_the_lazy_reset_is_consumed(folder: Path) -> None:
    state, module = load(folder)
    one, other = batch(1), batch(2)

    def gradient() -> np.ndarray:
        found = state.parameters["w1"].grad
        assert found is not None
        return found

    assert not gradient().any()
    module(*one)
    first = gradient()
    module.lazy_reset_grad()
    np.testing.assert_array_equal(gradient(), first)  # the flag alone changes nothing
    module(*other)
    second = gradient()
    module(*one)
    np.testing.assert_allclose(gradient(), first + second, rtol=1e-6, atol=1e-7)
    module.lazy_reset_grad()
    module(*one)
    np.testing.assert_array_equal(gradient(), first)


def test_the_optimizer_does_not_reset_gradients(folder: Path) -> None:
    state, module, optimizer = start(folder)
    module(*batch())
    before = state.parameters["w2"].grad
    optimizer.step()
    np.testing.assert_array_equal(state.parameters["w2"].grad, before)


def test_evaluation_leaves_gradients_and_parameters_alone(folder: Path) -> None:
    state, module = load(folder)
    module(*batch())
    gradients = {name: p.grad for name, p in state.parameters}
    module.eval()
    for seed in range(3):
        module(*batch(seed))
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.grad, gradients[name])


def test_gradients_of_inputs_do_not_stand_in_the_way(tmp_path: Path) -> None:
    write_classifier(tmp_path, requires_grad=["x", "w1", "b1", "w2", "b2"])
    state, module = load(tmp_path)
    module(*batch())
    first = state.parameters["w1"].grad
    assert first is not None and "x" not in state.parameters
    module(*batch())
    np.testing.assert_allclose(state.parameters["w1"].grad, 2 * first, rtol=1e-6)


# ---- construction --------------------------------------------------------------------------------


def test_evaluating_without_an_eval_model_is_an_error(folder: Path) -> None:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state).eval()
    with pytest.raises(ModelError, match="Eval model was not provided"):
        module(*batch())
    assert np.isfinite(module.train()(*batch())[0])


def test_a_device_that_the_runtime_lacks_is_named(folder: Path) -> None:
    available = ort.get_available_providers()
    if "CUDAExecutionProvider" in available:
        pytest.skip("this onnxruntime has CUDA")
    for device in ("cuda", "cuda:1", "CUDA"):
        with pytest.raises(
            ModelError, match=r"needs onnxruntime's CUDAExecutionProvider.*CPUExecutionProvider"
        ):
            load(folder, device=device)


@pytest.mark.parametrize("device", ["tpu", "", "cpu:x"])
def test_an_unknown_device_is_a_bad_value(folder: Path, device: str) -> None:
    with pytest.raises(ValueError, match="choose one of auto, cpu, cuda"):
        load(folder, device=device)


def test_session_options_are_the_users(folder: Path) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    _, module = load(folder, session_options=options)
    module(*batch())
    used = module.step._bound[True].session.get_session_options()
    assert used.intra_op_num_threads == 1 and used.execution_mode == ort.ExecutionMode.ORT_PARALLEL
    _, default = load(folder)
    np.testing.assert_array_equal(module.eval()(*batch())[1], default.eval()(*batch())[1])


def test_a_state_belongs_to_one_module(folder: Path) -> None:
    state, _ = load(folder)
    with pytest.raises(OnwardError, match="belongs to another Module"):
        Module(folder / "training_model.onnx", state)


WRONG_MODELS: dict[str, tuple[Any, type[Exception], str]] = {
    "missing file": ("nowhere.onnx", ModelError, "no training model at"),
    "not a model": (b"not a model", ModelError, "not a readable ONNX model|not an ONNX model"),
    "ORT format": (b"\x00\x00\x00\x00ORTM....", ModelError, "ORT format"),
    "a forward model": (classifier(), ModelError, "not an artifact of Onward"),
    "a number": (3, TypeError, "pass its path, its bytes or a ModelProto"),
}


@pytest.mark.parametrize(("model", "error", "message"), WRONG_MODELS.values(), ids=WRONG_MODELS)
def test_what_is_not_a_training_model_is_refused(
    folder: Path, model: Any, error: type[Exception], message: str
) -> None:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    with pytest.raises(error, match=message):
        Module(model, state)
    assert state._module is None


def test_a_model_of_a_training_build_is_explained(tmp_path: Path, folder: Path) -> None:
    model = classifier()
    model.graph.node.append(
        onnx.helper.make_node("InPlaceAccumulatorV2", ["x"], ["z"], domain="com.microsoft")
    )
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, tmp_path / "old.onnx")
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    with pytest.raises(ModelError, match=r"training build.*InPlaceAccumulatorV2.*generate_artifacts"):
        Module(tmp_path / "old.onnx", state)


def test_a_checkpoint_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    generate_artifacts(regression(), requires_grad=["w"], loss=LossType.MSELoss, artifact_directory=tmp_path)
    other = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(OnwardError, match=r"lacks 4 parameters.*do they belong together"):
        Module(folder / "training_model.onnx", other)
    data = other._data
    data.trainable["w"] = np.zeros((3, 1), np.float32)
    with pytest.raises(OnwardError, match=r"'w' has shape \(3, 1\) in the checkpoint and \(2, 1\)"):
        Module(tmp_path / "training_model.onnx", other)


def test_an_eval_model_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    generate_artifacts(regression(), requires_grad=["w"], loss=LossType.MSELoss, artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    with pytest.raises(
        ModelError, match=r"eval model reads parameter 'w' .*does not know it.*belong together"
    ):
        Module(folder / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    with pytest.raises(ModelError, match="no eval model at"):
        Module(folder / "training_model.onnx", state, tmp_path / "missing.onnx")
    assert np.isfinite(Module(folder / "training_model.onnx", state)(*batch())[0])


@pytest.mark.parametrize("form", ["bytes", "proto", "str"])
def test_models_may_be_in_memory(folder: Path, form: str) -> None:
    def give(name: str) -> Any:
        path = folder / name
        if form == "str":
            return str(path)
        return path.read_bytes() if form == "bytes" else onnx.load(path)

    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(give("training_model.onnx"), state, give("eval_model.onnx"))
    optimizer = Optimizer(give("optimizer_model.onnx"), module)
    _, expected, by_path = start(folder)
    for _ in range(3):
        np.testing.assert_array_equal(module(*batch())[0], expected(*batch())[0])
        optimizer.step(), by_path.step()
    np.testing.assert_array_equal(module.eval()(*batch())[1], expected.eval()(*batch())[1])


def test_artifacts_that_were_never_written_train_too() -> None:
    made = build_artifacts(regression(), requires_grad=["w"], loss=LossType.MSELoss, optimizer=OptimType.SGD)
    import onnx_ir as ir

    module = Module(ir.to_proto(made.training), CheckpointState(made.checkpoint))
    assert made.optimizer is not None
    optimizer = Optimizer(ir.to_proto(made.optimizer), module)
    x, target = np.eye(2, dtype=np.float32), np.ones((2, 1), np.float32)
    losses = []
    for _ in range(3):
        losses.append(float(module(x, target)))
        optimizer.set_learning_rate(0.5)
        optimizer.step()
        module.lazy_reset_grad()
    assert losses[0] > losses[1] > losses[2]


def test_bad_arguments_are_named(folder: Path) -> None:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    with pytest.raises(TypeError, match="takes a CheckpointState, got dict"):
        Module(folder / "training_model.onnx", {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_nonfinite is 'panic'"):
        Module(folder / "training_model.onnx", state, on_nonfinite="panic")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a Module, got str"):
        Optimizer(folder / "optimizer_model.onnx", "module")  # type: ignore[arg-type]
    _, module = load(folder)
    with pytest.raises(ModelError, match="not an optimizer model"):
        Optimizer(folder / "training_model.onnx", module)
    with pytest.raises(ModelError, match="no optimizer model at"):
        Optimizer(folder / "missing.onnx", module)


def test_an_array_of_a_type_that_the_runtime_cannot_read_is_named(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        n (bfloat16[N, 1] x) => (float[N, 1] y) <float[1] w = {2.0}> { f = Cast<to = 1>(x)  y = Mul(f, w) }""")
    generate_artifacts(model, requires_grad=["w"], loss=LossType.MSELoss, artifact_directory=tmp_path)
    module = Module(
        tmp_path / "training_model.onnx", CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    )
    x = np.ones((2, 1), onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16))
    with pytest.raises(TypeError, match="input 'x' is bfloat16, which onnxruntime takes as an OrtValue only"):
        module(x, np.ones((2, 1), np.float32))


def test_a_masked_array_is_refused_as_its_mask_would_be_lost(tmp_path: Path) -> None:
    state, module = load(write_classifier(tmp_path))
    x, labels = batch(0)
    masked = np.ma.masked_array(x, mask=np.zeros(x.shape, bool))
    loss, _ = module(masked, labels)  # a mask of nothing hides nothing
    assert loss == module(x, labels)[0]
    masked[0, 0] = np.ma.masked
    with pytest.raises(ValueError, match=r"'x' is a masked array with 1 masked elements.*filled"):
        module(masked, labels)
    name, parameter = next(iter(state.parameters))
    values = np.ma.masked_array(parameter.data, mask=True)
    with pytest.raises(ValueError, match=f"'{name}' is a masked array"):
        state.parameters[name] = values
