"""Pictures are there, small, said in words, and those that a script makes show what the pages tell to type."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.test_generated import load_program

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "docs" / "assets"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = [
    (page, alt, link)
    for page in PAGES
    for alt, link in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(
    ("page", "alt", "link"), SHOWN, ids=[f"{page.stem}-{Path(link).stem}" for page, _, link in SHOWN]
)
def test_a_picture_is_there_and_said_in_words(page: Path, alt: str, link: str) -> None:
    assert (page.parent / link).is_file()
    assert len(alt.split()) >= 5


def test_pictures_are_small_and_all_are_shown() -> None:
    sizes = {path.name: path.stat().st_size for path in ASSETS.iterdir()}
    assert sum(sizes.values()) < 1_500_000 and max(sizes.values()) < 200_000
    assert set(sizes) == {Path(link).name for _, _, link in SHOWN}


def test_the_recording_shows_the_commands_of_the_first_page() -> None:
    program = load_program("make_pictures")
    page = (ROOT / "docs" / "fine-tune-a-model.md").read_text(encoding="utf-8")
    recording = (ASSETS / "terminal.svg").read_text(encoding="utf-8").replace("&#160;", " ")
    for command in program.COMMANDS:
        assert f"\n{command}\n" in page
        assert command.split(" --")[0] in recording
    assert set(program.PICTURES) <= {path.stem for path in ASSETS.iterdir()}
