"""Every command and every option that a page names exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from onward.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "languages").glob("*.md")),
]
# Lines of shells stand in blocks of these names; the examples of a language's own tools are among them.
_SHELL = re.compile(r"^```(?:sh|bash|console)?\n(.*?)^```$", re.M | re.S)
_INLINE = re.compile(r"`([^`\n]+)`")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
# what other programs are called with
_PROGRAM = re.compile(r"(?:python|pip|make|torchrun|npm|git|c\+\+|cmake)\b|benchmarks/")
# options of other programs that a page names by themselves
OTHERS = {"--gpus-per-task", "--machine", "--max-restarts", "--standalone"}


def commands() -> dict[str, set[str]]:
    """Each command, with the name of its group, and the options that it takes."""
    entries: dict[str, set[str]] = {}

    def add(name: str, command: object) -> None:
        inner = getattr(command, "commands", None)
        if inner is not None:
            for word, part in inner.items():
                add(f"{name} {word}".strip(), part)
        options = {
            spelling
            for item in getattr(command, "params", ())
            for spelling in [*item.opts, *item.secondary_opts]
        }
        entries[name] = options | {"--help"}

    add("", typer.main.get_command(app))
    return entries


COMMANDS = commands()
ALL_OPTIONS = set().union(*COMMANDS.values())


def lines(page: Path) -> Iterator[str]:
    """The calls of `onward` that a page shows, in blocks and within sentences."""
    text = page.read_text(encoding="utf-8")
    for block in _SHELL.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            yield from re.findall(r"(?:^|&& |\$ |srun )((?:python -m )?onward .*)", line)
    yield from (code for code in _INLINE.findall(text) if re.match(r"(python -m )?onward [a-z-]", code))


def mistake(line: str) -> str | None:
    """What is wrong with a call of `onward`."""
    words = re.sub(r"^python -m ", "", line.split(" #")[0]).split()[1:]
    if not words or words[0].startswith("-") or words[0].isupper():  # `onward COMMAND --help`
        return None if set(words) & (COMMANDS[""] | {"COMMAND"}) else f"`{line}`: no command"
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    if name not in COMMANDS:
        return f"`{line}`: there is no command '{name}'"
    # The options of every command of a group may follow the group's name.
    options = {option for full in COMMANDS if full.split(" ")[0] == name for option in COMMANDS[full]}
    unknown = [word for word in words if re.match(r"--?[a-z]", word)]
    unknown = [word for word in unknown if word.split("=")[0] not in (COMMANDS[name] | options)]
    return f"`{line}`: 'onward {name}' has no {', '.join(unknown)}" if unknown else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_exists(page: Path) -> None:
    assert not [problem for line in lines(page) if (problem := mistake(line))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_option_of_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    codes = [code for code in _INLINE.findall(text) if not _PROGRAM.match(code)]
    options = {option for code in codes for option in _OPTION.findall(code)}
    assert not options - ALL_OPTIONS - OTHERS


def test_a_command_or_option_that_is_not_there_is_seen() -> None:
    assert mistake("onward trian artifacts")
    assert mistake("onward train artifacts --epoch 3")
    assert mistake("onward lora inject a.onnx --rnak 8")
    assert not mistake("onward train artifacts --data data.npz --epochs 3  # then --deploy")
    assert sum(1 for page in PAGES for _ in lines(page)) > 100
