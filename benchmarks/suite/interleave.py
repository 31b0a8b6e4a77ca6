"""Engines in processes of their own that take short turns, so that a busy moment of the machine hits all.

A round gives every engine a turn in each phase; the order of the engines turns around with every round. Before
a turn there is a pause, in which the threads of the engine before stop spinning, and within it some steps that
are not timed. Knows nothing about what a phase does: that is `step/worker.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from suite.settings import CACHE, HERE, Settings

__all__ = ["Track", "Worker", "WorkerEnded", "compare"]

PEER = HERE / ".envs" / "ort-training"
PEER_PACKAGES = ["onnxruntime-training-cpu==1.19.2", "numpy<2", "onnx==1.16.2", "torch==2.13.0"]
MOST_STEPS = 400


class WorkerEnded(Exception):
    """A worker's process is gone; the message is the last thing that it said."""


@dataclasses.dataclass
class Track:
    """What one engine did: for each phase, one figure a round, in milliseconds a step."""

    wall: dict[str, list[float]]
    processor: dict[str, list[float]]
    peak_mb: float = 0.0
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in dataclasses.asdict(self).items() if value}


class Worker:
    """An engine in its own process, which has done its first step and waits for commands."""

    def __init__(self, engine: str, folder: Path, *, threads: int, use: str = "train") -> None:
        # a pipe could fill up; it is open for as long as the process
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [*_command(engine, folder), "--threads", str(threads), "--use", use],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=_environment(threads),
        )
        self.phases: list[str] = self._read()["phases"]
        self.seconds_to_first_step = time.perf_counter() - started

    def turn(self, phase: str, steps: int) -> dict[str, Any]:
        """Milliseconds of each step on the wall clock, and of the processor's for all; the peak of memory."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # to read says why
            self._process.stdin.write(f"{phase} {steps}\n")
            self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        self._process.communicate()
        self._said.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self._process.wait()
        self._said.seek(0)
        said = self._said.read().strip().splitlines()
        raise WorkerEnded(_last_words(said))


def compare(
    folder: Path,
    *,
    engines: Sequence[str],
    phases: Sequence[str],
    rounds: int,
    settings: Settings,
    use: str = "train",
) -> dict[str, Track]:
    """Interleaved rounds of engines on one model. The first phase has all rounds, the others every second."""
    tracks = {engine: Track({}, {}) for engine in engines}
    workers: dict[str, Worker] = {}
    steps: dict[tuple[str, str], int] = {}
    for engine in engines:
        try:
            workers[engine] = Worker(engine, folder, threads=settings.threads, use=use)
            tracks[engine].peak_mb = workers[engine].turn(phases[0], 3)["peak_mb"]
            for phase in phases:
                if phase in workers[engine].phases:
                    usual = statistics.median(workers[engine].turn(phase, 3)["wall"])
                    steps[engine, phase] = min(MOST_STEPS, max(2, round(settings.turn_ms / usual)))
        except WorkerEnded as error:
            tracks[engine].problem = str(error)
            workers.pop(engine, None)
    for number in range(rounds):
        order = list(workers) if number % 2 == 0 else list(reversed(workers))
        for phase in phases if number % 2 == 0 else phases[:1]:
            for engine in order:
                if engine not in workers or (engine, phase) not in steps:
                    continue
                time.sleep(settings.pause)
                try:
                    answer = workers[engine].turn(phase, steps[engine, phase])
                except WorkerEnded as error:
                    tracks[engine] = Track({}, {}, problem=str(error))
                    del workers[engine]
                    continue
                track = tracks[engine]
                track.wall.setdefault(phase, []).append(statistics.median(answer["wall"]))
                track.processor.setdefault(phase, []).append(answer["processor"])
    for worker in workers.values():
        worker.stop()
    return tracks


def _command(engine: str, folder: Path) -> list[str]:
    python = _peer_python() if engine == "ort-training" else Path(sys.executable)
    command = [str(python), str(HERE / "step" / "worker.py"), engine, str(folder)]
    if engine == "ort-training" and not (folder / "ort-training" / "eval_model.onnx").exists():
        made = subprocess.run([*command, "--use", "generate"], capture_output=True, text=True, check=False)
        if made.returncode:
            raise WorkerEnded(_last_words(made.stderr.strip().splitlines()))
    return command


def _environment(threads: int) -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor"),
    }


def _peer_python() -> Path:
    """The interpreter of the peer's own environment, which is made when first needed."""
    python = PEER / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not (PEER / "ready").exists():
        print(f"setting up {PEER.name} …", file=sys.stderr)
        venv.create(PEER, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PEER_PACKAGES], check=True)
        (PEER / "ready").touch()
    return python


def _last_words(lines: list[str]) -> str:
    """The end of what a process said, without paths of this machine."""
    said = lines[-1] if lines else "it ended without a word"
    return said.replace(str(HERE.parent), "").replace(str(Path.home()), "~")[-200:]
