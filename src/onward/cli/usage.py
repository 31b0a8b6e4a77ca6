"""Formats usage errors as one line and a hint, like every other error; as JSON with --json.

Typer would show a box with the usage above it. The message here is shorter, and suggests a similar option or value.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from onward.cli.command import Output

__all__ = ["Commands", "explain_usage"]

# typer has a click of its own since 0.27 and used the package before: only this way names both
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
_MAY_BE_EMPTY = {"--prefix", "--title", "--text", "-t"}
_CHOICE = re.compile(r"(?P<before>.*?)(?P<given>'[^']*') is not one of (?P<known>.*?)\.?$", re.DOTALL)


class Commands(TyperGroup):
    """The commands of the app; wrong usage is reported in one line."""

    def main(
        self, args: Sequence[str] | None = None, *more: Any, standalone_mode: bool = True, **named: Any
    ) -> Any:
        """Run, and leave with an exit code; in a program (`standalone_mode=False`), raise as typer does."""
        if not standalone_mode:
            return super().main(args, *more, standalone_mode=False, **named)
        given = list(sys.argv[1:] if args is None else args)
        self._refuse_empty(given)
        try:
            code = super().main(args, *more, standalone_mode=False, **named)
        except typer.Abort:
            self._leave(given, "interrupted", "", code=130, label="")
        except _UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # the help, which it has printed or holds
                print(error, end="\n" if str(error) else "")
                sys.exit(2)
            message, hint = explain_usage(error)
            self._leave(given, message, hint, code=2)
        sys.exit(code if isinstance(code, int) else 0)

    def _refuse_empty(self, given: Sequence[str]) -> None:
        """An empty path would mean the current folder, and mostly is a variable of the shell without a value."""
        for before, argument in zip(["", *given], given):
            name, equals, value = argument.partition("=")
            empty_option = name if equals and not value and name.startswith("--") else None
            option = before if not argument else empty_option
            if option is not None and option not in _MAY_BE_EMPTY:
                what = f"the value of {option} is empty" if option.startswith("-") else "an argument is empty"
                self._leave(given, what, "is it a variable of the shell that has no value?", code=2)

    def _leave(
        self, given: Sequence[str], message: str, hint: str, *, code: int, label: str = "error: "
    ) -> NoReturn:
        Output(as_json="--json" in given).fail(message, hint, label=label)
        sys.exit(code)


def explain_usage(error: Any) -> tuple[str, str]:
    """What to print about wrong usage: a line, and what to do."""
    text = re.sub(r"\s+", " ", error.format_message()).strip()
    text = text.replace("Value error, ", "").replace("Input should be", "it should be")
    context = getattr(error, "ctx", None)
    where = getattr(context, "command_path", None) or "onward"
    hint = getattr(error, "hint", None) or f"{where} --help"
    choice = _CHOICE.match(text)
    if choice:
        known = re.findall(r"'([^']*)'", choice["known"])
        given = choice["given"].strip("'")
        starts = [word for word in known if given and word.startswith(given.lower())]
        found = starts or difflib.get_close_matches(given, known, n=1, cutoff=0.5)
        listed = f"one of {', '.join(known)}"
        return f"{choice['before']}'{given}' is unknown", (
            f"did you mean {' or '.join(map(repr, found))}? It is {listed}" if found else f"it is {listed}"
        )
    for pattern, form in (
        (r"^(.*?)\.? Choose from: (.*)$", "choose from {}"),
        (r"^(.*?) \(Possible options: (.*)\)$", "did you mean {}?"),
        (r"^(.*?)\.? Did you mean (.*?)\?$", "did you mean {}?"),
    ):
        found = re.match(pattern, text)
        if found:
            return found[1], form.format(found[2])
    return text.rstrip("."), hint
