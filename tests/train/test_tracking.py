"""What MLflow, Weights & Biases and a log file are told of a run, by stand-ins for the optional packages."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.newcomer import make_data, make_model
from onward import OnwardError, Trainer, build_artifacts
from onward.train.callbacks import LogFile, MLflow, WeightsAndBiases
from onward.train.history import MOST_STEPS, History


class Recorder(types.ModuleType):
    """A module whose functions write down how they are called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple, dict]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
            return self

        return call

    def named(self, name: str) -> list[tuple[tuple, dict]]:
        return [(args, options) for called, args, options in self.calls if called == name]


def fit(callback: Any) -> Trainer:
    data = make_data(32)
    made = build_artifacts(make_model(), loss="cross-entropy", optimizer="adamw")
    trainer = Trainer(made, callbacks=[callback], progress=False)
    trainer.fit((data["x"], data["labels"]), epochs=2, batch_size=16)
    return trainer


def test_mlflow_gets_settings_updates_and_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = Recorder("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    trainer = fit(MLflow("flowers", run_name="first"))
    assert mlflow.named("set_experiment") == [(("flowers",), {})]
    assert mlflow.named("start_run") == [((), {"run_name": "first"})]
    ((params,), _) = mlflow.named("log_params")[0]
    assert params["optimizer"].startswith("AdamW") or params["optimizer"].lower().startswith("adamw")
    assert params["loss"] == "cross-entropy"
    logged = mlflow.named("log_metrics")
    assert len(logged) == 6 and [options["step"] for _, options in logged] == [1, 2, 2, 3, 4, 4]
    assert logged[-1][0][0]["epoch/loss"] == trainer.history.epochs[-1]["loss"]
    assert mlflow.named("end_run")


def test_wandb_gets_settings_updates_and_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Recorder("wandb")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    fit(WeightsAndBiases("flowers"))
    assert wandb.named("init")[0][1]["project"] == "flowers"
    assert len(wandb.named("log")) == 6 and wandb.named("finish")


@pytest.mark.parametrize("tracker", [MLflow, WeightsAndBiases])
def test_a_package_that_is_missing_is_named(tracker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(OnwardError, match="pip install"):
        tracker()


def test_the_log_file_grows_while_the_run_goes(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Watching(LogFile):
        def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
            super().on_step(trainer, row)
            sizes.append((tmp_path / "log.txt").stat().st_size)

    fit(Watching(tmp_path / "log.txt", every=0.0))
    assert sizes == sorted(set(sizes))
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split("  ")[1].split(":")[0] for line in lines] == [
        "start", "update", "update", "epoch", "update", "update", "epoch", "end",
    ]  # fmt: skip


def test_a_long_history_is_thinned() -> None:
    history = History()
    for step in range(1, 50_001):
        history.log({"step": step, "loss": float(np.float32(1 / step))})
    assert MOST_STEPS / 2 <= len(history.steps) <= MOST_STEPS
    gaps = np.diff([row["step"] for row in history.steps])
    assert len(set(gaps.tolist())) == 1 and history.steps[-1]["step"] > 49_900
