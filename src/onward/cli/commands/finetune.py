"""`onward finetune`: a model that others have trained, and data of one's own, in one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.choices import DeviceOption, QuantizeChoice
from onward.cli.command import CommandError, Output, command, examples
from onward.cli.commands.train import require_finite
from onward.cli.model_file import read_model
from onward.cli.output_paths import file_target, folder_target, require_folder_target
from onward.cli.shared_options import ReadingOptions
from onward.escape import first_of

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "finetune",
        epilog=examples(
            "onward finetune smollm --lora --data chat.jsonl --output assistant     # a language model's folder",
            "onward finetune model.onnx --data pictures --output mine.onnx          # a classifier",
        ),
    )(finetune)


@command
def finetune(
    output: Output,
    model: Annotated[
        Path,
        typer.Argument(
            help="A language model's folder (onward export) or published model, or an ONNX file.",
            show_default=False,
        ),
    ],
    data: Annotated[
        Path,
        typer.Option(
            "--data",
            "-d",
            help="JSON lines of messages, prompts or texts; or a classifier's pictures or table.",
            show_default=False,
        ),
    ],
    target: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the result.", show_default=False)
    ],
    lora: Annotated[
        bool, typer.Option("--lora", help="Train low-rank adapters; the base stays as it is.")
    ] = False,
    rank: Annotated[int, typer.Option(min=1, help="The rank of the adapters.")] = 8,
    alpha: Annotated[float, typer.Option(help="Their scale is alpha / rank.")] = 16.0,
    targets: Annotated[
        list[str] | None,
        typer.Option("--target", "-t", metavar="NAME", help="Weights to adapt; patterns count."),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option("--epochs", "-e", min=1, help="Passes over the data; 5, a language model 1.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", "-b", min=1, help="Samples per step; 32, a language model 1."),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The layer to replace, or the value to put a new one on."),
    ] = None,
    reading: ReadingOptions = ReadingOptions(),  # noqa: B008  # frozen
    augment: Annotated[
        list[str] | None,
        typer.Option("--augment", metavar="NAME[=HOW]", help="Images: flip, crop, colour, mixup."),
    ] = None,
    accumulation: Annotated[
        int,
        typer.Option(
            "--gradient-accumulation-steps",
            "--accumulation",
            min=1,
            help="Steps whose gradients make one update.",
        ),
    ] = 1,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a text that are read; a language model: 512.")
    ] = None,
    packing: Annotated[
        bool, typer.Option("--packing", help="Put short examples into one row; they do not see each other.")
    ] = False,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", "--lr", min=0, help="The highest learning rate.")
    ] = None,
    hold_out: Annotated[
        float | None,
        typer.Option(min=0.0, max=0.9, help="The share to evaluate on; 0.2, a language model 0."),
    ] = None,
    quantize: Annotated[
        QuantizeChoice | None, typer.Option("--quantize", help="Store weights in fewer bits.")
    ] = None,
    adapters: Annotated[
        Path | None, typer.Option(help="Write the adapters there too, in peft's format.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the order of the data and of the adapters.")] = 0,
    device: DeviceOption = "cpu",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Fine-tune a language model with LoRA, or a classifier on classes of your own."""
    require_finite({"lr": learning_rate, "alpha": alpha}, "lr", "alpha")
    if quantize is QuantizeChoice.INT8_STATIC:
        raise CommandError("int8-static needs data", "choose int8, or train and deploy with onward deploy")
    scheme = None if quantize is None else str(quantize)
    from onward.pipeline.base_folder import is_published

    if not model.is_dir() and not (lora and is_published(model)):
        read_model(model)
        if lora:
            raise CommandError(
                "--lora is for the folder of a language model here",
                "leave it away, or use onward artifacts --lora",
            )
        read = {**vars(reading), "drop": reading.drop or ()}
        options = {
            "sampling_rate": read.pop("sample_rate"), **read,
            "head": head, "augment": augment or (), "max_length": max_length,
            "epochs": epochs or 5, "batch_size": batch_size, "learning_rate": learning_rate,
            "hold_out": 0.2 if hold_out is None else hold_out, "seed": seed, "device": device,
            "progress": not output.silent,
        }  # fmt: skip
        with file_target(target, overwrite=overwrite):
            _classifier(output, model, data, target, scheme, options)
        return
    if not lora:
        raise CommandError("a language model is trained with adapters here", "add --lora")
    from onward.lora import LoRA
    from onward.pipeline.language import finetune_language_model

    for folder in (target, *([] if adapters is None else [adapters])):
        require_folder_target(folder)
        if folder.exists() and not overwrite:
            raise CommandError(
                f"'{folder}' already exists", "replace it with --overwrite, or choose another name"
            )
    if target.resolve() in (model.resolve(), model.resolve().parent):
        raise CommandError(
            f"'{target}' is the base's own folder", "choose another, so that the base stays as it is"
        )
    chosen = LoRA(rank=rank, alpha=alpha, targets=targets or "attention", seed=seed)
    result = finetune_language_model(
        model, data, lora=chosen, epochs=epochs or 1, batch_size=batch_size or 1,
        gradient_accumulation_steps=accumulation, max_length=max_length or 512, packing=packing,
        learning_rate=2e-4 if learning_rate is None else learning_rate,
        hold_out=hold_out or 0.0, seed=seed, device=device,
    )  # fmt: skip
    with output.working("writing"):
        with folder_target(target):
            result.export(target, quantize=scheme or False)
        if adapters is not None:
            with folder_target(adapters):
                result.save_adapters(adapters)
    if result.metrics:
        output.line(f"perplexity {result.metrics['perplexity']:.4g} on what was held out")
    output.line(f"next: python -c \"import onward; print(onward.load('{target}')('…'))\"")
    output.result({"path": target, "metrics": dict(result.metrics), "adapters": sorted(result.adapters)})


def _classifier(
    output: Output, model: Path, data: Path, target: Path, quantize: str | None, options: dict[str, Any]
) -> None:
    from onward.pipeline.finetune import finetune as finetune_classifier

    result = finetune_classifier(model, data, **options)
    result.export(target, quantize=quantize)
    for note in result.notes:
        output.note(note)
    output.table("", ["", "value"], [[name, f"{value:.4g}"] for name, value in result.metrics.items()])
    if result.classes is not None:
        output.line(f"classes: {first_of(result.classes, 40)}")
    output.line(f"next: onward infer {target} --data YOUR_DATA")
    output.result({"path": target, "metrics": dict(result.metrics), "classes": result.classes})
