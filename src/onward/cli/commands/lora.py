"""`onward lora`: adds adapters to a model, extracts them from a checkpoint, merges them into the weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.command import command
from onward.cli.errors import CommandError
from onward.cli.output import Output, human_size
from onward.cli.paths import OverwriteOption, file_target, new_file, read_model


@command(
    "onward lora inject model.onnx adapted.onnx --rank 8 --target 'encoder.*.query.*'",
    "onward artifacts model.onnx --loss cross-entropy --lora 8     # and train them, in one go",
)
def inject(
    output: Output,
    model: Annotated[Path, typer.Argument(help="An ONNX file.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The file to write.", show_default=False)],
    rank: Annotated[int, typer.Option("--rank", "-r", min=1, help="The rank of the adapters.")] = 8,
    alpha: Annotated[float, typer.Option(help="Their scale is alpha / rank.")] = 16.0,
    targets: Annotated[
        list[str] | None,
        typer.Option("--target", "-t", metavar="NAME", help="Weights to adapt; patterns count."),
    ] = None,
    dropout: Annotated[
        float, typer.Option(min=0, max=0.99, help="Of the adapters' input, in training.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the adapters' first values.")] = 0,
    overwrite: OverwriteOption = False,
) -> None:
    """Add adapters to a model, which computes what it did before."""
    from onward.lora import LoRA, apply_lora

    # "nan" and "inf" are numbers to the command line, and would fill the weights
    if not math.isfinite(alpha):
        raise CommandError(f"--alpha is {alpha}: it must be a finite number", "for example --alpha 16")
    read_model(model)
    with output.working("adapting"), new_file(target, overwrite=overwrite) as file:
        made = apply_lora(
            str(model), LoRA(rank=rank, alpha=alpha, targets=targets or "*", dropout=dropout, seed=seed)
        )
        _save(made, file)
    names = _adapters(made)
    output.line(f"{target}: {len(names) // 2} weights adapted, {human_size(target.stat().st_size)}")
    output.line(f"next: onward artifacts {target} --train '*.lora_?' --loss LOSS")
    output.result({"path": target, "adapters": names})


@command("onward lora extract run/best adapters.safetensors")
def extract(
    output: Output,
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint with adapters.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="A .safetensors file or a checkpoint.", show_default=False)],
    overwrite: OverwriteOption = False,
) -> None:
    """Write the adapters of a checkpoint alone."""
    from onward import checkpoint as checkpoints
    from onward.lora import extract_lora, save_lora

    with file_target(target, overwrite=overwrite):
        data = checkpoints.load(checkpoint)
        names = list(extract_lora(data).trainable)
        save_lora(data, target)
    output.line(f"{target}: {len(names)} adapter matrices, {human_size(target.stat().st_size)}")
    output.result({"path": target, "adapters": names})


@command("onward lora merge trained.onnx merged.onnx")
def merge(
    output: Output,
    model: Annotated[Path, typer.Argument(help="An exported model with adapters.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The file to write.", show_default=False)],
    dequantize: Annotated[
        bool,
        typer.Option("--dequantize", help="Make adapted quantized weights float, so that they merge too."),
    ] = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Add adapters to the weights: the same outputs from a smaller, faster model."""
    from onward.lora import merge_lora

    # before the weights are read: a look at the names is enough
    if not _adapters(read_model(model)):
        raise CommandError(
            f"'{model}' has no adapters to merge",
            "deploy a run of adapters first: onward deploy run adapted.onnx",
        )
    with output.working("merging"), new_file(target, overwrite=overwrite) as file:
        made = merge_lora(str(model), dequantize=dequantize)
        _save(made, file)
    left = _adapters(made)
    output.line(f"{target}: {human_size(target.stat().st_size)}, from {human_size(model.stat().st_size)}")
    if left:
        output.note(
            f"{len(left) // 2} adapters of quantized weights stay separate (--dequantize merges them)"
        )
    output.result({"path": target, "bytes": target.stat().st_size, "separate": left})


def _adapters(model: Any) -> list[str]:
    """The matrices of adapters in a model."""
    return [tensor.name for tensor in model.graph.initializer if tensor.name.endswith((".lora_a", ".lora_b"))]


def _save(model: Any, file: Path) -> None:
    import onnx

    onnx.save(model, str(file))


lora = typer.Typer(help="Low-rank adapters: inject, extract, merge.", no_args_is_help=True)
for _command in (inject, extract, merge):
    _command.register(lora)
