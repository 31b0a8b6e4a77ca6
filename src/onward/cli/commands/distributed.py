"""`onward distributed`: train on several processes or machines, started by torchrun."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onward.cli.choices import DeviceOption
from onward.cli.command import CommandError, Output, command, examples
from onward.cli.commands.train import require_finite
from onward.cli.output_paths import require_folder_target
from onward.cli.run_folder import begun_run, refuse_earlier_run
from onward.cli.shared_options import (
    ClipNormOption,
    DataOption,
    MapOption,
    MaxLengthOption,
    ReadingOptions,
    WarmupOption,
)
from onward.limits import current
from onward.reading import read_json

if TYPE_CHECKING:
    from onward.data.read import Data

__all__ = ["Ended", "launch", "register"]


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
    reading: ReadingOptions = ReadingOptions(),  # noqa: B008  # frozen
    max_length: MaxLengthOption = None,
    processes: Annotated[
        int, typer.Option("--processes", "-p", min=1, help="Processes on this machine.")
    ] = 2,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages; the rest is data parallel.")] = 1,
    directory: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the run is kept.")
    ] = Path("run"),
    epochs: Annotated[int, typer.Option("--epochs", "-e", min=1, help="Passes over the data.")] = 1,
    batch_size: Annotated[
        int, typer.Option("--batch-size", "-b", min=1, help="Of all processes together.")
    ] = 32,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate",
            "--lr",
            min=0,
            help="The highest learning rate. Default: the artifacts' setting, or 0.001.",
        ),
    ] = None,
    warmup: WarmupOption = None,
    clip_norm: ClipNormOption = None,
    accumulation: Annotated[
        int,
        typer.Option("--gradient-accumulation-steps", "--accumulation", min=1, help="Batches per update."),
    ] = 1,
    shard_optimizer: Annotated[
        bool,
        typer.Option("--shard-optimizer", help="Keep only a share of the optimizer state on each process."),
    ] = False,
    device: DeviceOption = "cpu",
    save_every: Annotated[int, typer.Option(min=1, help="Save after so many updates.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of shuffling and dropout.")] = 0,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="The number of this machine.")] = 0,
    master: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Of machine 0, where there are several.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the last checkpoint in --output.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run in --output.")
    ] = False,
) -> None:
    """Train on many processes: the same result as one process with the same batch size, up to rounding."""
    if not (artifacts / "training_model.onnx").is_file():
        raise CommandError(f"no artifacts in '{artifacts}'", "make them with: onward artifacts model.onnx")
    if (processes * nodes) % stages:
        raise CommandError(
            f"{processes * nodes} processes cannot be divided into pipelines of {stages} stages",
            "change --processes",
        )
    place = _where(processes, nodes, node_rank, master)
    if not resume:
        refuse_earlier_run(directory, overwrite=overwrite)
    if importlib.util.find_spec("torch") is None:
        raise CommandError("torch is not installed", "pip install 'onward[distributed]'")
    options = {
        "artifacts": str(artifacts), "data": data, "eval_data": eval_data, "mapping": mapping,
        "stages": stages, "directory": str(directory), "epochs": epochs, "batch_size": batch_size,
        "learning_rate": learning_rate, "accumulation": accumulation, "shard_optimizer": shard_optimizer,
        "save_every": save_every, "seed": seed, "device": device, "warmup": warmup, "clip_norm": clip_norm,
        "max_length": max_length, **reading.settings(),
    }  # fmt: skip
    require_finite(options, "learning_rate", "warmup", "clip_norm")
    require_folder_target(directory)
    from onward.cli.data import keep_tokenizer

    checked = _check_data(artifacts, directory, options)
    samples = None if checked is None else checked.samples
    if checked is not None:
        options["label"] = reading.label or checked.label
        for note in checked.notes:
            output.note(note)
    total = None if resume or samples is None else -(-samples // batch_size) * epochs
    classes, done = (None, None) if checked is None else (checked.classes, checked.preprocessing)
    with begun_run(
        directory, artifacts, options, classes, done, replace=overwrite and not resume, lock=node_rank == 0
    ):
        if checked is not None:
            keep_tokenizer(checked, directory)
        history = _train(output, place, options, total=total, read_history=node_rank == 0)
    losses = history.get("losses", [])
    if losses:
        output.line(f"{len(losses)} updates, loss {losses[0]:.4g} at first, {losses[-1]:.4g} at last")
    if history.get("eval_loss") is not None:
        output.line(f"evaluation loss {history['eval_loss']:.4g}")
    output.line(f"next: onward deploy {directory} model.onnx")
    output.result({"directory": directory, "processes": processes * nodes, **history})


def _count(path: Path) -> int:
    """How many batches rank 0 has taken; 0 while it has not said so."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # not there yet, or being written
        return 0


