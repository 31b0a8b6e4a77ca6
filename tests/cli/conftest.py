"""A folder with a model and data, and a way to run commands in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from cli.newcomer import make_data, make_model

Run = Callable[..., Any]


def call(*arguments: object, code: int = 0) -> Any:
    from onward.cli.app import app

    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    shown = f"{result.stdout}\n{result.stderr}\n{result.exception!r}"
    assert result.exit_code == code, shown
    assert "Traceback" not in result.stderr, shown
    result.json = json.loads(result.stdout) if "--json" in arguments else None
    return result


@pytest.fixture
def run() -> Run:
    """`run("train", …)` gives the result; `.exit_code`, `.stdout`, `.stderr`, and `.json` with --json."""
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


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What someone has who went through all commands once, and files that are nothing of the kind."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        onnx.save(make_model(), "model.onnx")
        np.savez("data.npz", **make_data())
        call("artifacts", "model.onnx", "--loss", "cross-entropy")
        call("train", "artifacts", "-d", "data.npz", "-e", 2, "--hold-out", 0.25)
        call("convert", "run/best", "weights.safetensors")
        call("lora", "inject", "model.onnx", "adapted.onnx", "--rank", 2)
        call("artifacts", "model.onnx", "-l", "cross-entropy", "--lora", 2, "-o", "adapting")
        write_spoilt_files()
    return folder


def write_spoilt_files() -> None:
    """Files and folders that are not what their names say."""
    for name in ("model.onnx", "data.npz", "weights.safetensors"):
        whole = Path(name).read_bytes()
        kind = Path(name).suffix
        Path(f"cut{kind}").write_bytes(whole[: len(whole) // 2])
        Path(f"garbage{kind}").write_bytes(b"neither this nor that\n" * 20)
        Path(f"empty{kind}").write_bytes(b"")
        Path(f"folder{kind}").mkdir()
    checkpoint = Path("run/best").read_bytes()
    Path("cut.ckpt").write_bytes(checkpoint[: len(checkpoint) // 2])
    Path("garbage.ckpt").write_bytes(b"neither this nor that\n" * 20)
    Path("empty.ckpt").write_bytes(b"")
    Path("folder").mkdir()
    Path("file").write_text("a file, where a folder should be", encoding="utf-8")


@pytest.fixture
def workshop(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all of that, as the current folder."""
    shutil.copytree(finished, tmp_path / "workshop")
    monkeypatch.chdir(tmp_path / "workshop")
    return tmp_path / "workshop"


def contents(folder: Path | str = ".") -> dict[str, bytes | None]:
    """Everything below a folder, hidden files too: bytes of files, None for folders."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(Path(folder).rglob("*"))
        if "__pycache__" not in path.parts
    }
