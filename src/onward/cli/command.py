"""Shared by all commands: --json, --quiet, --debug, --config, and one-line errors.

`command` makes one of a function: it gets these options without naming them, its errors become one line with a hint
and exit code 1, Ctrl-C and SIGTERM become exit code 130. A command reports its results through `Output`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import logging
import re
import signal
import threading
import tomllib
import traceback
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from onward import limits
from onward.cli.errors import CommandError, explain
from onward.cli.output import Output
from onward.cli.python_entry import names_code
from onward.errors import LimitError
from onward.limits import require
from onward.reading import read_text, require_shallow

_PANEL = "Common"
_LIMITS = {field.name for field in dataclasses.fields(limits.Limits)}


@dataclasses.dataclass(frozen=True)
class Command:
    """A function with the shared options and behaviour of a command, and examples for the end of its help."""

    run: Callable[..., None]
    examples: Sequence[str]
    cls: type[TyperCommand] | None = None

    def register(self, app: typer.Typer) -> None:
        """Add the command to an app, by the function's name."""
        epilog = "\n\n".join(["Examples:", *(f"  $ {line}" for line in self.examples)])
        app.command(self.run.__name__, cls=self.cls, epilog=epilog)(self.run)


def command(
    *examples: str, cls: type[TyperCommand] | None = None
) -> Callable[[Callable[..., int | None]], Command]:
    """Make a command of a function that takes an `Output` first, and returns an exit code or None.

    An argument that is a dataclass stands for one option of each of its fields; its default gives theirs.
    """
    return lambda function: Command(_wrap(function), examples, cls)


def _wrap(function: Callable[..., int | None]) -> Callable[..., None]:
    own = _parameters(function)[1:]
    groups: dict[str, Any] = {p.name: p.annotation for p in own if dataclasses.is_dataclass(p.annotation)}

    @functools.wraps(function)
    def run(**options: Any) -> None:
        # taken out first: what is left belongs to the function
        common = _take(_Common, options)
        arguments = {name: _take(group, options) for name, group in groups.items()}
        output = Output(as_json=common.as_json, quiet=common.quiet, debug=common.debug)
        try:
            with (
                _terminated_as_interrupted(),
                _own_logging(output),
                limits.override(**_limits(common.limit or ())),
            ):
                code = function(output, **arguments, **options)
        # not errors: the way in which typer leaves
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt as stop:
            output.fail(str(stop) or "interrupted", "", label="")
            # 128 and the number of SIGINT, as shells have it
            raise typer.Exit(130) from None
        except Exception as error:
            if common.debug:
                traceback.print_exc()
            message, hint = explain(error)
            output.fail(message, hint)
            raise typer.Exit(1) from None
        if code:
            raise typer.Exit(code)

    parameters = []
    for parameter in own:
        fields = _parameters(groups[parameter.name]) if parameter.name in groups else [parameter]
        if parameter.name in groups and parameter.default is not parameter.empty:
            # one dataclass, two commands with other defaults: distributed has more processes
            fields = [field.replace(default=getattr(parameter.default, field.name)) for field in fields]
        parameters += fields
    parameters += _parameters(_Common)
    # typer reads the signature for defaults and the annotations for types
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _take(group: Any, options: dict[str, Any]) -> Any:
    """A dataclass of the options that are its fields, which leave the others."""
    return group(**{field.name: options.pop(field.name) for field in dataclasses.fields(group)})


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function or a dataclass, by keyword, with their annotations evaluated."""
    hints = typing.get_type_hints(function, include_extras=True)
    return [
        parameter.replace(annotation=hints.get(name), kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(function).parameters.items()
    ]


def _limits(texts: Sequence[str]) -> dict[str, int]:
    """`NAME=NUMBER` options as limits."""
    limits_by_name = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in _LIMITS or not (number.isascii() and number.isdigit()) or not int(number[:19]):
            raise CommandError(
                f"--limit takes NAME=NUMBER, got '{text}'", f"the names are {', '.join(sorted(_LIMITS))}"
            )
        # 19 digits hold any limit; Python refuses to convert thousands of them, with an error of its own
        limits_by_name[name] = int(number[:19])
    return limits_by_name


def _configure(context: typer.Context, path: Path | None) -> Path | None:
    if path is not None:
        try:
            context.default_map = {
                **(context.default_map or {}),
                **read_settings(path, context.command, context.info_name or ""),
            }
        except CommandError as error:
            wrong = typer.BadParameter(str(error))
            wrong.hint = error.hint  # type: ignore[attr-defined]
            raise wrong from error
    return path


@dataclasses.dataclass(frozen=True)
class _Common:
    """The options of every command."""

    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=_PANEL)
    ] = False
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print errors only.", rich_help_panel=_PANEL)
    ] = False
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=_PANEL)
    ] = False
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="NAME=NUMBER",
            help="Raise a limit on what files may ask for: docs/security.md.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            is_eager=True,  # the other options take their defaults from the file
            callback=_configure,
            help="Take options from this TOML file; flags win.",
            rich_help_panel=_PANEL,
        ),
    ] = None


@contextlib.contextmanager
def _own_logging(output: Output) -> Iterator[None]:
    """Show what Onward says, and undo what libraries do to the logging of the whole process when imported."""
    root, ours = logging.getLogger(), logging.getLogger("onward")
    before, level, our_level, handler = list(root.handlers), root.level, ours.level, _Notes(output)
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(our_level)
        root.handlers[:] = before
        root.setLevel(level)


class _Notes(logging.Handler):
    """Log records as remarks of a command."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.note(record.getMessage())


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that a scheduler's stop cleans up and saves too."""
    # only the main thread may set a handler, and one that is there belongs to the program that called us
    usual = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not usual:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# --- Options from a TOML file: a table for each command, keys as the long options without dashes.
