"""Starts the ranks of a job on this machine: `python -m onward.distributed.launch -n 4 train.py --its-options`.

On one machine the ranks meet in a file that only this user can read, and talk over the loopback interface: nothing
listens on another address, and nothing is unpickled. When a rank is lost, all are started again, from the last
checkpoint if the program writes one. Signals are passed on, and no process stays behind, not even after a SIGKILL.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from onward.distributed.errors import RankLost
from onward.distributed.rank_environment import ATTEMPT_VARIABLE, SECRET_VARIABLE, STORE_VARIABLE
from onward.files import scratch_folder

# What a rank exits with that saw another one die (EX_TEMPFAIL): on another machine nobody else can tell.
LOST = 75
# An error reaches all ranks within a second; who is still there after this hangs.
_GRACE_SECONDS = 15.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class World:
    """The ranks of a job: so many on each of so many machines, of which this is one."""

    ranks_here: int
    machines: int = 1
    machine: int = 0
    # host and port of machine 0, where there are several
    address: tuple[str, int] | None = None

    @property
    def size(self) -> int:
        """How many ranks there are on all machines."""
        return self.machines * self.ranks_here

    def variables(self, local_rank: int, attempt: int, store: Path) -> dict[str, str]:
        """What a rank reads from its environment (`rank_environment`)."""
        values = {
            "RANK": self.machine * self.ranks_here + local_rank, "WORLD_SIZE": self.size,
            "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": self.ranks_here, ATTEMPT_VARIABLE: attempt,
        }  # fmt: skip
        if self.address is None:
            return {**{name: str(value) for name, value in values.items()}, STORE_VARIABLE: str(store)}
        host, port = self.address
        return {
            name: str(value) for name, value in {**values, "MASTER_ADDR": host, "MASTER_PORT": port}.items()
        }


@dataclass(frozen=True)
class Ended:
    """How the ranks ended: the exit code of all, whether they were interrupted, and which one was lost last."""

    code: int
    interrupted: bool = False
    lost: str | None = None
    restarts: int = 0


def run_ranks(
    command: Sequence[str],
    world: World,
    *,
    max_restarts: int = 0,
    environment: Mapping[str, str] | None = None,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | None = None,
    poll: Callable[[], None] = lambda: None,
    before_restart: Callable[[], None] = lambda: None,
) -> Ended:
    """Run a command as every rank of this machine, to the end of all; a first interrupt asks them to stop.

    A rank that a signal ended, or that exits with `LOST`, was lost: then all start again, `max_restarts` times at most.
    Any other exit code than 0 is an error of the program, which a restart would only repeat.
    """
    # of a launcher around this one: its store is not that of these ranks
    base = {
        name: value
        for name, value in (environment or os.environ).items()
        if not name.startswith("TORCHELASTIC_")
    }
    base.setdefault("OMP_NUM_THREADS", "1")  # onnxruntime's threads are chosen by the settings of the run
    for attempt in range(max_restarts + 1):
        with scratch_folder() as folder:
            environments = [
                base | world.variables(rank, attempt, folder / "store") for rank in range(world.ranks_here)
            ]
            with _started(command, environments, stdout, stderr) as ranks:
                interrupted = _wait(ranks, poll)
                codes = [process.returncode for process in ranks]
        first = world.machine * world.ranks_here
        lost = _describe_lost(codes, first)
        if interrupted or lost is None or attempt == max_restarts:
            return Ended(_worst(codes), interrupted, lost, attempt)
        before_restart()
    raise AssertionError("the loop returns")


@contextlib.contextmanager
def _started(
    command: Sequence[str], environments: Sequence[Mapping[str, str]], stdout: Any, stderr: Any
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a process for each environment, with a group of its own; whatever is left of the groups ends with this."""
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for variables in environments:
            ranks.append(
                subprocess.Popen(
                    command,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,  # Windows has flags instead, and ignores this
                    creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
                )
            )
        yield ranks
    finally:
        for process in ranks:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a rank, and the processes that it started (loaders of data): they are in its group."""
    if os.name == "nt":
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], poll: Callable[[], None]) -> bool:
    """Wait for all ranks; whether they were interrupted. After one fails the others have some seconds to fail too."""
    interrupted, deadline = False, float("inf")
    while True:
        try:
            codes = [process.poll() for process in ranks]
            if None not in codes:
                return interrupted
            if any(codes):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            if time.monotonic() > deadline:
                for process in ranks:
                    _kill(process)
            poll()
            time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            for process in ranks:
                process.terminate()


def _describe_lost(codes: Sequence[int], first: int) -> str | None:
    """Which rank was lost; None where all ended by themselves, or one by an error of its own."""
    if any(code > 0 and code != LOST for code in codes):
        return None
    names = {number.value: number.name for number in signal.Signals}
    for rank, code in enumerate(codes, first):
        # Windows gives killed processes a positive code: there only ranks that saw another die tell
        if code < 0:
            return f"rank {rank} was killed ({names.get(-code, f'signal {-code}')})"
    if LOST in codes:
        return f"rank {first + codes.index(LOST)} lost contact with another rank"
    return None


def _worst(codes: Sequence[int]) -> int:
    """One code for all: of a rank's own error before that of ranks that were ended or saw another die."""
    errors = [code for code in codes if code not in (0, LOST) and code > 0]
    return (errors or [abs(code) for code in codes if code] or [0])[0]


