"""The `onward` app: all commands in one place. Nothing heavy is imported until a command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from onward.cli.commands import (
    artifacts,
    bench,
    check,
    convert,
    deploy,
    distributed,
    doctor,
    evaluate,
    export,
    finetune,
    gradcheck,
    inspect,
    lora,
    train,
    web,
)
from onward.cli.usage import Commands

__all__ = ["app"]

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


def _version(wanted: bool) -> None:
    if wanted:
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


for _module in (
    export, artifacts, check, train, finetune, evaluate, deploy, inspect, bench, gradcheck, convert, lora, distributed,
    web, doctor,
):  # fmt: skip
    _module.register(app)
