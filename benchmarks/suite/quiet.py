"""Whether the machine has something else to do: figures of a busy one are of little use, ratios included."""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["busy_share", "warning"]

STATISTICS = Path("/proc/stat")


def busy_share(seconds: float = 1.0) -> float | None:
    """The share of all processors that was in use while this process slept; None where the system can't say."""
    if not STATISTICS.exists():
        return None
    before = _times()
    time.sleep(seconds)
    spent = [after - start for after, start in zip(_times(), before)]
    idle = spent[3] + spent[4]  # idle, and waiting for a disk
    return 1 - idle / max(sum(spent), 1)


def _times() -> list[int]:
    return [int(number) for number in STATISTICS.read_text().splitlines()[0].split()[1:9]]


def warning(share: float | None) -> str:
    """What to say about a machine that is busy; nothing about a quiet one."""
    if share is None or share < 0.1:
        return ""
    return (
        f"{share:.0%} of the machine is in use already. Engines suffer from that differently (OpenMP's threads wait "
        "for each other by spinning, so that torch loses most): don't keep these figures."
    )
