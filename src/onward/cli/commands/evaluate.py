"""`onward evaluate`: metrics of models: of runs, of deployed and of published ones."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated

import typer

from onward.cli.choices import DeviceOption, MetricChoice
from onward.cli.command import command
from onward.cli.errors import CommandError
from onward.cli.output import Output, human_size
from onward.cli.paths import read_model
from onward.cli.run_folder import RunFiles, export_run, find_run
from onward.cli.shared_options import (
    BatchSizeOption,
    CheckpointOption,
    DataOption,
    LabelOption,
    MapOption,
    PrefixOption,
    TaskOption,
    parse_pairs,
)
from onward.files import scratch_folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `onward evaluate`."""

    models: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL…",
            help="The folder of a run or of artifacts, an ONNX file, or a model's folder; several are compared.",
            show_default=False,
        ),
    ]
    data: DataOption = None
    task: TaskOption = None
    metric: Annotated[list[MetricChoice] | None, typer.Option("--metric", "-m", help="Besides the loss.")] = (
        None
    )
    checkpoint: CheckpointOption = None
    mapping: MapOption = None
    label: LabelOption = None
    batch_size: BatchSizeOption = 64
    device: DeviceOption = "cpu"
    prefix: PrefixOption = ""

    def metrics(self) -> list[str]:
        """The names of the metrics."""
        return [str(name) for name in self.metric or ()]


@command(
    "onward evaluate run --data test.npz --metric accuracy --metric f1",
    "onward evaluate trained.onnx trained-int8.onnx --data pictures     # float against quantized",
    "onward evaluate assistant --data questions.jsonl    # perplexity, or multiple choice",
)
def evaluate(output: Output, options: Options) -> None:
    """Metrics of models over some data: of a run's best checkpoint, of deployed and quantized files."""
    models = options.models
    if len(models) == 1 and not _is_for_inference(models[0]):
        if options.task is not None:
            raise CommandError("--task is for models for inference, and a run has its own", "leave it away")
        _evaluate_run(output, find_run(models[0], options.checkpoint, prefix=options.prefix), options)
        return
    names_run = options.checkpoint is not None or options.prefix
    if names_run and all(map(_is_for_inference, models)):
        raise CommandError("--checkpoint and --prefix are for a run", "leave them away, or name a run")
    _compare(output, options)


def _is_for_inference(model: Path) -> bool:
    """Whether a path is a model for inference, not a run or artifacts."""
    if model.is_dir():
        return not (model / "run.json").is_file() and any(
            (model / name).exists() for name in ("model.onnx", "onnx", "onward.json", "config.json")
        )
    return model.suffix == ".onnx" and model.is_file()


def _evaluate_run(output: Output, run: RunFiles, options: Options) -> None:
    """The loss and metrics of a run's checkpoint, dropout off."""
    import numpy as np

    from onward import Trainer
    from onward import checkpoint as checkpoints
    from onward.cli.data import input_specs, load_data
    from onward.data.splits import evaluation_part

    # the eval model and its loss, over the weights of the checkpoint: the trainer has both
    trainer = Trainer(
        run.artifacts, metrics=options.metrics(), progress=False, prefix=run.prefix, device=options.device
    )
    for name, array in checkpoints.load(run.checkpoint).parameters().items():
        trainer.state.parameters[name].data = np.asarray(array)
    model = run.artifacts / f"{run.prefix}training_model.onnx"
    loaded = load_data(
        options.data or (),
        input_specs(model, trainer.module.input_names()),
        run.data_options(mapping=options.mapping, label=options.label),
    )
    loaded = evaluation_part(loaded)
    for note in loaded.notes:
        output.note(note)
    with output.working("evaluating"):
        figures = trainer.evaluate(loaded.value, batch_size=options.batch_size)
    output.table("", ["", "value"], [[name, f"{value:.6g}"] for name, value in figures.items()])
    output.result({"checkpoint": run.checkpoint, "samples": loaded.samples, **figures})


def _compare(output: Output, options: Options) -> None:
    """The figures of models for inference beside one another: a float model and its quantized form, say."""
    from onward import evaluate_model
    from onward.cli.data import load_data
    from onward.data.read import DataOptions

    models, sources = options.models, options.data or []
    if not sources:
        load_data((), [])  # raises, and says what data is
    mapping = parse_pairs(options.mapping or (), "--map")
    evaluations = {}
    with scratch_folder() as folder:
        for index, model in enumerate(models):
            path, label = model, options.label
            if not _is_for_inference(model):
                run = find_run(model, options.checkpoint, prefix=options.prefix)
                # as it would be deployed, so that the figures compare with those of files
                path, label = export_run(run, folder / f"{index}.onnx"), label or run.options.label
            elif not model.is_dir():
                read_model(model)
            with output.working(f"evaluating {model}"):
                evaluations[str(model)] = evaluate_model(
                    path, Path(sources[0].partition("=")[2] or sources[0]),
                    lambda inputs, reading: load_data(sources, inputs, reading), task=options.task,
                    options=DataOptions(mapping=mapping, label=label),
                    metrics=options.metrics(), batch_size=options.batch_size, device=options.device,
                )  # fmt: skip
    first = next(iter(evaluations.values()))
    for note in first.notes:
        output.note(note)
    rows = [
        [name, *(f"{one.figures[name]:.6g}" if name in one.figures else "" for one in evaluations.values())]
        for name in first.figures
    ]
    sizes = [human_size(_size(model)) for model in models]
    output.table(f"{first.task}, {first.samples} samples", ["", *evaluations], [*rows, ["size", *sizes]])
    for model, one in evaluations.items():
        # a thousand classes are for --json: a terminal shows the first hundred
        # a class that is never predicted has no precision
        cells = [
            [
                ("–" if math.isnan(cell) else f"{cell:.3f}") if isinstance(cell, float) else cell
                for cell in row
            ]
            for row in one.classes
        ]
        output.table(model if len(models) > 1 else "", list(one.columns), cells[:100])
    documents = [
        {"model": model, "task": one.task, "samples": one.samples, **one.figures,
         "classes": [dict(zip(("name", *map(str.lower, one.columns[1:])), row)) for row in one.classes]}
        for model, one in evaluations.items()
    ]  # fmt: skip
    output.result(documents[0] if len(models) == 1 else {"models": documents})


def _size(model: Path) -> int:
    """The bytes of a model's file, or of a folder's models."""
    files = (
        [model]
        if model.is_file()
        else [*model.glob("*.onnx*"), *model.glob("onnx/*.onnx*"), *model.glob("best*")]
    )
    return sum(file.stat().st_size for file in files)
