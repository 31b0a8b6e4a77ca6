"""The table of docs/languages/index.md: what the tests that ran saw. ONWARD_WRITE_MATRIX=1 makes them write it."""

from __future__ import annotations

import os
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "languages" / "index.md"
BEGIN, END = "<!-- written by tests/languages -->\n", "<!-- end -->"
_results: dict[str, dict[str, float | str | bool]] = {}


def record(language: str, **results: float | str | bool) -> None:
    """Remember what a test saw of a language."""
    _results.setdefault(language, {}).update(results)


def table(models: list[str]) -> str:
    """A row a language; a cell is the largest difference of a loss from Python's."""
    heads = ["language", *models, "accumulation", "refusals", "growth over 10,000 steps"]
    rows = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for language, results in _results.items():
        cells = [f"{results[name]:.0e}" if name in results else "–" for name in models]
        cells += ["yes" if results.get(key) else "–" for key in ("accumulates", "refuses")]
        grows = results.get("grows")
        cells.append("–" if grows is None else f"{max(float(grows), 0) / 2**20:.1f} MB")
        if "missing" in results:
            cells = [f"not run: {results['missing']}", *[""] * (len(heads) - 2)]
        rows.append(f"| {' | '.join([language, *cells])} |")
    return "\n".join(rows) + "\n"


def write(models: list[str]) -> None:
    """Put the table into the page, where it was asked for and every language has a row."""
    from languages.programs import LANGUAGES

    if not os.environ.get("ONWARD_WRITE_MATRIX") or _results.keys() != LANGUAGES.keys():
        return
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(before + BEGIN + table(models) + END + after, encoding="utf-8")
