"""The options of a run: commands that train take them, `run.json` keeps them, and ranks are sent them."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.choices import DeviceOption, MetricChoice, ScheduleChoice
from onward.cli.shared_options import DataOption, LabelOption, MapOption, PrefixOption, parse_rate

RunFolderOption = Annotated[
    Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the run is kept.")
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Resume the run in --output.")]
OverwriteRunOption = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in --output.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """What a run trains on, and how it is read; `command` makes an option of each field."""

    data: DataOption = None
    eval_data: Annotated[
        list[str] | None, typer.Option("--eval-data", metavar="[INPUT=]PATH", help="Data to evaluate on.")
    ] = None
    hold_out: Annotated[
        float | None, typer.Option("--hold-out", metavar="SHARE", help="Evaluate on this share of the data.")
    ] = None
    mapping: MapOption = None
    label: LabelOption = None
    normalize: Annotated[
        str | None,
        typer.Option(
            metavar="imagenet|half|none|MEAN,STD", help="Images: bring pixels to this mean and deviation."
        ),
    ] = None
    resize: Annotated[int | None, typer.Option(min=1, help="Images: the shorter side, before --crop.")] = None
    crop: Annotated[int | None, typer.Option(min=1, help="Images: cut this square from the middle.")] = None
    standardize: Annotated[
        bool, typer.Option("--standardize", help="Tables: bring columns to mean 0 and deviation 1.")
    ] = False
    drop: Annotated[
        list[str] | None,
        typer.Option("--drop", metavar="COLUMN", help="Tables: leave this column out; may be repeated."),
    ] = None
    text_column: Annotated[
        str | None,
        typer.Option("--text-column", metavar="COLUMN", help="The column of a table that has texts."),
    ] = None
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A tokenizer.json, where none is beside the model.")
    ] = None
    sample_rate: Annotated[
        int | None, typer.Option(min=1, help="WAV files: the rate that the model takes.")
    ] = None
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Images, WAV files: leave out those that cannot be read.")
    ] = False
    augment: Annotated[
        list[str] | None,
        typer.Option(
            "--augment", metavar="NAME[=HOW]", help="Images: flip, crop, colour, mixup; also flip,crop=0.2."
        ),
    ] = None
    max_length: Annotated[int | None, typer.Option(min=1, help="Texts: cut them after so many tokens.")] = (
        None
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions(ReadingOptions):
    """How it trains."""

    device: DeviceOption = "cpu"
    epochs: Annotated[int, typer.Option("--epochs", "-e", min=1, help="Passes over the data, in all.")] = 1
    batch_size: Annotated[
        int, typer.Option("--batch-size", "-b", min=1, help="Samples per batch, of all processes together.")
    ] = 32
    # a number or "auto": typer takes no union, and asks the parser alone
    learning_rate: Annotated[
        Any,
        typer.Option(
            "--learning-rate",
            "--lr",
            metavar="RATE|auto",
            parser=parse_rate,
            help="The highest learning rate; 'auto' finds one by a short trial. "
            "Default: the artifacts' setting, or 0.001.",
        ),
    ] = None
    schedule: Annotated[ScheduleChoice, typer.Option(help="The learning-rate schedule.")] = (
        ScheduleChoice.CONSTANT
    )
    warmup: Annotated[
        float | None,
        typer.Option(
            min=0, help="Warm-up: updates, or a fraction of all if below 1; default: the artifacts' setting."
        ),
    ] = None
    accumulation: Annotated[
        int,
        typer.Option("--gradient-accumulation-steps", "--accumulation", min=1, help="Batches per update."),
    ] = 1
    clip_norm: Annotated[
        float | None,
        typer.Option(min=0, help="Clip gradients to this norm, 0 for none; default: the artifacts' setting."),
    ] = None
    metric: Annotated[
        list[MetricChoice] | None, typer.Option("--metric", "-m", help="Compute when evaluating.")
    ] = None
    best: Annotated[
        str | None, typer.Option("--best", metavar="METRIC", help="What decides on the best epoch.")
    ] = None
    patience: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many epochs without progress.")
    ] = None
    save_every: Annotated[int | None, typer.Option(min=1, help="Also save after so many updates.")] = None
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints to keep.")] = 2
    seed: Annotated[int, typer.Option(min=0, help="Of shuffling, dropout and hold-out.")] = 0
    no_shuffle: Annotated[bool, typer.Option("--no-shuffle", help="Take samples in their order.")] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(TrainingOptions):
    """Where it trains, and who else is told."""

    prefix: PrefixOption = ""
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="FOLDER", help="Also write TensorBoard event files."),
    ] = None
    mlflow: Annotated[
        str | None, typer.Option(metavar="EXPERIMENT", help="Also log to MLflow, if it is installed.")
    ] = None
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Also log to Weights & Biases, if it is installed.")
    ] = None
    processes: Annotated[int, typer.Option("--processes", "-p", min=1, help="Processes on this machine.")] = 1
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages; the rest is data parallel.")] = 1
    shard_optimizer: Annotated[
        bool,
        typer.Option("--shard-optimizer", help="Keep only a share of the optimizer state on each process."),
    ] = False

    def to_json(self) -> dict[str, Any]:
        """Every option by its name, in types that JSON has."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}


def read_options(values: Mapping[str, Any]) -> RunOptions:
    """The options that `to_json` wrote, or another did; a `ValueError` names the first of another kind."""
    # the same annotations that the command line is made of: a file can say no more than it
    kinds = typing.get_type_hints(RunOptions, include_extras=True)
    options = {}
    for name, annotation in kinds.items():
        value = values.get(name)
        # an option that the file lacks is newer than the run: its default is what the run had
        if value is not None:
            kind, option = typing.get_args(annotation)
            try:
                options[name] = read_value(value, kind, least=option.min)
            except ValueError as error:
                raise ValueError(f"its option '{name}' is {str(value)[:40]!r}") from error
    return RunOptions(**options)


def read_value(value: Any, kind: Any, *, least: float | None = None) -> Any:
    """A value of JSON as the kind that an option has; a `ValueError` where it is of another."""
    if typing.get_origin(kind) is types.UnionType:  # with None
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if kind is Any:  # the learning rate
        if value == "auto":
            return value
        kind = float
    if typing.get_origin(kind) is list and isinstance(value, list):
        return [read_value(item, typing.get_args(kind)[0]) for item in value]
    if kind is bool and isinstance(value, bool):
        return value
    is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if kind in (int, float) and is_number and (least or 0) <= value < 2**63:  # NaN is refused too
        return value
    if (
        isinstance(kind, type)
        and issubclass(kind, str | Path)
        and isinstance(value, str)
        and "\0" not in value
    ):
        return kind(value)
    raise ValueError(f"{value!r} is no {kind}")
