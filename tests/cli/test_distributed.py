"""`onward distributed`: the same training on several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def test_distributed_trains_on_two_processes(artifacts: Path, run: Any) -> None:
    options = ("-d", "data.npz", "--eval-data", "data.npz", "-e", 8, "--lr", 0.02)
    found = run("distributed", "artifacts", *options, "-p", 2, "-o", "many", "--json").json
    assert found["losses"][-1] < found["losses"][0]
    # the same shuffling on one process: equal up to the order in which gradients are summed
    one = run("train", "artifacts", *options, "-o", "one", "--json").json
    assert found["eval_loss"] == pytest.approx(one["epochs"][-1]["eval_loss"], rel=1e-3)
    run("deploy", "many", "model-many.onnx")


def test_an_error_on_a_rank_is_one_line_here(artifacts: Path, run: Any) -> None:
    """What only the ranks find out: here, that a function gives batches that the model does not take."""
    Path("my_loader.py").write_text(
        "import numpy as np\ndef batches():\n    return [(np.zeros((4, 9), 'f'), np.zeros(4, 'q'))]\n",
        encoding="utf-8",
    )
    said = run("distributed", "artifacts", "-d", "my_loader:batches", "-p", 1, "-o", "new", code=1).stderr
    assert [line.split(":")[0] for line in said.splitlines()] == ["error", "hint"]
    assert "x" in said.splitlines()[0]
    assert not Path("new").exists()


def test_a_terminal_shows_how_far_the_ranks_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from onward.cli.command import Output

    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes stderr for a terminal
    with Output().counting("training", 10) as show:
        show(5)
    assert "5/10" in capsys.readouterr().err
    with Output(quiet=True).counting("training", 10) as show:
        show(5)
    assert capsys.readouterr().err == ""
