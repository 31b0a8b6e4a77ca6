"""A run that stops at any step and goes on ends with the bytes of one that never stopped."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from onward.api import CheckpointState, CosineLRScheduler, LinearLRScheduler
from onward.errors import OnwardError
from onward.onnxblock import optim
from onward.runtime.environment import EnvironmentWarning
from small_models import batch, start, write_classifier

MICRO_STEPS = 12
OPTIMIZERS = {"SGD": lambda: optim.SGD(), "AdamW": lambda: optim.AdamW(weight_decay=0.01)}
SETTINGS = [
    {"accumulation": accumulation, "dropout": dropout, "scheduler": scheduler}
    for accumulation, dropout, scheduler in itertools.product((1, 3), (0.0, 0.4), (None, "linear", "cosine"))
]


def run(
    folder: Path,
    checkpoint: str | Path,
    micro_steps: range,
    *,
    accumulation: int,
    scheduler: str | None,
    **_: Any,
) -> CheckpointState:
    """Some micro-steps of a run, with an update after every `accumulation` of them."""
    state, module, optimizer = start(folder, checkpoint, **({"seed": 3} if micro_steps.start == 0 else {}))
    schedule = None
    if scheduler == "linear":
        schedule = LinearLRScheduler(optimizer, 2, 20, 0.1)
    elif scheduler == "cosine":
        schedule = CosineLRScheduler(optimizer, 0.1, total_step_count=20, warmup_step_count=1)
    elif micro_steps.start == 0:
        optimizer.set_learning_rate(0.05)
    for index in micro_steps:
        module(*batch(index))
        if (index + 1) % accumulation == 0:
            optimizer.step()
            module.lazy_reset_grad()
            if schedule is not None:
                schedule.step()
    state.properties["index"] = micro_steps.stop
    return state


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(f"{k}={v}" for k, v in s.items()))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resuming_changes_no_byte(optimizer: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = write_classifier(
        tmp_path / "artifacts", dropout=settings["dropout"], optimizer=OPTIMIZERS[optimizer]()
    )

    def save(state: CheckpointState, name: str) -> bytes:
        CheckpointState.save_checkpoint(state, tmp_path / name, include_optimizer_state=True)
        return (tmp_path / name).read_bytes()

    whole = save(run(folder, "checkpoint", range(MICRO_STEPS), **settings), "whole")
    rng = np.random.default_rng([len(optimizer), settings["accumulation"], int(10 * settings["dropout"])])
    for _ in range(2):
        # two stops at random places, in the middle of an accumulation or not
        first, second = sorted(rng.choice(range(1, MICRO_STEPS), 2, replace=False).tolist())
        save(run(folder, "checkpoint", range(first), **settings), "first")
        save(run(folder, tmp_path / "first", range(first, second), **settings), "second")
        final = save(run(folder, tmp_path / "second", range(second, MICRO_STEPS), **settings), "final")
        assert final == whole, f"stopped after {first} and {second}"


def test_a_stop_before_the_first_step_is_no_different(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "artifacts", dropout=0.2)
    settings: dict[str, Any] = {"accumulation": 1, "scheduler": "linear"}
    whole = run(folder, "checkpoint", range(4), **settings)
    CheckpointState.save_checkpoint(whole, tmp_path / "whole", include_optimizer_state=True)
    early = run(folder, "checkpoint", range(0), **settings)
    CheckpointState.save_checkpoint(early, tmp_path / "early", include_optimizer_state=True)
    final = run(folder, tmp_path / "early", range(4), **settings)
    CheckpointState.save_checkpoint(final, tmp_path / "final", include_optimizer_state=True)
    assert (tmp_path / "final").read_bytes() == (tmp_path / "whole").read_bytes()


# ---- environment ---------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    folder = write_classifier(tmp_path / "artifacts")
    state, module, optimizer = start(folder)
    module(*batch())
    optimizer.step()
    CheckpointState.save_checkpoint(state, tmp_path / "later", include_optimizer_state=True)
    return folder, tmp_path / "later"


def test_the_environment_is_recorded(saved: tuple[Path, Path]) -> None:
    found = json.loads(str(CheckpointState.load_checkpoint(saved[1])._data.extras["environment"]))
    assert found["onnxruntime"] == ort.__version__ and found["numpy"] == np.__version__
    assert found["threads"] >= 1 and set(found) == {
        "onward", "onnxruntime", "numpy", "machine", "vectors", "threads",
    }  # fmt: skip


def test_the_same_environment_says_nothing(saved: tuple[Path, Path]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(*saved)


@pytest.mark.parametrize("key", ["onward", "onnxruntime", "numpy", "machine", "vectors"])
def test_another_version_is_warned_of(saved: tuple[Path, Path], key: str) -> None:
    folder, path = saved
    state = CheckpointState.load_checkpoint(path)
    found = json.loads(str(state._data.extras["environment"]))
    state._data.extras["environment"] = json.dumps({**found, key: "another"})
    CheckpointState.save_checkpoint(state, path, include_optimizer_state=True)
    with pytest.warns(EnvironmentWarning, match=f"{key} was another, is {found[key]}"):
        start(folder, path)


def test_another_number_of_threads_is_warned_of(saved: tuple[Path, Path]) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 97
    with pytest.warns(EnvironmentWarning, match=r"threads was \d+, is 97"):
        start(*saved, session_options=options)


@pytest.mark.parametrize("recorded", ["not json", "[1]", "3"])
def test_an_unreadable_record_stops_nobody(saved: tuple[Path, Path], recorded: str) -> None:
    folder, path = saved
    state = CheckpointState.load_checkpoint(path)
    state._data.extras["environment"] = recorded
    CheckpointState.save_checkpoint(state, path, include_optimizer_state=True)
    start(folder, path)


@pytest.mark.parametrize("value", ["many", float("nan"), float("inf"), ""], ids=repr)
@pytest.mark.parametrize("name", ["seed", "train_step", "skipped_in_a_row", "scale_steps", "learning_rate"])
def test_a_count_that_is_no_number_is_a_damaged_checkpoint(tmp_path: Path, name: str, value: Any) -> None:
    folder = write_classifier(tmp_path)
    state, module, optimizer = start(folder, folder / "checkpoint")
    module(*batch(0))
    optimizer.step()
    saved = state.to_data(include_optimizer_state=True)
    saved.extras[name] = value
    CheckpointState.save_checkpoint(CheckpointState(saved), tmp_path / "damaged", True)
    with pytest.raises(OnwardError, match=f"damaged: its '{name}' is .*not a finite number"):
        start(folder, tmp_path / "damaged")
