"""Ctrl-C between two updates, never inside one: what is saved then is exactly a state of the run."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

from onward.fit.callbacks import Callback

if TYPE_CHECKING:
    from onward.trainer import Trainer

__all__ = ["StopBetweenSteps"]


class StopBetweenSteps(Callback):
    """Turns the first SIGINT or SIGTERM into a KeyboardInterrupt after the current update; the second kills."""

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[int, Any] = {}

    def on_start(self, trainer: Trainer) -> None:
        self._asked = False
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)

    def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
        if self._asked:
            raise KeyboardInterrupt

    def on_end(self, trainer: Trainer) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _ask(self, number: int, frame: Any) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
