"""`onward distributed`: train on several processes or machines, started by torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from onward.cli.frame import CommandError, Output, command, examples
from onward.cli.runs import clear_run, write_run
from onward.cli.train import DataOption, LabelOption, MapOption

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "distributed",
        epilog=examples(
            "onward distributed artifacts --data digits.npz --processes 4 --epochs 10",
            "onward distributed artifacts -d digits.npz -p 2 --stages 2          # a pipeline",
            "onward distributed artifacts -d digits.npz -p 4 --nodes 2 --node-rank 0 --master host0:29500",
        ),
    )(distributed)


@command
def distributed(
    output: Output,
    artifacts: Annotated[Path, typer.Argument(help="The folder of artifacts.", show_default=False)],
    data: DataOption = None,
    eval_data: Annotated[
        list[str] | None, typer.Option("--eval-data", metavar="[INPUT=]PATH", help="Data to evaluate on.")
    ] = None,
    mapping: MapOption = None,
    label: LabelOption = None,
    processes: Annotated[
        int, typer.Option("--processes", "-p", min=1, help="Processes on this machine.")
    ] = 2,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages; the rest is data parallel.")] = 1,
    directory: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the run is kept.")
    ] = Path("run"),
    epochs: Annotated[int, typer.Option("--epochs", "-e", min=1)] = 1,
    batch_size: Annotated[
        int, typer.Option("--batch-size", "-b", min=1, help="Of all processes together.")
    ] = 32,
    learning_rate: Annotated[float, typer.Option("--learning-rate", "--lr")] = 1e-3,
    accumulation: Annotated[int, typer.Option(min=1, help="Batches per update.")] = 1,
    shard_optimizer: Annotated[
        bool,
        typer.Option("--shard-optimizer", help="Keep only a share of the optimizer state on each process."),
    ] = False,
    save_every: Annotated[int, typer.Option(min=1, help="Save after so many updates.")] = 100,
    seed: Annotated[int, typer.Option()] = 0,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="The number of this machine.")] = 0,
    master: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Of machine 0, where there are several.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --output.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run in --output.")
    ] = False,
) -> int:
    """Train on many processes: the same result as one process with the same batch size, up to rounding."""
    if not (artifacts / "training_model.onnx").is_file():
        raise CommandError(f"no artifacts in '{artifacts}'", "make them with: onward artifacts model.onnx")
    if not data:
        raise CommandError("no data was given", "name it with --data")
    if (processes * nodes) % stages:
        raise CommandError(
            f"{processes * nodes} processes cannot be divided into pipelines of {stages} stages",
            "change --processes",
        )
    if nodes > 1 and master is None:
        raise CommandError(
            "several machines need --master HOST:PORT", "the address of machine 0, for example host0:29500"
        )
    if any(directory.glob("checkpoint-*")) and not resume:
        if not overwrite:
            raise CommandError(
                f"'{directory}' holds an earlier run",
                "go on with --resume, replace it with --overwrite, or choose -o",
            )
        clear_run(directory)
    options = {
        "artifacts": str(artifacts), "data": data, "eval_data": eval_data, "mapping": mapping, "label": label,
        "stages": stages, "directory": str(directory), "epochs": epochs, "batch_size": batch_size,
        "learning_rate": learning_rate, "accumulation": accumulation, "shard_optimizer": shard_optimizer,
        "save_every": save_every, "seed": seed,
    }  # fmt: skip
    write_run(directory, artifacts, options, None)
    try:
        import torch.distributed.run as _launcher  # noqa: F401 - only to say early that it is missing
    except ImportError as error:
        raise CommandError("torch is not installed", "pip install 'onward[distributed]'") from error
    code = subprocess.call(
        [sys.executable, "-m", "torch.distributed.run", *_where(processes, nodes, node_rank, master),
         "--module", "onward.cli.rank", json.dumps(options)]
    )  # fmt: skip
    if code:
        raise CommandError(
            f"torchrun ended with code {code}", "the first error above is the cause; --resume goes on"
        )
    history = (
        json.loads((directory / "distributed.json").read_text(encoding="utf-8")) if node_rank == 0 else {}
    )
    losses = history.get("losses", [])
    if losses:
        output.line(f"{len(losses)} updates, loss {losses[0]:.4g} at first, {losses[-1]:.4g} at last")
    if history.get("eval_loss") is not None:
        output.line(f"evaluation loss {history['eval_loss']:.4g}")
    output.line(f"next: onward deploy {directory} model.onnx")
    output.result({"directory": directory, "processes": processes * nodes, **history})
    return 0


def _where(processes: int, nodes: int, node_rank: int, master: str | None) -> list[str]:
    many = ["--nproc-per-node", str(processes)]
    if nodes == 1:
        return ["--standalone", *many]
    host, _, port = (master or "").partition(":")
    return [
        *many, "--nnodes", str(nodes), "--node-rank", str(node_rank),
        "--master-addr", host, "--master-port", port or "29500",
    ]  # fmt: skip
