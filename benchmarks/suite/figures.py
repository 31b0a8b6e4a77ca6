"""Medians, ratios of rounds with their spread, and tables in Markdown. Knows nothing about benchmarks."""

from __future__ import annotations

import dataclasses
import statistics
import textwrap
from collections.abc import Iterable, Sequence

__all__ = ["MISSING", "Spread", "milliseconds", "paragraph", "ratio_of_rounds", "spread", "table"]

MISSING = "–"


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median of some figures and the quartiles around it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:  # a single round has no spread
            return f"**{self.median:.2f}**"
        return f"**{self.median:.2f}** ({self.low:.2f}–{self.high:.2f})"


def spread(values: Sequence[float]) -> Spread | None:
    """Median and quartiles, or None of nothing."""
    if not values:
        return None
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)


def ratio_of_rounds(ours: Sequence[float], theirs: Sequence[float]) -> Spread | None:
    """The spread of each round's own ratio: a busy moment of the machine hits both sides of it."""
    return spread([a / b for a, b in zip(ours, theirs) if b > 0])


def milliseconds(value: float | None) -> str:
    """A time that shows three digits."""
    if value is None:
        return MISSING
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def paragraph(text: str) -> str:
    """Prose in lines that are not too long."""
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of Markdown; the first column is text, the others are figures."""
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in (head, *rows)]
    return [lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:]]
