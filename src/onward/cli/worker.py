"""One process of `onward distributed`; torchrun starts it with the options as JSON.

An error, or that the run was stopped, is written to a file for the launcher: one rank's message is enough, and
torchrun's own messages are about processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["main"]

_TELL_EVERY = 0.5  # seconds
_STOPPED = "a signal asked to stop"


def main(options: dict[str, Any]) -> int:
    """Train this rank's share; rank 0 writes checkpoints and the history. Returns the exit code."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    _die_with_the_launcher()
    report = Path(options["report"])
    from onward import limits

    try:
        with limits.override(**options.pop("limits", {})):
            updates = _train(options, stop)
    except Exception as error:
        import traceback

        from onward.cli.error_lines import explain

        traceback.print_exc()
        message, hint = explain(error)
        _write_once(report, {"error": message, "hint": hint})
        return 1
    if updates is not None:
        _write_once(report, {"stopped": updates})
    return 0


def _train(options: dict[str, Any], stop: threading.Event) -> int | None:
    """Train; the number of updates where a signal stopped it, all of them saved."""
    from onward.cli.data import load_training_data, user_inputs
    from onward.distributed import DistributedError, RunnerSettings, ShardedArrays, TrainingRunner
    from onward.train.artifact_set import find_artifacts
    from onward.train.schedules import make_schedule

    artifacts, directory = Path(options["artifacts"]), Path(options["directory"])
    specs = user_inputs(artifacts / "training_model.onnx")
    _, *parts = load_training_data(artifacts, directory, options, specs)
    train, test = (
        None if part is None else _batches(part, options, shuffle=part is parts[0]) for part in parts
    )
    rate, warmup, clip_norm = find_artifacts(artifacts).settings(
        **{name: options[name] for name in ("learning_rate", "warmup", "clip_norm")}
    )
    total: int | None = None
    if isinstance(train, ShardedArrays):
        total = -(-len(train) // options["accumulation"]) * options["epochs"]
    elif options["warmup"] is None:
        warmup = 0.0  # of how many updates is not known, and only a recorded default asks for it
    runner = TrainingRunner(
        RunnerSettings(
            artifacts=artifacts,
            epochs=options["epochs"],
            learning_rate=float(rate),
            scheduler=lambda optimizer: make_schedule(
                "constant", optimizer, float(rate), total=total, warmup=warmup
            ),
            clip_norm=clip_norm,
            gradient_accumulation_steps=options["accumulation"],
            seed=options["seed"],
            pipeline_parallel_size=options["stages"],
            shard_optimizer=options["shard_optimizer"],
            device=options.get("device") or "cpu",
            checkpoint_directory=directory,
            checkpoint_every=options["save_every"],
        )
    )
    with runner:
        try:
            counter = Path(options["report"]).with_name("batches") if runner.rank == 0 else None
            history = runner.run(_Watched(train, stop, counter), test)
        except DistributedError as error:
            # a rank that heard of the stop fails in its loader, and so all ranks stop before the same update
            if _STOPPED not in str(error):
                raise
            runner.save_checkpoint()
            return runner.updates
        loss = runner.end_training(test)
        if runner.rank == 0:
            found = {"losses": history.losses, "skipped": history.skipped, "eval_loss": loss}
            (directory / "distributed.json").write_text(json.dumps(found), encoding="utf-8")
    return None


def _batches(data: Any, options: dict[str, Any], *, shuffle: bool) -> Any:
    """What the runner takes: shares of arrays, or what a function of the user's gave."""
    import numpy as np

    from onward.distributed import ShardedArrays

    if data.arrays is None:
        return data.value
    arrays = [np.asarray(array) for array in data.arrays.values()]
    return ShardedArrays(*arrays, batch_size=options["batch_size"], shuffle=shuffle, seed=options["seed"])


class _Watched:
    """A loader that fails at the next batch after a signal, and says now and then how many it gave."""

    def __init__(self, loader: Any, stop: threading.Event, counter: Path | None) -> None:
        self._loader, self._stop, self._counter = loader, stop, counter
        self._given, self._told = 0, 0.0
        self.sampler = getattr(loader, "sampler", None)
        if hasattr(loader, "description"):
            self.description = loader.description
        if hasattr(loader, "epoch"):
            self.epoch = lambda *place, **named: self._watch(loader.epoch(*place, **named))

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return self._watch(self._loader)

    def _watch(self, batches: Iterable[Any]) -> Iterator[Any]:
        from onward.distributed.errors import DistributedError

        for batch in batches:
            if self._stop.is_set():
                raise DistributedError(_STOPPED)
            yield batch
            self._given += 1
            if self._counter is not None and time.monotonic() - self._told > _TELL_EVERY:
                self._told = time.monotonic()
                self._counter.write_text(str(self._given), encoding="ascii")


def _die_with_the_launcher() -> None:
    """End this process when torchrun is killed: nobody would wait for it."""
    if os.name != "posix":
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _write_once(path: Path, content: dict[str, Any]) -> None:
    with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
        json.dump(content, file)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