def _check_data(artifacts: Path, directory: Path, options: Mapping[str, Any]) -> Data | None:
    """Read the data once here, so that errors are one line. A function is called on the ranks only."""
    from onward.cli.data import load_training_data, user_inputs
    from onward.cli.python_entry import is_entry

    if any(is_entry(source) for source in [*(options["data"] or ()), *(options["eval_data"] or ())]):
        return None
    inputs = user_inputs(artifacts / "training_model.onnx")
    return load_training_data(artifacts, directory, options, inputs)[1]


def _train(
    output: Output,
    place: Sequence[str],
    options: Mapping[str, Any],
    *,
    total: int | None,
    read_history: bool,
) -> dict[str, Any]:
    """Run the ranks to their end; what rank 0 measured."""
    directory = Path(options["directory"])
    with tempfile.TemporaryDirectory(prefix="onward-") as scratch:
        report = Path(scratch) / "report.json"
        command = [sys.executable, "-m", "torch.distributed.run", *place, "--module", "onward.cli.worker"]
        with output.counting("training", total) as show:
            ended = launch(
                [
                    *command,
                    json.dumps({**options, "report": str(report), "limits": dataclasses.asdict(current())}),
                ],
                log=Path(scratch) / "stderr.txt",
                quiet=output.silent,
                look=lambda: show(_count(report.with_name("batches"))),
            )
        found = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
    if output.debug:
        print(ended.words, file=sys.stderr)
    if "error" in found:
        raise CommandError(found["error"], found["hint"])
    if ended.interrupted or "stopped" in found:
        again = "resume with the same command and --resume"
        saved = f"stopped after {found['stopped']} updates, all saved; {again}" if "stopped" in found else ""
        raise KeyboardInterrupt(
            saved or (f"interrupted; {again}" if any(directory.glob("checkpoint-*")) else "")
        )
    if ended.code:
        last = [line for line in ended.words.splitlines() if line.strip()][-1:] or [""]
        raise CommandError(
            f"torchrun ended with code {ended.code}: {last[0].strip()[:200]}", "--debug shows all it said"
        )
    for line in ended.words.splitlines():
        if "Warning:" in line:
            output.note(line.strip())
    return read_json(directory / "distributed.json") if read_history else {}


def _where(processes: int, nodes: int, node_rank: int, master: str | None) -> list[str]:
    """What torchrun is told about the machines."""
    many = ["--nproc-per-node", str(processes)]
    if nodes == 1:
        if node_rank or master is not None:
            raise CommandError("--node-rank and --master are for several machines", "add --nodes")
        return ["--standalone", *many]
    example = "the address of machine 0, for example host0:29500"
    if master is None:
        raise CommandError("several machines need --master HOST:PORT", example)
    if node_rank >= nodes:
        raise CommandError(f"--node-rank is {node_rank}: machines are 0 to {nodes - 1}", "count from 0")
    host, _, port = master.rpartition(":") if ":" in master else (master, "", "29500")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise CommandError(f"--master is '{master}', not HOST:PORT", example)
    return [
        *many, "--nnodes", str(nodes), "--node-rank", str(node_rank),
        "--master-addr", host, "--master-port", port,
    ]  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How it ended: its exit code, whether a signal ended it, and what it wrote to stderr."""

    code: int
    interrupted: bool
    words: str


def launch(command: Sequence[str], *, log: Path, quiet: bool, look: Callable[[], None]) -> Ended:
    """Run a command to its end; a first interrupt asks it to stop, a second kills it. `look` is called meanwhile."""
    own: dict[str, Any] = {"start_new_session": True}
    if os.name == "nt":
        own = {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
    # threads as torchrun chooses, but without its remark; modules of the current folder only where the user names one
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONSAFEPATH": "1"}
    interrupted = False
    with open(log, "wb") as stderr:
        process = subprocess.Popen(
            command, stderr=stderr, stdout=subprocess.DEVNULL if quiet else None, env=environment, **own
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    look()
                except KeyboardInterrupt:
                    if interrupted:
                        raise
                    interrupted = True
                    process.terminate()
        finally:
            if process.poll() is None:
                process.kill()  # its ranks see that it is gone
                process.wait()
    return Ended(code, interrupted, log.read_text(encoding="utf-8", errors="replace"))
