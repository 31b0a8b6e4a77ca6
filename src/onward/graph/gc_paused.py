"""Pauses Python's garbage collector while a graph is built.

A graph is many small objects that refer to each other, all of them in use: collecting again and again finds nothing,
takes as long as building them, and longer the more there are.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection; if it was disabled before, it stays so.

    >>> with gc_paused():
    ...     gc.isenabled()
    False
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
