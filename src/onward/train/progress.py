"""The progress of a run, saved in checkpoints beside the state of model and optimizer."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping
from typing import Any

from onward.reading import parse_json

__all__ = ["Place", "ResumeWarning"]


class ResumeWarning(UserWarning):
    """A run is resumed with other settings: it will differ from an uninterrupted one."""


@dataclasses.dataclass
class Place:
    """The position of a run, and sums over the current epoch and accumulation window.

    `first_epoch` and `first_step` are where this call of `fit` began; `weights` are those of the batches whose
    gradients are added up at the moment. No times and no paths: equal runs have equal bytes.

    >>> Place.from_json(Place(epoch=2, batch=7).to_json()).batch
    7
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    first_epoch: int = 0
    first_step: int = 0
    loss_sum: float = 0.0
    loss_weight: float = 0.0
    window_loss: float = 0.0
    weights: list[float] = dataclasses.field(default_factory=list)
    best: dict[str, Any] | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """The place as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Place:
        """Read what `to_json` wrote; `ValueError` for anything else."""
        found = parse_json(text)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name, value in found.items():
            if name not in fields or not _fits(name, value):
                raise ValueError("not the place of a training run")
        return cls(**found)

    def begin_fit(self) -> None:
        """A further `fit` counts its own epochs from here; what an earlier one left half done is dropped."""
        self.first_epoch, self.first_step = self.epoch, self.step
        self.batch = 0
        self.loss_sum = self.loss_weight = self.window_loss = 0.0
        self.weights = []

    def begin_epoch(self) -> None:
        """The next epoch has no batch yet."""
        self.epoch += 1
        self.batch = 0
        self.loss_sum = self.loss_weight = 0.0

    def add(self, loss: float, weight: float) -> None:
        """A batch's loss, for the window's and the epoch's mean."""
        self.weights.append(weight)
        self.window_loss += loss * weight
        self.loss_sum += loss * weight
        self.loss_weight += weight

    def close_window(self) -> float:
        """Count an update; returns the mean loss of its batches."""
        loss = self.window_loss / sum(self.weights)
        self.step += 1
        self.window_loss, self.weights = 0.0, []
        return loss

    def mean_loss(self) -> float:
        """The mean loss of the epoch so far."""
        return self.loss_sum / self.loss_weight if self.loss_weight else math.nan

    def note_best(self, metric: str, value: float, *, sign: float) -> bool:
        """Remember the last epoch if it is the best by this metric (times `sign`); whether it is."""
        best = self.best
        comparable = best is not None and best["metric"] == metric and not math.isnan(best["value"])
        if best is not None and comparable and not sign * value > sign * best["value"]:
            return False
        self.best = {"metric": metric, "value": value, "epoch": self.epoch}
        return True

    def change_settings(self, settings: Mapping[str, Any], *, resumed: bool) -> None:
        """Take note of a run's settings; a resumed one should have those that it had."""
        changed = [
            f"{name} was {self.settings[name]}, is {value}"
            for name, value in settings.items()
            if name in self.settings and self.settings[name] != value and name != "epochs"
        ]
        if resumed and changed:
            warnings.warn(
                f"the run is resumed with other settings ({'; '.join(changed)}): it will differ from one that "
                "was never stopped",
                ResumeWarning,
                stacklevel=4,
            )
        self.settings = dict(settings)


def _fits(name: str, value: Any) -> bool:
    """Whether a value from a file is of the kind that the field of this name has."""
    if name == "weights":
        return isinstance(value, list) and all(isinstance(weight, int | float) for weight in value)
    if name in ("best", "settings"):
        return isinstance(value, dict) or (name == "best" and value is None)
    if name in ("loss_sum", "loss_weight", "window_loss"):
        return isinstance(value, int | float)
    return type(value) is int and value >= 0
