"""`onward bench`: how long does a training step take, and which part of it?"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.choices import DeviceOption
from onward.cli.command import command
from onward.cli.output import Output
from onward.cli.paths import plain_prefix, read_metadata
from onward.cli.run_folder import find_run
from onward.cli.shared_options import BatchSizeOption, PrefixOption


@command(
    "onward bench artifacts --batch-size 32",
    "onward bench artifacts --threads 1 --steps 100 --json",
    "onward bench artifacts --device cuda",
)
def bench(
    output: Output,
    artifacts: Annotated[
        Path, typer.Argument(help="The folder of artifacts, or of a run.", show_default=False)
    ],
    batch_size: BatchSizeOption = 32,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = 30,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before measuring.")] = 3,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; onnxruntime's choice by default.")
    ] = None,
    device: DeviceOption = "cpu",
    prefix: PrefixOption = "",
) -> None:
    """Measure forward and backward, update and evaluation on random inputs."""
    run = find_run(artifacts, prefix=plain_prefix(prefix))
    with output.working("measuring"):
        times = time_steps(
            run.artifacts, batch_size=batch_size, steps=steps, warmup=warmup, threads=threads,
            prefix=run.prefix, device=device,
        )  # fmt: skip
    names = {
        "step": "step in all",
        "gradients": "forward and backward",
        "update": "optimizer",
        "evaluation": "evaluation",
    }
    rows = [
        [title, *(f"{1e3 * times[name][figure]:.3f}" for figure in ("median", "fastest", "slowest"))]
        for name, title in names.items()
        if times.get(name)
    ]
    output.table(f"milliseconds per batch of {batch_size}", ["", "median", "fastest", "slowest"], rows)
    output.line(f"{batch_size / times['step']['median']:.0f} samples per second")
    output.result(
        {"batch_size": batch_size, "samples_per_second": batch_size / times["step"]["median"], **times}
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
    from onward.cli.data import random_inputs

    options = ort.SessionOptions()
    options.log_severity_level = 4
    if threads is not None:
        options.intra_op_num_threads = threads
    trainer = Trainer(
        artifacts,
        session_options=options,
        progress=False,
        on_nonfinite="ignore",  # random numbers may overflow, and take as long
        prefix=prefix,
        device=device,
    )
    specs, classes = _inputs_of(artifacts, prefix, trainer.module.input_names())
    # labels below the number of classes: others are refused by the step
    batch = list(random_inputs(specs, size=batch_size, classes=classes).values())
    spent: dict[str, list[float]] = {"gradients": [], "update": [], "step": [], "evaluation": []}
    for index in range(warmup + steps):
        started = time.perf_counter()
        trainer.module(*batch)
        differentiated = time.perf_counter()
        trainer.optimizer.step()
        # part of the step: it is what tells the next one to begin from zero
        trainer.module.lazy_reset_grad()
        updated = time.perf_counter()
        if index >= warmup:
            spent["gradients"].append(differentiated - started)
            spent["update"].append(updated - differentiated)
            spent["step"].append(updated - started)
    if isinstance(artifacts, Path):
        evaluate = evaluate and (artifacts / f"{prefix}eval_model.onnx").is_file()
    if evaluate:
        trainer.module.eval()
        for index in range(warmup + steps):
            started = time.perf_counter()
            trainer.module(*batch)
            if index >= warmup:
                spent["evaluation"].append(time.perf_counter() - started)
    return {
        name: {"median": statistics.median(times), "fastest": min(times), "slowest": max(times)}
        for name, times in spent.items()
        if times
    }


def _inputs_of(artifacts: Any, prefix: str, names: list[str]) -> tuple[list[Any], dict[str, int]]:
    """What the training model takes from the user, and how many classes its labels have."""
    from onward.cli.data import input_specs
    from onward.data.match_inputs import specs_of
    from onward.model_metadata import read_labels

    if isinstance(artifacts, Path):
        path = artifacts / f"{prefix}training_model.onnx"
        specs = input_specs(path, names)
        about = read_metadata(path)
    else:
        import onnx_ir as ir

        specs = specs_of(ir.to_proto(artifacts.training).graph, names)
        about = dict(artifacts.training.metadata_props)
    return specs, {name: classes for name, (classes, _) in read_labels(about).items()}
