"""`onward chat`: a conversation with a language model in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.command import command
from onward.cli.output import Output
from onward.cli.shared_options import Generation
from onward.escape import printable

# what a user may type instead of a question
_AGAIN, _END, _USE = "/new", "/end", "/use"


@command(
    'onward chat assistant --system "Answer in one sentence."',
    "onward chat assistant --temperature 0.7 --top-p 0.9 --seed 1",
    'echo "Where does the path end?" | onward chat assistant',
)
def chat(
    output: Output,
    *,
    model: Annotated[
        Path, typer.Argument(help="A language model's folder, or a model file in it.", show_default=False)
    ],
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the model is told before the conversation.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", "-k", min=1, help="Draw from so many of the likeliest words.")
    ] = None,
    generation: Generation,
) -> None:
    """Talk with a language model: it writes as it goes, and remembers what was said. /new begins again, /end ends."""
    from onward.errors import DataError, ModelError
    from onward.language.chat import read_template

    pipeline = generation.load(model)
    # a base without a template cannot converse: say so before the first question
    read_template(pipeline.folder)
    options = generation.settings(top_k=top_k, max_new_tokens=256)
    beginning = [] if system is None else [{"role": "system", "content": system}]
    messages = list(beginning)
    for question in _questions(output):
        if question == _AGAIN:
            messages = list(beginning)
            continue
        if question.split()[0] == _USE:
            try:
                pipeline.use(question.removeprefix(_USE).strip() or None)
            except ModelError as error:  # the conversation goes on with the adapter that it has
                output.note(f"{error}")
            continue
        # a typing mistake, not a question for the model
        if question.startswith("/") and question[1:].isalpha():
            output.note(f"there are {_AGAIN}, {_USE} NAME ({_USE} alone is the base), and {_END}")
            continue
        messages.append({"role": "user", "content": question})
        while True:
            try:
                answer = _write(output, pipeline, messages, options)
                break
            except DataError:
                # the conversation has become longer than the model reads: what was said first goes first
                if len(messages) - len(beginning) < 3:
                    raise
                output.note(
                    "the conversation is longer than the model reads: its first question is forgotten"
                )
                del messages[len(beginning) : len(beginning) + 2]
        messages.append({"role": "assistant", "content": answer})
    output.result({"messages": messages})


def _questions(output: Output) -> Iterator[str]:
    """What the user types, line by line, until the end of the input."""
    while True:
        if sys.stdin.isatty() and not output.silent:
            print("> ", end="", flush=True, file=sys.stderr)
        line = sys.stdin.readline()
        if not line or line.strip() == _END:
            return
        if line.strip():
            yield line.strip()


def _write(output: Output, pipeline: Any, messages: list[dict[str, str]], options: dict[str, Any]) -> str:
    """Print an answer while it is written; returns it whole."""
    pieces = []
    for piece in pipeline.stream(messages, **options):
        pieces.append(piece)
        if not output.silent:
            print(printable(piece), end="", flush=True)
    if not output.silent:
        print(flush=True)
    return "".join(pieces).strip()
