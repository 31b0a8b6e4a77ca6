"""A newcomer with an ONNX file and an .npz: three commands, no Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from cli.newcomer import make_data


def test_from_a_file_to_a_trained_quantized_model(place: Path, run: Any) -> None:
    run("artifacts", "model.onnx", "--loss", "cross-entropy")
    run("train", "artifacts", "--data", "data.npz", "--epochs", 20, "--lr", 0.02)
    run("deploy", "run", "trained.onnx", "--quantize", "int8", "--force")

    data = make_data(seed=2)
    answers = ort.InferenceSession("trained.onnx").run(None, {"x": data["x"]})[0]
    before = ort.InferenceSession("model.onnx").run(None, {"x": data["x"]})[0]

    def accuracy(scores: Any) -> float:
        return float(np.mean(np.argmax(np.asarray(scores), axis=1) == data["labels"]))

    assert accuracy(before) < 0.6 < 0.9 < accuracy(answers)
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "http://" not in page and "https://" not in page  # needs no network


def test_each_command_says_what_comes_next(place: Path, run: Any) -> None:
    assert "onward train artifacts" in run("artifacts", "model.onnx", "--loss", "cross-entropy").stdout
    assert "onward deploy run" in run("train", "artifacts", "--data", "data.npz").stdout
