"""Training and eval models whose constants lie in files of their own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onward.api import CheckpointState, Module
from onward.artifacts import LossType, OptimType, build_artifacts, generate_artifacts
from onward.errors import ModelError
from onward.runtime import sessions
from onward.train.trainer import Trainer
from small_models import batch, start, with_weights


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a large constant that is in neither list."""
    folder = tmp_path_factory.mktemp("plain")
    text = """net (float[n, 4] x) => (float[n, 3] y) { a = MatMul (x, constant)  h = Tanh (a)  y = MatMul (h, w) }"""
    generate_artifacts(
        with_weights(text, constant=(4, 64), w=(64, 3)), requires_grad=["w"], loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW, artifact_directory=folder,
    )  # fmt: skip
    return folder


@pytest.fixture
def outside(plain: Path, tmp_path: Path) -> Path:
    """The same, with its constant outside."""
    folder = tmp_path / "outside"
    shutil.copytree(plain, folder)
    for name in ("training_model.onnx", "eval_model.onnx"):
        model = onnx.load(plain / name)
        onnx.save_model(
            model, folder / name, save_as_external_data=True, location=f"{name}.data", size_threshold=512
        )
        assert any(t.data_location == onnx.TensorProto.EXTERNAL for t in onnx.load(
            folder / name, load_external_data=False).graph.initializer)  # fmt: skip
    return folder


@pytest.mark.parametrize("smallest", [1 << 16, 64], ids=["read", "mapped"])
def test_external_data_trains_and_evaluates_the_same(
    plain: Path, outside: Path, smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_SMALLEST_MAPPED", smallest)
    files = sorted(os.listdir(outside))
    runs = [start(plain), start(outside)]
    for seed in range(4):  # with and without accumulation
        losses = [module(*batch(seed)) for _, module, _ in runs]
        assert losses[0] == losses[1]
        for _, module, optimizer in runs:
            if seed % 2:
                optimizer.step()
                module.lazy_reset_grad()
    evaluated = [module.eval()(*batch(9)) for _, module, _ in runs]
    assert evaluated[0] == evaluated[1]
    np.testing.assert_array_equal(runs[0][0].parameters["w"].data, runs[1][0].parameters["w"].data)
    assert sorted(os.listdir(outside)) == files  # nothing is left behind


def test_large_constants_are_written_once_and_train_the_same(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.graph.save._SHARED", 1024)
    text = """net (float[n, 4] x) => (float[n, 3] y) { a = MatMul (x, constant)  h = Tanh (a)  y = MatMul (h, w) }"""
    generate_artifacts(
        with_weights(text, constant=(4, 64), w=(64, 3)), requires_grad=["w"], loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW, artifact_directory=tmp_path,
    )  # fmt: skip
    (constants,) = tmp_path.glob("constants.*.data")
    assert constants.stat().st_size == 4 * 64 * 4
    for name in ("training_model.onnx", "eval_model.onnx"):
        held = onnx.load(tmp_path / name, load_external_data=False).graph.initializer
        assert [t.external_data[0].value for t in held if t.name == "constant"] == [constants.name]
    (_, ours, _), (_, theirs, _) = start(tmp_path), start(plain)
    assert ours(*batch(0)) == theirs(*batch(0))
    assert ours.eval()(*batch(1)) == theirs.eval()(*batch(1))


def test_constants_are_mapped_once_and_parts_of_them_share_their_memory(tmp_path: Path) -> None:
    numbers = np.arange(3 * 2**15, dtype=np.float32)
    for shift in (0, 1):  # numbers at addresses that fit their type, and at others
        (tmp_path / f"data{shift}").write_bytes(b"!" * shift + numbers.tobytes())
        tensors = []
        for name, first, count in (("part", 2**15, 2**15), ("whole", 0, numbers.size)):
            tensor = onnx.TensorProto(name=name, data_type=1, dims=[count], data_location=1)
            entries = {"location": f"data{shift}", "offset": str(shift + 4 * first), "length": str(4 * count)}
            for key, value in entries.items():
                tensor.external_data.add(key=key, value=value)
            tensors.append(tensor)
        model = onnx.ModelProto(graph=onnx.GraphProto(initializer=tensors))
        (first, found), (_, again) = (sessions.constants_as_inputs(model, tmp_path) for _ in range(2))
        assert sorted(value.name for value in first.graph.input) == ["part", "whole"]
        assert not first.graph.initializer and len(model.graph.initializer) == 2
        arrays = {name: tensor.read().view(np.float32) for name, tensor in found.items()}
        np.testing.assert_array_equal(arrays["whole"], numbers)
        np.testing.assert_array_equal(arrays["part"], numbers[2**15 : 2**16])
        assert np.shares_memory(arrays["whole"], arrays["part"])
        assert np.shares_memory(found["whole"].read(), again["whole"].read())


def test_external_data_is_exported_with_the_model(outside: Path, tmp_path: Path) -> None:
    _, module, _ = start(outside)
    module.export_model_for_inferencing(tmp_path / "model.onnx", ["y"])
    assert not list(
        onnx.load(tmp_path / "model.onnx", load_external_data=False).graph.initializer[0].external_data
    )


@pytest.mark.parametrize("form", ["bytes", "proto"])
def test_in_memory_models_cannot_refer_to_files(outside: Path, form: str) -> None:
    path = outside / "training_model.onnx"
    given = path.read_bytes() if form == "bytes" else onnx.load(path, load_external_data=False)
    state = CheckpointState.load_checkpoint(outside / "checkpoint")
    with pytest.raises(ModelError, match=r"refers to external data.*pass the path"):
        Module(given, state)


def rewrite(folder: Path, **entries: str) -> None:
    path = folder / "training_model.onnx"
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = entries.get(entry.key, entry.value)
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "missing", "", "link"])
def test_hostile_locations_are_refused(outside: Path, location: str) -> None:
    (outside.parent / "secret").write_bytes(bytes(4096))
    if location == "link":
        try:
            os.symlink(outside.parent / "secret", outside / "link")
        except OSError:
            pytest.skip("this system does not let us make symbolic links")
    rewrite(outside, location=location)
    state = CheckpointState.load_checkpoint(outside / "checkpoint")
    with pytest.raises(ModelError, match="external data"):
        Module(outside / "training_model.onnx", state)


def test_artifacts_in_memory_read_the_models_own_file(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_SMALLEST_MAPPED", 64)
    text = """net (float[n, 4] x) => (float[n, 3] y) { a = MatMul (x, constant)  h = Tanh (a)  y = MatMul (h, w) }"""
    model = with_weights(text, constant=(4, 64), w=(64, 3))
    onnx.save_model(
        model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=512
    )
    made = build_artifacts(
        tmp_path / "m.onnx", requires_grad=["w"], loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW
    )
    trainer, (_, module, _) = Trainer(made, progress=False), start(plain)
    assert trainer.module(*batch(0)) == module(*batch(0))
    assert trainer.module.eval()(*batch(1)) == module.eval()(*batch(1))
    trainer.module.export_model_for_inferencing(tmp_path / "out.onnx", ["y"])
    x = batch(0)[0]
    answers = [
        np.asarray(ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0])
        for path in (tmp_path / "m.onnx", tmp_path / "out.onnx")
    ]
    np.testing.assert_array_equal(*answers)
    assert sorted(os.listdir(tmp_path)) == ["m.data", "m.onnx", "out.onnx"]
