"""Pictures with several labels on the command line: training, evaluation and answers agree."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from cli.test_finetune import published

pytest.importorskip("PIL")
from PIL import Image

Run = Any


@pytest.fixture
def scenes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pictures that are red, blue, both or neither, beside a table with a column for each."""
    monkeypatch.chdir(tmp_path)
    onnx.save(published(), "model.onnx")
    rng = np.random.default_rng(0)
    Path("scenes").mkdir()
    lines = ["file_name,red,blue"]
    for index in range(48):
        red, blue = index % 2, index // 2 % 2
        pixels = rng.integers(0, 60, (16, 16, 3), dtype=np.uint8)
        pixels[..., 0] += np.uint8(180 * red)
        pixels[..., 2] += np.uint8(180 * blue)
        Image.fromarray(pixels).save(f"scenes/{index}.png")
        lines.append(f"{index}.png,{red},{blue}")
    Path("scenes/metadata.csv").write_text("\n".join(lines))
    return tmp_path


def test_pictures_with_several_labels_from_training_to_answers(scenes: Path, run: Run) -> None:
    trained = run(
        "finetune",
        "model.onnx",
        "-d",
        "scenes",
        "-o",
        "m.onnx",
        "-e",
        20,
        "--lr",
        0.05,
        "--run",
        "r",
        "--json",
    )
    assert trained.json["task"] == "image-multi-label" and trained.json["metrics"]["f1_micro"] > 0.95
    assert "The samples that are hardest for the model" in Path("r/report.html").read_text()
    judged = run("evaluate", "m.onnx", "-d", "scenes", "--json").json
    assert judged["mAP"] > 0.95 and [row["name"] for row in judged["classes"]] == ["red", "blue"]
    both = run("infer", "m.onnx", "-d", "scenes/3.png", "--json").json["labels"][0]
    assert {answer["label"] for answer in both} == {"red", "blue"}
    assert run("infer", "m.onnx", "-d", "scenes/0.png", "--json").json["labels"] == [[]]
    assert len(run("infer", "m.onnx", "-d", "scenes/0.png", "--top-k", 2, "--json").json["labels"][0]) == 2
    run("infer", "m.onnx", "-d", "scenes", "-o", "answers.csv")
    with open("answers.csv", newline="") as file:
        labels = {row["file"]: row["label"] for row in csv.DictReader(file)}
    assert set(labels["scenes/3.png"].split("|")) == {"red", "blue"} and labels["scenes/0.png"] == ""


def test_a_picture_with_a_wrong_label_is_named(scenes: Path, run: Run) -> None:
    Path("scenes/metadata.csv").write_text("file_name,label\n0.png,red\n1.png,red|blue\n2.png,red|\n")
    said = run("finetune", "model.onnx", "-d", "scenes", "-o", "m.onnx", code=1).stderr
    assert "'scenes/2.png': 'red|' has an empty label" in said
    Path("scenes/metadata.csv").write_text("file_name,label\n0.png,red\n1.png,red|blue\n2.png,green\n")
    said = run(
        "finetune", "model.onnx", "-d", "scenes", "-o", "m.onnx", "--classes", "red,blue", code=1
    ).stderr
    assert "'scenes/2.png': the label 'green' is none of red, blue" in said
    Path("scenes/metadata.csv").write_text("file_name,painter,year\n0.png,Ada,1\n1.png,Bo,2\n")
    said = run(
        "finetune", "model.onnx", "-d", "scenes", "-o", "m.onnx", "--task", "image-multi-label", code=1
    ).stderr
    assert "which column is the label" in said and "--label" in said
