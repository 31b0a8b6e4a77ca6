"""Options that several commands share, and what is checked of their values."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.choices import LossChoice, OptimizerChoice
from onward.cli.errors import CommandError
from onward.cli.paths import read_model

TrainOption = Annotated[
    list[str] | None,
    typer.Option("--train", metavar="NAME", help="Train these; patterns such as 'encoder.*' count."),
]
FreezeOption = Annotated[
    list[str] | None, typer.Option("--freeze", metavar="NAME", help="Do not train these.")
]
OptimizerOption = Annotated[OptimizerChoice, typer.Option("--optimizer", help="The update rule.")]
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data", "-d", metavar="[INPUT=]PATH",
        help="Training data: .npz, .npy, .csv, .jsonl, .parquet, .safetensors, a folder of images or WAV files, "
        "or module:function.",
    ),
]  # fmt: skip
MapOption = Annotated[
    list[str] | None,
    typer.Option("--map", metavar="INPUT=ARRAY", help="Which array of the data is which input of the model."),
]
LabelOption = Annotated[
    str | None, typer.Option("--label", metavar="COLUMN", help="The label column of a table.")
]
TaskOption = Annotated[
    str | None,
    typer.Option("--task", metavar="TASK", help="The task. Default: by the model and the data."),
]
CheckpointOption = Annotated[
    str | None, typer.Option("--checkpoint", "-c", help="'best', 'latest' or a file; best by default.")
]
PrefixOption = Annotated[str, typer.Option(help="The prefix of the artifacts' file names.")]
BatchSizeOption = Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Samples at a time.")]


_TEXT_PANEL = "Text"


@dataclasses.dataclass(frozen=True)
class Generation:
    """How text is written: the likeliest words, or drawn where one of the options of drawing is given."""

    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="The most tokens of an answer.", rich_help_panel=_TEXT_PANEL)
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, help="Draw words; above 1 more freely, 0 takes the likeliest.", rich_help_panel=_TEXT_PANEL
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Draw from the likeliest words of this share.", rich_help_panel=_TEXT_PANEL
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(min=0, help="Above 1: say less again.", rich_help_panel=_TEXT_PANEL)
    ] = None
    seed: Annotated[
        int | None, typer.Option(min=0, help="Draw the same words again.", rich_help_panel=_TEXT_PANEL)
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="End an answer before this word.", rich_help_panel=_TEXT_PANEL),
    ] = None
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Another adapter of the folder, or a file of one.",
            rich_help_panel=_TEXT_PANEL,
        ),
    ] = None

    def settings(self, *, top_k: int | None, max_new_tokens: int) -> dict[str, Any]:
        """The options as `onward.load`'s result takes them."""
        drawing = {"temperature": self.temperature, "top_p": self.top_p, "top_k": top_k, "seed": self.seed}
        chosen = {name: value for name, value in drawing.items() if value is not None}
        # dividing scores by zero: what people mean is the likeliest word
        if self.temperature == 0:
            chosen = {}
        more = {"repetition_penalty": self.repetition_penalty, "stop": self.stop}
        return {
            "max_new_tokens": self.max_new_tokens or max_new_tokens,
            **({"do_sample": True, **chosen} if chosen else {}),
            **{name: value for name, value in more.items() if value},
        }

    def load(self, model: Path) -> Any:
        """A folder that writes text, with the adapter that the options name."""
        from onward import load

        pipeline: Any = load(model)
        if getattr(pipeline, "task", None) != "text-generation":
            raise CommandError(f"'{model}' does not write text", "give a language model's folder")
        return pipeline if self.adapter is None else pipeline.use(self.adapter)


@contextlib.contextmanager
def known_names() -> Iterator[None]:
    """Refuse a name of --freeze that the model does not have: the library warns, here it is a typing mistake."""
    from onward.artifacts.choose import UnknownParameterWarning
    from onward.errors import SEE_NAMES

    with warnings.catch_warnings():
        # after the fact in Python, before anything is written here
        warnings.simplefilter("error", UnknownParameterWarning)
        try:
            yield
        except UnknownParameterWarning as unknown:
            raise CommandError(
                f"--freeze {unknown.name}: {unknown.name} is not found among the parameters{unknown.hint}",
                SEE_NAMES,
            ) from None


def refuse_unused(unused: Mapping[str, Any]) -> None:
    """Refuse options that would do nothing here, each in words that end with what it is for."""
    # one that is ignored looks as if it had been followed
    for message, is_given in unused.items():
        if is_given:
            raise CommandError(message, "leave it away")


def require_finite(options: object, *names: str) -> None:
    """Refuse "nan" and "inf", which are numbers to the command line."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not math.isfinite(value):
            raise CommandError(
                f"--{name.replace('_', '-')} is {value}: it must be a finite number",
                "give a number, or leave the option out",
            )


def parse_pairs(pairs: Sequence[str], option: str) -> dict[str, str]:
    """`NAME=VALUE` options as a dict."""
    values: dict[str, str] = {}
    for pair in pairs:
        # the first "=": names of inputs have none, names of arrays may
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise CommandError(f"{option} takes NAME=VALUE, got '{pair}'", f"for example {option} image=x")
        values[name] = value
    return values


def parse_rate(text: Any) -> Any:
    """A learning rate, or "auto"."""
    if text is None or text == "auto":
        return text
    try:
        rate = float(text)
    except ValueError:
        # refused below, with the same words as a negative number
        rate = -1.0
    if not (math.isfinite(rate) and rate >= 0):
        raise typer.BadParameter(f"'{text}' is not a learning rate: it is a number, 0 or more, or 'auto'")
    return rate


# the operators after which a loss should not come, and what it takes instead
_UNFIT = {
    LossChoice.CROSS_ENTROPY: ("Softmax", "scores before a Softmax"),
    LossChoice.BCE_WITH_LOGITS: ("Sigmoid", "scores before a Sigmoid"),
    LossChoice.NLL: ("Softmax", "logarithms of probabilities, which LogSoftmax gives"),
}


def advise_on_loss(model: Path, loss: LossChoice, loss_input: Sequence[str] = ()) -> str | None:
    """A warning about a loss on the model's output; None if there is no problem."""
    if loss not in _UNFIT:
        return None
    graph = read_model(model).graph
    if not graph.output:
        return None
    read = loss_input[0] if loss_input else graph.output[0].name
    operator, expected = _UNFIT[loss]
    # the last operator alone: a Softmax further inside, as in attention, is no mistake
    node = next((node for node in graph.node if read in node.output), None)
    if node is None or node.op_type != operator or node.domain not in ("", "ai.onnx"):
        return None
    remark = f"'{read}' comes out of a {operator}, and {loss} takes {expected}"
    fix = "use --loss cross-entropy" if loss is LossChoice.NLL else "add"
    return f"{remark}: {fix} --loss-input {node.input[0]}"
