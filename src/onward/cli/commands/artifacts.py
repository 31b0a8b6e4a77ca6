"""`onward artifacts`: turns a forward model into the files that training needs."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from onward.cli.choices import (
    BatchNormChoice,
    LossChoice,
    OptimizerChoice,
    PrecisionChoice,
    TrainedChoice,
    loss_of,
    optimizer_of,
)
from onward.cli.command import command
from onward.cli.errors import CommandError
from onward.cli.output import Output
from onward.cli.paths import OverwriteOption, folder_target, plain_prefix, read_model, refuse_strangers
from onward.cli.shared_options import FreezeOption, OptimizerOption, TrainOption, advise_on_loss, known_names
from onward.files import write_set

if TYPE_CHECKING:
    from onward.info.model_info import ModelInfo
    from onward.lora import LoRA

# losses that take what comes out of a softmax; the others take scores, or numbers of any size
_PROBABILITIES = (LossChoice.NLL, LossChoice.KL_DIV, LossChoice.NONE)
_CLASSIFYING = (LossChoice.CROSS_ENTROPY, LossChoice.NLL)
_FILES = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")
_PORTABLE_FILES = (
    *(f"{step}_step.onnx" for step in ("train", "accumulate", "eval", "gradient", "update")),
    "train_step.json", "accumulate_step.json", "state.bin", "inference_model.onnx",
)  # fmt: skip
# what a language model's folder takes: its loss and its optimizer are set
_OF_LANGUAGE_MODELS = frozenset({"model", "directory", "lora", "lora_target", "overwrite"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GraphOptions:
    """What the training model is made of."""

    model: Annotated[
        Path,
        typer.Argument(
            help="The forward model, an ONNX file; with --lora also a language model's folder.",
            show_default=False,
        ),
    ]
    loss: Annotated[
        LossChoice | None,
        typer.Option(
            "--loss",
            "-l",
            help="The loss; 'none' if the model's first output already is it. "
            "With --classes, cross-entropy by default.",
        ),
    ] = None
    classes: Annotated[
        str | None,
        typer.Option(
            "--classes",
            "-c",
            metavar="NUMBER|NAMES|FOLDER",
            help="Replace the head: so many classes, their names (cat,dog), or a folder with one folder for each.",
        ),
    ] = None
    head: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The layer to replace, or the value to put a new one on."),
    ] = None
    batch_norm: Annotated[
        BatchNormChoice | None,
        typer.Option(help="Let statistics follow the data, or keep them; by default as in the model."),
    ] = None
    directory: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where to write; made if missing.")
    ] = Path("artifacts")
    optimizer: OptimizerOption = OptimizerChoice.ADAMW
    train: TrainOption = None
    freeze: FreezeOption = None
    weight_decay: Annotated[float | None, typer.Option(help="The optimizer's weight decay.")] = None
    momentum: Annotated[float | None, typer.Option(help="Momentum, for sgd and rmsprop.")] = None
    loss_input: Annotated[
        list[str] | None, typer.Option("--loss-input", metavar="NAME", help="Outputs that the loss reads.")
    ] = None
    extra_output: Annotated[
        list[str] | None,
        typer.Option("--extra-output", metavar="NAME", help="Values to return beside the loss."),
    ] = None
    lora: Annotated[
        int | None,
        typer.Option("--lora", metavar="RANK", min=1, help="Train adapters of this rank, not weights."),
    ] = None
    lora_target: Annotated[
        list[str] | None,
        typer.Option("--lora-target", metavar="NAME", help="Weights to adapt; patterns count."),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(_GraphOptions):
    """The options of `onward artifacts`: how values are rounded, and which files are written."""

    prefix: Annotated[str, typer.Option(help="Put this before every file name.")] = ""
    ort_format: Annotated[bool, typer.Option("--ort-format", help="Write .ort files too.")] = False
    nominal: Annotated[bool, typer.Option("--nominal", help="Write a checkpoint without values too.")] = False
    precision: Annotated[
        PrecisionChoice,
        typer.Option(help="Run matrix products and convolutions in 16 bits; weights stay float32."),
    ] = PrecisionChoice.FP32
    keep_batch: Annotated[
        bool,
        typer.Option("--keep-batch", help="Keep a batch size that the model fixes; by default it is opened."),
    ] = False
    portable: Annotated[
        bool, typer.Option("--portable", help="Write a step, a state and a model for other languages too.")
    ] = False
    quantize: Annotated[
        TrainedChoice | None,
        typer.Option(help="Round in the step as a deployed file of this kind does."),
    ] = None
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "-d", metavar="[INPUT=]PATH", help="int8: samples to take ranges from."),
    ] = None
    teacher: Annotated[
        Path | None,
        typer.Option(help="Learn this model's answers too; without --loss nothing else, and no labels."),
    ] = None
    overwrite: OverwriteOption = False


@command(
    "onward artifacts model.onnx --classes 5      # a published model, for classes of your own",
    "onward artifacts model.onnx --loss cross-entropy",
    "onward artifacts model.onnx --loss mse --train 'head.*' --optimizer sgd --momentum 0.9 -o out",
    "onward artifacts model.onnx --loss cross-entropy --lora 8 --lora-target 'encoder.*'",
    "onward artifacts smollm --lora 8      # a language model's folder, to train in a browser",
    "onward artifacts model.onnx --loss cross-entropy --portable      # to train in C++ and others",
    "onward artifacts model.onnx --quantize int8 --data pictures --teacher big.onnx      # needs no labels",
)
def artifacts(output: Output, options: Options) -> None:
    """Make training artifacts of an ONNX model: training, eval and optimizer model, and a checkpoint."""
    from onward.artifacts.generate import generate_artifacts
    from onward.artifacts.write import older_members
    from onward.hub.origin import origin_of
    from onward.info.metadata import info_to_metadata

    # before anything else: a folder has another set of options
    if options.model.is_dir():
        _write_language_artifacts(output, options)
        return
    read_model(options.model)
    loss = _choose_loss(options)
    refuse_strangers(
        options.directory, [f"{plain_prefix(options.prefix)}{name}" for name in _FILES],
        ours=f"{options.prefix}training_model.onnx", overwrite=options.overwrite,
    )  # fmt: skip
    remark = None
    if options.classes is None and loss is not None:
        # a new head ends in scores by itself, so that only the model's own output can be the wrong one
        remark = advise_on_loss(options.model, loss, options.loss_input or ())
    if remark:
        output.note(remark)
    adapters = _choose_adapters(options, targets="*")
    if options.batch_norm is not None and not _has_batch_norm(options.model):
        raise CommandError(
            "--batch-norm is for models with batch norm, and this one has none", "leave it away"
        )
    source, info = _replace_head(options, loss)
    calibration = _read_samples(options)
    if not options.keep_batch:
        from onward.export.batch_size import open_if_fixed

        source, note = open_if_fixed(source)
        if note:
            output.note(note)
    trainable = list(options.train or ())
    # the tokenizer is one of the set: a new one beside old models would read other tokens
    with (
        folder_target(options.directory),
        output.working("differentiating"),
        known_names(),
        write_set(options.directory, older=older_members(options.directory, options.prefix)) as aside,
    ):
        generate_artifacts(
            source,
            # beside adapters trains what was named, and by default nothing
            requires_grad=trainable if trainable or adapters else None,
            frozen_params=list(options.freeze or ()) or None,
            batch_norm=None if options.batch_norm is None else cast("Any", str(options.batch_norm)),
            loss=None if loss is None else loss_of(loss),
            optimizer=optimizer_of(
                options.optimizer, weight_decay=options.weight_decay, momentum=options.momentum
            ),
            artifact_directory=aside,
            prefix=options.prefix,
            ort_format=options.ort_format,
            additional_output_names=_choose_outputs(options) or None,
            nominal_checkpoint=options.nominal,
            loss_input_names=options.loss_input or None,
            portable=options.portable,
            precision=cast("Any", str(options.precision)),
            metadata=info_to_metadata(
                info if info.origin else info.replace(origin=origin_of(options.model.name))
            ),
            lora=adapters,
            quantize=None if options.quantize is None else str(options.quantize),
            calibration=calibration,
            teacher=None if options.teacher is None else str(options.teacher),
        )
        _copy_tokenizer(options.model, aside)
    _report(output, options, str(loss or "distillation"), remark)


def _choose_loss(options: Options) -> LossChoice | None:
    """The loss; None where a teacher's answers alone are learnt."""
    if options.head is not None and options.classes is None:
        raise CommandError("--head needs --classes", "for example --classes 5")
    if options.loss is not None:
        return options.loss
    if options.classes is not None:
        return LossChoice.CROSS_ENTROPY
    if options.teacher is None:
        raise CommandError("which loss?", f"choose one with --loss: {', '.join(LossChoice)}")
    return None


