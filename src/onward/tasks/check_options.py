"""What an option says of itself, and the check of the values that a user gives.

Knows no task: it reads the fields of any dataclass whose types are `Annotated[…, Option(…)]`, as those of `options`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from onward.errors import OnwardError


@dataclasses.dataclass(frozen=True)
class Option:
    """What the command line and the docs say of an option.

    `flags` are further spellings, `metavar` stands for its value in the help. An option with `python` has values
    that only Python can write, such as functions, and is no option of the command line.
    """

    help: str
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    python: bool = False


class OptionError(OnwardError, TypeError, ValueError):
    """An option that a task or its data does not have, or a value that it cannot have."""


# the command line asks for the same fields again and again, and types are read slowly
@functools.cache
def fields_of(options: type) -> dict[str, tuple[dataclasses.Field[Any], Any, Option]]:
    """The fields of a task's options by name: the field, the type of its value, and what is said of it."""
    hints = typing.get_type_hints(options, include_extras=True)
    fields = {}
    for field in dataclasses.fields(options):
        kind, option = typing.get_args(hints[field.name])
        assert isinstance(option, Option), f"{options.__name__}.{field.name} has no help text"
        fields[field.name] = field, kind, option
    return fields


def make_options(task: str, options: type, values: Mapping[str, Any], tasks: Mapping[str, type]) -> Any:
    """A task's options of the values that a user gave; an error for those it does not have.

    `tasks` are the options of all tasks, so that the error can say whose option it is.
    """
    own = fields_of(options)
    for name in values:
        if name not in own:
            owners = [other for other, fields in tasks.items() if name in fields_of(fields)]
            # an option of another task is no misspelling of one of this task
            near = get_close_matches(name, own, n=1)
            meant = f"did you mean {near[0]}? " if near and not owners else ""
            whose = f"it is one of {', '.join(owners)}; " if owners else ""
            raise OptionError(
                f"{name} is no option of {task}", hint=f"{meant}{whose}{task} takes {', '.join(own)}"
            )
    if "lora" in own and not values.get("lora", own["lora"][0].default):
        for name in ("rank", "alpha", "targets"):
            if name in values:
                raise OptionError(
                    f"{name} is for adapters, and none were asked for", hint="add --lora (lora=True)"
                )
    values = dict(values)
    for name, value in values.items():
        _, kind, option = own[name]
        _check_value(name, value, kind, option)
        parts = parts_of(kind)
        is_list = any(typing.get_origin(part) is Sequence for part in parts)
        if isinstance(value, str) and is_list and str not in parts:
            values[name] = [value]  # a text is a sequence too, of letters
    return options(**values)


def _check_value(name: str, value: Any, kind: Any, option: Option) -> None:
    choices = [
        choice
        for part in parts_of(kind)
        for choice in typing.get_args(part)
        if typing.get_origin(part) is Literal
    ]
    numeric = any(part in (int, float) for part in parts_of(kind))
    words = [part for part in parts_of(kind) if part in (str, Path) or typing.get_origin(part) is Sequence]
    if choices and isinstance(value, str) and value not in choices and not words:
        near = get_close_matches(value, map(str, choices), n=1)
        meant = f"; did you mean '{near[0]}'?" if near else ""
        raise OptionError(f"{name} is '{value}': it is one of {', '.join(map(str, choices))}{meant}")
    if not numeric or not isinstance(value, int | float) or isinstance(value, bool):
        return
    if not math.isfinite(value):
        raise OptionError(
            f"{name} is {value}: it must be a finite number", hint="give a number, or leave it out"
        )
    if (option.least is not None and value < option.least) or (
        option.most is not None and value > option.most
    ):
        most = "" if option.most is None else f", at most {option.most:g}"
        raise OptionError(f"{name} is {value}: it must be {option.least or 0:g} or more{most}")


def parts_of(kind: Any) -> Sequence[Any]:
    """The members of a union, or the type itself."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else [kind]
