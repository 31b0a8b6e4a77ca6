"""Checkpoint save and load against a plain write, flushed to the disk, and a plain read of as many bytes."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from suite.figures import milliseconds, paragraph, ratio_of_rounds, table
from suite.section import Cases, Section

if TYPE_CHECKING:
    from suite.settings import Settings

__all__ = ["SECTION"]

SIZES = (1, 16, 64, 256)
ROUNDS = 7


def measure(settings: Settings) -> Cases:
    """The four in turns, on the disk that the project is on."""
    from checkpoint_large import all_arrays, plain_write, state_of

    from onward.checkpoint import load, save

    settings.cache.mkdir(parents=True, exist_ok=True)
    cases: Cases = {}
    for mib in SIZES:
        data = state_of(mib)
        arrays = all_arrays(data)
        times: dict[str, list[float]] = {"write": [], "save": [], "read": [], "load": []}
        with tempfile.TemporaryDirectory(dir=settings.cache) as name:
            plain, checkpoint = Path(name) / "plain", Path(name) / "checkpoint"
            uses: dict[str, Callable[[], object]] = {
                "write": lambda arrays=arrays, plain=plain: plain_write(arrays, plain),
                "save": lambda data=data, checkpoint=checkpoint: save(data, checkpoint),
                "read": plain.read_bytes,
                "load": lambda checkpoint=checkpoint: load(checkpoint),
            }
            for use in uses.values():
                use()
            for number in range(settings.rounds_or(ROUNDS)):
                for kind in uses if number % 2 == 0 else reversed(uses):
                    _settle()
                    begun = time.perf_counter()
                    uses[kind]()
                    times[kind].append((time.perf_counter() - begun) * 1e3)
        cases[f"{mib}"] = times
    return cases


def _settle() -> None:
    """Let the disk be done with what was written before."""
    if hasattr(os, "sync"):
        os.sync()


def render(cases: Cases) -> list[str]:
    """Times and ratios."""
    rows = []
    for mib, times in sorted(cases.items(), key=lambda item: int(item[0])):
        medians = {kind: milliseconds(statistics.median(found)) for kind, found in times.items()}
        rows.append(
            [
                f"{mib} MiB",
                medians["write"],
                medians["save"],
                str(ratio_of_rounds(times["save"], times["write"])),
                medians["read"],
                medians["load"],
                str(ratio_of_rounds(times["load"], times["read"])),
            ]
        )
    return [
        paragraph(
            "A third of the bytes are parameters, the rest AdamW's state. A save is a new file with a digest, "
            "flushed to the disk, read again, and put in the old one's place; the plain write puts the same bytes "
            "over the old ones and flushes them. A load checks bounds and the digest; the "
            "plain read is `Path.read_bytes`, from the disk's cache as the load is."
        ),
        "",
        *table(["size", "plain write, ms", "save, ms", "ratio", "plain read, ms", "load, ms", "ratio"], rows),
    ]


SECTION = Section("checkpoint", "Checkpoints", measure, render)
