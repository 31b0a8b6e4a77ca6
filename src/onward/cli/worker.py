"""One rank of a run on several processes; the launcher starts it with the run as JSON.

An error, that the run was stopped, or what came of it is written to a file for the launcher: one rank's message is
enough.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from onward.distributed.errors import RankLost
from onward.distributed.launch import LOST, end_with_launcher
from onward.train.callbacks import Callback

_TELL_EVERY = 0.5  # seconds


def main(job: dict[str, Any]) -> int:
    """Train this rank's share; rank 0 writes the files of the run. Returns the exit code."""
    # the trainer defers what these raise to the end of an update, which all ranks make
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    # a rank whose launcher was killed would wait for the others for ever
    end_with_launcher()
    report = Path(job["report"])
    from onward import limits

    try:
        with limits.override(**job["limits"]):
            summary = _train(job, report)
    except KeyboardInterrupt as stop:
        # with words: the run was saved; without: it was stopped before there was anything to save
        if stop.args:
            _write_once(report, {"stopped": str(stop)})
        return 0 if stop.args else 130
    except RankLost:
        traceback.print_exc()
        return LOST  # nothing to say that the launcher does not know
    except Exception as error:
        from onward.cli.errors import explain

        traceback.print_exc()
        message, hint = explain(error)
        _write_once(report, {"error": message, "hint": hint})
        return 1
    if summary is not None:
        _write_once(report, {"summary": summary})
    return 0


def _train(job: dict[str, Any], report: Path) -> dict[str, Any] | None:
    """Train; what rank 0 says of the run."""
    from onward.cli.run_options import read_options
    from onward.cli.training_run import read_training_run
    from onward.distributed.rank_environment import read_environment
    from onward.distributed.runner import join_ranks
    from onward.distributed.settings import RunnerSettings

    artifacts, directory, options = (
        Path(job["artifacts"]),
        Path(job["directory"]),
        read_options(job["options"]),
    )
    prefix = options.prefix
    evaluation = Path(f"{prefix}eval_model.onnx")
    engines = join_ranks(
        RunnerSettings(
            artifacts=artifacts,
            training_model=Path(f"{prefix}training_model.onnx"),
            eval_model=evaluation if (artifacts / evaluation).is_file() else None,
            optimizer_model=Path(f"{prefix}optimizer_model.onnx"),
            checkpoint=Path(f"{prefix}checkpoint"),
            pipeline_parallel_size=options.stages,
            shard_optimizer=options.shard_optimizer,
            device=options.device,
        )
    )
    try:
        with engines.all_or_none():
            run = read_training_run(artifacts, directory, options)
            # a tracker would see each figure once for each rank
            callbacks = run.make_callbacks() if engines.rank == 0 else []
        callbacks.append(_Counter(report.with_name("updates")))
        # ranks that were started again go on from the last checkpoint, where there is one
        resume = job["resume"] or read_environment().attempt > 0
        trainer = run.make_trainer(callbacks, resume=resume, progress=False, engines=engines)
        summary = run.fit(trainer)
    finally:
        engines.close()
    return summary if engines.rank == 0 else None


class _Counter(Callback):
    """Tells the launcher now and then how many updates were made."""

    def __init__(self, path: Path) -> None:
        self._path, self._told = path, 0.0

    def on_step(self, trainer: Any, row: dict[str, Any]) -> None:
        if time.monotonic() - self._told > _TELL_EVERY:
            self._told = time.monotonic()
            self._path.write_text(str(row["step"]), encoding="ascii")


def _write_once(path: Path, content: dict[str, Any]) -> None:
    # "x": the first rank that fails tells why, the others only follow it
    with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
        json.dump(content, file)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
