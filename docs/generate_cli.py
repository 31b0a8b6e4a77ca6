"""Writes docs/cli-options.md: every command with its arguments and options, as the command line itself has them.

python docs/generate_cli.py
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

PAGE = Path(__file__).parent / "cli-options.md"
_INTRODUCTION = """# Command line: every option

Written by `python docs/generate_cli.py` from the commands themselves; do not edit. [Command line](cli.md) explains what
they do. Every command also takes `--json`, `--quiet`, `--debug`, `--config FILE`, `--limit NAME=NUMBER` and `--help`.
"""
_EVERYWHERE = {"--json", "--quiet", "--debug", "--config", "--limit", "--help"}


def page() -> str:
    """The whole page."""
    from onward.cli.app import app

    return "\n".join([_INTRODUCTION, *(_section(name, command) for name, command in _commands(app))])


def _commands(app: Any) -> Iterator[tuple[str, Any]]:
    """Commands and commands of groups, by the words that call them."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
        else:
            yield from ((f"{name} {word}", part) for word, part in inner.items())


def _section(name: str, command: Any) -> str:
    parameters = [item for item in command.params if not _EVERYWHERE & set(item.opts)]
    rows = [
        f"| {_spelling(item)} | {_default(item)} | {_text(item.help)} |"
        for item in parameters
        if not getattr(item, "hidden", False)
    ]
    summary = _text((command.help or "").strip().split("\n\n")[0])
    return "\n".join(
        [
            f"## onward {name}",
            "",
            summary,
            "",
            "| option | default | what it does |",
            "|---|---|---|",
            *rows,
            "",
            *(_tasks() if name == "finetune" else ()),
        ]
    )


def _tasks() -> Iterator[str]:
    """The options of each task, which refuses the others."""
    from onward.tasks import TASKS
    from onward.tasks.check_options import fields_of

    yield "A task takes the options below and refuses the others; `onward finetune --task TASK --help` explains them."
    yield ""
    yield "| task | its options |"
    yield "|---|---|"
    for task in TASKS.values():
        names = [name for name, (_, _, option) in fields_of(task.Options).items() if not option.python]
        yield f"| {task.name} | {', '.join(f'`{name}`' for name in names)} |"
    yield ""


def _spelling(item: Any) -> str:
    if item.param_type_name == "argument":
        return f"`{item.metavar or item.name.upper()}`"
    spellings = [*sorted(item.opts, key=len, reverse=True), *item.secondary_opts]
    words = ", ".join(f"`{word}`" for word in spellings)
    if item.is_flag:
        return words
    values, kind = _values(item)
    shown = (
        " or ".join(f"`{value}`" for value in values)
        if values
        else f"`{item.metavar or kind}`".replace("|", "\\|")
    )
    return f"{words} {shown}"


def _values(item: Any) -> tuple[list[str], str]:
    """The values that an option may have, where they are listed, and the word for its type."""
    if hasattr(item, "type_descriptor"):
        annotation = item.type_descriptor.annotation
        if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
            return [str(member.value) for member in annotation], ""
        return [], {int: "INTEGER", float: "FLOAT", Path: "PATH"}.get(annotation, "TEXT")
    # typer on click
    choices = [str(getattr(value, "value", value)) for value in getattr(item.type, "choices", [])]
    return choices, item.type.name.upper().removesuffix(" RANGE")


def _default(item: Any) -> str:
    default = item.default
    if item.required:
        return "required"
    if callable(default) or default is None or default is False or "UNSET" in repr(default).upper():
        return ""
    if default is True:
        return f"`{item.opts[0]}`"
    if default == "" or (isinstance(default, list | tuple) and not default):
        return ""
    return f"`{getattr(default, 'value', default)}`"


def _text(words: str | None) -> str:
    return " ".join((words or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8", newline="\n")