def _choose_adapters(options: Options, *, targets: str) -> LoRA | None:
    if options.lora is not None:
        from onward.lora import LoRA

        # alpha twice the rank: the scale of the update then does not depend on the rank
        return LoRA(rank=options.lora, alpha=2.0 * options.lora, targets=options.lora_target or targets)
    if options.lora_target:
        raise CommandError("--lora-target needs --lora RANK", "for example --lora 8")
    return None


def _replace_head(options: Options, loss: LossChoice | None) -> tuple[Any, ModelInfo]:
    """The model, with a new head where classes are named, and what it is for."""
    from onward import replace_head
    from onward.hub.read_info import read_info

    info = read_info(options.model)
    if options.classes is None:
        return str(options.model), info
    classes = _parse_classes(options.classes)
    _require_two(options.classes, classes, loss)
    # the old head's labels go with it; a number of classes has no names yet
    labels = None if isinstance(classes, int) else tuple(classes)
    info = info.replace(labels=labels, problem_type=None, source="--classes")
    scores = loss not in _PROBABILITIES
    return replace_head(options.model, classes=classes, head=options.head, scores=scores), info


def _write_language_artifacts(output: Output, options: Options) -> None:
    """The training models of adapters beside a language model's folder."""
    from onward.language.finetune import write_language_artifacts

    lora = _choose_adapters(options, targets="attention")
    if lora is None:
        raise CommandError(
            f"no model at '{options.model}': it is a folder",
            "name an ONNX file, or add --lora RANK for a language model's folder",
        )
    # every option, so that none is silently ignored when another is added
    for field in dataclasses.fields(options):
        if field.name not in _OF_LANGUAGE_MODELS and getattr(options, field.name) != field.default:
            raise CommandError(
                f"--{field.name.replace('_', '-')} does not go with a language model's folder",
                "its loss and its optimizer are set",
            )
    refuse_strangers(
        options.directory,
        _FILES,
        ours="training_model.onnx",
        overwrite=options.overwrite,
    )
    with folder_target(options.directory), output.working("differentiating"):
        files = write_language_artifacts(options.model, options.directory, lora=lora)
    sizes = _show_sizes(output, files)
    output.line(f"to train here instead: onward finetune {options.model} --lora --data chat.jsonl")
    output.result({"directory": options.directory, "files": sizes})