#
#     [train]
#     epochs = 20
#     learning-rate = 1e-3
#
# Such a file never runs code: module:function is for the command line only.


# A string that does not end runs to the end of its line, so that the search is linear in hostile text too.
_QUOTED = re.compile(r"\"(?:[^\"\\\n]|\\[^\n])*+(?:\"|\\?$)|'[^'\n]*+(?:'|$)", re.MULTILINE)
_PARTS = re.compile(r"[=,{}\[\]\n#]")


def read_settings(path: Path, command: Any, name: str) -> dict[str, Any]:
    """The options that a file has for a command, by parameter name."""
    try:
        # within a limit: a file that is named by mistake may be a disk image
        text = read_text(path)
        _require_shallow(text)
        document = tomllib.loads(text)
    except OSError as error:
        raise CommandError(
            f"cannot read '{path}': {error.strerror or error}", "is the path right?"
        ) from error
    except LimitError as error:
        raise CommandError(f"'{path}' is rejected: {error}", error.hint) from error
    except (ValueError, RecursionError) as error:
        raise CommandError(
            f"'{path}' is not valid TOML: {error}", "one option a line, as in: epochs = 20"
        ) from error
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise CommandError(f"'{path}': [{name}] must be a table", f"write it as [{name}] with one key a line")
    parameters = {_spelling(parameter): parameter for parameter in command.params}
    parameters |= {
        parameter.name.replace("_", "-"): parameter for parameter in command.params if parameter.name
    }
    settings: dict[str, Any] = {}
    for key, value in table.items():
        parameter = parameters.get(key.replace("_", "-"))
        if parameter is None:
            near = difflib.get_close_matches(key, parameters, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(sorted(parameters))}"
            raise CommandError(f"'{path}': [{name}] has the unknown option '{key}'", hint)
        # a settings file is often someone else's
        code = names_code(value)
        if code is not None:
            raise CommandError(
                f"'{path}': [{name}] {key} names Python code, '{code}', and a file never runs code here",
                f"if you trust that code, name it on the command line: {_option(parameter)} {code}".replace(
                    "  ", " "
                ),
            )
        if getattr(parameter, "multiple", False) and not isinstance(value, list):
            value = [value]
        settings[parameter.name] = value
    return settings


def _require_shallow(text: str) -> None:
    """Refuse brackets and dotted keys that nest deep: the parser's memory grows with the square of the dots."""
    require_shallow(text)
    for part in _PARTS.split(_QUOTED.sub("", text)):
        require("text_nesting", part.count("."), "a dotted key")


def _option(parameter: Any) -> str:
    """How a parameter is named on the command line; nothing for an argument."""
    return f"--{_spelling(parameter)}" if any(text.startswith("-") for text in parameter.opts) else ""


def _spelling(parameter: Any) -> str:
    """The long option of a parameter, without dashes."""
    longest = max(parameter.opts, key=len, default=parameter.name or "")
    return longest.lstrip("-")
