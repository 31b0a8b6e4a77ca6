"""Stops at any moment, by any means: the run that goes on leaves the bytes of one that never stopped."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward import Trainer, checkpoint
from onward.errors import NonFiniteError, OnwardError
from onward.onnxblock import optim
from onward.train.callbacks import Callback, EarlyStopping
from onward.train.progress import ResumeWarning
from small_models import write_classifier, write_normalized
from trainer_runs import data, kept, make

TESTS = Path(__file__).parent.parent
FIT: dict[str, Any] = {"epochs": 3, "batch_size": 5, "save_every": 2}
UPDATES = 3 * 5  # ten batches an epoch, two for an update


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that the system has; only a power cut would, and here is none."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Stop(Exception):
    pass


class StopAt(Callback):
    """Ends a run as an error would, a callback may, or the user does."""

    def __init__(self, step: int, how: str) -> None:
        self.step, self.how = step, how

    def on_step(self, trainer: Trainer, row: dict[str, Any]) -> bool:
        if row["step"] != self.step:
            return False
        if self.how == "error":
            raise Stop
        if self.how == "interrupt":
            raise KeyboardInterrupt
        return self.how == "callback"


@pytest.fixture(scope="module", params=["SGD", "AdamW"])
def artifacts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rule = {"SGD": optim.SGD, "AdamW": optim.AdamW}[request.param]()
    return write_classifier(tmp_path_factory.mktemp("artifacts"), dropout=0.3, optimizer=rule)


@pytest.fixture(scope="module")
def whole(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], list[dict]]:
    output = tmp_path_factory.mktemp("whole")
    history = make(artifacts, output).fit(data(), data(1), **FIT)
    return kept(output), history.epochs


def stop(artifacts: Path, output: Path, step: int, how: str, **options: Any) -> None:
    trainer = make(artifacts, output, callbacks=[StopAt(step, how)], **options)
    with contextlib.suppress(Stop, KeyboardInterrupt):
        trainer.fit(data(), data(1), resume=True, **FIT)


def timeless(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in ("seconds", "samples_per_second")} for row in rows]


@pytest.mark.parametrize("how", ["error", "interrupt", "callback"])
def test_a_stopped_run_goes_on_as_if_it_had_not(
    artifacts: Path, whole: tuple[dict[str, bytes], list[dict]], how: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(len(how))
    for attempt in range(3):
        output = tmp_path / str(attempt)
        for step in sorted(rng.choice(range(1, UPDATES), 2, replace=False).tolist()):
            stop(artifacts, output, step, how)
        trainer = make(artifacts, output)
        history = trainer.fit(data(), data(1), resume=True, **FIT)
        assert kept(output) == whole[0]
        assert timeless(history.epochs) == timeless(whole[1])
        assert [row["step"] for row in history.steps] == list(range(1, UPDATES + 1))


def test_an_interrupt_inside_an_accumulation_keeps_its_window(
    artifacts: Path, whole: tuple[dict[str, bytes], list[dict]], tmp_path: Path
) -> None:
    def interrupted(epoch: int) -> Iterator[Any]:
        """The run's batches; the fourth is never delivered."""
        x, labels = data()
        order = np.arange(len(x))
        np.random.default_rng([5, epoch]).shuffle(order)
        for index in range(0, len(x), 5):
            if stop_at is not None and (epoch, index // 5) == stop_at:
                raise KeyboardInterrupt
            yield x[order[index : index + 5]], labels[order[index : index + 5]]

    options = {**FIT, "save_every": None}
    stop_at: tuple[int, int] | None = None
    fixed = {"schedule": "constant"}
    make(artifacts, tmp_path / "whole", **fixed).fit(interrupted, data(1), **options)
    for stop_at in ((0, 1), (0, 4), (1, 7), (2, 9)):
        output = tmp_path / f"{stop_at}"
        with pytest.raises(KeyboardInterrupt):
            make(artifacts, output, **fixed).fit(interrupted, data(1), **options)
        stop_at = None
        make(artifacts, output, **fixed).fit(interrupted, data(1), resume=True, **options)
        found, wanted = kept(output), kept(tmp_path / "whole")
        last = max(wanted)  # the one before is that of the interrupt
        assert {name: found[name] for name in ("best", last)} == {
            name: wanted[name] for name in ("best", last)
        }


@pytest.mark.parametrize("moment", ["inside an update", "after the gradients"])
def test_an_interrupt_inside_a_step_saves_nothing_half_done(
    artifacts: Path, whole: Any, moment: str, tmp_path: Path
) -> None:
    trainer = make(artifacts, tmp_path)
    optimizer, real = trainer.optimizer, trainer.optimizer._updater.run
    calls = []

    def interrupted(scale: float) -> None:
        calls.append(scale)
        if len(calls) == 8:
            if moment == "inside an update":
                real(scale)
            raise KeyboardInterrupt
        real(scale)

    optimizer._updater.run = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(data(), data(1), **FIT)
    assert checkpoint.load_latest(tmp_path).path.name.endswith("6")
    make(artifacts, tmp_path).fit(data(), data(1), resume=True, **FIT)
    assert kept(tmp_path) == whole[0]


def test_kill_at_random_moments(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """SIGKILL in another process, again and again, until one run reaches the end."""
    artifacts = write_classifier(tmp_path_factory.mktemp("artifacts"), dropout=0.3)
    whole = tmp_path_factory.mktemp("whole")
    make(artifacts, whole).fit(data(), data(1), **FIT)
    command = [
        sys.executable,
        str(Path(__file__).with_name("killed_run.py")),
        str(artifacts),
        str(tmp_path),
        str(TESTS),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    rng = random.Random(0)
    for attempt in range(8):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        if attempt < 3:
            time.sleep(rng.uniform(0.005, 0.12))
            process.kill()
        if process.communicate()[0] == "done\n":
            break
    else:
        pytest.fail("no run reached the end")
    assert kept(tmp_path) == kept(whole)


def test_resuming_a_run_that_died_before_rotation_rotates(
    artifacts: Path, whole: Any, tmp_path: Path
) -> None:
    make(artifacts, tmp_path).fit(data(), data(1), **FIT)
    newest = checkpoint.load_latest(tmp_path).path
    (tmp_path / "checkpoint-1").write_bytes(newest.read_bytes())  # an old one that was left behind
    make(artifacts, tmp_path).fit(data(), data(1), resume=True, **FIT)
    assert kept(tmp_path) == whole[0]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT that one process can send another alone")
def test_ctrl_c_waits_for_the_end_of_the_batch(artifacts: Path, whole: Any, tmp_path: Path) -> None:
    class Press(Callback):
        def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
            if row["step"] == 7:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        make(artifacts, tmp_path, callbacks=[Press()]).fit(data(), data(1), **FIT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert checkpoint.load_latest(tmp_path).path.name.endswith("7")
    make(artifacts, tmp_path).fit(data(), data(1), resume=True, **FIT)
    assert kept(tmp_path) == whole[0]


def test_a_damaged_checkpoint_is_passed_over(artifacts: Path, whole: Any, tmp_path: Path) -> None:
    stop(artifacts, tmp_path, 9, "interrupt")
    latest = checkpoint.load_latest(tmp_path).path
    latest.write_bytes(latest.read_bytes()[:-30])
    trainer = make(artifacts, tmp_path)
    with pytest.warns(checkpoint.SkippedCheckpointWarning, match="skipped"):
        trainer.fit(data(), data(1), resume=True, **FIT)
    assert kept(tmp_path) == whole[0]


def test_resuming_nothing_starts_and_resuming_the_end_does_nothing(
    artifacts: Path, whole: Any, tmp_path: Path
) -> None:
    make(artifacts, tmp_path).fit(data(), data(1), resume=True, **FIT)
    assert kept(tmp_path) == whole[0]
    trainer = make(artifacts, tmp_path)
    history = trainer.fit(data(), data(1), resume=True, **FIT)
    assert trainer.step == UPDATES and len(history.epochs) == 3 and kept(tmp_path) == whole[0]


def test_more_epochs_may_be_asked_for(artifacts: Path, tmp_path: Path) -> None:
    fixed = {"schedule": "constant"}
    make(artifacts, tmp_path / "a", **fixed).fit(data(), data(1), **FIT)
    make(artifacts, tmp_path / "a", **fixed).fit(data(), data(1), resume=True, **{**FIT, "epochs": 5})
    make(artifacts, tmp_path / "b", **fixed).fit(data(), data(1), **{**FIT, "epochs": 5})
    assert kept(tmp_path / "a") == kept(tmp_path / "b")


def test_the_seed_of_the_run_is_kept(artifacts: Path, whole: Any, tmp_path: Path) -> None:
    stop(artifacts, tmp_path, 6, "interrupt")
    make(artifacts, tmp_path, seed=77).fit(data(), data(1), resume=True, **FIT)
    assert kept(tmp_path) == whole[0]


@pytest.mark.parametrize(
    ("options", "fit", "message"),
    [
        ({"gradient_accumulation_steps": 3}, {}, "accumulation was 2, is 3"),
        ({}, {"batch_size": 6}, "batch size was 5, is 6; batches was 10, is 8"),
        ({}, {"shuffle": False}, "shuffle was True, is False"),
        ({"learning_rate": 0.5}, {}, "learning rate was 0.02, is 0.5"),
    ],
)
def test_other_settings_are_warned_of(
    artifacts: Path, tmp_path: Path, options: dict, fit: dict, message: str
) -> None:
    stop(artifacts, tmp_path, 6, "interrupt")
    with pytest.warns(ResumeWarning, match=message):
        make(artifacts, tmp_path, **options).fit(data(), data(1), resume=True, **{**FIT, **fit})


def test_a_run_that_stopped_early_stays_stopped(artifacts: Path, tmp_path: Path) -> None:
    def early() -> EarlyStopping:
        return EarlyStopping("accuracy", patience=1, min_delta=2.0)  # nothing improves by that much

    fit = {**FIT, "epochs": 6}
    first = make(artifacts, tmp_path, callbacks=[early()])
    assert len(first.fit(data(), data(1), **fit).epochs) == 2
    before = kept(tmp_path)
    again = make(artifacts, tmp_path, callbacks=[early()])
    assert len(again.fit(data(), data(1), resume=True, **fit).epochs) == 2 and kept(tmp_path) == before
    on = make(artifacts, tmp_path)
    assert len(on.fit(data(), data(1), resume=True, **fit).epochs) == 6


def test_a_new_run_does_not_mix_with_an_old_one(artifacts: Path, tmp_path: Path) -> None:
    make(artifacts, tmp_path).fit(data(), **FIT)
    before = kept(tmp_path)
    with pytest.raises(OnwardError, match=r"has the checkpoints of an earlier run.*resume=True"):
        make(artifacts, tmp_path).fit(data(), **FIT)
    assert kept(tmp_path) == before


def test_what_cannot_be_resumed_is_named(artifacts: Path, tmp_path: Path) -> None:
    with pytest.raises(OnwardError, match="needs the output_directory"):
        make(artifacts, None).fit(data(), resume=True)
    checkpoint.save_step(checkpoint.load(artifacts / "checkpoint"), tmp_path, step=3)
    with pytest.raises(OnwardError, match="not saved by a Trainer"):
        make(artifacts, tmp_path).fit(data(), resume=True)


def test_an_error_inside_a_batch_is_not_saved_over_good_state(
    artifacts: Path, whole: Any, tmp_path: Path
) -> None:
    x, labels = data()
    x = x.copy()
    x[30] = np.nan
    with pytest.raises(NonFiniteError, match="training step"):
        make(artifacts, tmp_path).fit((x, labels), data(1), **FIT)
    make(artifacts, tmp_path).fit(data(), data(1), resume=True, **FIT)
    assert kept(tmp_path) == whole[0]


@pytest.mark.parametrize("trial", range(4))
def test_batch_norm_skips_clipping_and_schedules_resume_alike(trial: int, tmp_path: Path) -> None:
    folder = write_normalized(tmp_path / "artifacts")
    rng = random.Random(trial)
    x, labels = data(size=41)
    x = x.copy()
    x[rng.randrange(41)] = np.nan  # one update in each epoch is skipped
    options: dict[str, Any] = {
        "gradient_accumulation_steps": rng.choice((1, 2, 3)),
        "schedule": ("linear", "one-cycle", "step", "polynomial")[trial],
        "warmup": rng.choice((0, 2, 0.1)),
        "clip_norm": rng.choice((None, 0.5)),
        "on_nonfinite": "skip",
        "metrics": (),
    }
    fit: dict[str, Any] = {"epochs": 3, "batch_size": 4, "save_every": rng.choice((None, 1, 3))}
    trainer = make(folder, tmp_path / "whole", **options)
    trainer.fit((x, labels), data(1), **fit)
    for step in sorted(rng.sample(range(1, trainer.step), 2)):
        with contextlib.suppress(Stop):
            make(folder, tmp_path / "parts", callbacks=[StopAt(step, "error")], **options).fit(
                (x, labels), data(1), resume=True, **fit
            )
    make(folder, tmp_path / "parts", **options).fit((x, labels), data(1), resume=True, **fit)
    assert kept(tmp_path / "parts") == kept(tmp_path / "whole")
