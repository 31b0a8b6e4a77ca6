"""The progress of a run, saved in checkpoints beside the state of model and optimizer."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping
from typing import Any

from onward.reading import parse_json


class ResumeWarning(UserWarning):
    """A run is resumed with other settings: it will differ from an uninterrupted one."""


@dataclasses.dataclass
class Position:
    """How far a run is, and sums over the current epoch and the current window (the batches of one update).

    `first_epoch` and `first_step` are where this call of `fit` began; `unit` is the weight of the window's last
    batch. No times and no paths: equal runs have equal bytes.

    >>> Position.from_json(Position(epoch=2, batch=7).to_json()).batch
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
    window_weight: float = 0.0
    window_batches: int = 0
    unit: float = 0.0
    best: dict[str, Any] | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """The position as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Position:
        """Read what `to_json` wrote; `ValueError` for anything else."""
        document = parse_json(text)
        fields = {field.name for field in dataclasses.fields(cls)}
        for name, value in document.items():
            # a checkpoint may come from a stranger: a text as a count would fail in the middle of a run
            if name not in fields or not _fits(name, value):
                raise ValueError("not the position of a training run")
        return cls(**document)

    def begin_fit(self) -> None:
        """A further `fit` counts its own epochs from here; what an earlier one left half done is dropped."""
        self.first_epoch, self.first_step = self.epoch, self.step
        self.batch = 0
        self.loss_sum = self.loss_weight = 0.0
        self._clear_window()

    def begin_epoch(self) -> None:
        """The next epoch has no batch yet."""
        self.epoch += 1
        self.batch = 0
        self.loss_sum = self.loss_weight = 0.0

    def add(self, loss: float, weight: float) -> None:
        """A batch's loss, for the window's and the epoch's mean."""
        self.window_loss += loss * weight
        self.window_weight += weight
        # the gradients in the buffer are in units of the last batch's mean
        self.unit = weight

    def close_window(self, loss: float, weight: float, *, updated: bool) -> None:
        """Begin the next window; `loss` and `weight` are sums over all ranks."""
        self.step += updated
        self.loss_sum += loss
        self.loss_weight += weight
        self._clear_window()

    def _clear_window(self) -> None:
        self.window_loss = self.window_weight = self.unit = 0.0
        self.window_batches = 0

    def mean_loss(self) -> float:
        """The mean loss of the epoch so far."""
        return self.loss_sum / self.loss_weight if self.loss_weight else math.nan

    def note_best(self, metric: str, value: float, *, sign: float) -> bool:
        """Remember the last epoch if it is the best by this metric (times `sign`); whether it is."""
        best = self.best
        # NaN compares as false with all: an epoch of which nothing is known must not stay the best
        comparable = best is not None and best["metric"] == metric and not math.isnan(best["value"])
        if best is not None and comparable and not sign * value > sign * best["value"]:
            return False
        self.best = {"metric": metric, "value": value, "epoch": self.epoch}
        return True

    def change_settings(self, settings: Mapping[str, Any], *, resumed: bool) -> None:
        """Take note of a run's settings; a resumed one should have those that it had."""
        # more epochs are what many resume a run for
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
    if name in ("best", "settings"):
        return isinstance(value, dict) or (name == "best" and value is None)
    if name in ("loss_sum", "loss_weight", "window_loss", "window_weight", "unit"):
        return isinstance(value, int | float)
    # by the type itself: True is an int, too
    return type(value) is int and value >= 0
