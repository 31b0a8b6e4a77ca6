"""Export for inference: chosen outputs, weights inside, nothing of training, proven before it replaces anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onward import files
from onward.api import CheckpointState, Module
from onward.artifacts import LossType, generate_artifacts
from onward.errors import ExportError, ModelError, OnwardError, ParityError
from onward.export import for_inference
from onward.graph import save
from onward.runtime import inference_model as inference
from small_models import batch, load, start, with_weights, write_classifier, write_normalized


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained classifier with dropout; `trained` is its checkpoint."""
    folder = write_classifier(tmp_path_factory.mktemp("artifacts"), dropout=0.3, nominal_checkpoint=True)
    state, module, optimizer = start(folder)
    for seed in range(5):
        module(*batch(seed))
        optimizer.step()
        module.lazy_reset_grad()
    CheckpointState.save_checkpoint(state, folder / "trained")
    return folder


def run(path: Path, *inputs: np.ndarray) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(path)
    names = [value.name for value in session.get_outputs()]
    feeds = dict(zip([value.name for value in session.get_inputs()], inputs))
    return dict(zip(names, (np.asarray(r) for r in session.run(names, feeds))))


def inputs_of(path: Path) -> list[str]:
    return [value.name for value in ort.InferenceSession(path).get_inputs()]


# ---- what is in the file -------------------------------------------------------------------------


def test_the_module_writes_what_it_evaluates(folder: Path, tmp_path: Path) -> None:
    _, module = load(folder, "trained")
    path = tmp_path / "model.onnx"
    assert module.export_model_for_inferencing(path, ["scores"]) is None
    x, labels = batch(50)
    expected = module.eval()(x, labels)[1]
    np.testing.assert_allclose(run(path, x)["scores"], expected, rtol=1e-5, atol=1e-6)
    assert os.listdir(tmp_path) == ["model.onnx"]


def test_nothing_of_training_is_left(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    report = for_inference(folder / "eval_model.onnx", folder / "trained", ["scores"], path)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.input] == ["x"]
    assert {node.domain for node in model.graph.node} == {""}
    assert not {node.op_type for node in model.graph.node} & {
        "Dropout",
        "SoftmaxCrossEntropyLoss",
        "Identity",
    }
    assert {t.name for t in model.graph.initializer} == {"w1", "b1", "w2", "b2"}
    assert path.stat().st_size == report.size
    assert report.size < (folder / "eval_model.onnx").stat().st_size + (folder / "trained").stat().st_size
    assert report.parity is not None and report.parity.passed and report.quantization is None
    assert "model.onnx" in str(report) and "within tolerance" in str(report)


