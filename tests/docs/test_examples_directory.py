"""The examples reach what they say: each is run, shortened where that shows the same."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onward

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_unet_finds_discs_at_any_size() -> None:
    found = load("segmentation_unet").main(epochs=4)
    assert found["before"] < 0.3 < 0.65 < found["after"]
    assert found["larger"] > 0.6


def test_an_lstm_beats_the_naive_forecast() -> None:
    found = load("forecast_lstm").main(epochs=8)
    assert found["learned"] < found["naive"] / 2


def test_adapters_teach_a_frozen_model() -> None:
    found = load("personalise_lora").main()
    assert found["before"] + 0.25 < found["adapted"]
    assert found["merged"] == pytest.approx(found["adapted"], abs=0.01)
    assert found["adapter_bytes"] < found["base_bytes"] / 5


def test_a_loss_from_blocks_finds_quantiles() -> None:
    covered = load("custom_loss").main(epochs=15)
    assert covered[0.5] == pytest.approx(0.5, abs=0.06)
    assert covered[0.9] == pytest.approx(0.9, abs=0.05)


def test_an_average_of_clients_knows_more_than_one() -> None:
    found = load("federated_migrated").main()
    assert found["together"] > found["alone"] + 0.1


def test_two_clients_learn_as_much_as_one_process_with_all_data() -> None:
    found = load("federated_digits").main()
    assert found["whole"] > 0.88
    assert found["together"] > found["whole"] - 0.015


def test_a_hugging_face_model_is_fine_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small model with random weights and a few posts, which it learns by heart."""
    from export.tiny_transformers import tiny_pair

    example = load("finetune_minilm")
    monkeypatch.setattr(example, "LEARNING_RATE", 1e-2)  # random weights have further to go
    folder = tmp_path / "bert"
    for part in tiny_pair("bert", "text-classification"):
        part.save_pretrained(folder)
    posts = example.Posts(
        ["the ferry leaves at noon", "nobody expected a small library"] * 8, np.arange(16) % 2
    )
    found = example.main(
        str(folder), tmp_path / "classifier", training=posts, held_out=posts, epochs=12, threads=1
    )
    assert found["loss"] < found["first_loss"]
    assert found["int8"] == found["fp32"] == 1.0
    assert onward.load(tmp_path / "classifier")(posts.texts[1])["label"] == example.GROUPS[1]


def test_every_example_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"`{path.name}`" in listed for path in EXAMPLES.glob("*.py"))


PUBLISHED = ["pages", "words", "sentences", "pitch", "files"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_takes_new_classes_by_three_commands(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """In small: the file as it is published where its package is on this machine, else a model of its structure.

    Nothing is fetched: `python examples/finetune_published.py` does that, and docs/fine-tune-a-model.md has the
    accuracies of whole runs, beside torch's.
    """
    from cli.conftest import call
    from published_stand_ins import stand_in

    example = load("finetune_published")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(example, "onward", lambda *arguments, cwd: call(*arguments))
    case = example.CASES[name]
    published = bool(case.file) and example.cached(case) is not None
    if (
        name == "sentences"
    ):  # the encoder of the package takes minutes here: one of its architecture, but tiny
        case = dataclasses.replace(case, data=few_sentences)
        monkeypatch.setattr(example, "fetch", lambda case, folder: tiny_encoder(folder))
    elif not published:
        monkeypatch.setattr(
            example, "fetch", lambda case, folder: save(stand_in(name), folder / "model.onnx")
        )
    record_property("model", "as published" if published else "a stand-in")
    monkeypatch.setitem(example.CASES, name, case)
    rows = example.three_commands(name, tmp_path, small=True)
    assert len(rows) == case.small_epochs and rows[-1]["loss"] < rows[0]["loss"]
    assert 0 <= rows[-1]["accuracy"] <= 1
    answer: Any = onward.load("mine.onnx")
    sample = {
        "sentences": "a new disk drive", "pitch": "tones/E2/0.wav", "files": dict.fromkeys(FIRST_BYTES, 32),
    }.get(name, "digits/digit-3/3.png")  # fmt: skip
    assert answer(sample)["label"] in answer.classes
    about = {
        entry.key: entry.value for entry in onnx.load("mine.onnx", load_external_data=False).metadata_props
    }
    assert json.loads(about["onward.classes"]) == answer.classes and len(answer.classes) >= 2
    assert json.loads(about["onward.preprocessing"])["kind"] in ("image", "text", "sound", "table")


FIRST_BYTES = [f"byte{index}" for index in range(2048)]


def save(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


def tiny_encoder(folder: Path) -> Path:
    from cli.conftest import call
    from export.tiny_transformers import tiny_pair

    for part in tiny_pair("bert", "pooling"):
        part.save_pretrained(folder / "bert")
    call("export", "bert", "--output", "exported", "--task", "pooling")
    return folder / "exported" / "model.onnx"


def few_sentences(folder: Path, small: bool) -> str:
    """Sentences about two kinds of computers, where the corpus of newsgroups is not on this machine."""
    words = {"pc": ["bios", "motherboard", "jumper"], "mac": ["quadra", "finder", "powerbook"]}
    rows = [
        {"text": f"how do I fix the {word} of my machine, attempt {n}?", "group": group}
        for n in range(4)
        for group, known in words.items()
        for word in known
    ]
    (folder / "posts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return "posts.jsonl"
