"""`onward distributed`: the run of `onward train` on several processes or machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onward.cli.command import command
from onward.cli.errors import CommandError
from onward.cli.output import Output
from onward.cli.paths import plain_prefix
from onward.cli.run_folder import refuse_earlier_run
from onward.cli.run_options import OverwriteRunOption, ResumeOption, RunFolderOption, RunOptions
from onward.cli.shared_options import require_finite
from onward.cli.training_run import run_training


@command(
    "onward distributed artifacts --data digits.npz --processes 4 --epochs 10",
    "onward distributed artifacts -d digits.npz -p 2 --stages 2          # a pipeline",
    "onward distributed artifacts -d digits.npz -p 4 --nodes 2 --node-rank 0 --master host0:29500",
)
def distributed(
    output: Output,
    artifacts: Annotated[Path, typer.Argument(help="The folder of artifacts.", show_default=False)],
    # with a checkpoint now and then: a lost rank costs what came after the last one
    options: RunOptions = RunOptions(processes=2, save_every=100),  # noqa: B008  # frozen
    directory: RunFolderOption = Path("run"),
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="The number of this machine.")] = 0,
    master: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Of machine 0, where there are several.")
    ] = None,
    resume: ResumeOption = False,
    overwrite: OverwriteRunOption = False,
) -> None:
    """Train on many processes: the same result as one process with the same batch size, up to rounding."""
    from onward.distributed.launch import World, read_address

    if not (artifacts / f"{plain_prefix(options.prefix)}training_model.onnx").is_file():
        raise CommandError(f"no artifacts in '{artifacts}'", "make them with: onward artifacts model.onnx")
    # its mistakes first: they cost nothing to find
    address = read_address(master, machines=nodes, machine=node_rank)
    world = World(options.processes, nodes, node_rank, address)
    if not resume:
        refuse_earlier_run(directory, overwrite=overwrite)
    require_finite(options, "warmup", "clip_norm", "hold_out")
    run_training(output, artifacts, directory, options, resume=resume, overwrite=overwrite, world=world)
