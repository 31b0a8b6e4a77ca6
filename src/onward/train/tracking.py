"""Logs metrics to MLflow or Weights & Biases; both packages are optional. See also `onward.train.tensorboard`."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onward.errors import OnwardError
from onward.train.callbacks import Callback

if TYPE_CHECKING:
    from onward.train.trainer import Trainer

__all__ = ["MLflow", "WeightsAndBiases"]


class MLflow(Callback):
    """Logs settings, updates and epochs to MLflow: `Trainer(…, callbacks=[MLflow("flowers")])`."""

    def __init__(self, experiment: str | None = None, *, run_name: str | None = None) -> None:
        self._mlflow = _load("mlflow")
        self._experiment, self._run_name = experiment, run_name

    def on_start(self, trainer: Trainer) -> None:
        if self._experiment is not None:
            self._mlflow.set_experiment(self._experiment)
        self._mlflow.start_run(run_name=self._run_name)
        self._mlflow.log_params({name: str(value) for name, value in trainer.settings.items()})

    def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self._mlflow.log_metrics(_figures(row, "update/"), step=row["step"])

    def on_epoch(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self._mlflow.log_metrics(_figures(row, "epoch/"), step=row["step"])

    def on_end(self, trainer: Trainer) -> None:
        # `on_start` may have failed before there was one
        if self._mlflow.active_run() is not None:
            self._mlflow.end_run()


class WeightsAndBiases(Callback):
    """Logs settings, updates and epochs to Weights & Biases: `Trainer(…, callbacks=[WeightsAndBiases("flowers")])`."""

    def __init__(self, project: str | None = None, *, run_name: str | None = None) -> None:
        self._wandb = _load("wandb")
        self._project, self._run_name = project, run_name
        self._run: Any = None

    def on_start(self, trainer: Trainer) -> None:
        self._run = self._wandb.init(
            project=self._project, name=self._run_name, config=dict(trainer.settings)
        )

    def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self._run.log(_figures(row, "update/"), step=row["step"])

    def on_epoch(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self._run.log(_figures(row, "epoch/"), step=row["step"])

    def on_end(self, trainer: Trainer) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def _load(name: str) -> Any:
    try:
        # only where a run asks for it: both packages are optional
        return importlib.import_module(name)
    except ImportError as error:
        raise OnwardError(f"the package {name} is not installed: pip install {name}") from error


def _figures(row: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {
        f"{prefix}{name}": float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and name != "step" and math.isfinite(value)
    }
