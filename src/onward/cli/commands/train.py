"""`onward train`: trains artifacts on data; writes checkpoints, a history and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onward.cli.command import command
from onward.cli.errors import CommandError
from onward.cli.output import Output
from onward.cli.paths import plain_prefix
from onward.cli.run_folder import read_run, refuse_earlier_run, resume_options
from onward.cli.run_options import OverwriteRunOption, ResumeOption, RunFolderOption, RunOptions
from onward.cli.shared_options import require_finite
from onward.cli.training_run import run_training


@command(
    "onward train artifacts --data digits.npz --epochs 10 --hold-out 0.2 --metric accuracy",
    "onward train artifacts -d train.csv --eval-data test.csv --label species --schedule cosine",
    "onward train --output run --resume      # resume after Ctrl-C",
    "onward train artifacts -d digits.npz --processes 4 --hold-out 0.2 --metric accuracy",
)
def train(
    output: Output,
    context: typer.Context,
    *,
    artifacts: Annotated[
        Path | None,
        typer.Argument(help="The folder of artifacts; with --resume, that of the run.", show_default=False),
    ] = None,
    options: RunOptions,
    directory: RunFolderOption = Path("run"),
    resume: ResumeOption = False,
    overwrite: OverwriteRunOption = False,
) -> None:
    """Train: a run folder with checkpoints, history and a report that opens in any browser."""
    if resume and artifacts is not None and read_run(artifacts):
        artifacts, directory = None, artifacts  # onward train RUN --resume
    if resume:
        earlier = read_run(directory)
        if earlier is None:
            raise CommandError(f"there is no run to resume in '{directory}'", "start it without --resume")
        # an option that is given with its default's value was given: only the parser knows
        named = {name for name in vars(options) if not _is_default(context, name)}
        options = resume_options(directory, earlier.options, options, named)
        artifacts = artifacts or earlier.artifacts
    else:
        refuse_earlier_run(directory, overwrite=overwrite)
    if artifacts is None:
        raise CommandError(
            "which artifacts?", "onward train ARTIFACTS --data FILE; make them with: onward artifacts"
        )
    plain_prefix(options.prefix)
    if artifacts.is_file():
        raise CommandError(
            f"'{artifacts}' is a file, not a folder of artifacts",
            f"make artifacts with: onward artifacts {artifacts} --loss LOSS",
        )
    # its run.json names artifacts; what is meant is mostly to go on with it
    if read_run(artifacts):
        raise CommandError(
            f"'{artifacts}' is a run, not a folder of artifacts",
            f"resume with: onward train {artifacts} --resume",
        )
    require_finite(options, "warmup", "clip_norm", "hold_out")
    run_training(output, artifacts, directory, options, resume=resume, overwrite=overwrite)


def _is_default(context: typer.Context, name: str) -> bool:
    # by its name: the enum is click's own or typer's copy of it
    source = context.get_parameter_source(name)
    return source is None or source.name == "DEFAULT"
