"""Shared by all commands: --json, --quiet, --debug, --config, and one-line errors.

`command` wraps a function: it gets these options without naming them, its errors become one line with a hint
and exit code 1, Ctrl-C and SIGTERM become exit code 130. A command reports its results through `Output`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import logging
import signal
import sys
import threading
import time
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from onward import limits
from onward.cli.config_file import read_settings
from onward.cli.error_lines import explain
from onward.cli.errors import CommandError
from onward.escape import printable

__all__ = ["CommandError", "Output", "command", "examples", "human_size"]

_PANEL = "Common"
_LIMITS = {field.name for field in dataclasses.fields(limits.Limits)}
_LONGEST = 4000  # characters of an error that are shown
Item = TypeVar("Item")


class Output:
    """The output of a command: tables and lines, or one JSON document."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False, debug: bool = False) -> None:
        self.as_json, self.quiet, self.debug = as_json, quiet, debug

    @property
    def silent(self) -> bool:
        """Whether to print only the result."""
        return self.as_json or self.quiet

    def note(self, text: str) -> None:
        """Print a note on stderr."""
        if not self.silent:
            from rich.console import Console

            Console(stderr=True, highlight=False, soft_wrap=True).print(
                printable(text), style="dim", markup=False
            )

    @contextlib.contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Show a spinner on a terminal."""
        if self.silent:
            yield
            return
        from rich.console import Console

        console = Console(stderr=True)
        if not console.is_terminal:
            yield
            return
        with console.status(text):
            yield

    @contextlib.contextmanager
    def counting(self, text: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A bar with speed and time left on a terminal, for work elsewhere: called with how much is done."""
        from rich.console import Console

        console = Console(stderr=True)
        if self.silent or not console.is_terminal:
            yield lambda done: None
            return
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
        )  # fmt: skip
        begun = time.monotonic()

        def show(done: int) -> None:
            speed = done / max(time.monotonic() - begun, 1e-9)
            bar.update(task, completed=done, description=f"{text}, {speed:.0f} batches/s")

        with progress.Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(text, total=total)
            yield show

    def track(self, items: Sequence[Item], text: str) -> Iterable[Item]:
        """The items, with a bar, speed and time left on a terminal."""
        if self.silent:
            return items
        from rich.console import Console
        from rich.progress import track

        console = Console(stderr=True)
        if not console.is_terminal:
            return items
        return track(items, description=text, console=console, transient=True)

    def line(self, text: str) -> None:
        """A line of the result."""
        if not self.silent:
            from rich.console import Console

            Console(highlight=False, soft_wrap=True).print(printable(text), markup=False)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table of the result."""
        if self.silent or not rows:
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=Text(printable(title, keep="")) if title else None,
            title_justify="left",
            box=None,
            pad_edge=False,
            title_style="bold",
            show_header=any(columns),
        )
        for column in columns:
            table.add_column(Text(printable(column, keep="")), overflow="fold")
        for row in rows:
            table.add_row(*(Text(printable(str(cell))) for cell in row))
        Console(highlight=False).print(table)

    def result(self, document: Mapping[str, Any]) -> None:
        """The whole result, for --json."""
        if self.as_json:
            print(json.dumps(document, indent=2, default=_plain))

    def fail(self, message: str, hint: str, *, label: str = "error: ") -> None:
        """An error, in one line and a hint; names from a file may be long, so the middle of a long text goes."""
        message, hint = _shortened(message), _shortened(hint)
        if self.as_json:
            print(json.dumps({"error": message, "hint": hint}))
            return
        print(f"{label}{printable(message)}", file=sys.stderr)
        if hint:
            print(f"hint: {printable(hint)}", file=sys.stderr)


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function that takes an `Output` first the shared options and behaviour of a command.

    An argument that is a dataclass stands for one option of each of its fields.
    """
    hints = _hints(function)
    own = list(inspect.signature(function).parameters.values())[1:]
    groups = {p.name: hints[p.name] for p in own if dataclasses.is_dataclass(hints[p.name])}
    shared = {
        "as_json": Annotated[
            bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=_PANEL)
        ],
        "quiet": Annotated[
            bool, typer.Option("--quiet", "-q", help="Print errors only.", rich_help_panel=_PANEL)
        ],
        "debug": Annotated[
            bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=_PANEL)
        ],
        "limit": Annotated[
            list[str] | None,
            typer.Option(
                "--limit",
                metavar="NAME=NUMBER",
                help="Raise a limit on what files may ask for: docs/security.md.",
                rich_help_panel=_PANEL,
            ),
        ],
        "config": Annotated[
            Path | None,
            typer.Option(
                "--config",
                metavar="FILE",
                is_eager=True,
                callback=_configure,
                help="Take options from this TOML file; flags win.",
                rich_help_panel=_PANEL,
            ),
        ],
    }

    @functools.wraps(function)
    def run(
        *,
        as_json: bool,
        quiet: bool,
        debug: bool,
        limit: list[str] | None,
        config: Path | None,
        **options: Any,
    ) -> None:
        output = Output(as_json=as_json, quiet=quiet, debug=debug)
        for name, group in groups.items():
            fields = [field.name for field in dataclasses.fields(group)]
            options[name] = group(**{field: options.pop(field) for field in fields if field in options})
        try:
            with (
                _terminated_as_interrupted(),
                _own_logging(output),
                limits.override(**_limits(limit or ())),
            ):
                code = function(output, **options)
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt as stop:
            output.fail(str(stop) or "interrupted", "", label="")
            raise typer.Exit(130) from None
        except Exception as error:
            if debug:
                traceback.print_exc()
            message, hint = explain(error)
            output.fail(message, hint)
            raise typer.Exit(1) from None
        if code:
            raise typer.Exit(code)

    parameters = []
    for parameter in own:
        if parameter.name in groups:
            parameters += inspect.signature(groups[parameter.name]).parameters.values()
        else:
            parameters.append(parameter)
    hints |= {name: kind for group in groups.values() for name, kind in _hints(group).items()}
    parameters = [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in parameters
    ]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=_default(name))
        for name, kind in shared.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(function, include_extras=True)


def examples(*lines: str) -> str:
    """Examples for the end of a command's help."""
    return "\n\n".join(["Examples:", *(f"  $ {line}" for line in lines)])


def human_size(count: float) -> str:
    """Bytes in the unit that people read.

    >>> human_size(1536)
    '1.5 KB'
    """
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def _default(name: str) -> Any:
    return None if name in ("config", "limit") else False


def _limits(given: Sequence[str]) -> dict[str, int]:
    """`NAME=NUMBER` options as limits."""
    found = {}
    for text in given:
        name, _, number = text.partition("=")
        if name not in _LIMITS or not (number.isascii() and number.isdigit()) or not int(number[:19]):
            raise CommandError(
                f"--limit takes NAME=NUMBER, got '{text}'", f"the names are {', '.join(sorted(_LIMITS))}"
            )
        found[name] = int(number[:19])
    return found


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


def _plain(value: Any) -> Any:
    """What JSON has no form for: paths, numpy numbers and arrays."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
