"""`onward finetune` of folders: of Onward's own export and as Hugging Face has them, for images and texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest

import onward
from cli.test_finetune import draw, published
from export.huggingface_types import tiny_of
from onward.export import from_transformers

Run = Any


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"text": f"{word} there", "mood": mood} for word, mood in (("hello", "good"), ("never", "bad"))
    ] * 6
    Path("moods.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_an_image_classifiers_folder_keeps_its_preprocessing(place: Path, run: Run) -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny_of("vit", "image-classification")[0]
    size = {"height": model.config.image_size, "width": model.config.image_size}
    processor = transformers.ViTImageProcessor(size=size, image_mean=[0.4, 0.5, 0.6], image_std=[0.25] * 3)
    from_transformers((model, processor), "image-classification", "vit")
    draw(Path("pictures"), 4)
    said = run("finetune", "vit", "-d", "pictures", "-o", "mine.onnx", "-e", 1)
    assert "task: image-classification" in said.stderr and "a new head for blue, green, red" in said.stderr
    assert onward.load("mine.onnx")("pictures/red/1.png")["label"] in ("blue", "green", "red")  # type: ignore[operator]
    done = onward.load("mine.onnx").preprocessing  # type: ignore[union-attr]
    assert done is not None and done.settings["image_mean"] == [0.4, 0.5, 0.6]


@pytest.mark.parametrize("task", ["text-classification", "pooling", "feature-extraction"])
def test_folders_of_text_models_learn_labels(place: Path, run: Run, task: str) -> None:
    from_transformers(tiny_of("bert", task), task, "bert")
    said = run("finetune", "bert", "-d", "moods.jsonl", "--label", "mood", "-o", "mine", "-e", 2)
    assert "task: text-classification" in said.stderr and "a new head for bad, good" in said.stderr
    assert sorted(path.name for path in Path("mine").iterdir()) == ["model.onnx", "model.tokenizer.json"]
    answer: Any = onward.load("mine")
    assert answer("hello there")["label"] in ("bad", "good")
    assert run("evaluate", "mine", "-d", "moods.jsonl", "--label", "mood", "--json").json["samples"] == 12


def test_a_folder_whose_labels_the_data_has_is_trained_on(place: Path, run: Run) -> None:
    model, tokenizer = tiny_of("bert", "text-classification")
    model.config.id2label = {index: f"kind {index}" for index in range(model.config.num_labels)}
    from_transformers((model, tokenizer), "text-classification", "bert")
    rows = [{"text": "hello there", "kind": "kind 1"}, {"text": "never there", "kind": "kind 0"}] * 6
    Path("kinds.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = run("finetune", "bert", "-d", "kinds.jsonl", "--label", "kind", "-o", "mine.onnx", "-e", 1)
    assert "the model's own head goes on" in said.stderr


def test_a_published_folder_needs_no_file_of_ours(place: Path, run: Run) -> None:
    model, tokenizer = tiny_of("bert", "text-classification")
    from_transformers((model, tokenizer), "text-classification", "ours")
    Path("theirs").mkdir()
    for name in ("model.onnx", "tokenizer.json"):
        shutil.copyfile(Path("ours", name), Path("theirs", name))
    model.config.save_pretrained("theirs")
    said = run("finetune", "theirs", "-d", "moods.jsonl", "--label", "mood", "-o", "mine.onnx", "-e", 1)
    assert "task: text-classification" in said.stderr


def test_a_task_that_cannot_be_trained_from_a_folder_is_said(place: Path, run: Run) -> None:
    from_transformers(tiny_of("bert", "fill-mask"), "fill-mask", "bert")
    said = run("finetune", "bert", "-d", "moods.jsonl", "-o", "mine.onnx", code=1).stderr
    assert "the model's task is fill-mask" in said and "--task" in said


def test_int4_of_a_conv_net_is_an_error_that_says_why(place: Path, run: Run) -> None:
    onnx.save(published(), "model.onnx")
    draw(Path("pictures"), 4)
    said = run(
        "finetune", "model.onnx", "-d", "pictures", "-o", "mine.onnx", "-e", 1, "--quantize", "int4", code=1
    ).stderr
    assert "int4 stores matrices" in said and "in convolutions" in said and "--quantize int8" in said
    assert not Path("mine.onnx").exists()
