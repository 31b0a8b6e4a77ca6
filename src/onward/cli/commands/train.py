"""`onward train`: trains artifacts on data; writes checkpoints, a history and a report."""

from __future__ import annotations

import errno
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onward.cli.choices import DeviceOption, MetricChoice, ScheduleChoice
from onward.cli.command import CommandError, Output, command, examples
from onward.cli.output_paths import plain_prefix, require_folder_target
from onward.cli.python_entry import names_code
from onward.cli.run_folder import begun_run, read_run, refuse_earlier_run, trusted_options
from onward.cli.shared_options import (
    ClipNormOption,
    DataOption,
    MapOption,
    MaxLengthOption,
    ReadingOptions,
    WarmupOption,
)

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec

__all__ = ["register", "require_finite"]


def _rate(text: Any) -> Any:
    """A learning rate, or "auto"."""
    if text is None or text == "auto":
        return text
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not (math.isfinite(rate) and rate >= 0):
        raise typer.BadParameter(f"'{text}' is not a learning rate: it is a number, 0 or more, or 'auto'")
    return rate


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "train",
        epilog=examples(
            "onward train artifacts --data digits.npz --epochs 10 --hold-out 0.2 --metric accuracy",
            "onward train artifacts -d train.csv --eval-data test.csv --label species --schedule cosine",
            "onward train --output run --resume      # resume after Ctrl-C",
        ),
    )(train)


@command
def train(
    output: Output,
    context: typer.Context,
    artifacts: Annotated[
        Path | None,
        typer.Argument(help="The folder of artifacts; with --resume, that of the run.", show_default=False),
    ] = None,
    data: DataOption = None,
    eval_data: Annotated[
        list[str] | None, typer.Option("--eval-data", metavar="[INPUT=]PATH", help="Data to evaluate on.")
    ] = None,
    hold_out: Annotated[
        float | None, typer.Option("--hold-out", metavar="SHARE", help="Evaluate on this share of the data.")
    ] = None,
    mapping: MapOption = None,
    reading: ReadingOptions = ReadingOptions(),  # noqa: B008  # frozen
    directory: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the run is kept.")
    ] = Path("run"),
    augment: Annotated[
        list[str] | None,
        typer.Option(
            "--augment", metavar="NAME[=HOW]", help="Images: flip, crop, colour, mixup; also flip,crop=0.2."
        ),
    ] = None,
    max_length: MaxLengthOption = None,
    device: DeviceOption = "cpu",
    epochs: Annotated[int, typer.Option("--epochs", "-e", min=1, help="Passes over the data, in all.")] = 1,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Samples per batch.")] = 32,
    learning_rate: Annotated[
        str | None,
        typer.Option(
            "--learning-rate",
            "--lr",
            metavar="RATE|auto",
            parser=_rate,
            help="The highest learning rate; 'auto' finds one by a short trial. "
            "Default: the artifacts' setting, or 0.001.",
        ),
    ] = None,
    schedule: Annotated[
        ScheduleChoice, typer.Option(help="The learning-rate schedule.")
    ] = ScheduleChoice.CONSTANT,
    warmup: WarmupOption = None,
    accumulation: Annotated[
        int,
        typer.Option("--gradient-accumulation-steps", "--accumulation", min=1, help="Batches per update."),
    ] = 1,
    clip_norm: ClipNormOption = None,
    metric: Annotated[
        list[MetricChoice] | None, typer.Option("--metric", "-m", help="Compute when evaluating.")
    ] = None,
    best: Annotated[
        str | None, typer.Option("--best", metavar="METRIC", help="What decides on the best epoch.")
    ] = None,
    patience: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many epochs without progress.")
    ] = None,
    save_every: Annotated[int | None, typer.Option(min=1, help="Also save after so many updates.")] = None,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints to keep.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of shuffling, dropout and hold-out.")] = 0,
    no_shuffle: Annotated[bool, typer.Option("--no-shuffle", help="Take samples in their order.")] = False,
    prefix: Annotated[str, typer.Option(help="The prefix of the artifacts' file names.")] = "",
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="FOLDER", help="Also write TensorBoard event files."),
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option(metavar="EXPERIMENT", help="Also log to MLflow, if it is installed.")
    ] = None,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Also log to Weights & Biases, if it is installed.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --output.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run in --output.")
    ] = False,
) -> None:
    """Train: a run folder with checkpoints, history and a report that opens in any browser."""
    options: dict[str, Any] = {
        "data": data, "eval_data": eval_data, "hold_out": hold_out, "mapping": mapping,
        "epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate, "schedule": str(schedule),
        "warmup": warmup, "accumulation": accumulation, "clip_norm": clip_norm,
        "metric": [str(name) for name in metric or []], "best": best, "patience": patience,
        "save_every": save_every, "keep": keep, "seed": seed, "no_shuffle": no_shuffle, "prefix": prefix,
        "tensorboard": None if tensorboard is None else str(tensorboard),
        "augment": augment, "max_length": max_length, "mlflow": mlflow, "wandb": wandb, "device": device,
        **reading.settings(),
    }  # fmt: skip
    artifacts, directory, options = _continue_or_begin(
        context, artifacts, directory, options, resume=resume, overwrite=overwrite
    )
    _refuse_others(artifacts, options)
    summary = _fit(output, artifacts, directory, options, resume=resume, replace=overwrite and not resume)
    _report(output, directory, summary)


