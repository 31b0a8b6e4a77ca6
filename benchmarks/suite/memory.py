"""Peak memory of training against depth and batch, in Onward and torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from suite.figures import paragraph, table
from suite.interleave import Worker
from suite.section import Cases, Section

if TYPE_CHECKING:
    from suite.settings import Settings

__all__ = ["SECTION"]

ENGINES = ("onward", "torch-fused")
DEPTHS, BATCHES = (2, 4, 8), (4, 16, 48)
DEPTH, BATCH = 4, 16


def measure(settings: Settings) -> Cases:
    """One process for each engine and size; three steps each."""
    from models import sized_encoder
    from prepare import prepare

    cases: Cases = {}
    for layers, batch in dict.fromkeys(
        [*((depth, BATCH) for depth in DEPTHS), *((DEPTH, batch) for batch in BATCHES)]
    ):
        folder = prepare(sized_encoder(layers, batch), settings.cache)
        case: dict[str, float] = {}
        for engine in ENGINES:
            worker = Worker(engine, folder, threads=settings.threads)
            case[engine] = worker.turn("step", 3)["peak_mb"]
            worker.stop()
        cases[f"{layers}x{batch}"] = case
    return cases


def render(cases: Cases) -> list[str]:
    """A table of each series, and what one more layer or sequence takes."""
    depth = [(str(layers), cases[f"{layers}x{BATCH}"]) for layers in DEPTHS]
    batch = [(str(size), cases[f"{DEPTH}x{size}"]) for size in BATCHES]
    return [
        paragraph(
            "MiniLM-shaped encoders on sequences of 64 tokens, three steps with AdamW, the largest resident size in "
            "MB. The last row is what one more takes, which leaves out what does not depend on the size."
        ),
        "",
        *_series(f"layers (batch {BATCH})", "a layer", depth),
        "",
        *_series(f"batch ({DEPTH} layers)", "a sequence", batch),
    ]


def _series(head: str, one: str, points: list[tuple[str, dict[str, float]]]) -> list[str]:
    rows = [[size, *(f"{peaks[e]:.0f}" for e in ENGINES), _ratio(peaks)] for size, peaks in points]
    (first, low), (last, high) = points[0], points[-1]
    slopes = {engine: (high[engine] - low[engine]) / (int(last) - int(first)) for engine in ENGINES}
    rows.append([one, *(f"{slopes[engine]:.1f}" for engine in ENGINES), _ratio(slopes)])
    return table([head, *(f"{engine}, MB" for engine in ENGINES), "ratio"], rows)


def _ratio(figures: dict[str, float]) -> str:
    ours, theirs = (figures[engine] for engine in ENGINES)
    return f"**{ours / theirs:.2f}**"


SECTION = Section("memory", "Memory against depth and batch", measure, render)
