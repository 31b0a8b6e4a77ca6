"""Exports of Hugging Face models keep labels and preprocessing through training, `save_pipeline` and fine-tuning."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import onward
from cli.conftest import call
from export.tiny_transformers import tiny_pair
from onward.checkpoint import store
from onward.export import artifacts_from_transformers, from_transformers, save_pipeline
from onward.hub.read_info import read_info

LABELS = ("good", "bad")
TEXTS = {"good": ["the ferry leaves at noon", "the ferry"], "bad": ["why", "nobody expected a small library"]}


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of a text classifier with the labels good and bad, in this order, a run of them, and its texts."""
    folder = tmp_path_factory.mktemp("reviews")
    pair = tiny_pair("bert", "text-classification", num_labels=2)
    artifacts_from_transformers(pair, "text-classification", folder / "artifacts", labels=LABELS)
    with open(folder / "texts.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([text, label] for label, texts in TEXTS.items() for text in texts * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        call("train", "artifacts", "--data", "texts.csv", "--epochs", 25, "--batch-size", 4, "--lr", 0.01)
    return folder


def test_artifacts_state_the_labels_and_training_keeps_their_order(reviews: Path) -> None:
    for place in ("artifacts", "artifacts/training_model.onnx", "run"):
        assert read_info(reviews / place).labels == LABELS


def test_a_saved_pipeline_calls_good_what_was_good(reviews: Path, tmp_path: Path) -> None:
    save_pipeline(reviews / "artifacts", store.load(reviews / "run" / "best"), tmp_path / "pipeline")
    assert read_info(tmp_path / "pipeline").labels == LABELS
    pipeline: Any = onward.load(tmp_path / "pipeline")
    for label, texts in TEXTS.items():
        assert [answer["label"] for answer in pipeline(texts)] == [label] * len(texts)


def test_evaluate_of_artifacts_with_a_checkpoint_prints_the_accuracy(
    reviews: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(reviews)
    for place in (("run",), ("artifacts", "--checkpoint", "run/best")):
        figures = call("evaluate", *place, "--data", "texts.csv", "--metric", "accuracy", "--json").json
        assert figures["accuracy"] == 1.0


def test_a_deployed_text_classifier_answers_by_its_labels(
    reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(reviews)
    call("deploy", "run", tmp_path / "texts.onnx")
    classifier: Any = onward.load(tmp_path / "texts.onnx")
    assert classifier.classes == list(LABELS)
    assert [answer["label"] for answer in classifier([TEXTS["bad"][0], TEXTS["good"][0]])] == ["bad", "good"]


def test_a_vision_model_of_export_is_fine_tuned_with_its_own_pixels(tmp_path: Path) -> None:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
        id2label={0: "wolf", 1: "cat"},
    )  # fmt: skip
    processor = transformers.ViTImageProcessorPil(
        size={"height": 16, "width": 16}, resample=0, image_mean=[0.5] * 3, image_std=[0.25] * 3
    )
    model = transformers.ViTForImageClassification(config)
    from_transformers((model, processor), "image-classification", tmp_path / "vit")
    assert (tmp_path / "vit" / "preprocessor_config.json").is_file()
    info = read_info(tmp_path / "vit")
    assert info.labels == ("wolf", "cat")
    for label, colour in (("wolf", (200, 0, 0)), ("cat", (0, 0, 200))):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (16, 16), colour).save(tmp_path / "pictures" / label / f"{number}.png")
    result = onward.finetune(
        tmp_path / "vit" / "model.onnx", tmp_path / "pictures", epochs=1, batch_size=2, progress=False
    )
    assert result.preprocessing is not None
    settings = result.preprocessing.settings
    assert (settings["image_mean"], settings["image_std"], settings["resample"]) == ([0.5] * 3, [0.25] * 3, 0)
