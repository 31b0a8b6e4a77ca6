"""`onward distributed`: the same training on several processes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward import checkpoint


def test_distributed_trains_on_two_processes(artifacts: Path, run: Any) -> None:
    options = ("-d", "data.npz", "--hold-out", 0.25, "--metric", "accuracy", "-e", 8, "--lr", 0.02)
    found = run("distributed", "artifacts", *options, "-p", 2, "-o", "many", "--json").json
    assert found["epochs"][-1]["loss"] < found["epochs"][0]["loss"]
    # the same shuffling on one process: equal up to the order in which gradients are summed
    one = run("train", "artifacts", *options, "-o", "one", "--json").json
    assert found["epochs"][-1]["eval_loss"] == pytest.approx(one["epochs"][-1]["eval_loss"], rel=1e-3)
    assert found["epochs"][-1]["accuracy"] == one["epochs"][-1]["accuracy"]
    run("deploy", "many", "model-many.onnx")


def test_recorded_settings_hold_for_many_processes_too(artifacts: Path, run: Any) -> None:
    """Learning rate, warmup and clipping of the artifacts, flags against them, and what is done to data: as `train`."""
    about = {p.key: p.value for p in onnx.load("artifacts/training_model.onnx").metadata_props}
    assert set(json.loads(about["onward.defaults"])) == {"learning_rate", "warmup", "clip_norm"}
    found = np.load("data.npz")
    lines = [",".join(map(str, [*row, f"kind {label}"])) for row, label in zip(found["x"], found["labels"])]
    columns = ",".join(f"c{index}" for index in range(found["x"].shape[1]))
    Path("d.csv").write_text("\n".join([f"{columns},kind", *lines]))
    losses = []
    tried = (("data.npz", ()), ("d.csv", ("--lr", 0.02, "--warmup", 0, "--clip-norm", 0.1, "--standardize")))
    for number, (path, flags) in enumerate(tried):
        data = ("-d", path, "--eval-data", path, "-e", 4, *flags)
        many = run("distributed", "artifacts", *data, "-p", 1, "-o", f"many{number}", "--json").json
        one = run("train", "artifacts", *data, "-o", f"one{number}", "--json").json
        losses.append(many["epochs"][-1]["eval_loss"])
        assert losses[-1] == pytest.approx(one["epochs"][-1]["eval_loss"], rel=1e-5)
    assert losses[1] != pytest.approx(losses[0], rel=1e-2)
    many, one = (json.loads(Path(f, "run.json").read_text()) for f in ("many1", "one1"))
    assert many["classes"] == ["kind 0", "kind 1", "kind 2"] and many["preprocessing"]["kind"] == "table"
    assert {k: many[k] for k in ("classes", "preprocessing")} == {
        k: one[k] for k in ("classes", "preprocessing")
    }


def test_a_pipeline_warms_up_and_clips_too(artifacts: Path, run: Any) -> None:
    data = ("-d", "data.npz", "--eval-data", "data.npz", "-e", 4, "--lr", 0.02)
    many = run("distributed", "artifacts", *data, "-p", 2, "--stages", 2, "-o", "many", "--json").json
    one = run("train", "artifacts", *data, "-o", "one", "--json").json
    assert many["epochs"][-1]["eval_loss"] == pytest.approx(one["epochs"][-1]["eval_loss"], rel=1e-3)


def test_an_error_on_a_rank_is_one_line_here(artifacts: Path, run: Any) -> None:
    """What only the ranks find out: here, that a function gives batches that the model does not take."""
    Path("my_loader.py").write_text(
        "import numpy as np\ndef batches():\n    return [(np.zeros((4, 9), 'f'), np.zeros(4, 'q'))]\n",
        encoding="utf-8",
    )
    said = run("distributed", "artifacts", "-d", "my_loader:batches", "-p", 2, "-o", "new", code=1).stderr
    assert [line.split(":")[0] for line in said.splitlines()] == ["error", "hint"]
    assert "x" in said.splitlines()[0]
    assert not Path("new").exists()


def test_a_terminal_shows_how_far_the_ranks_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from onward.cli.output import Output

    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes stderr for a terminal
    with Output().counting("training", 10) as show:
        show(5)
    assert "5/10" in capsys.readouterr().err
    with Output(quiet=True).counting("training", 10) as show:
        show(5)
    assert capsys.readouterr().err == ""


def test_train_on_two_processes_writes_the_run_of_one_and_resumes_it(artifacts: Path, run: Any) -> None:
    """The same report, best epoch and metrics up to rounding, on the number of processes of the first command."""
    line = "-d data.npz --hold-out 0.25 --metric accuracy --best accuracy --lr 0.02 --warmup 0"
    options = line.split()
    one = run("train", "artifacts", *options, "-e", 6, "-o", "one", "--json").json
    run("train", "artifacts", *options, "-e", 3, "-o", "two", "--processes", 2)
    two = run("train", "two", "--resume", "-e", 6, "--json").json
    assert two["steps"] == one["steps"] and two["best"]["epoch"] == one["best"]["epoch"]
    for many, alone in zip(two["epochs"], one["epochs"], strict=True):
        for name in ("loss", "eval_loss", "accuracy"):
            assert many[name] == pytest.approx(alone[name], rel=1e-3)
    states = [checkpoint.load(Path(folder, "best")).trainable for folder in ("two", "one")]
    for name, array in states[1].items():
        np.testing.assert_allclose(states[0][name], array, rtol=1e-3, atol=1e-4)
    histories = [json.loads(Path(folder, "history.json").read_text()) for folder in ("two", "one")]
    assert histories[0]["confusion"] == histories[1]["confusion"]
    assert [len(history["steps"]) for history in histories] == [one["steps"]] * 2
    rows = [
        re.findall(r"<t[dh][^>]*>([^<]*)", Path(f, "report.html").read_text("utf-8")) for f in ("two", "one")
    ]
    assert len(rows[0]) == len(rows[1])
    assert json.loads(Path("two/run.json").read_text())["options"]["processes"] == 2


def test_early_stopping_ends_all_processes(artifacts: Path, run: Any) -> None:
    options = ("-d", "data.npz", "--hold-out", 0.25, "--lr", 0.0, "--patience", 2, "-e", 9)
    found = run("train", "artifacts", *options, "-p", 2, "-o", "two", "--json").json
    assert len(found["epochs"]) == 3 and found["best"]["epoch"] == 1
