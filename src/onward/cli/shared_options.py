"""Options that several commands share: what the data is and how it is read, warm-up and clipping."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "AccumulationOption",
    "ClipNormOption",
    "DataOption",
    "LabelOption",
    "MapOption",
    "MaxLengthOption",
    "ReadingOptions",
    "WarmupOption",
]

AccumulationOption = Annotated[
    int,
    typer.Option(
        "--gradient-accumulation-steps",
        "--accumulation",
        min=1,
        help="Batches whose gradients make one update.",
    ),
]
WarmupOption = Annotated[
    float | None,
    typer.Option(
        min=0, help="Warm-up: updates, or a fraction of all if below 1; default: the artifacts' setting."
    ),
]
ClipNormOption = Annotated[
    float | None,
    typer.Option(min=0, help="Clip gradients to this norm, 0 for none; default: the artifacts' setting."),
]
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
MaxLengthOption = Annotated[int | None, typer.Option(min=1, help="Texts: cut them after so many tokens.")]


@dataclasses.dataclass(frozen=True)
class ReadingOptions:
    """How data is read; `command` makes an option of each field."""

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

    def settings(self) -> dict[str, Any]:
        """Every option by its name, as a run folder stores it."""
        return {**vars(self), "tokenizer": None if self.tokenizer is None else str(self.tokenizer)}