def _continue_or_begin(
    context: typer.Context,
    artifacts: Path | None,
    directory: Path,
    options: dict[str, Any],
    *,
    resume: bool,
    overwrite: bool,
) -> tuple[Path, Path, dict[str, Any]]:
    """The artifacts, the run's folder and the options: a resumed run keeps its own where no flag says else."""
    if resume and artifacts is not None and read_run(artifacts):
        artifacts, directory = None, artifacts  # onward train RUN --resume
    earlier = read_run(directory)
    if resume:
        if not earlier:
            raise CommandError(f"there is no run to resume in '{directory}'", "start it without --resume")
        given = {name for name in options if not _is_default(context, name)}
        kept = {name: value for name, value in earlier["options"].items() if name not in given}
        options |= {
            k: v for k, v in trusted_options(directory, kept).items() if k in options and v is not None
        }
        artifacts = artifacts or earlier["artifacts"]
    else:
        refuse_earlier_run(directory, overwrite=overwrite)
    if artifacts is None:
        raise CommandError(
            "which artifacts?", "onward train ARTIFACTS --data FILE; make them with: onward artifacts"
        )
    return artifacts, directory, options


def _is_default(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is None or source.name == "DEFAULT"


def _refuse_others(artifacts: Path, options: Mapping[str, Any]) -> None:
    """Check that the path is a folder of artifacts, and reject non-finite values."""
    plain_prefix(options["prefix"])
    if artifacts.is_file():
        raise CommandError(
            f"'{artifacts}' is a file, not a folder of artifacts",
            f"make artifacts with: onward artifacts {artifacts} --loss LOSS",
        )
    if read_run(artifacts):
        raise CommandError(
            f"'{artifacts}' is a run, not a folder of artifacts",
            f"resume with: onward train {artifacts} --resume",
        )
    require_finite(options, "warmup", "clip_norm", "hold_out")


def require_finite(options: Mapping[str, Any], *names: str) -> None:
    """Refuse "nan" and "inf", which are numbers to the command line."""
    for name in names:
        if options[name] is not None and not math.isfinite(options[name]):
            raise CommandError(
                f"--{name.replace('_', '-')} is {options[name]}: it must be a finite number",
                "give a number, or leave the option out",
            )


def _fit(
    output: Output,
    artifacts: Path,
    directory: Path,
    options: Mapping[str, Any],
    *,
    resume: bool,
    replace: bool,
) -> dict[str, Any]:
    from onward import Trainer
    from onward.cli.data import keep_tokenizer, load_training_data, user_inputs
    from onward.data.read import blame_data
    from onward.errors import CheckpointError, NonFiniteError
    from onward.train.artifact_set import find_artifacts
    from onward.train.callbacks import Callback, EarlyStopping, LogFile
    from onward.train.history import History

    if (options["metric"] or options["best"]) and not (
        options["eval_data"] or options["hold_out"] is not None
    ):
        raise CommandError(
            "--metric and --best need data to evaluate on", "add --eval-data FILE or --hold-out 0.1"
        )
    require_folder_target(directory)
    find_artifacts(artifacts, options["prefix"])
    inputs = user_inputs(artifacts / f"{options['prefix']}training_model.onnx")
    # the data first: most mistakes are there, and a session for training takes seconds
    whole, loaded, evaluation = load_training_data(artifacts, directory, options, inputs)
    for note in loaded.notes:
        output.note(note)
    options = {**options, "label": options["label"] or loaded.label}  # what was found is kept in the run
    callbacks: list[Callback] = []
    if options["patience"]:
        watched = options["best"] or (
            "eval_loss" if options["eval_data"] or options["hold_out"] is not None else "loss"
        )
        callbacks.append(EarlyStopping(watched, patience=options["patience"]))
    if options["tensorboard"]:
        from onward.train.tensorboard import EventFile

        require_folder_target(Path(options["tensorboard"]))
        callbacks.append(EventFile(Path(options["tensorboard"])))
    if options["mlflow"]:
        from onward.train.tracking import MLflow

        callbacks.append(MLflow(options["mlflow"]))
    if options["wandb"]:
        from onward.train.tracking import WeightsAndBiases

        callbacks.append(WeightsAndBiases(options["wandb"]))
    callbacks.append(LogFile(directory / "log.txt"))
    trainer = Trainer(
        artifacts,
        output_directory=directory,
        learning_rate=_rate(options["learning_rate"]),
        schedule=options["schedule"],
        warmup=options["warmup"],
        gradient_accumulation_steps=options["accumulation"],
        clip_norm=options["clip_norm"],
        metrics=options["metric"],
        callbacks=callbacks,
        seed=options["seed"],
        keep=options["keep"],
        progress=not output.silent,
        prefix=options["prefix"],
        device=options.get("device") or "cpu",
    )
    trainer.classes = loaded.classes or trainer.classes
    trainer.details = {"data": ", ".join(options["data"] or ()), "model": str(artifacts)}
    if options["augment"]:
        trainer.details["augmentation"] = ", ".join(options["augment"])
    done_before = len(History.load(directory / "history.json").epochs) if resume else -1
    # an earlier run goes only now, when all that was asked for is there
    with begun_run(directory, artifacts, options, loaded.classes, loaded.preprocessing, replace=replace):
        keep_tokenizer(loaded, directory)
        try:
            trainer.fit(
                loaded.value,
                None if evaluation is None else evaluation.value,
                epochs=options["epochs"],
                batch_size=options["batch_size"],
                shuffle=not options["no_shuffle"],
                resume=resume,
                save_every=options["save_every"],
                best_metric=options["best"],
                transform=_augmentation(options, _in_order(inputs, trainer.module.input_names()), loaded),
            )
        except NonFiniteError as error:
            raise blame_data(error, whole) from error
        except (OSError, CheckpointError) as error:
            raise _disk_full(error, directory, options, trainer.step) from error
        except KeyboardInterrupt:
            if not any(directory.glob("checkpoint-*")):
                raise
            raise KeyboardInterrupt(
                f"stopped after {trainer.step} updates, all saved; resume with: {_resume(directory, options)}"
            ) from None
    if len(trainer.history.epochs) == done_before:
        output.note(
            f"nothing is left to do: the run has its {done_before} epochs; for more, say --epochs {done_before + 5}"
        )
    return {
        "epochs": trainer.history.epochs,
        "best": trainer.best,
        "steps": trainer.step,
        "samples": loaded.samples,
    }


def _resume(directory: Path, options: Mapping[str, Any]) -> str:
    """The command that resumes a run; what a file may not decide has to be named again."""
    again = [
        f" --{name.replace('_', '-')} {entry}"
        for name in ("data", "eval_data")
        if (entry := names_code(options[name])) is not None
    ]
    again += [f" --{name} {options[name]}" for name in ("mlflow", "wandb") if options.get(name) is not None]
    return f"onward train {directory} --resume{''.join(again)}"


def _disk_full(error: Exception, directory: Path, options: Mapping[str, Any], step: int) -> Exception:
    """What to say where the disk is full: what is safe, and how to go on; other errors as they are."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(cause, OSError) or cause.errno != errno.ENOSPC:
        return error
    if any(directory.glob("checkpoint-*")):
        return CommandError(
            f"no space is left on the disk of '{directory}': stopped after {step} updates, the last save is whole",
            f"free some, then resume with: {_resume(directory, options)}",
        )
    return CommandError(
        f"no space is left on the disk of '{directory}', nothing was saved", "free some, or choose -o"
    )


def _in_order(inputs: Sequence[InputSpec], names: Sequence[str]) -> list[InputSpec]:
    return sorted(inputs, key=lambda spec: names.index(spec.name))


def _augmentation(options: Mapping[str, Any], inputs: Any, loaded: Any) -> Any:
    if not options["augment"]:
        return None
    from onward.data.augment import make_augmentation

    return make_augmentation(options["augment"], inputs, loaded)


def _report(output: Output, directory: Path, summary: Mapping[str, Any]) -> None:
    rows = summary["epochs"]
    columns = [
        key for key in dict.fromkeys(key for row in rows for key in row) if key not in ("learning_rate",)
    ]
    output.table(
        "", [c.replace("_", " ") for c in columns], [[_cell(row.get(c, "")) for c in columns] for row in rows]
    )
    if summary["best"]:
        best = summary["best"]
        output.line(
            f"best: epoch {best['epoch']} with {best['metric'].replace('_', ' ')} {best['value']:.4g}"
        )
    output.line(f"report: {directory / 'report.html'}")
    output.line(f"next: onward deploy {directory} trained.onnx")
    output.result({"directory": directory, "report": directory / "report.html", **summary})


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
