"""`onward evaluate` of files: deployed, quantized, published; of folders; several beside one another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onward
from cli.test_finetune import draw, published
from export.huggingface_types import tiny_of
from onward.export import from_transformers

Run = Any


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> Path:
    """A run over pictures whose classes are not in alphabetical order."""
    monkeypatch.chdir(tmp_path)
    onnx.save(published(), "model.onnx")
    draw(Path("pictures"))
    run("artifacts", "model.onnx", "--classes", "red,blue,green")
    run("train", "artifacts", "-d", "pictures", "-e", 12, "--lr", 0.05, "-b", 8)
    return tmp_path


def test_deployed_and_quantized_files_are_scored_as_the_run(shop: Path, run: Run) -> None:
    run("deploy", "run", "float.onnx")
    run("deploy", "run", "small.onnx", "--quantize", "int8-static", "--force")
    expected = run("evaluate", "run", "-d", "pictures", "-m", "accuracy", "--json").json["accuracy"]
    assert expected > 0.9
    alone = run("evaluate", "float.onnx", "-d", "pictures", "--json").json
    assert alone["task"] == "image-classification" and alone["samples"] == 36
    assert alone["accuracy"] == pytest.approx(expected)
    assert [row["name"] for row in alone["classes"]] == ["red", "blue", "green"]
    assert all(row["samples"] == 12 and row["recall"] > 0.5 for row in alone["classes"])
    shown = run("evaluate", "float.onnx", "small.onnx", "-d", "pictures").stdout
    assert "float.onnx" in shown and "small.onnx" in shown and "precision" in shown and "size" in shown
    three = run("evaluate", "run", "float.onnx", "small.onnx", "-d", "pictures", "--json").json["models"]
    assert [one["accuracy"] for one in three[:2]] == pytest.approx([expected] * 2)
    assert three[2]["accuracy"] > 0.8


def test_precision_recall_and_f1_are_those_of_their_definitions(
    tmp_path: Path, monkeypatch: Any, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> net (float[N, 3] x) => (float[N, 3] y) { y = Identity(x) }'
    )
    model.metadata_props.add(key="onward.classes", value=json.dumps(["b", "c", "a"]))
    onnx.save(model, "identity.onnx")
    answers = np.asarray([0, 0, 1, 1, 1, 0])
    labels = np.asarray([0, 1, 1, 1, 0, 0])
    np.savez("data.npz", x=np.eye(3, dtype=np.float32)[answers], labels=labels)
    figures = run("evaluate", "identity.onnx", "-d", "data.npz", "-m", "top3", "--json").json
    assert figures["accuracy"] == pytest.approx(4 / 6) and figures["top3"] == 1
    first, second, absent = figures["classes"]
    assert (first["name"], first["precision"], first["recall"]) == (
        "b",
        pytest.approx(2 / 3),
        pytest.approx(2 / 3),
    )
    assert second["f1"] == pytest.approx(2 / 3) and absent["samples"] == 0 and absent["f1"] is None
    assert figures["f1"] == pytest.approx(2 / 3)
    Path("words.csv").write_text("x0,x1,x2,kind\n1,0,0,b\n0,0,1,z\n")
    assert (
        "'z', which the model has not" in run("evaluate", "identity.onnx", "-d", "words.csv", code=1).stderr
    )


def test_numbers_have_other_figures(tmp_path: Path, monkeypatch: Any, run: Run) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(published("table"), "model.onnx")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 3)).astype(np.float32)
    result = onward.finetune("model.onnx", (x, x[:, :1] * 2), epochs=60, learning_rate=0.02, progress=False)
    assert result.task == "tabular-regression"
    result.export("numbers.onnx")
    np.savez("data.npz", x=x, target=x[:, :1] * 2)
    figures = run("evaluate", "numbers.onnx", "-d", "data.npz", "--json").json
    assert set(figures) == {"model", "task", "samples", "mae", "mse", "r2", "classes"} and figures["r2"] > 0.8


def test_a_language_model_has_a_perplexity(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "base"
    from_transformers(tiny_of("gpt2", "text-generation"), "text-generation", folder, opset=18)
    lines = [{"text": "where does the path end"}, {"text": "hello there"}]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    figures = run("evaluate", folder, "-d", tmp_path / "texts.jsonl", "--json").json
    assert figures["task"] == "text-generation" and figures["samples"] == 2
    assert figures["perplexity"] == pytest.approx(np.exp(figures["loss"]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("evaluate model.onnx -d pictures -c best", "--checkpoint and --prefix are for a run"),
        ("evaluate model.onnx", "no data was given"),
        ("evaluate model.onnx -d pictures", "nothing says which output of the model is which class"),
        ("evaluate run -d pictures --task image-classification", "--task is for models for inference"),
    ],
)
def test_what_cannot_be_evaluated_is_said(shop: Path, run: Run, line: str, message: str) -> None:
    assert message in run(*line.split(), code=1).stderr
