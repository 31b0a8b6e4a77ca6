"""`onward bench`: how long does a training step take, and which part of it?"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.choices import DeviceOption
from onward.cli.command import Output, command, examples
from onward.cli.output_paths import plain_prefix
from onward.cli.run_folder import find

__all__ = ["register", "time_steps"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "bench",
        epilog=examples(
            "onward bench artifacts --batch-size 32",
            "onward bench artifacts --threads 1 --steps 100 --json",
            "onward bench artifacts --device cuda",
        ),
    )(bench)


@command
def bench(
    output: Output,
    artifacts: Annotated[
        Path, typer.Argument(help="The folder of artifacts, or of a run.", show_default=False)
    ],
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Samples at a time.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = 30,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before measuring.")] = 3,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; onnxruntime's choice by default.")
    ] = None,
    device: DeviceOption = "cpu",
    prefix: Annotated[str, typer.Option(help="The prefix of the artifacts' file names.")] = "",
) -> None:
    """Measure forward and backward, update and evaluation on random inputs."""
    place = find(artifacts, prefix=plain_prefix(prefix))
    with output.working("measuring"):
        found = time_steps(
            place.artifacts, batch_size=batch_size, steps=steps, warmup=warmup, threads=threads,
            prefix=place.prefix, device=device,
        )  # fmt: skip
    names = {
        "step": "step in all",
        "gradients": "forward and backward",
        "update": "optimizer",
        "evaluation": "evaluation",
    }
    rows = [
        [title, *(f"{1e3 * found[name][figure]:.3f}" for figure in ("median", "fastest", "slowest"))]
        for name, title in names.items()
        if found.get(name)
    ]
    output.table(f"milliseconds per batch of {batch_size}", ["", "median", "fastest", "slowest"], rows)
    output.line(f"{batch_size / found['step']['median']:.0f} samples per second")
    output.result(
        {"batch_size": batch_size, "samples_per_second": batch_size / found["step"]["median"], **found}
    )


def time_steps(
    artifacts: Any,
    *,
    batch_size: int,
    steps: int,
    warmup: int = 3,
    threads: int | None = None,
    prefix: str = "",
    evaluate: bool = True,
    device: str = "cpu",
) -> dict[str, Any]:
    """Seconds of each part of a step, of artifacts in a folder or in memory, on random inputs."""
    import onnxruntime as ort

    from onward import Trainer
    from onward.cli.samples import random_inputs

    options = ort.SessionOptions()
    options.log_severity_level = 4
    if threads is not None:
        options.intra_op_num_threads = threads
    trainer = Trainer(
        artifacts,
        session_options=options,
        progress=False,
        on_nonfinite="ignore",
        prefix=prefix,
        device=device,
    )
    specs, classes = _inputs_of(artifacts, prefix, trainer.module.input_names())
    batch = list(random_inputs(specs, size=batch_size, classes=classes).values())
    spent: dict[str, list[float]] = {"gradients": [], "update": [], "step": []}
    for index in range(warmup + steps):
        begun = time.perf_counter()
        trainer.module(*batch)
        between = time.perf_counter()
        trainer.optimizer.step()
        trainer.module.lazy_reset_grad()
        ended = time.perf_counter()
        if index >= warmup:
            spent["gradients"].append(between - begun)
            spent["update"].append(ended - between)
            spent["step"].append(ended - begun)
    spent["evaluation"] = []
    evaluates = evaluate and (
        not isinstance(artifacts, Path) or (artifacts / f"{prefix}eval_model.onnx").is_file()
    )
    if evaluates:
        trainer.module.eval()
    for index in range(warmup + steps if evaluates else 0):
        begun = time.perf_counter()
        trainer.module(*batch)
        if index >= warmup:
            spent["evaluation"].append(time.perf_counter() - begun)
    return {
        name: {"median": statistics.median(times), "fastest": min(times), "slowest": max(times)}
        for name, times in spent.items()
        if times
    }


def _inputs_of(artifacts: Any, prefix: str, names: list[str]) -> tuple[list[Any], dict[str, int]]:
    """What the training model takes from the user, and how many classes its labels have."""
    from onward.cli.data import input_specs
    from onward.cli.model_file import read_model
    from onward.data.match_inputs import specs_of
    from onward.model_metadata import read_labels

    if isinstance(artifacts, Path):
        path = artifacts / f"{prefix}training_model.onnx"
        specs = input_specs(str(path), names)
        about = {e.key: e.value for e in read_model(path).metadata_props}
    else:
        import onnx_ir as ir

        specs = specs_of(ir.to_proto(artifacts.training).graph, names)
        about = dict(artifacts.training.metadata_props)
    return specs, {name: classes for name, (classes, _) in read_labels(about).items()}
