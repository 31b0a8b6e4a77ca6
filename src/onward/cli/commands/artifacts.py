"""`onward artifacts`: turns a forward model into the files that training needs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from onward import contract
from onward.cli.advice import advice
from onward.cli.choices import (
    BatchNormChoice,
    LossChoice,
    OptimizerChoice,
    PrecisionChoice,
    loss_of,
    optimizer_of,
)
from onward.cli.command import CommandError, Output, command, examples, human_size
from onward.cli.model_file import read_model
from onward.cli.output_paths import Overwrite, folder_target, plain_prefix, refuse_strangers

__all__ = ["Freeze", "Loss", "Model", "Optimizer", "Train", "known_names", "register"]

Model = Annotated[Path, typer.Argument(help="The forward model, an ONNX file.", show_default=False)]
Loss = Annotated[
    LossChoice,
    typer.Option("--loss", "-l", help="The loss; 'none' if the model's first output already is it."),
]
LossOrNone = Annotated[
    LossChoice | None,
    typer.Option(
        "--loss", "-l",
        help="The loss; 'none' if the model's first output already is it. With --classes, cross-entropy by default.",
    ),
]  # fmt: skip
# losses that take what comes out of a softmax; the others take scores, or numbers of any size
_PROBABILITIES = (LossChoice.NLL, LossChoice.KL_DIV, LossChoice.NONE)
_FILES = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")
_CLASSIFYING = (LossChoice.CROSS_ENTROPY, LossChoice.NLL)
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
            "onward artifacts model.onnx --classes 5      # a published model, for classes of your own",
            "onward artifacts model.onnx --loss cross-entropy",
            "onward artifacts model.onnx --loss mse --train 'head.*' --optimizer sgd --momentum 0.9 -o out",
            "onward artifacts model.onnx --loss cross-entropy --lora 8 --lora-target 'encoder.*'",
            "onward artifacts smollm --lora 8      # a language model's folder, to train in a browser",
            "onward artifacts model.onnx --loss cross-entropy --portable      # to train in C++ and others",
        ),
    )(artifacts)


@command
def artifacts(
    output: Output,
    model: Annotated[
        Path,
        typer.Argument(
            help="The forward model, an ONNX file; with --lora also a language model's folder.",
            show_default=False,
        ),
    ],
    loss: LossOrNone = None,
    classes: Annotated[
        str | None,
        typer.Option(
            "--classes",
            "-c",
            metavar="NUMBER|NAMES|FOLDER",
            help="Replace the head: so many classes, their names (cat,dog), or a folder with one folder for each.",
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The layer to replace, or the value to put a new one on."),
    ] = None,
    batch_norm: Annotated[
        BatchNormChoice | None,
        typer.Option(help="Let statistics follow the data, or keep them; by default as in the model."),
    ] = None,
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
    precision: Annotated[
        PrecisionChoice,
        typer.Option(help="Run matrix products and convolutions in 16 bits; weights stay float32."),
    ] = PrecisionChoice.FP32,
    keep_batch: Annotated[
        bool,
        typer.Option("--keep-batch", help="Keep a batch size that the model fixes; by default it is opened."),
    ] = False,
    portable: Annotated[
        bool, typer.Option("--portable", help="Write a step, a state and a model for other languages too.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Make training artifacts of an ONNX model: training, eval and optimizer model, and a checkpoint."""
    from onward.artifacts.generate import generate_artifacts

    if model.is_dir() and lora is not None:
        others = {
            "--loss": loss, "--classes": classes, "--head": head, "--batch-norm": batch_norm, "--train": train,
            "--freeze": freeze, "--weight-decay": weight_decay, "--momentum": momentum, "--loss-input": loss_input,
            "--extra-output": extra_output, "--prefix": prefix, "--ort-format": ort_format, "--nominal": nominal,
            "--portable": portable, "--keep-batch": keep_batch,
            "--precision": precision is not PrecisionChoice.FP32, "--optimizer": optimizer is not OptimizerChoice.ADAMW,
        }  # fmt: skip
        unread = [name for name, value in others.items() if value not in (None, False, "")]
        if unread:
            raise CommandError(
                f"{unread[0]} does not go with a language model's folder",
                "its loss and its optimizer are set",
            )
        _language_model(output, model, directory, lora, lora_target, overwrite=overwrite)
        return
    if model.is_dir():
        raise CommandError(
            f"no model at '{model}': it is a folder",
            "name an ONNX file, or add --lora RANK for a language model's folder",
        )
    read_model(model)
    if loss is None and classes is None:
        raise CommandError("which loss?", f"choose one with --loss: {', '.join(LossChoice)}")
    if head is not None and classes is None:
        raise CommandError("--head needs --classes", "for example --classes 5")
    loss = loss or LossChoice.CROSS_ENTROPY
    refuse_strangers(
        directory, [f"{plain_prefix(prefix)}{name}" for name in _FILES],
        ours=f"{prefix}training_model.onnx", overwrite=overwrite,
    )  # fmt: skip
    remark = advice(model, loss, loss_input or ()) if classes is None else None
    if remark:
        output.note(remark)
    trainable = list(train) if train else None
    options: dict[str, Any] = {"metadata": _what_the_model_wants(model)}
    if lora is not None:
        from onward.lora import LoRA

        options |= {"lora": LoRA(rank=lora, alpha=2.0 * lora, targets=lora_target or "*")}
        trainable = list(train or ())  # the adapters, and what was asked for by name
    elif lora_target:
        raise CommandError("--lora-target needs --lora RANK", "for example --lora 8")
    source: Any = str(model)
    if classes is not None:
        from onward import replace_head

        wanted = _classes(classes)
        _require_two(classes, wanted, loss)
        source = replace_head(model, classes=wanted, head=head, scores=loss not in _PROBABILITIES)
    if not keep_batch:
        from onward.export.batch_size import open_if_fixed

        source, said = open_if_fixed(source)
        if said:
            output.note(said)
    with folder_target(directory), output.working("differentiating"), known_names():
        generate_artifacts(
            source,
            requires_grad=trainable,
            frozen_params=list(freeze) if freeze else None,
            batch_norm=None if batch_norm is None else cast("Any", str(batch_norm)),
            loss=loss_of(loss),
            optimizer=optimizer_of(optimizer, weight_decay=weight_decay, momentum=momentum),
            artifact_directory=directory,
            prefix=prefix,
            ort_format=ort_format,
            additional_output_names=_extra_outputs(model, loss_input or [], extra_output or []) or None,
            nominal_checkpoint=nominal,
            loss_input_names=loss_input or None,
            portable=portable,
            precision=cast("Any", str(precision)),
            **options,
        )
        _keep_tokenizer(model, directory)
    _report(output, directory, prefix, str(loss), remark, portable=portable, classes=classes)


