"""What a command prints: tables and lines for people, one JSON document for programs, errors in a line and a hint."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from onward.escape import printable

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

    def _progress_console(self) -> Any:
        """The console that shows progress; None where nobody would see it move."""
        from rich.console import Console

        console = Console(stderr=True)
        # on stderr, so that a result can be piped while the bar is seen
        return None if self.silent or not console.is_terminal else console

    @contextlib.contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Show a spinner on a terminal."""
        console = self._progress_console()
        with contextlib.nullcontext() if console is None else console.status(text):
            yield

    @contextlib.contextmanager
    def counting(self, text: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A bar with speed and time left on a terminal, for work elsewhere: called with how much is done."""
        console = self._progress_console()
        if console is None:
            yield lambda done: None
            return
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
        )  # fmt: skip
        started = time.monotonic()

        def show(done: int) -> None:
            speed = done / max(time.monotonic() - started, 1e-9)
            bar.update(task, completed=done, description=f"{text}, {speed:.0f} batches/s")

        with progress.Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(text, total=total)
            yield show

    def track(self, items: Sequence[Item], text: str) -> Iterable[Item]:
        """The items, with a bar, speed and time left on a terminal."""
        console = self._progress_console()
        if console is None:
            return items
        from rich.progress import track

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

        console = Console(highlight=False)
        if title:
            # Text, not str: rich would read "[red]" in a name as markup. A table's own title is folded to its width.
            console.print(Text(printable(title, keep=""), style="bold"), soft_wrap=True)
        table = Table(box=None, pad_edge=False, show_header=any(columns))
        for column in columns:
            # folded, not cut: the end of a name is often what tells it from the next
            table.add_column(Text(printable(column, keep="")), overflow="fold")
        for row in rows:
            table.add_row(*(Text(printable(str(cell))) for cell in row))
        console.print(table)

    # rich is imported where something is shown: --json and --quiet start faster without it
    def sizes(self, title: str, sizes: Mapping[str, int]) -> None:
        """A table of files and how large they are."""
        self.table(title, ["file", "size"], [[name, human_size(size)] for name, size in sizes.items()])

    def result(self, document: Mapping[str, Any]) -> None:
        """The whole result, for --json."""
        if self.as_json:
            print(json.dumps(_plain(document), indent=2, allow_nan=False))

    def fail(self, message: str, hint: str, *, label: str = "error: ") -> None:
        """An error, in one line and a hint; names from a file may be long, so the middle of a long text goes."""
        # a hostile file may have names of megabytes, and a terminal shows none of the rest then
        message, hint = _shortened(message), _shortened(hint)
        if self.as_json:
            # on stdout, where a program reads the result
            print(json.dumps({"error": message, "hint": hint}))
            return
        print(f"{label}{printable(message)}", file=sys.stderr)
        if hint:
            print(f"hint: {printable(hint)}", file=sys.stderr)


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"


def human_size(count: float) -> str:
    """Bytes in the unit that people read.

    >>> human_size(1536)
    '1.5 KB'
    """
    units = ["B", "KB", "MB", "GB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        del units[0]
    return f"{count:.0f} B" if units == ["B", "KB", "MB", "GB"] else f"{count:.1f} {units[0]}"


def _plain(value: Any) -> Any:
    """A value as JSON has it: texts for paths, lists for arrays, null for a number that is none.

    >>> _plain({"recall": float("nan"), "epochs": (1, 2)})
    {'recall': None, 'epochs': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    # by the method: numpy's scalars and arrays have it, and numpy need not be loaded to know
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None  # JSON's grammar has neither NaN nor Infinity
    return value if value is None or isinstance(value, bool | int | str) else str(value)
