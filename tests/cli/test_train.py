"""`onward train`: what it writes, how it goes on, and how it stops."""

from __future__ import annotations

import itertools
import json
import signal
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward import checkpoint


def parameters(path: Path) -> dict[str, Any]:
    return dict(checkpoint.load(path).parameters())


def latest(folder: Path) -> Path:
    return sorted(folder.glob("checkpoint-*"))[-1]


def test_a_run_has_checkpoints_history_report_and_settings(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert {"best", "history.json", "report.html", "run.json"} <= names
    assert any(name.startswith("checkpoint-") for name in names)


def test_json_has_every_epoch(artifacts: Path, run: Any) -> None:
    found = run(
        "train", "artifacts", "-d", "data.npz", "-e", 3, "--hold-out", 0.25, "-m", "accuracy", "--json"
    ).json
    assert [row["epoch"] for row in found["epochs"]] == [1, 2, 3]
    assert all({"loss", "eval_loss", "accuracy"} <= set(row) for row in found["epochs"])
    assert found["samples"] == 72


def test_quiet_says_nothing(artifacts: Path, run: Any) -> None:
    result = run("train", "artifacts", "-d", "data.npz", "--quiet")
    assert (result.stdout, result.stderr) == ("", "")


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
    """Send ourselves a signal inside an update, as a person or a scheduler would."""
    from onward.api import Optimizer

    update, updates = Optimizer.step, itertools.count(1)

    def pressed(optimizer: Optimizer) -> bool:
        if next(updates) == step:
            signal.raise_signal(number)
        return update(optimizer)

    monkeypatch.setattr(Optimizer, "step", pressed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminate"])
def test_an_interrupted_run_resumes_to_the_same_bytes(
    artifacts: Path, run: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    options = ("-d", "data.npz", "-e", 4, "--schedule", "cosine", "--lr", 0.02, "-b", 16)
    run("train", "artifacts", *options, "-o", "whole")
    with monkeypatch.context() as patched:
        interrupt_at(patched, 9, number)
        stopped = run("train", "artifacts", *options, "-o", "parts", code=130)
    assert "stopped after 9 updates" in stopped.stderr
    assert "onward train parts --resume" in stopped.stderr
    assert "<svg" in Path("parts/report.html").read_text("utf-8")
    run("train", "parts", "--resume")
    whole, parts = parameters(latest(Path("whole"))), parameters(latest(Path("parts")))
    assert latest(Path("whole")).name == latest(Path("parts")).name
    for name, array in whole.items():
        np.testing.assert_array_equal(array, parts[name], err_msg=name)


def test_the_usual_handler_is_back_after_a_run(artifacts: Path, run: Any) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run("train", "artifacts", "-d", "data.npz")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_flags_win_over_a_resumed_runs_own(trained: Path, run: Any) -> None:
    found = run("train", "run", "--resume", "--epochs", 5, "--json").json
    assert len(found["epochs"]) == 5
    kept = json.loads((trained / "run.json").read_text(encoding="utf-8"))["options"]
    assert kept["epochs"] == 5 and kept["learning_rate"] == 0.01


def test_an_earlier_run_is_not_overwritten_by_accident(trained: Path, run: Any) -> None:
    before = {path.name: path.read_bytes() for path in trained.iterdir()}
    result = run("train", "artifacts", "-d", "data.npz", code=1)
    assert "--resume" in result.stderr and "--overwrite" in result.stderr
    assert {path.name: path.read_bytes() for path in trained.iterdir()} == before
    run("train", "artifacts", "-d", "data.npz", "--overwrite", "-b", 96)
    assert [path.name for path in sorted(trained.glob("checkpoint-*"))] == ["checkpoint-000000000001"]


def test_a_run_that_failed_at_once_leaves_the_way_free(artifacts: Path, run: Any) -> None:
    data = dict(np.load("data.npz"))
    np.savez("wrong.npz", x=data["x"], labels=data["labels"] + 7)
    assert "label" in run("train", "artifacts", "-d", "wrong.npz", code=1).stderr
    run("train", "artifacts", "-d", "data.npz")


def test_patience_ends_a_run_early(artifacts: Path, run: Any) -> None:
    found = run("train", "artifacts", "-d", "data.npz", "-e", 30, "--lr", 0.0, "--patience", 2, "--json").json
    assert len(found["epochs"]) < 30


def test_options_come_from_a_file_and_flags_win(artifacts: Path, run: Any) -> None:
    Path("onward.toml").write_text(
        '[train]\nartifacts = "artifacts"\ndata = "data.npz"\nepochs = 3\nlearning-rate = 0.5\n',
        encoding="utf-8",
    )
    run("train", "--config", "onward.toml", "--lr", 0.25)
    kept = json.loads(Path("run/run.json").read_text(encoding="utf-8"))["options"]
    assert (kept["epochs"], kept["learning_rate"], kept["data"]) == (3, 0.25, ["data.npz"])


def test_event_files_hold_the_loss_of_every_update(artifacts: Path, run: Any) -> None:
    run("train", "artifacts", "-d", "data.npz", "-b", 32, "-e", 2, "--tensorboard", "events")
    (path,) = Path("events").iterdir()
    records = list(read_records(path.read_bytes()))
    assert b"brain.Event:2" in records[0]
    assert sum(b"update/loss" in record for record in records) == 6
    assert sum(b"epoch/loss" in record for record in records) == 2


def read_records(data: bytes) -> Any:
    """Events, their checksums compared with an independent CRC-32C."""
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert masked_crc(data[:8]) == data[8:12]
        event = data[12 : 12 + length]
        assert masked_crc(event) == data[12 + length : 16 + length]
        yield event
        data = data[16 + length :]


def masked_crc(data: bytes) -> bytes:
    """By polynomial division over GF(2), on one big number; no table and no shifts in common with the writer."""
    bits = int("".join(f"{byte:08b}"[::-1] for byte in data), 2) << 32
    bits ^= 0xFFFFFFFF << (len(data) * 8)
    polynomial = 0x11EDC6F41
    while bits.bit_length() > 32:
        bits ^= polynomial << (bits.bit_length() - 33)
    crc = int(f"{bits ^ 0xFFFFFFFF:032b}"[::-1], 2)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def test_checksum_of_a_known_text() -> None:
    from onward.train.callbacks import _checksum

    assert _checksum(b"123456789") == masked_crc(b"123456789")
    assert (
        struct.unpack("<I", _checksum(b"123456789"))[0]
        == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF
    )  # the check value of CRC-32C
