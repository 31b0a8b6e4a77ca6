"""The options of tasks on the command line: one of each name in any task's dataclass.

Until the model and the data are read nobody knows the task, so a command takes them all and the task refuses those
that are not its own. Help for one task shows its options alone, with its defaults.
"""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from onward.cli.shared_options import parse_rate
from onward.tasks import OPTIONS, find_task
from onward.tasks.options import Option, OptionError, fields_of

_FLAGS = frozenset({"lora"})  # options that are more than a flag in Python


class TaskCommand(TyperCommand):
    """A command with the options of all tasks, whose help with --task shows those of one."""

    _help_task: str | None = None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read --task before the rest where help is wanted: options are shown in the order they are read."""
        words = [part for argument in args for part in argument.split("=", 1)]
        if {"--help", "-h"} & set(args) and "--task" in words[:-1]:
            try:
                self._help_task = find_task(words[words.index("--task") + 1]).name
            except OptionError as error:
                wrong = typer.BadParameter(str(error))
                wrong.hint = error.hint  # type: ignore[attr-defined]
                raise wrong from error
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, or those that one task has, with its defaults."""
        parameters = super().get_params(ctx)
        if self._help_task is None:
            return parameters
        own = fields_of(OPTIONS[self._help_task])
        shown = []
        for parameter in parameters:
            if parameter.name in own:
                parameter: Any = copy.copy(parameter)
                field, _, option = own[parameter.name]
                parameter.help, parameter.default = option.help, _shown(field.default)
            elif parameter.name in ALL_OPTIONS:
                continue
            shown.append(parameter)
        return shown


def _shown(default: Any) -> Any:
    return None if isinstance(default, bool) or default in (None, (), "data") else default


def _annotation(name: str, kind: Any, option: Option) -> Any:
    """An option of the command line for a field, which is None where it is not given."""
    parts = [part for part in typing.get_args(kind) if part is not type(None)] or [kind]
    choices = [
        choice for part in parts for choice in typing.get_args(part) if typing.get_origin(part) is Literal
    ]
    names = (f"--{name.replace('_', '-')}", *option.flags)
    settings: dict[str, Any] = {"help": option.help + _defaults(name), "metavar": option.metavar}
    if kind is bool or name in _FLAGS:
        return Annotated[bool, typer.Option(*names, help=settings["help"])]
    if "auto" in choices:
        return Annotated[str | None, typer.Option(*names, parser=parse_rate, **settings)]
    if any(typing.get_origin(part) is Sequence for part in parts) and str not in parts:
        return Annotated[list[str] | None, typer.Option(*names, **settings)]
    if choices:
        settings["metavar"] = option.metavar or "|".join(map(str, _choices(name)))
    value = next((part for part in parts if part in (int, float, Path) and str not in parts), str)
    if value in (int, float):
        settings |= {"min": option.least, "max": option.most}
    return Annotated[value | None, typer.Option(*names, **settings)]


def _choices(name: str) -> list[Any]:
    """The values of an option in all tasks."""
    kinds = [fields_of(options)[name][1] for options in OPTIONS.values() if name in fields_of(options)]
    parts = [
        part
        for kind in kinds
        for part in (kind, *typing.get_args(kind))
        if typing.get_origin(part) is Literal
    ]
    return list(dict.fromkeys(choice for part in parts for choice in typing.get_args(part)))


def _defaults(name: str) -> str:
    """The default of an option, and those of tasks that have another; for the help."""
    by_value: dict[Any, list[str]] = {}
    for task, options in OPTIONS.items():
        if name in fields_of(options):
            by_value.setdefault(_shown(fields_of(options)[name][0].default), []).append(task)
    if set(by_value) == {None} or len(by_value) > 2:
        return ""
    most = max(by_value, key=lambda value: len(by_value[value]))
    others = [
        f"{', '.join(tasks)} {value}"
        for value, tasks in by_value.items()
        if value != most and value is not None
    ]
    words = [*([] if most is None else [str(most)]), *others]
    return (
        f" Default: {'; '.join(words)}."
        if "Default" not in fields_of(OPTIONS[by_value[most][0]])[name][2].help
        else ""
    )


def _fields() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for options in OPTIONS.values():
        for name, (_, kind, option) in fields_of(options).items():
            if not option.python and name not in fields:
                fields[name] = _annotation(name, kind, option)
    return fields


def _unset(kind: Any) -> bool | None:
    """The value of an option that is not given; a flag has two values only."""
    return False if typing.get_args(kind)[0] is bool else None


ALL_OPTIONS = _fields()
TaskOptions = dataclasses.make_dataclass(
    "TaskOptions",
    [(name, kind, dataclasses.field(default=_unset(kind))) for name, kind in ALL_OPTIONS.items()],
    frozen=True,
)


def given(options: Any) -> dict[str, Any]:
    """The options that the user gave, on the command line or in a config file."""
    return {
        name: value for name, value in vars(options).items() if value not in (None, []) and value is not False
    }
