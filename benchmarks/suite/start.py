"""Cold start: from the start of a process until its first training step is done."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from suite.figures import MISSING, paragraph, ratio_of_rounds, table
from suite.interleave import Worker, WorkerEnded
from suite.section import Cases, Section
from suite.steps import by_model

if TYPE_CHECKING:
    from suite.settings import Settings

__all__ = ["SECTION"]

ENGINES = ("onward", "torch-fused", "ort-training")
ROUNDS = 3


def measure(settings: Settings) -> Cases:
    """Processes started in turns; their files are in the disk's cache."""
    from prepare import prepare

    cases: Cases = {}
    for model in settings.models:
        folder = prepare(model, settings.cache)
        seconds: dict[str, list[float]] = {engine: [] for engine in ENGINES if engine in settings.engines}
        for _ in range(settings.rounds_or(ROUNDS)):
            for engine in seconds:
                try:
                    worker = Worker(engine, folder, threads=settings.threads)
                except WorkerEnded:
                    continue
                seconds[engine].append(worker.seconds_to_first_step)
                worker.stop()
        cases[model] = seconds
    return cases


def render(cases: Cases) -> list[str]:
    """Seconds, and ratios."""
    peers = ENGINES[1:]
    rows = []
    for model, seconds in by_model(cases).items():
        medians = [statistics.median(seconds[e]) if seconds.get(e) else None for e in ENGINES]
        ratios = [ratio_of_rounds(seconds.get("onward", []), seconds.get(peer, [])) for peer in peers]
        rows.append(
            [model, *(f"{m:.2f}" if m else MISSING for m in medians), *(str(r or MISSING) for r in ratios)]
        )
    return [
        paragraph(
            "Seconds from the start of a Python process until its first whole training step is done: imports, the "
            "model, the checkpoint, sessions. Files are in the disk's cache. torch.compile is left out: it compiles "
            "for tens of seconds the first time, and keeps what it compiled."
        ),
        "",
        *table(["model", *(f"{e}, s" for e in ENGINES), *(f"to {p}" for p in peers)], rows),
    ]


SECTION = Section("start", "Cold start", measure, render)
