"""Python's garbage collector, put off while a graph is built.

A graph is many small objects that refer to each other, all of them in use: looking through them again and again
finds nothing, takes as long as building them, and longer the more there are.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["gc_paused"]


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Leave garbage for later; whoever had turned collection off finds it off.

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
