"""Labels in no alphabetical order, and preprocessing that is not the default, survive every step a model goes through.

A table of sources that state them, and a table of steps; each step is tried with the model of each source.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from PIL import Image

import onward
from cli.conftest import call
from cli.npm import write_packages
from onward.hub.read_info import read_info

LABELS = ("zebra", "ant", "mole")
COLOURS = {"zebra": (250, 10, 10), "ant": (10, 250, 10), "mole": (10, 10, 250)}
MEAN, SPREAD = [0.3, 0.3, 0.3], [0.2, 0.2, 0.2]
PROCESSOR = {
    "do_resize": True, "size": {"height": 8, "width": 8}, "resample": 0, "do_rescale": True,
    "do_normalize": True, "image_mean": MEAN, "image_std": SPREAD,
}  # fmt: skip
KEYS = ("image_mean", "image_std", "resample")
CONFIG = {"architectures": ["ViTForImageClassification"], "model_type": "vit"}


def write_pictures(folder: Path) -> Path:
    for label, colour in COLOURS.items():
        (folder / label).mkdir(parents=True)
        for number in range(4):
            shade = tuple(min(255, part + number) for part in colour)
            Image.new("RGB", (8, 8), shade).save(folder / label / f"{number}.png")
    return folder


def write_model(path: Path, metadata: dict[str, str], classes: int = 3) -> None:
    """A model that knows red, green and blue as its first, second and third class, and white as its fourth."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        net (float[N, 3, 8, 8] pixel_values) => (float[N, {classes}] logits)
        <float[3, {classes}] w, float[{classes}] b> {{ mean = GlobalAveragePool(pixel_values) flat = Flatten(mean)
        logits = Gemm(flat, w, b) }}"""
    )
    weights = np.concatenate([5 * np.eye(3), np.full((3, 1), 2)], axis=1, dtype=np.float32)[:, :classes]
    for name, array in {"w": weights, "b": np.zeros(classes, np.float32)}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.helper.set_model_props(proto, metadata)
    onnx.save(proto, path)


def own_metadata(folder: Path) -> None:
    table = {"kind": "image", "input": "pixel_values", **PROCESSOR}
    write_model(
        folder / "model.onnx",
        {"onward.classes": json.dumps(LABELS), "onward.preprocessing": json.dumps(table)},
    )


def card_in_the_file(folder: Path) -> None:
    card = {
        "task": "image-classification",
        "labels": LABELS,
        "inputs": {"pixel_values": {}},
        "processor": PROCESSOR,
    }
    write_model(folder / "model.onnx", {"onward.export": json.dumps(card)})


def hugging_face_files(folder: Path) -> None:
    write_model(folder / "model.onnx", {})
    table = {str(number): label for number, label in reversed(list(enumerate(LABELS)))}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "id2label": table}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


def characters_of_paddle(folder: Path) -> None:
    write_model(folder / "model.onnx", {"character": "\n".join(LABELS)})
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


SOURCES: list[Callable[[Path], None]] = [
    own_metadata, card_in_the_file, hugging_face_files, characters_of_paddle,
]  # fmt: skip


@pytest.fixture(scope="module", params=SOURCES, ids=lambda source: source.__name__)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, pictures, its artifacts, a run of them, and deployed files."""
    path = tmp_path_factory.mktemp("paths")
    request.param(path)
    write_pictures(path / "pictures")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        call("artifacts", "model.onnx", "--loss", "cross-entropy", "--portable")
        # weights stay as they are: what is tried is that classes and pixels mean the same after training
        call(
            "train",
            "artifacts",
            "--data",
            "pictures",
            "--hold-out",
            0.25,
            "--lr",
            1e-12,
            "--metric",
            "accuracy",
        )
        call("deploy", "run", "deployed.onnx")
        call("deploy", "run", "small.onnx", "--quantize", "int8")
        write_packages(path / "node_modules")
        call("web", "artifacts", "site", "--packages", "node_modules")
    return path


