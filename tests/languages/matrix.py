"""Tables in the documentation of what the tests that ran saw. ONWARD_WRITE_MATRIX=1 makes them write it."""

from __future__ import annotations

import os
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- written by `make languages` -->\n", "<!-- end -->"
_results: dict[str, dict[str, float | str | bool]] = {}


def record(language: str, **results: float | str | bool) -> None:
    """Remember what a test saw of a language."""
    _results.setdefault(language, {}).update(results)


def table(models: list[str]) -> str:
    """A row a language; a cell is the largest difference of a loss from Python's."""
    heads = ["language", "lines", *models, "accumulation", "refusals", "growth over 10,000 steps"]
    rows = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for language, results in _results.items():
        cells = [f"{results[name]:.0e}" if name in results else "–" for name in models]
        cells += ["yes" if results.get(key) else "–" for key in ("accumulates", "refuses")]
        grows = results.get("grows")
        cells.append("–" if grows is None else f"{max(float(grows), 0) / 2**20:.1f} MB")
        cells.insert(0, str(_count_lines(language)))
        if "missing" in results:
            cells = [f"not run: {results['missing']}", *[""] * (len(heads) - 2)]
        rows.append(f"| {' | '.join([language, *cells])} |")
    return "\n".join(rows) + "\n"


def _count_lines(language: str) -> int:
    """How long the file is that a reader lifts out."""
    name = language.split(",")[0]
    folder = {"C++": "cpp", "C#": "csharp", "Node.js": "node"}.get(name, name.lower())
    (trainer,) = (DOCS.parent / "examples" / "languages" / folder).rglob("[Tt]rainer.*")
    return len(trainer.read_text(encoding="utf-8").splitlines())


def write(models: list[str]) -> None:
    """Put the table into its page, where every language has a row."""
    from languages.programs import LANGUAGES

    if _results.keys() == LANGUAGES.keys():
        write_table(DOCS / "languages" / "index.md", table(models))


def write_table(page: Path, text: str) -> None:
    """Put the text between the page's marks, where it was asked for."""
    if not os.environ.get("ONWARD_WRITE_MATRIX"):
        return
    content = page.read_text(encoding="utf-8")
    before, after = content.split(BEGIN)[0], content.split(END)[1]
    page.write_text(before + BEGIN + text + END + after, encoding="utf-8")
