"""Ranks for tests: processes of one machine that find each other through a store of their own.

`run(world, job, **arguments)` calls `job(**arguments)` on every rank and returns what each returned. The
processes come from a fork server that has imported everything, so that a rank starts at once.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["Job", "Lost", "run", "start"]

_CONTEXT = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
if os.name == "posix":
    _CONTEXT.set_forkserver_preload(["ranks_preload"])


class Lost(AssertionError):
    """Ranks that failed; `errors` has the text of each that could say why."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())))


class Job:
    """A job on some ranks, as its launcher sees it."""

    def __init__(self, world: int, job: Callable[..., Any], arguments: dict[str, Any], attempt: int) -> None:
        import torch.distributed as dist

        # as torchrun's agent does: the launcher hosts the store, at a port that the system chose
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.results = _CONTEXT.Queue()
        self.processes = [
            _CONTEXT.Process(
                target=_rank,
                args=(rank, world, self._store.port, attempt, job, arguments, self.results),
                daemon=True,
            )
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def wait(self, *, seconds: float = 60, grace: float = 10) -> list[Any]:
        """What each rank returned; after a failure the others have `grace` seconds to fail as well."""
        found: dict[int, Any] = {}
        errors: dict[int, str] = {}
        end = time.monotonic() + seconds
        while len(found) + len(errors) < len(self.processes) and time.monotonic() < end:
            try:
                rank, good, value = self.results.get(timeout=0.05)
                (found if good else errors)[rank] = value
            except queue.Empty:
                for rank, process in enumerate(self.processes):
                    if process.exitcode not in (None, 0) and rank not in errors:
                        errors[rank] = f"exit {process.exitcode}"
            if errors:
                end = min(end, time.monotonic() + grace)
                grace = float("inf")
        self.end()
        missing = [r for r in range(len(self.processes)) if r not in found and r not in errors]
        errors.update(dict.fromkeys(missing, "did not end"))
        if errors:
            raise Lost(errors)
        return [found[rank] for rank in range(len(self.processes))]

    def end(self) -> None:
        """Kill what is left."""
        for process in self.processes:
            process.join(timeout=1)
            if process.is_alive():
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
                process.join()


def start(world: int, job: Callable[..., Any], *, attempt: int = 0, **arguments: Any) -> Job:
    return Job(world, job, arguments, attempt)


def run(world: int, job: Callable[..., Any], **arguments: Any) -> list[Any]:
    return start(world, job, **arguments).wait()


def _rank(
    rank: int, world: int, port: int, attempt: int, job: Callable[..., Any], arguments: dict, results: Any
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(attempt),
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    try:
        results.put((rank, True, job(**arguments)))
    except BaseException as error:
        traceback.print_exc()
        results.put((rank, False, f"{type(error).__name__}: {error}"))
        results.close()
        results.join_thread()
        os._exit(1)