def _language_model(
    output: Output, folder: Path, directory: Path, rank: int, targets: list[str] | None, *, overwrite: bool
) -> None:
    """The training models of adapters beside a language model's folder."""
    from onward.lora import LoRA
    from onward.pipeline.language import write_language_artifacts

    names = [*_FILES, "constants.data"]
    refuse_strangers(directory, names, ours="training_model.onnx", overwrite=overwrite)
    lora = LoRA(rank=rank, alpha=2.0 * rank, targets=targets or "attention")
    with folder_target(directory), output.working("differentiating"):
        files = write_language_artifacts(folder, directory, lora=lora)
    sizes = {file.name: file.stat().st_size for file in files}
    output.table("", ["file", "size"], [[name, human_size(size)] for name, size in sizes.items()])
    output.line(f"to train here instead: onward finetune {folder} --lora --data chat.jsonl")
    output.result({"directory": directory, "files": sizes})


@contextlib.contextmanager
def known_names() -> Iterator[None]:
    """Refuse a name of --freeze that the model does not have: the library warns, here it is a typing mistake."""
    from onward.artifacts.choose import UnknownParameterWarning
    from onward.errors import SEE_NAMES

    with warnings.catch_warnings():
        warnings.simplefilter("error", UnknownParameterWarning)
        try:
            yield
        except UnknownParameterWarning as unknown:
            raise CommandError(
                f"--freeze {unknown.name}: {unknown.name} is not found among the parameters{unknown.hint}",
                SEE_NAMES,
            ) from None


