"""Artifacts of one set go together; names that training keeps for itself are refused; metadata may lie."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from onward import artifacts
from onward.api import CheckpointState, Module, Optimizer
from onward.errors import ModelError, OnwardError


def made(folder: Path, *, activation: str = "Tanh", weight: str = "w", **options: Any) -> Path:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> n (float[N, 2] x) => (float[N, 1] y)'
        f"<float[2, 1] w = {{1, 2}}> {{ m = MatMul(x, w) y = {activation}(m) }}"
    )
    for graph in (model.graph,):
        graph.initializer[0].name = weight
        graph.node[0].input[1] = weight
    artifacts.generate_artifacts(
        model, requires_grad=[weight], loss=artifacts.LossType.MSELoss, optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder, **options,
    )  # fmt: skip
    return folder


def module(training: Path, evaluation: Path, state: Path) -> Module:
    loaded = CheckpointState.load_checkpoint(state / "checkpoint")
    return Module(training / "training_model.onnx", loaded, evaluation / "eval_model.onnx")


def test_models_of_other_artifacts_are_refused(tmp_path: Path) -> None:
    first, second = made(tmp_path / "a"), made(tmp_path / "b", activation="Relu")
    with pytest.raises(ModelError, match="eval model belongs to other artifacts"):
        module(first, second, first)
    good = module(first, first, first)
    with pytest.raises(ModelError, match="optimizer model belongs to other artifacts"):
        Optimizer(second / "optimizer_model.onnx", good)
    Optimizer(first / "optimizer_model.onnx", good)


def test_an_eval_model_does_not_train(tmp_path: Path) -> None:
    folder = made(tmp_path)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    with pytest.raises(ModelError, match="is the eval model, and the training model is needed"):
        Module(folder / "eval_model.onnx", state)


@pytest.mark.parametrize(
    "name",
    [
        "lazy_reset_grad",
        "random_seed",
        "v_grad.accumulation.buffer",
        "v_grad.accumulation.out",
        "__metadata__",
    ],
)
def test_reserved_names_are_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="keep such names for themselves"):
        made(tmp_path / "new", weight=name)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("key", ["onward.trainable", "onward.frozen", "onward.labels", "onward.statistics"])
@pytest.mark.parametrize("text", ["null", "3", "[1]", '{"a": 3}', "[" * 5000, "", "not JSON", '["nothing"]'])
def test_hostile_metadata_of_a_training_model(key: str, text: str, tmp_path: Path) -> None:
    folder = made(tmp_path)
    model = onnx.load(folder / "training_model.onnx")
    for entry in model.metadata_props:
        if entry.key == key:
            entry.value = text
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    try:
        Module(model.SerializeToString(), state)
    except OnwardError:
        return
    assert (key, text) == ("onward.statistics", '["nothing"]')


def test_every_model_is_opened_in_a_session_before_the_set_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = onnxruntime.InferenceSession

    def watched(path: str, *arguments: object, **options: object) -> object:
        opened.append(Path(path).name)
        assert not (tmp_path / "new" / "training_model.onnx").exists()
        if len(opened) == failing:
            raise RuntimeError("this runtime cannot")
        return real(path, *arguments, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", watched)
    for failing in (1, 2, 3):  # noqa: B007 - read by what is called
        opened.clear()
        with pytest.raises(ModelError, match=r"nothing was written: this runtime cannot"):
            made(tmp_path / "new")
        assert not (tmp_path / "new").exists()
    failing = 0
    opened.clear()
    made(tmp_path / "new")
    assert {"training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"} <= set(opened)


def test_a_new_set_leaves_no_file_of_an_older_one(tmp_path: Path) -> None:
    """Nor anything that is not of it, and nothing where no set was."""
    made(tmp_path, portable=True, nominal_checkpoint=True, ort_format=True)
    others = ["notes.json", "b_state.bin", "constants.data"]
    for name in others:
        (tmp_path / name).write_text("{}")
    for name in ("pipeline/onward.json", "pipeline/tokenizer.json"):  # of an exported model
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    new = {path.name for path in made(tmp_path / "new").iterdir()}
    shutil.rmtree(tmp_path / "new")
    made(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*new, *others}
    own = ("inference_model.onnx", "state.bin", "pipeline/notes.txt")
    (tmp_path / "pipeline").mkdir()
    for name in own:
        (tmp_path / name).write_text("what somebody made of a trained checkpoint")
    made(tmp_path)
    assert all((tmp_path / name).is_file() for name in own)


def test_constants_of_two_versions_have_two_names(tmp_path: Path) -> None:
    """The rename of a model then replaces it and its constants; those that no model refers to go."""
    names = []
    for version in (1, 2):
        weights = {
            name: onnx.numpy_helper.from_array(np.full((4, size), version, np.float32), name)
            for name, size in (("frozen", 400), ("w", 1))
        }
        model = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["": 21]> n (float[N, 4] x) => (float[N, 1] y)'
            "{ f = MatMul(x, frozen) m = ReduceMean<keepdims = 1>(f) v = Mul(x, m) y = MatMul(v, w) }"
        )
        model.graph.initializer.extend(weights.values())
        onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location=f"{version}.bin")
        artifacts.generate_artifacts(
            tmp_path / "m.onnx", requires_grad=["w"], loss=artifacts.LossType.MSELoss,
            artifact_directory=tmp_path / "set",
        )  # fmt: skip
        (data,) = (tmp_path / "set").glob("constants.*.data")
        names.append(data.name)
        for name in ("training_model.onnx", "eval_model.onnx"):
            held = onnx.load(tmp_path / "set" / name, load_external_data=False).graph.initializer
            assert data.name in {entry.value for tensor in held for entry in tensor.external_data}
    assert names[0] != names[1]
