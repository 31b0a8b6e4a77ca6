"""Pages are written for readers: no diary, one page of timings, and a length that can be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("*/*.md")])
# Written by programs: tables of operators, options and models, which are looked up and not read.
GENERATED = {
    "architectures", "benchmarks", "cli-options", "huggingface-types", "models", "operators", "published-models",
}  # fmt: skip
DIARY = re.compile(
    r"(?i)\bruns? \d|\bwas asked|\b\d+ asked|\bgoals?\b|(?m:^#.*before and after)|\bstate of the code\b"
)
# a row of a table with a duration in it
TIMING = re.compile(r"^\|.*\b\d+(\.\d+)? (ms|µs)\b", re.M)


def ids(page: Path) -> str:
    return page.relative_to(DOCS).with_suffix("").as_posix()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_a_page_is_no_diary(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not [match[0] for match in DIARY.finditer(text)]


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "benchmarks"], ids=ids)
def test_timings_are_on_the_page_of_results(page: Path) -> None:
    assert not TIMING.findall(page.read_text(encoding="utf-8"))


def test_the_pages_to_read_are_short_together() -> None:
    words = {ids(page): len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    read = sum(count for name, count in words.items() if name not in GENERATED)
    assert read <= 36_000, sorted(words.items(), key=lambda item: -item[1])[:10]
