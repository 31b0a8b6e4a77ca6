"""Runs torchrun and waits for it: captures its output, and forwards Ctrl-C to the ranks once.

Torchrun gets a session of its own, since Ctrl-C in a terminal goes to all processes of a session at once and
torchrun gives up its ranks at the second signal. So we forward the first one; it passes it on to the
ranks, which have half a minute to save.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Ended", "launch"]


@dataclass(frozen=True)
class Ended:
    """How it ended: its exit code, whether a signal ended it, and what it wrote to stderr."""

    code: int
    interrupted: bool
    words: str


def launch(command: Sequence[str], *, log: Path, quiet: bool, look: Callable[[], None]) -> Ended:
    """Run a command to its end; a first interrupt asks it to stop, a second kills it. `look` is called meanwhile."""
    own: dict[str, Any] = {"start_new_session": True}
    if os.name == "nt":
        own = {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as torchrun chooses, but without its remark
    interrupted = False
    with open(log, "wb") as stderr:
        process = subprocess.Popen(
            command, stderr=stderr, stdout=subprocess.DEVNULL if quiet else None, env=environment, **own
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    look()
                except KeyboardInterrupt:
                    if interrupted:
                        raise
                    interrupted = True
                    process.terminate()
        finally:
            if process.poll() is None:
                process.kill()  # its ranks see that it is gone
                process.wait()
    return Ended(code, interrupted, log.read_text(encoding="utf-8", errors="replace"))
