"""The page of errors has a section for every class, in which the class's messages are found by their text."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import onward
from docs.test_generated import load_program
from onward.cli.errors import SECTIONS, explain, page_of
from onward.errors import CheckpointError, DataError, NonFiniteError, OnwardError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*(subclasses(child) for child in kind.__subclasses__()))


def test_every_class_of_errors_leads_to_a_section() -> None:
    # What needs an extra that is not installed is not imported; the other classes are all there then.
    for module in pkgutil.walk_packages(onward.__path__, "onward."):
        if module.name.endswith(("errors", "update", "privacy", "check", "options")):
            importlib.import_module(module.name)
    assert set(re.findall(r"^## (\w+)$", PAGE, re.M)) == SECTIONS
    for kind in subclasses(OnwardError):
        section = next(parent.__name__ for parent in kind.__mro__ if parent.__name__ in SECTIONS)
        assert (section == "OnwardError") == (kind is OnwardError), f"{kind.__name__} has no section"


@pytest.mark.parametrize(
    ("error", "address"),
    [
        (DataError("no rows", "give some"), "docs/errors.md#dataerror"),
        (CheckpointError("run", "not a checkpoint"), "docs/errors.md#checkpointerror"),
        (NonFiniteError("the loss is nan"), "docs/errors.md#nonfiniteerror"),
        (OnwardError("no"), "docs/errors.md#onwarderror"),
        (ValueError("no"), ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_the_command_line_names_the_page_of_an_error(error: Exception, address: str) -> None:
    assert page_of(error) == address
    _, hint = explain(error)
    assert hint.endswith(f"; see {address}" if address else "--debug shows where it happened")


def test_the_address_is_the_site_where_the_package_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Metadata:
        def get_all(self, _: str) -> list[str]:
            return ["Source, https://example.org/code", "Documentation, https://example.org/onward/"]

    monkeypatch.setattr("importlib.metadata.metadata", lambda _: Metadata())
    assert page_of(DataError("no rows")) == "https://example.org/onward/errors/#dataerror"


def test_messages_that_the_page_quotes_are_messages_of_the_code() -> None:
    source = "\n".join(_strings(path) for path in (ROOT / "src" / "onward").rglob("*.py"))
    quoted = re.findall(r"^\| (`.+?`) \|", PAGE, re.M)
    texts = [text for cell in quoted for text in re.findall(r"`([^`]+)`", cell)]
    assert len(texts) >= 15
    for text in texts:
        # what is filled in stands for itself in the source
        parts = [part for part in re.split(r"'…'|…", text) if len(part.strip(" :;,.()'")) > 3]
        assert parts and all(part.strip() in source for part in parts), text


def _strings(path: Path) -> str:
    """A module with literals that follow one another joined, as Python reads them."""
    return re.sub(r"\"\s*\n\s*f?\"", "", path.read_text(encoding="utf-8"))


def test_the_site_lists_the_messages_of_each_class() -> None:
    program: Any = load_program("list_messages")
    filled = program.fill(PAGE)
    assert "<!-- messages" not in filled
    assert "    - `not a checkpoint: identifier …`" in filled
    assert all(
        len(lines) > 5 for name, lines in program.messages().items() if f"messages: {name} -->" in PAGE
    )
