"""A folder with a model and data, and a way to run commands in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from cli.newcomer import make_data, make_model

Run = Callable[..., Any]


@pytest.fixture
def run() -> Run:
    """`run("train", …)` gives the result; `.code`, `.out`, `.err`, and `.json` with --json."""

    def call(*arguments: object, code: int = 0) -> Any:
        from onward.cli.app import app

        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        shown = f"{result.stdout}\n{result.stderr}\n{result.exception!r}"
        assert result.exit_code == code, shown
        assert "Traceback" not in result.stderr, shown
        result.json = json.loads(result.stdout) if "--json" in arguments else None
        return result

    return call


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with model.onnx and data.npz."""
    monkeypatch.chdir(tmp_path)
    onnx.save(make_model(), "model.onnx")
    np.savez("data.npz", **make_data())
    return tmp_path


@pytest.fixture
def artifacts(place: Path, run: Run) -> Path:
    """The artifacts of the model."""
    run("artifacts", "model.onnx", "--loss", "cross-entropy")
    return place / "artifacts"


@pytest.fixture
def trained(artifacts: Path, run: Run) -> Path:
    """A run of two epochs."""
    run("train", "artifacts", "--data", "data.npz", "--epochs", 2, "--hold-out", 0.25, "--lr", 0.01)
    return artifacts.parent / "run"
