"""`onward lora`: adapters into a model, out of a checkpoint, and into the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.frame import CommandError, Output, command, examples, human_size

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(help="Low-rank adapters: inject, extract, merge.", no_args_is_help=True)
    group.command(
        "inject",
        epilog=examples(
            "onward lora inject model.onnx adapted.onnx --rank 8 --target 'encoder.*.query.*'",
            "onward artifacts model.onnx --loss cross-entropy --lora 8     # and train them, in one go",
        ),
    )(inject)
    group.command("extract", epilog=examples("onward lora extract run/best adapters.safetensors"))(extract)
    group.command("merge", epilog=examples("onward lora merge trained.onnx merged.onnx"))(merge)
    app.add_typer(group, name="lora")


@command
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
    seed: Annotated[int, typer.Option(help="Of the adapters' first values.")] = 0,
) -> None:
    """Add adapters to a model, which computes what it did before."""
    from onward.lora import LoRA, apply_lora

    _require(model)
    made = apply_lora(
        str(model), LoRA(rank=rank, alpha=alpha, targets=targets or "*", dropout=dropout, seed=seed)
    )
    names = [tensor.name for tensor in made.graph.initializer if tensor.name.endswith((".lora_a", ".lora_b"))]
    _save(made, target)
    output.line(f"{target}: {len(names) // 2} weights adapted, {human_size(target.stat().st_size)}")
    output.line(f"next: onward artifacts {target} --train '*.lora_?' --loss LOSS")
    output.result({"path": target, "adapters": names})


@command
def extract(
    output: Output,
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint with adapters.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="A .safetensors file or a checkpoint.", show_default=False)],
) -> None:
    """Write the adapters of a checkpoint alone."""
    from onward import checkpoint as checkpoints
    from onward.lora import extract_lora, save_lora

    data = checkpoints.load(checkpoint)
    names = list(extract_lora(data).trainable)
    save_lora(data, target)
    output.line(f"{target}: {len(names)} adapter matrices, {human_size(target.stat().st_size)}")
    output.result({"path": target, "adapters": names})


@command
def merge(
    output: Output,
    model: Annotated[Path, typer.Argument(help="An exported model with adapters.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The file to write.", show_default=False)],
    dequantize: Annotated[
        bool,
        typer.Option("--dequantize", help="Make adapted quantized weights float, so that they merge too."),
    ] = False,
) -> None:
    """Add adapters to the weights: the same outputs from a smaller, faster model."""
    from onward.lora import merge_lora

    _require(model)
    made = merge_lora(str(model), dequantize=dequantize)
    left = [t.name for t in made.graph.initializer if t.name.endswith((".lora_a", ".lora_b"))]
    _save(made, target)
    output.line(f"{target}: {human_size(target.stat().st_size)}, from {human_size(model.stat().st_size)}")
    if left:
        output.note(
            f"{len(left) // 2} adapters of quantized weights stay separate (--dequantize merges them)"
        )
    output.result({"path": target, "bytes": target.stat().st_size, "separate": left})


def _require(model: Path) -> None:
    if not model.is_file():
        raise CommandError(f"no model at '{model}'", "is the path right?")


def _save(model: Any, target: Path) -> None:
    """Write a model so that an older file stays until the new one is whole."""
    import os

    import onnx

    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.new")
    try:
        onnx.save(model, str(temporary))
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
