"""A run that ends in the middle as a killed one does, and is resumed, beside one that is whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.train.callbacks import Callback


class Killed(BaseException):
    """What no code catches to save something before the end."""


class Kill(Callback):
    """Ends the run after the first update of the third epoch."""

    def on_step(self, trainer: Any, row: dict[str, Any]) -> None:
        if len(trainer.history.epochs) == 2:
            raise Killed


def same_weights_when_resumed(teach: Callable[..., Any], model: Any, data: Any, folder: Path) -> None:
    """Train whole and in two parts with `teach(model, data, …)`: every weight must be the same to the bit."""
    whole = teach(model, data, epochs=4, output_directory=folder / "whole")
    with pytest.raises(Killed):
        teach(model, data, epochs=4, output_directory=folder / "parts", callbacks=[Kill()])
    resumed = teach(model, data, epochs=4, output_directory=folder / "parts", resume=True)
    losses = [[row["loss"] for row in run.history.epochs] for run in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    for name, array in whole.state.trainable.items():
        assert np.array_equal(array, resumed.state.trainable[name]), name
