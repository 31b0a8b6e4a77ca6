"""`onward finetune`: a language model's folder and JSON lines in, a folder that answers out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import onward
from export.huggingface_types import tiny_of
from onward.cli.app import app
from onward.export import from_transformers

LINES = [
    {"prompt": "where does the path end", "completion": " at a bridge"},
    {"prompt": "hello there", "completion": " friend"},
]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    from_transformers(tiny_of("gpt2", "text-generation"), "text-generation", tmp_path / "base", opset=18)
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, LINES)))
    return tmp_path


def test_a_folder_and_json_lines_become_a_folder_that_answers(base: Path) -> None:
    arguments = [
        "finetune", str(base / "base"), "--lora", "--data", str(base / "chat.jsonl"), "--output", str(base / "out"),
        "--epochs", "40", "--batch-size", "2", "--lr", "0.02", "--adapters", str(base / "adapters"),
    ]  # fmt: skip
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    assert onward.load(base / "out")("where does the path end").strip() == "at a bridge"
    assert (base / "adapters" / "adapter_config.json").is_file()
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code != 0 and "--overwrite" in again.output


def test_one_function_takes_both_kinds(base: Path) -> None:
    result = onward.finetune(
        base / "base",
        LINES,
        lora=onward.lora.LoRA(rank=2, targets="attention"),
        epochs=1,
        hold_out=0.0,
        progress=False,
    )
    assert result.export(base / "out") == base / "out"
    assert isinstance(onward.load(base / "out")("why"), str)


def test_a_language_model_needs_no_word_for_its_adapters(base: Path) -> None:
    arguments = ["finetune", str(base / "base"), "--data", str(base / "chat.jsonl"), "-o", str(base / "out")]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    assert "task: text-generation, because" in ran.stderr and "onward.export" in ran.stderr


def test_a_device_that_is_not_there_is_named(base: Path) -> None:
    arguments = [
        "finetune",
        str(base / "base"),
        "--lora",
        "--data",
        str(base / "chat.jsonl"),
        "-o",
        str(base / "out"),
    ]
    ran = CliRunner().invoke(app, [*arguments, "--device", "cuda:99"])
    assert ran.exit_code != 0 and "cuda:99" in ran.output
    assert not (base / "out").exists()