def _read_samples(options: Options) -> dict[str, Any] | None:
    """Samples for the model's inputs, read as its metadata says; labels of the data are left out."""
    if not options.data:
        return None
    if options.quantize is None:
        raise CommandError(
            "--data is for --quantize: ranges are taken from it", "add --quantize int8, or leave it out"
        )
    from onward.cli.data import input_specs, load_samples
    from onward.data.match_inputs import calibration_rows
    from onward.data.read import DataOptions
    from onward.hub.read_info import read_info

    reading = DataOptions(preprocessing=read_info(options.model).preprocessing, near=[options.model])
    specs = input_specs(options.model)
    return load_samples(options.data, specs, reading, calibration_rows(specs))


def _parse_classes(text: str) -> int | list[str]:
    """`5`, `cat,dog,bird`, or a folder with one folder for each class."""
    if text.isdigit():
        return int(text)
    if Path(text).is_dir():
        from onward.data.layouts import split_folders

        folder = split_folders(Path(text)).get("train", Path(text))
        # folders have no order of their own; here their names are all there is, and the model is new
        names = sorted(
            path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
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


def _require_two(text: str, classes: int | list[str], loss: LossChoice | None) -> None:
    """One class is a mistake where classes are told apart: a folder that is not there, or all samples in one."""
    count = classes if isinstance(classes, int) else len(classes)
    if count != 1 or loss not in _CLASSIFYING:
        return
    # a mistyped folder looks like one name of a class
    if classes == [text]:
        raise CommandError(
            f"--classes {text} is one class, and there is no such folder",
            "give a number, names (cat,dog) or a folder",
        )
    raise CommandError(
        f"--classes {text} is one class, and {loss} tells two or more apart",
        "give more; for one number, such as a price or yes and no, add --loss mse or --loss bce-with-logits",
    )


def _has_batch_norm(path: Path) -> bool:
    model = read_model(path)
    graphs = (model.graph, *model.functions)
    return any(node.op_type == "BatchNormalization" for graph in graphs for node in graph.node)


def _copy_tokenizer(model: Path, directory: Path) -> None:
    """The tokenizer beside a model goes with its artifacts."""
    source, target = model.parent / "tokenizer.json", directory / "tokenizer.json"
    reads_texts = any(value.name == "input_ids" for value in read_model(model).graph.input)
    # a model for pictures may lie beside a language model's files
    if source.is_file() and reads_texts and source.resolve() != target.resolve():
        shutil.copyfile(source, target)


def _choose_outputs(options: Options) -> list[str]:
    """The values to return beside the loss: with a loss inside the graph, also the model's own outputs.

    Nothing else would need them, and they would be gone when the trained model is deployed.
    """
    extra = options.extra_output or []
    if not options.loss_input:
        return extra
    outputs = [value.name for value in read_model(options.model).graph.output]
    return [*extra, *(name for name in outputs if name not in {*extra, *options.loss_input})]


def _show_sizes(output: Output, files: list[Path]) -> dict[str, int]:
    """The sizes of the files that are there, by name."""
    sizes = {file.name: file.stat().st_size for file in files if file.is_file()}
    output.sizes("", sizes)
    return sizes


def _report(output: Output, options: Options, loss: str, remark: str | None) -> None:
    from onward import checkpoint

    directory, classes = options.directory, options.classes
    state = checkpoint.load(directory / f"{options.prefix}checkpoint")
    trained = sum(
        array.size for array in state.trainable.values() if not isinstance(array, checkpoint.NominalTensor)
    )
    names = [*_FILES, *(_PORTABLE_FILES if options.portable else ())]
    sizes = _show_sizes(output, [directory / f"{options.prefix}{name}" for name in names])
    output.line(
        f"{trained:,} values of {len(state.trainable)} parameters train, {len(state.frozen)} parameters are frozen"
    )
    data = classes if classes is not None and Path(classes).is_dir() else "YOUR_DATA"
    metric = "accuracy" if loss in _CLASSIFYING else "mae"
    judged = "" if loss == "distillation" else f" --hold-out 0.2 --metric {metric} --epochs 5"
    output.line(f"next: onward train {directory} --data {data}{judged}")
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