def _classes(text: str) -> int | list[str]:
    """`5`, `cat,dog,bird`, or a folder with one folder for each class."""
    if text.isdigit():
        return int(text)
    if Path(text).is_dir():
        names = sorted(
            path.name for path in Path(text).iterdir() if path.is_dir() and not path.name.startswith(".")
        )
        if not names:
            raise CommandError(
                f"'{text}' has no folder for a class", "folders name classes: pictures/cat, pictures/dog"
            )
        return names
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise CommandError(f"--classes '{text}' has an empty name", "for example --classes cat,dog,bird")
    return names


def _require_two(text: str, classes: int | list[str], loss: LossChoice) -> None:
    """One class is a mistake where classes are told apart: a folder that is not there, or all samples in one."""
    count = classes if isinstance(classes, int) else len(classes)
    if count != 1 or loss not in _CLASSIFYING:
        return
    what = f"--classes {text} is one class"
    if classes == [text]:
        raise CommandError(
            f"{what}, and there is no such folder", "give a number, names (cat,dog) or a folder"
        )
    raise CommandError(
        f"{what}, and {loss} tells two or more apart",
        "give more; for one number, such as a price or yes and no, add --loss mse or --loss bce-with-logits",
    )


def _what_the_model_wants(model: Path) -> dict[str, str]:
    """How pictures are prepared for a model, where it or a file beside it says so."""

    from onward.data.match_inputs import specs_of
    from onward.data.preprocessing import KEY, Preprocessing, beside, known_image_settings

    proto = read_model(model)
    about = {entry.key: entry.value for entry in proto.metadata_props}
    settings = beside(model)
    if not settings and contract.EXPORT in about:  # a model that `onward export` made
        settings = known_image_settings(_processor(about))
    pictures = [spec for spec in specs_of(proto.graph) if spec.dims is not None and len(spec.dims) == 4]
    if not settings or len(pictures) != 1:
        return {}
    return {KEY: Preprocessing("image", pictures[0].name, settings).to_json()}


def _keep_tokenizer(model: Path, directory: Path) -> None:
    """The tokenizer beside a model goes with its artifacts."""
    import shutil

    source = model.parent / "tokenizer.json"
    takes = {value.name for value in read_model(model).graph.input}
    if (
        source.is_file()
        and "input_ids" in takes
        and source.resolve() != (directory / "tokenizer.json").resolve()
    ):
        shutil.copyfile(source, directory / "tokenizer.json")


def _extra_outputs(model: Path, loss_input: list[str], wanted: list[str]) -> list[str]:
    """The values to return beside the loss: with a loss inside the graph, also the model's own outputs.

    Nothing else would need them, and they would be gone when the trained model is deployed.
    """
    from onward.cli.model_file import read_model

    if not loss_input:
        return wanted
    outputs = [value.name for value in read_model(model).graph.output]
    return [*wanted, *(name for name in outputs if name not in {*wanted, *loss_input})]


def _report(
    output: Output,
    directory: Path,
    prefix: str,
    loss: str,
    remark: str | None,
    *,
    portable: bool,
    classes: str | None,
) -> None:
    from onward import checkpoint

    state = checkpoint.load(directory / f"{prefix}checkpoint")
    trained = sum(
        array.size for array in state.trainable.values() if not isinstance(array, checkpoint.NominalTensor)
    )
    names = list(_FILES)
    if portable:
        names += ["train_step.onnx", "gradient_step.onnx", "update_step.onnx", "state.bin"]
        names += ["inference_model.onnx", "inference_model.bin"]
    files = [directory / f"{prefix}{name}" for name in names]
    sizes = {file.name: file.stat().st_size for file in files if file.is_file()}
    output.table("", ["file", "size"], [[name, human_size(size)] for name, size in sizes.items()])
    output.line(
        f"{trained:,} values of {len(state.trainable)} parameters train, {len(state.frozen)} parameters are frozen"
    )
    data = classes if classes is not None and Path(classes).is_dir() else "YOUR_DATA"
    metric = "accuracy" if loss in _CLASSIFYING else "mae"
    output.line(f"next: onward train {directory} --data {data} --hold-out 0.2 --metric {metric} --epochs 5")
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


def _processor(about: dict[str, str]) -> dict[str, Any]:
    """The image processor that `onward export` recorded."""
    from onward.model_metadata import read_table

    found = read_table(about, contract.EXPORT).get("processor")
    return found if isinstance(found, dict) else {}