# ---- one rank ------------------------------------------------------------------------------------


def end_with_launcher() -> None:
    """End this process and its group when the launcher is killed: nobody would wait for them."""
    if os.name != "posix":
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        if os.getpgrp() == os.getpid():  # the launcher gave this rank a group of its own
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_program(program: str, arguments: Sequence[str], *, is_module: bool) -> int:
    """Run a program as this rank; its exit code."""
    end_with_launcher()
    for number in (signal.SIGINT, signal.SIGTERM):  # a trainer saves before it stops
        signal.signal(number, signal.default_int_handler)
    sys.argv = [program, *arguments]
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            if not sys.flags.safe_path:
                sys.path[0] = str(
                    Path(program).resolve().parent
                )  # as `python train.py` does; -m put this folder there
            runpy.run_path(program, run_name="__main__")
    except RankLost:
        traceback.print_exc()
        return LOST
    except KeyboardInterrupt:
        return 130
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, start the ranks, and return the exit code of all."""
    options = _parser().parse_args(arguments)
    if options.rank:
        return _run_program(options.program, options.arguments, is_module=options.module)
    try:
        world = World(options.ranks, options.machines, options.machine, _address(options))
    except AddressError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    module = ["--module"] if options.module else []
    command = [sys.executable, "-m", "onward.distributed.launch", "--rank", *module, "--"]
    try:
        ended = run_ranks(
            [*command, options.program, *options.arguments],
            world,
            max_restarts=options.max_restarts,
            before_restart=lambda: print("a rank was lost: all start again", file=sys.stderr),
        )
    except KeyboardInterrupt:
        return 130
    if ended.lost and not ended.interrupted:
        print(f"error: {ended.lost}, {ended.restarts + 1} times", file=sys.stderr)
    return 130 if ended.interrupted else ended.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m onward.distributed.launch", description="Start the ranks of a job on this machine."
    )
    parser.add_argument("-n", "--ranks", type=int, default=1, help="ranks on this machine")
    parser.add_argument(
        "--max-restarts", type=int, default=0, help="how often all start again after one is lost"
    )
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--machine", type=int, default=0, help="the number of this machine, from 0")
    parser.add_argument(
        "--master", metavar="HOST:PORT", help="an address of machine 0, where there are several"
    )
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _address(options: argparse.Namespace) -> tuple[str, int] | None:
    if options.ranks < 1 or options.max_restarts < 0:
        raise AddressError("--ranks must be at least 1, and --max-restarts at least 0", "change them")
    return read_address(options.master, machines=options.machines, machine=options.machine)


class AddressError(ValueError):
    """What was said of the machines does not fit together; `hint` is what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def read_address(master: str | None, *, machines: int, machine: int) -> tuple[str, int] | None:
    """HOST:PORT of machine 0 as its parts; None on one machine. Anything that does not fit is an `AddressError`."""
    example = "an address of machine 0, for example host0:29500"
    if machines == 1:
        if machine or master is not None:
            raise AddressError("the number of a machine and --master are for several machines", "add --nodes")
        return None
    if master is None:
        raise AddressError("several machines need --master HOST:PORT", example)
    if not 0 <= machine < machines:
        raise AddressError(
            f"the number of this machine is {machine}: machines are 0 to {machines - 1}", "count from 0"
        )
    host, _, port = master.rpartition(":") if ":" in master else (master, "", "29500")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise AddressError(f"--master is '{master}', not HOST:PORT", example)
    if not os.environ.get(SECRET_VARIABLE):
        raise AddressError(
            f"{SECRET_VARIABLE} is not set: ranks of several machines prove with it that they belong together",
            "make one with: python -c 'import secrets; print(secrets.token_hex(32))', and set it on all machines",
        )
    return host.strip("[]"), int(port)


if __name__ == "__main__":
    sys.exit(main())
