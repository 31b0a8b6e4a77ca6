"""`onward artifacts`: a forward model to everything that training needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.advice import advice
from onward.cli.choices import LossChoice, OptimizerChoice, loss_of, optimizer_of
from onward.cli.command import CommandError, Output, command, examples, human_size
from onward.cli.output_paths import folder_target, plain_prefix
from onward.cli.trainable import choose_parameters

__all__ = ["register"]

Model = Annotated[Path, typer.Argument(help="The forward model, an ONNX file.", show_default=False)]
Loss = Annotated[
    LossChoice,
    typer.Option("--loss", "-l", help="The loss; 'none' if the model's first output already is it."),
]
Train = Annotated[
    list[str] | None,
    typer.Option("--train", metavar="NAME", help="Train these; patterns such as 'encoder.*' count."),
]
Freeze = Annotated[list[str] | None, typer.Option("--freeze", metavar="NAME", help="Do not train these.")]
Optimizer = Annotated[OptimizerChoice, typer.Option("--optimizer", help="The update rule.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "artifacts",
        epilog=examples(
            "onward artifacts model.onnx --loss cross-entropy",
            "onward artifacts model.onnx --loss mse --train 'head.*' --optimizer sgd --momentum 0.9 -o out",
            "onward artifacts model.onnx --loss cross-entropy --lora 8 --lora-target 'encoder.*'",
            "onward artifacts model.onnx --loss cross-entropy --portable      # to train in C++ and others",
        ),
    )(artifacts)


@command
def artifacts(
    output: Output,
    model: Model,
    loss: Loss,
    directory: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where to write; made if missing.")
    ] = Path("artifacts"),
    optimizer: Optimizer = OptimizerChoice.ADAMW,
    train: Train = None,
    freeze: Freeze = None,
    weight_decay: Annotated[float | None, typer.Option(help="The optimizer's weight decay.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum, for sgd and rmsprop.")] = None,
    loss_input: Annotated[
        list[str] | None, typer.Option("--loss-input", metavar="NAME", help="Outputs that the loss reads.")
    ] = None,
    extra_output: Annotated[
        list[str] | None,
        typer.Option("--extra-output", metavar="NAME", help="Values to return beside the loss."),
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option("--lora", metavar="RANK", min=1, help="Train adapters of this rank, not weights."),
    ] = None,
    lora_target: Annotated[
        list[str] | None,
        typer.Option("--lora-target", metavar="NAME", help="Weights to adapt; patterns count."),
    ] = None,
    prefix: Annotated[str, typer.Option(help="Put this before every file name.")] = "",
    ort_format: Annotated[bool, typer.Option("--ort-format", help="Write .ort files too.")] = False,
    nominal: Annotated[
        bool, typer.Option("--nominal", help="Write a checkpoint without values too.")
    ] = False,
    portable: Annotated[
        bool, typer.Option("--portable", help="Write a step, a state and a model for other languages too.")
    ] = False,
) -> None:
    """Make training artifacts of an ONNX model: training, eval and optimizer model, and a checkpoint."""
    from onward.artifacts import generate_artifacts

    choice = choose_parameters(model, train=train or (), freeze=freeze or (), adapted=lora is not None)
    plain_prefix(prefix)
    remark = advice(model, loss, loss_input or ())
    if remark:
        output.note(remark)
    trainable = choice.trainable
    options: dict[str, Any] = {}
    if lora is not None:
        from onward.lora import LoRA

        options = {"lora": LoRA(rank=lora, alpha=2.0 * lora, targets=lora_target or "*")}
        trainable = list(train or ())  # the adapters, and what was asked for by name
    elif lora_target:
        raise CommandError("--lora-target needs --lora RANK", "for example --lora 8")
    with folder_target(directory), output.working("differentiating"):
        generate_artifacts(
            str(model),
            requires_grad=trainable,
            frozen_params=choice.frozen,
            loss=loss_of(loss),
            optimizer=optimizer_of(optimizer, weight_decay=weight_decay, momentum=momentum),
            artifact_directory=directory,
            prefix=prefix,
            ort_format=ort_format,
            additional_output_names=_extra_outputs(model, loss_input or [], extra_output or []) or None,
            nominal_checkpoint=nominal,
            loss_input_names=loss_input or None,
            portable=portable,
            **options,
        )
    _report(output, directory, prefix, str(loss), remark, portable=portable)


def _extra_outputs(model: Path, loss_input: list[str], wanted: list[str]) -> list[str]:
    """The values to return beside the loss: with a loss inside the graph, also the model's own outputs.

    Nothing else would need them, and they would be gone when the trained model is deployed.
    """
    import onnx

    if not loss_input:
        return wanted
    outputs = [value.name for value in onnx.load(str(model), load_external_data=False).graph.output]
    return [*wanted, *(name for name in outputs if name not in {*wanted, *loss_input})]


def _report(
    output: Output, directory: Path, prefix: str, loss: str, remark: str | None, *, portable: bool
) -> None:
    from onward import checkpoint

    state = checkpoint.load(directory / f"{prefix}checkpoint")
    trained = sum(
        array.size for array in state.trainable.values() if not isinstance(array, checkpoint.NominalTensor)
    )
    names = ["training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"]
    if portable:
        names += ["train_step.onnx", "state.bin", "inference_model.onnx", "inference_model.bin"]
    files = [directory / f"{prefix}{name}" for name in names]
    sizes = {file.name: file.stat().st_size for file in files if file.is_file()}
    output.table("", ["file", "size"], [[name, human_size(size)] for name, size in sizes.items()])
    output.line(
        f"{trained:,} values of {len(state.trainable)} parameters train, {len(state.frozen)} parameters are frozen"
    )
    output.line(f"next: onward train {directory} --data YOUR.npz")
    output.result(
        {
            "directory": directory,
            "files": sizes,
            "loss": loss,
            "remark": remark,
            "trainable": list(state.trainable),
            "frozen": list(state.frozen),
            "trainable_values": trained,
        }
    )
