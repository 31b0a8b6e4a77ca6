"""Pages are written for readers: no diary, one page of timings, and a length that can be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("*/*.md")])
# Written by programs: tables of operators, options and models, which are looked up and not read.
GENERATED = {
    "architectures", "benchmarks", "cli-options", "families", "huggingface-types", "models", "operators",
    "published-models",
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


def words(page: Path) -> int:
    """Words of a page, without the tables that programs write into it."""
    text = page.read_text(encoding="utf-8")
    return len(re.sub(r"<!-- (contrib|newer|written) ?.*?<!-- end -->", "", text, flags=re.S).split())


def test_the_pages_to_read_are_short_together() -> None:
    counts = {ids(page): words(page) for page in PAGES if ids(page) not in GENERATED}
    assert sum(counts.values()) <= 35_000, sorted(counts.items(), key=lambda item: -item[1])[:10]


def pages_of(kind: str) -> list[Path]:
    """The pages of a part of the navigation."""
    part = re.split(r"\n  - ", NAVIGATION.split(f"  - {kind}:\n")[1])[0]
    return [DOCS / name for name in re.findall(r": (\S+\.md)$", part, re.M)]


NAVIGATION = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
STARTS, GUIDES = pages_of("Start"), pages_of("Guides")


@pytest.mark.parametrize("page", GUIDES, ids=ids)
def test_a_guide_is_read_in_minutes(page: Path) -> None:
    assert words(page) <= 900


@pytest.mark.parametrize("page", STARTS, ids=ids)
def test_a_start_is_one_screen(page: Path) -> None:
    assert words(page) <= 550


@pytest.mark.parametrize(
    "page", [page for page in [*STARTS, *GUIDES] if page.parent.name != "languages"], ids=ids
)
def test_a_page_begins_with_what_its_reader_can_do_then(page: Path) -> None:
    _, first, *_ = page.read_text(encoding="utf-8").split("\n\n")
    assert first.startswith("After this page")


CONTRIBUTORS = [
    ROOT / "CONTRIBUTING.md",
    *(
        DOCS / f"{name}.md"
        for name in ("architecture", "adding-a-gradient", "adding-a-task", "adding-a-device")
    ),
]


@pytest.mark.parametrize("page", CONTRIBUTORS, ids=lambda page: page.stem)
def test_the_files_that_contributors_are_sent_to_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:[\w-]+/)+[\w-]*(?:\.\w+)?|[\w-]+\.(?:py|toml|md))`", text)
    modules = {path.name for path in (ROOT / "src").rglob("*.py")}
    missing = [
        path
        for path in paths
        if path not in WRITTEN | modules
        and not any((start / path).exists() for start in (ROOT, ROOT / "src" / "onward"))
    ]
    assert paths and not missing


# what commands write, and not the repository
WRITTEN = {"dist/"}


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_scripts_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    scripts = re.findall(r"\b(?:benchmarks|examples|tests|docs)/[\w/]+\.py\b", text)
    assert not [script for script in scripts if not (ROOT / script).exists()]
