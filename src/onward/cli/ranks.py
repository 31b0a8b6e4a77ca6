"""Trains on several processes: each is a rank and runs `onward.cli.worker` with the options of the run."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.cli.errors import CommandError
from onward.files import scratch_folder
from onward.limits import current

if TYPE_CHECKING:
    from onward.cli.command import Output
    from onward.cli.training_run import TrainingRun
    from onward.distributed.launch import Ended, World


# A rank that is killed again after that many restarts, each from the last checkpoint, will be killed again.
_MAX_RESTARTS = 3


def train_on_ranks(
    output: Output, run: TrainingRun, world: World | None, *, resume: bool
) -> dict[str, Any] | None:
    """Train on the ranks of a world, or of this machine, to their end; what rank 0 says of the run, if it is here."""
    from onward.distributed.launch import World

    if importlib.util.find_spec("torch") is None:
        raise CommandError("torch is not installed", "pip install 'onward[distributed]'")
    with scratch_folder() as scratch:
        return _launch_ranks(output, run, world or World(run.options.processes), scratch, resume=resume)


def _launch_ranks(
    output: Output, run: TrainingRun, world: World, scratch: Path, *, resume: bool
) -> dict[str, Any] | None:
    from onward.distributed.launch import run_ranks

    report, log = scratch / "report.json", scratch / "stderr.txt"
    job = {
        "artifacts": str(run.artifacts),
        "directory": str(run.directory),
        "options": run.options.to_json(),
        "resume": resume,
        "report": str(report),
        # those of --limit: a rank is a process of its own
        "limits": dataclasses.asdict(current()),
    }

    def before_restart() -> None:
        report.unlink(missing_ok=True)  # what the ranks of the attempt that is over said
        output.note("a rank was lost: all start again from the last checkpoint")

    with output.counting("training", run.count_updates()) as show, open(log, "ab") as stderr:
        ended = run_ranks(
            [sys.executable, "-m", "onward.cli.worker", json.dumps(job)],
            world,
            max_restarts=_MAX_RESTARTS,
            # modules of the current folder only where the user names one
            environment={**os.environ, "PYTHONSAFEPATH": "1"},
            stdout=subprocess.DEVNULL if output.silent else None,
            stderr=stderr,
            poll=lambda: show(_read_count(report.with_name("updates"))),
            before_restart=before_restart,
        )
    answer = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
    return _explain_end(output, run, ended, answer, log.read_text(encoding="utf-8", errors="replace"))


def _explain_end(
    output: Output, run: TrainingRun, ended: Ended, answer: dict[str, Any], log: str
) -> dict[str, Any] | None:
    """What rank 0 says of the run; an error where the ranks failed, were lost or interrupted."""
    if output.debug:
        print(log, file=sys.stderr)
    if "error" in answer:
        raise CommandError(answer["error"], answer["hint"])
    saved = any(run.directory.glob("checkpoint-*"))
    again = f"resume with: onward train {run.directory} --resume"
    if ended.interrupted or "stopped" in answer:
        raise KeyboardInterrupt(answer.get("stopped") or (f"interrupted; {again}" if saved else ""))
    if ended.lost:
        times = f", {ended.restarts + 1} times" if ended.restarts else ""
        raise CommandError(f"{ended.lost}{times}", again if saved else "--debug shows what the ranks said")
    if ended.code:
        last = [line for line in log.splitlines() if line.strip()][-1:] or [""]
        raise CommandError(
            f"a rank ended with code {ended.code}: {last[0].strip()[:200]}", "--debug shows all it said"
        )
    for line in log.splitlines():
        if "Warning:" in line:
            output.note(line.strip())
    return answer.get("summary")


def _read_count(path: Path) -> int:
    """How many updates rank 0 has made; 0 while it has not said so."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # not there yet, or being written
        return 0
