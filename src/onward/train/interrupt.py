"""Defers Ctrl-C to the end of the current batch, so that the saved state is consistent."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["DeferredInterrupt"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class DeferredInterrupt:
    """Defers the first interrupt signal until `check` is called; a second one takes effect immediately.

    That is Ctrl-C, and SIGTERM in a program that made it mean the same (its handler is Python's
    `signal.default_int_handler`, as in the command line). A program that handles a signal in a way of its own
    keeps that way; outside the main thread nothing happens.

    >>> with DeferredInterrupt() as interrupt:
    ...     for batch in range(3):
    ...         interrupt.check()
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> DeferredInterrupt:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.default_int_handler:
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def check(self) -> None:
        """Raise the deferred KeyboardInterrupt."""
        if self._asked:
            self._asked = False
            raise KeyboardInterrupt

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
