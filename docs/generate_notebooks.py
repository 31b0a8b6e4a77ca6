"""Writes the start pages as notebooks: `python docs/generate_notebooks.py`.

A page's Python blocks are code cells, what stands between them is text; the tests run the same blocks from the page.
Commands of a shell stay text.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
FOLDER = DOCS / "notebooks"
# the pages, and the extras that each needs
STARTS = {
    "fine-tune-a-model": "data",
    "start-pytorch": "torch",
    "quickstart": "",
    "language-models": "transformers",
}
_BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```\n?", re.M | re.S)


def notebook(page: Path, extra: str) -> str:
    """A page as the text of a notebook."""
    text = _absolute_links(page.read_text(encoding="utf-8"))
    cells = [
        _cell(
            "markdown", "The repository is not on a package index yet: open this notebook in a clone of it."
        ),
        _cell("code", install(extra)),
    ]
    position = 0
    for match in _BLOCK.finditer(text):
        cells += [_cell("markdown", text[position : match.start()]), _cell("code", match[1])]
        position = match.end()
    cells.append(_cell("markdown", text[position:]))
    document = {
        "cells": [{"id": f"cell-{n}", **cell} for n, cell in enumerate(cells) if "".join(cell["source"])],
        "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _absolute_links(text: str) -> str:
    """Links to pages and pictures lead one folder up from a notebook."""
    return re.sub(r"\]\((?!https?:|#)([^)]+\.(?:md|png|svg))", r"](../\1", text)


def install(extra: str) -> str:
    """The first cell: Onward from the clone around the notebook, with the versions that the tests run with."""
    package = f"../..[{extra}]" if extra else "../.."
    return f'%pip install --quiet --constraint ../../constraints.txt "{package}"'


def _cell(kind: str, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {
        "cell_type": kind,
        "metadata": {},
        "source": text.strip("\n").splitlines(keepends=True),
    }
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def notebooks() -> dict[Path, str]:
    """Every notebook's file and text."""
    return {FOLDER / f"{name}.ipynb": notebook(DOCS / f"{name}.md", extra) for name, extra in STARTS.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, content in notebooks().items():
        path.write_text(content, encoding="utf-8")
