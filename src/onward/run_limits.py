"""Limits on what a model from elsewhere takes when it runs: a loop of it may never end, or double at each turn.

`run_limited` runs a session of onnxruntime within `run_seconds` and `run_bytes` and makes its errors ours. `watched`
bounds a longer piece of work in Python, which looks at `require_time` now and then.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from onward.errors import LimitError, ModelError
from onward.limits import current

_EVERY = 0.1  # seconds between looks


class Watch:
    """Work that began now, and what it may take: the limits `<kind>_seconds` and `<kind>_bytes`."""

    def __init__(self, kind: str, what: str) -> None:
        self._kind, self._what, self._allowed = kind, what, current()
        self._started, self._before = time.monotonic(), _resident()
        self.options: Any = None
        self.over: LimitError | None = None

    def look(self) -> LimitError | None:
        """The error where it takes too much; noted, and onnxruntime told to end the run that `options` belong to."""
        spent = {"seconds": int(time.monotonic() - self._started), "bytes": _resident() - self._before}
        for unit, amount in spent.items():
            name = f"{self._kind}_{unit}"
            allowed = getattr(self._allowed, name)
            if amount >= allowed and self.over is None:
                # nobody knows how much more it would have taken
                self.over = LimitError(f"{self._what}, in {unit},", name, max(10 * allowed, amount), allowed)
                if self.options is not None:
                    self.options.terminate = True
        return self.over


_running: set[Watch] = set()
_changed = threading.Condition()
_watcher: threading.Thread | None = None
_active: contextvars.ContextVar[Watch | None] = contextvars.ContextVar("onward_watch", default=None)


def run_limited(
    run: Callable[..., Any],
    names: Sequence[str] | None,
    feeds: dict[str, Any],
    options: Any = None,
    *,
    what: str = "the model",
) -> Any:
    """Call `run` of a session; a `LimitError` where it takes too much, a `ModelError` where onnxruntime gives up."""
    import onnxruntime

    watch = Watch("run", f"{what}: one run of it")
    if options is None:
        options = onnxruntime.RunOptions()
        options.log_severity_level = 4  # what went wrong is in the error
    watch.options = options
    _begin(watch)
    try:
        return run(names, feeds, options)
    except Exception as error:
        if watch.over is not None:
            raise watch.over from None
        raise ModelError(
            f"onnxruntime cannot run {what}: {error}", hint="do the inputs fit the model?"
        ) from error
    finally:
        with _changed:
            _running.discard(watch)


def _begin(watch: Watch) -> None:
    global _watcher
    with _changed:
        _running.add(watch)
        if _watcher is None:
            _watcher = threading.Thread(target=_look_at_all, daemon=True, name="onward-limits")
            _watcher.start()
        _changed.notify()


def _start_anew() -> None:
    """In a fork: it has neither the thread nor the runs, and maybe a lock that nobody will open."""
    global _watcher, _changed
    _watcher, _changed = None, threading.Condition()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


def _look_at_all() -> None:
    while True:
        with _changed:
            while not _running:
                _changed.wait()
            seen = list(_running)
        for watch in seen:
            watch.look()
        time.sleep(_EVERY)


@contextlib.contextmanager
def watched(kind: str, what: str) -> Iterator[Watch]:
    """Bound what is done in the block: `require_time` raises there once it took too much."""
    watch = Watch(kind, what)
    token = _active.set(watch)
    try:
        yield watch
    finally:
        _active.reset(token)


def require_time() -> None:
    """Raise `LimitError` where the block around took too much; nothing outside of one."""
    watch = _active.get()
    if watch is not None and (over := watch.look()) is not None:
        raise over


def _resident() -> int:
    """Bytes of memory that this process has; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0