STEPS = [
    "model.onnx", "artifacts", "artifacts/eval_model.onnx", "run", "deployed.onnx", "small.onnx",
    "artifacts/train_step.onnx", "artifacts/gradient_step.onnx", "artifacts/inference_model.onnx",
    "site/artifacts/training_model.onnx", "site/artifacts/eval_model.onnx",
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_labels_and_preprocessing_are_those_of_the_source(folder: Path, step: str) -> None:
    info = read_info(folder / step)
    assert info.labels == LABELS
    assert info.preprocessing is not None
    assert [info.preprocessing.settings[key] for key in KEYS] == [MEAN, SPREAD, 0]


@pytest.mark.parametrize("file", ["deployed.onnx", "small.onnx"])
def test_a_deployed_file_answers_with_the_right_labels(folder: Path, file: str) -> None:
    classifier: Any = onward.load(folder / file)
    for label in LABELS:
        assert classifier(folder / "pictures" / label / "0.png")["label"] == label


def test_evaluate_counts_every_sample_of_a_run_and_of_artifacts_as_right(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for place in ("run", "artifacts"):
        figures = call("evaluate", place, "--data", "pictures", "--metric", "accuracy", "--json").json
        assert figures["accuracy"] == 1.0, place


@pytest.mark.parametrize("place", ["model.onnx", "run", "deployed.onnx", "small.onnx"])
def test_infer_names_the_classes(folder: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    answers = call("infer", place, "--data", "pictures", "--json").json
    named = {
        Path(file).parent.name: answer["label"] for file, answer in zip(answers["files"], answers["labels"])
    }
    assert named == {label: label for label in LABELS}


def test_finetune_keeps_preprocessing_and_names_its_classes_right(folder: Path, tmp_path: Path) -> None:
    result = onward.finetune(
        folder / "model.onnx", folder / "pictures", epochs=30, learning_rate=0.1, progress=False
    )
    assert result.preprocessing is not None
    assert [result.preprocessing.settings[key] for key in KEYS] == [MEAN, SPREAD, 0]
    result.export(tmp_path / "mine.onnx")
    loaded: Any = onward.load(tmp_path / "mine.onnx")
    for label in LABELS:
        assert result.predict(folder / "pictures" / label / "0.png")["label"] == label
        assert loaded(folder / "pictures" / label / "0.png")["label"] == label


def test_a_class_that_the_labels_lack_is_one_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pictures(tmp_path / "more")
    (tmp_path / "more" / "ant").rename(tmp_path / "more" / "bee")
    monkeypatch.chdir(folder)
    said = call("train", "artifacts", "--data", tmp_path / "more", "-o", tmp_path / "run", code=1).stderr
    assert "'bee', which the model has not" in said and "zebra, ant, mole" in said


@pytest.mark.parametrize("place", ["model.onnx", "artifacts", "run", "deployed.onnx"])
def test_inspect_shows_what_a_model_is_for_and_where_that_was_read(
    folder: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    facts = {fact: (text, source) for fact, text, source in call("inspect", place, "--json").json["info"]}
    text, source = facts["labels"]
    assert text == "3: zebra, ant, mole"
    assert source.strip("'").split("'")[0].endswith((".onnx", ".json"))
    assert "image_mean [0.3, 0.3, 0.3]" in facts["input pixel_values"][0]
    assert "zebra, ant, mole" in call("inspect", place).stdout


def test_a_deployed_file_says_where_it_came_from(folder: Path) -> None:
    origin = read_info(folder / "deployed.onnx").origin
    assert origin.base == "model.onnx"
    assert list(origin.data) == ["pictures"] and len(origin.data["pictures"]) == 64
    assert origin.settings["learning_rate"] == 1e-12
    assert "onnxruntime" in origin.versions
    assert str(folder) not in json.dumps(vars(origin))


def test_labels_that_are_numbers_are_neither_sorted_nor_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Angles of a published model: as texts they sort as 0, 180, 270, 90, and as classes they are 0 to 3."""
    angles = {"0": (250, 10, 10), "90": (10, 250, 10), "180": (10, 10, 250), "270": (250, 250, 250)}
    monkeypatch.chdir(tmp_path)
    for angle, colour in angles.items():
        (tmp_path / "pictures" / angle).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (8, 8), colour).save(tmp_path / "pictures" / angle / f"{number}.png")
    write_model(tmp_path / "model.onnx", {"character": "\n".join(angles)}, classes=4)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    call("artifacts", "model.onnx", "--loss", "cross-entropy")
    call("train", "artifacts", "--data", "pictures", "--lr", 1e-12)
    call("deploy", "run", "deployed.onnx")
    for place in ("model.onnx", "run", "deployed.onnx"):
        assert call("evaluate", place, "-d", "pictures", "-m", "accuracy", "--json").json["accuracy"] == 1.0
        answers = call("infer", place, "--data", "pictures", "--json").json
        named = {
            Path(file).parent.name: label["label"] for file, label in zip(answers["files"], answers["labels"])
        }
        assert named == {angle: angle for angle in angles}
