"""The `onward` app: all commands in one place. Nothing heavy is imported until a command runs."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from onward.cli.output import Output

# --- Formats usage errors as one line and a hint, like every other error; as JSON with --json.
#
# Typer would show a box with the usage above it. The message here is shorter, and suggests a similar option
# or value.


# typer has a click of its own since 0.27 and used the package before: only this way names both
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
# texts of which nothing is a value too
_MAY_BE_EMPTY = {"--prefix", "--title", "--text", "-t"}
_CHOICE = re.compile(r"(?P<before>.*?)(?P<value>'[^']*') is not one of (?P<choices>.*?)\.?$", re.DOTALL)


class Commands(TyperGroup):
    """The commands of the app; wrong usage is reported in one line."""

    def main(
        self, args: Sequence[str] | None = None, *more: Any, standalone_mode: bool = True, **named: Any
    ) -> Any:
        """Run, and leave with an exit code; in a program (`standalone_mode=False`), raise as typer does."""
        # a program that calls the app wants exceptions, not an exit
        if not standalone_mode:
            return super().main(args, *more, standalone_mode=False, **named)
        arguments = list(sys.argv[1:] if args is None else args)
        # before parsing: Path("") is the current folder, and --overwrite would be right there
        self._refuse_empty(arguments)
        try:
            code = super().main(args, *more, standalone_mode=False, **named)
        except typer.Abort:
            self._leave(arguments, "interrupted", "", code=130, label="")
        except _UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # the help, which it has printed or holds
                print(error, end="\n" if str(error) else "")
                sys.exit(2)
            message, hint = explain_usage(error)
            self._leave(arguments, message, hint, code=2)
        sys.exit(code if isinstance(code, int) else 0)

    def _refuse_empty(self, arguments: Sequence[str]) -> None:
        """An empty path would mean the current folder, and mostly is a variable of the shell without a value."""
        for before, argument in zip(["", *arguments], arguments):
            name, equals, value = argument.partition("=")
            empty_option = name if equals and not value and name.startswith("--") else None
            option = before if not argument else empty_option
            if option is not None and option not in _MAY_BE_EMPTY:
                problem = (
                    f"the value of {option} is empty" if option.startswith("-") else "an argument is empty"
                )
                self._leave(arguments, problem, "is it a variable of the shell that has no value?", code=2)

    def _leave(
        self, arguments: Sequence[str], message: str, hint: str, *, code: int, label: str = "error: "
    ) -> NoReturn:
        Output(as_json="--json" in arguments).fail(message, hint, label=label)
        sys.exit(code)


def explain_usage(error: Any) -> tuple[str, str]:
    """What to print about wrong usage: a line, and what to do."""
    text = re.sub(r"\s+", " ", error.format_message()).strip()
    text = text.replace("Value error, ", "").replace("Input should be", "it should be")
    context = getattr(error, "ctx", None)
    where = getattr(context, "command_path", None) or "onward"
    hint = getattr(error, "hint", None) or f"{where} --help"
    choice = _CHOICE.match(text)
    if choice:  # typer lists the choices, and does not say which is near
        # typer's words, for typer has no form of this error that carries its parts
        value, choices = choice["value"].strip("'"), re.findall(r"'([^']*)'", choice["choices"])
        near = [word for word in choices if value and word.startswith(value.lower())]
        near = near or difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
        listed = f"one of {', '.join(choices)}"
        hint = f"did you mean {' or '.join(map(repr, near))}? It is {listed}" if near else f"it is {listed}"
        return f"{choice['before']}'{value}' is unknown", hint
    for pattern, form in (
        (r"^(.*?)\.? Choose from: (.*)$", "choose from {}"),
        (r"^(.*?) \(Possible options: (.*)\)$", "did you mean {}?"),
        (r"^(.*?)\.? Did you mean (.*?)\?$", "did you mean {}?"),
    ):
        parts = re.match(pattern, text)
        if parts:
            return parts[1], form.format(parts[2])
    return text.rstrip("."), hint


app = typer.Typer(
    cls=Commands,
    name="onward",
    help="Train any ONNX model on the stock onnxruntime wheel.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="From a model to a trained one in three commands:\n\n"
    "  $ onward artifacts model.onnx --loss cross-entropy\n\n"
    "  $ onward train artifacts --data data.npz --epochs 10\n\n"
    "  $ onward deploy run trained.onnx --quantize int8",
)


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        print(f"onward {version('onward')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
) -> None:
    """Train any ONNX model on the stock onnxruntime wheel."""


# In the order of the help: each is a module of onward.cli.commands, and there a command or a group of this name.
COMMANDS = (
    "export", "artifacts", "check", "train", "finetune", "chat", "evaluate", "infer", "deploy", "inspect", "bench",
    "gradcheck", "convert", "lora", "distributed", "web", "mobile", "doctor", "conform",
)  # fmt: skip

for _name in COMMANDS:
    _command = getattr(importlib.import_module(f"onward.cli.commands.{_name}"), _name)
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name)
    else:
        _command.register(app)