def test_metadata_tells_where_the_model_comes_from(folder: Path, tmp_path: Path) -> None:
    for_inference(folder / "eval_model.onnx", folder / "trained", ["scores"], tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    about = {entry.key: entry.value for entry in model.metadata_props}
    assert model.producer_name == "onward" and about["onward.role"] == "inference"
    assert about["onward.trained"] == '{"parameters": 4}' and "onward.version" in about
    assert not {"onward.labels", "onward.loss", "onward.trainable", "onward.frozen"} & set(about)


OUTPUTS: dict[str, tuple[list[str], list[str], set[str]]] = {
    # outputs, inputs that remain, initializers that remain
    "an intermediate": (["h"], ["x"], {"w1", "b1"}),
    "two in an order": (["scores", "h"], ["x"], {"w1", "b1", "w2", "b2"}),
    "twice the same": (["scores", "scores"], ["x"], {"w1", "b1", "w2", "b2"}),
}


@pytest.mark.parametrize(("outputs", "inputs", "weights"), OUTPUTS.values(), ids=OUTPUTS)
def test_any_value_of_the_graph_may_be_an_output(
    folder: Path, tmp_path: Path, outputs: list[str], inputs: list[str], weights: set[str]
) -> None:
    path = tmp_path / "model.onnx"
    state, module = load(folder, "trained")
    module.export_model_for_inferencing(path, outputs)
    model = onnx.load(path)
    assert [value.name for value in model.graph.output] == list(dict.fromkeys(outputs))
    assert [value.name for value in model.graph.input] == inputs
    assert {t.name for t in model.graph.initializer} == weights
    p = {name: parameter.data for name, parameter in state.parameters}
    x, _ = batch(3)
    hidden = np.tanh(x @ p["w1"] + p["b1"])
    wanted = {"h": hidden, "scores": hidden @ p["w2"] + p["b2"]}
    for name, found in run(path, x).items():
        np.testing.assert_allclose(found, wanted[name], rtol=1e-5, atol=1e-6)


def test_an_input_or_a_parameter_may_be_an_output_too(folder: Path, tmp_path: Path) -> None:
    state, module = load(folder, "trained")
    module.export_model_for_inferencing(tmp_path / "model.onnx", ["x", "w2", "scores"])
    found = run(tmp_path / "model.onnx", batch()[0])
    np.testing.assert_array_equal(found["x"], batch()[0])
    np.testing.assert_array_equal(found["w2"], state.parameters["w2"].data)


def test_the_loss_may_be_exported_and_keeps_its_labels(folder: Path, tmp_path: Path) -> None:
    _, module = load(folder, "trained")
    loss = module.output_names()[0]
    module.export_model_for_inferencing(tmp_path / "model.onnx", [loss])
    assert inputs_of(tmp_path / "model.onnx") == ["x", "labels"]
    np.testing.assert_allclose(
        run(tmp_path / "model.onnx", *batch())[loss], module.eval()(*batch())[0], rtol=1e-6
    )


def test_batch_norm_is_in_its_inference_form(tmp_path: Path) -> None:
    folder = write_normalized(tmp_path / "artifacts", additional_output_names=["scores"])
    state, module, optimizer = start(folder)
    for seed in range(5):
        module(*batch(seed))
        optimizer.step()
        module.lazy_reset_grad()
    for_inference(folder / "eval_model.onnx", state, ["scores"], tmp_path / "model.onnx")
    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    modes = [a.i for node in nodes for a in node.attribute if a.name == "training_mode"]
    assert all(mode == 0 for mode in modes)
    x, labels = batch(9)
    expected = module.eval()(x, labels)[1]
    found = run(tmp_path / "model.onnx", x)["scores"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    # one row alone: statistics of the batch would make it constant
    np.testing.assert_allclose(
        run(tmp_path / "model.onnx", x[:1])["scores"], expected[:1], rtol=1e-5, atol=1e-6
    )


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    text = """net (int64[n, t] ids) => (float[n, t, 50] scores) {
        e = Gather (table, ids)  h = Tanh (e)  back = Transpose <perm = [1, 0]> (table)  scores = MatMul (h, back) }"""
    model = with_weights(text, table=(50, 64))
    generate_artifacts(
        model, requires_grad=["table"], loss=LossType.MSELoss, artifact_directory=tmp_path / "artifacts"
    )
    report = for_inference(
        tmp_path / "artifacts" / "eval_model.onnx", tmp_path / "artifacts" / "checkpoint", ["scores"],
        tmp_path / "model.onnx",
    )  # fmt: skip
    assert report.size < 1.2 * 50 * 64 * 4


def test_models_in_memory_export_too(folder: Path, tmp_path: Path) -> None:
    proto = onnx.load(folder / "eval_model.onnx")
    state = CheckpointState.load_checkpoint(folder / "trained")
    for name, model in (("proto", proto), ("bytes", proto.SerializeToString())):
        for_inference(model, state, ["scores"], tmp_path / name)
    for_inference(folder / "eval_model.onnx", state, ["scores"], tmp_path / "path")
    assert (
        (tmp_path / "proto").read_bytes()
        == (tmp_path / "path").read_bytes()
        == (tmp_path / "bytes").read_bytes()
    )


def test_training_goes_on_after_an_export(folder: Path, tmp_path: Path) -> None:
    _, module, optimizer = start(folder, "trained")
    module.export_model_for_inferencing(tmp_path / "before.onnx", ["scores"])
    module(*batch())
    optimizer.step()
    module.export_model_for_inferencing(tmp_path / "after.onnx", ["scores"])
    x, labels = batch(7)
    expected = module.eval()(x, labels)[1]
    np.testing.assert_allclose(run(tmp_path / "after.onnx", x)["scores"], expected, rtol=1e-5, atol=1e-6)
    assert np.abs(run(tmp_path / "before.onnx", x)["scores"] - expected).max() > 1e-5


# ---- external data -------------------------------------------------------------------------------


def wide(folder: Path) -> Path:
    text = "net (float[n, 4] x) => (float[n, 3] y) { a = MatMul (x, w1)  h = Tanh (a)  y = MatMul (h, w2) }"
    generate_artifacts(
        with_weights(text, w1=(4, 256), w2=(256, 3)), requires_grad=["w1", "w2"], loss=LossType.MSELoss,
        artifact_directory=folder,
    )  # fmt: skip
    return folder


def is_external(path: Path) -> bool:
    model = onnx.load(path, load_external_data=False)
    return any(t.data_location == onnx.TensorProto.EXTERNAL for t in model.graph.initializer)


def test_external_data_on_request_and_past_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = wide(tmp_path / "artifacts")

    def export(name: str, **options: Any) -> Path:
        path = tmp_path / name
        report = for_inference(made / "eval_model.onnx", made / "checkpoint", ["y"], path, **options)
        assert report.parity is not None and report.parity.passed
        files = [path, *tmp_path.glob(f"{name}.*.data")]
        assert report.size == sum(file.stat().st_size for file in files)
        return path

    inside, asked = export("inside"), export("asked", external_data=True)
    monkeypatch.setattr(save, "EXTERNAL_THRESHOLD", 4000)
    passed, forbidden = export("passed"), export("forbidden", external_data=False)
    assert [is_external(path) for path in (inside, asked, passed, forbidden)] == [False, True, True, False]
    x, _ = batch()
    for path in (asked, passed, forbidden):
        np.testing.assert_array_equal(run(path, x)["y"], run(inside, x)["y"])


def test_both_files_are_replaced_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = wide(tmp_path / "artifacts")
    path = tmp_path / "out" / "model.onnx"
    path.parent.mkdir()
    state = CheckpointState.load_checkpoint(made / "checkpoint")
    for_inference(made / "eval_model.onnx", state, ["y"], path, external_data=True)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    assert len(before) == 2 and "model.onnx" in before
    state.parameters["w1"] = state.parameters["w1"].data + 1
    real = os.replace

    def failing(source: Any, target: Any) -> None:
        if Path(target) == path:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(ExportError, match="No space left"):
        for_inference(made / "eval_model.onnx", state, ["y"], path, external_data=True)
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
    for_inference(made / "eval_model.onnx", state, ["y"], path, external_data=True)
    after = {file.name for file in path.parent.iterdir()}
    assert len(after) == 2 and after & before.keys() == {"model.onnx"}


# ---- smaller models ------------------------------------------------------------------------------


@pytest.mark.parametrize("external", [None, True])
@pytest.mark.parametrize("scheme", ["int8", "int8-tensor", "int8-weights", "int4", "fp16"])
def test_quantized_models_are_smaller_and_measured(
    tmp_path: Path, scheme: str, external: bool | None
) -> None:
    made = wide(tmp_path / "artifacts")
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "model.onnx"
    whole = for_inference(made / "eval_model.onnx", made / "checkpoint", ["y"], tmp_path / "whole.onnx")
    x, _ = batch()
    report = for_inference(
        made / "eval_model.onnx", made / "checkpoint", ["y"], path, quantize=scheme, inputs={"x": x},
        external_data=external,
    )  # fmt: skip
    assert report.parity is not None and report.parity.passed
    assert report.quantization is not None and report.quantization.cosine_min > 0.98
    assert report.size == report.quantization.bytes_after
    assert report.size == sum(file.stat().st_size for file in path.parent.iterdir())
    assert report.quantization.bytes_before >= whole.size
    if scheme in ("int8", "int4", "fp16"):
        assert report.size < whole.size
    found, expected = run(path, x)["y"], run(tmp_path / "whole.onnx", x)["y"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=0.2 * np.abs(expected).max())
    assert onnx.load(path, load_external_data=False).producer_name


def test_an_unknown_scheme_is_refused_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown quantization 'int3'.*did you mean 'int"):
        for_inference(folder / "eval_model.onnx", folder / "trained", ["scores"], tmp_path / "m.onnx",
                      quantize="int3")  # fmt: skip
    assert not os.listdir(tmp_path)


# ---- proof and failure ---------------------------------------------------------------------------


def test_a_model_that_differs_is_not_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onward.export import inference as exporting

    path = tmp_path / "model.onnx"
    path.write_bytes(b"the old one")

    own: dict[str, np.ndarray] = {}

    def wrong(eval_model: Any, data: Any, outputs: Any) -> Any:
        own["b2"] = data.trainable["b2"]
        data.trainable["b2"] = own["b2"] + np.float32(0.01)
        return inference.inference_model(eval_model, data, outputs)

    real = exporting._reference

    def reference(eval_model: Any, data: Any, *rest: Any, **options: Any) -> Any:
        data.trainable["b2"] = own["b2"]
        return real(eval_model, data, *rest, **options)

    monkeypatch.setattr(exporting, "inference_model", wrong)
    monkeypatch.setattr(exporting, "_reference", reference)
    with pytest.raises(ParityError, match=r"not written:\noutside tolerance.*\n.*FAIL scores"):
        for_inference(folder / "eval_model.onnx", folder / "trained", ["scores"], path)
    assert path.read_bytes() == b"the old one" and os.listdir(tmp_path) == ["model.onnx"]
    for_inference(folder / "eval_model.onnx", folder / "trained", ["scores"], path, atol=0.02)
    assert path.read_bytes() != b"the old one"


def test_rounding_that_the_model_amplifies_itself_is_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch norm takes a mean of 20,000 off values that differ by hundredths: its fused form rounds otherwise."""
    from onward.export import inference as exporting

    rng = np.random.default_rng(0)
    weights = {
        "kernel": rng.normal(0, 0.2, (4, 3, 3, 3)), "bias": np.full(4, 20_000.0), "scale": np.ones(4),
        "shift": np.zeros(4), "mean": np.full(4, 20_000.0), "variance": np.full(4, 1e-4),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "kernel", "bias"], ["y"]),
        helper.make_node("BatchNormalization", ["y", "scale", "shift", "mean", "variance"], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 4, 6, 6])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    generate_artifacts(
        model, requires_grad=["kernel", "scale"], frozen_params=["bias", "shift", "mean", "variance"],
        loss=LossType.MSELoss, additional_output_names=["scores"], artifact_directory=tmp_path,
    )  # fmt: skip
    paths = tmp_path / "eval_model.onnx", tmp_path / "checkpoint"
    written = for_inference(*paths, ["scores"], tmp_path / "model.onnx")
    assert written.parity is not None and written.parity.passed
    assert "onnxruntime's fusions round" in str(written.parity)

    def damaged(*arguments: Any) -> Any:
        model = inference.inference_model(*arguments)
        scale = model.graph.initializers["scale"]
        scale.const_value = ir.tensor(np.full(4, 1.005, np.float32))
        return model

    monkeypatch.setattr(exporting, "inference_model", damaged)
    with pytest.raises(ParityError, match="FAIL scores"):
        for_inference(*paths, ["scores"], tmp_path / "model.onnx")


FAILURES = [(inference, "write_model"), (inference, "_load"), (files, "_sync")]


@pytest.mark.parametrize(("module", "where"), FAILURES, ids=[where for _, where in FAILURES])
def test_a_failing_write_leaves_the_old_file(
    folder: Path, tmp_path: Path, module: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"the old one")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, where, fail)
    _, module = load(folder, "trained")
    with pytest.raises(ExportError, match=r"cannot write .*model.onnx.*No space left on device"):
        module.export_model_for_inferencing(path, ["scores"])
    assert path.read_bytes() == b"the old one" and os.listdir(tmp_path) == ["model.onnx"]


def test_places_that_cannot_be_written_are_named(folder: Path, tmp_path: Path) -> None:
    _, module = load(folder, "trained")
    with pytest.raises(ExportError, match="there is no folder"):
        module.export_model_for_inferencing(tmp_path / "missing" / "model.onnx", ["scores"])
    with pytest.raises(ExportError, match="it is a folder"):
        module.export_model_for_inferencing(tmp_path, ["scores"])


def test_wrong_requests_are_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    _, module = load(folder, "trained")
    state = CheckpointState.load_checkpoint(folder / "trained")
    without = Module(folder / "training_model.onnx", state)
    _, nominal = load(folder, "nominal_checkpoint")
    unknown = (
        "Expected graph output for inference graph score could not be found: the eval model has no value of "
        "that name; did you mean 'scores'?"
    )
    empty, load_first = (
        "Expected a non empty vector of graph output names",
        "Please load the model parameters first.",
    )
    evaluation, trained = folder / "eval_model.onnx", folder / "trained"
    bad = {"x": np.zeros((2, 5), np.float32)}
    export = module.export_model_for_inferencing
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: export(path, []), ModelError, empty),
        (lambda: export(path, "scores"), ModelError, "a list with at least one name"),
        (lambda: export(path, ["score"]), ModelError, unknown),
        (lambda: without.export_model_for_inferencing(path, ["scores"]), ModelError,
         "Eval model was not provided. Cannot export a model for inferencing."),
        (lambda: nominal.export_model_for_inferencing(path, ["scores"]), OnwardError, load_first),
        (lambda: for_inference(evaluation, folder / "nominal_checkpoint", ["scores"], path), OnwardError, load_first),
        (lambda: for_inference(evaluation, trained, ["scores"], path, inputs=bad), ExportError,
         "does not run on the given inputs"),
        (lambda: for_inference(folder / "nowhere.onnx", trained, ["scores"], path), ModelError, "no model file at"),
    ]  # fmt: skip
    for use, error, message in cases:
        with pytest.raises(error) as raised:
            use()
        assert message in str(raised.value)
    assert not os.listdir(tmp_path)


# ---- older opsets --------------------------------------------------------------------------------


def test_an_older_opset_on_request(folder: Path, tmp_path: Path) -> None:
    current = {e.domain: e.version for e in onnx.load(folder / "eval_model.onnx").opset_import}[""]
    report = for_inference(
        folder / "eval_model.onnx", folder / "trained", ["scores"], tmp_path / "old.onnx", opset=13
    )
    model = onnx.load(tmp_path / "old.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert {e.domain: e.version for e in model.opset_import} == {"": 13} and current > 13
    assert report.parity is not None and report.parity.passed
    with pytest.raises(ModelError, match="opset 6 cannot be made: choose one from 7"):
        for_inference(folder / "eval_model.onnx", folder / "trained", ["scores"], tmp_path / "x", opset=6)
    assert os.listdir(tmp_path) == ["old.onnx"]
