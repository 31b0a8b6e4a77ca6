"""Variables of launchers: they make one job, or are refused; never are two processes both rank 0 of 1."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from onward.distributed import DistributedError
from onward.distributed.rank_environment import read_environment

SECRET = {"ONWARD_SECRET": "what nobody else can guess"}
THERE = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500", **SECRET}


def variables(launcher: str, rank: int, world: int) -> dict[str, str]:
    """What a launcher sets for a rank on one machine."""
    r, w = str(rank), str(world)
    return {
        "ours": {"RANK": r, "WORLD_SIZE": w, "LOCAL_RANK": r, "LOCAL_WORLD_SIZE": w},
        "Open MPI": {
            "OMPI_COMM_WORLD_RANK": r, "OMPI_COMM_WORLD_SIZE": w,
            "OMPI_COMM_WORLD_LOCAL_RANK": r, "OMPI_COMM_WORLD_LOCAL_SIZE": w,
        },
        "MPICH": {"PMI_RANK": r, "PMI_SIZE": w, "MPI_LOCALRANKID": r, "MPI_LOCALNRANKS": w},
        "Slurm": {"SLURM_PROCID": r, "SLURM_NTASKS": w, "SLURM_LOCALID": r},
        "a step of Slurm": {"SLURM_PROCID": r, "SLURM_NTASKS": "64", "SLURM_STEP_NUM_TASKS": w, "SLURM_LOCALID": r},
        "mpirun in Slurm": {
            "OMPI_COMM_WORLD_RANK": r, "OMPI_COMM_WORLD_SIZE": w, "OMPI_COMM_WORLD_LOCAL_RANK": r,
            "SLURM_PROCID": "0", "SLURM_NTASKS": "1",
        },
    }[launcher]  # fmt: skip


LAUNCHERS = ["ours", "Open MPI", "MPICH", "Slurm", "a step of Slurm", "mpirun in Slurm"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_knows_its_number(launcher: str) -> None:
    there = read_environment({**variables(launcher, 1, 2), **THERE})
    assert (there.rank, there.world, there.local_rank) == (1, 2, 1)
    assert (there.address, there.port, there.secret) == ("host0", 29500, b"what nobody else can guess")


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT", "ONWARD_SECRET"])
def test_ranks_that_do_not_know_where_they_meet_or_whom_are_refused(launcher: str, missing: str) -> None:
    values = {**variables(launcher, 0, 2), **THERE}
    del values[missing]
    with pytest.raises(DistributedError, match=f"{missing} is not set"):
        read_environment(values)


REFUSED: list[tuple[dict[str, str], str]] = [
    ({"RANK": "2", "WORLD_SIZE": "2"}, "ranks count from 0"),
    ({"RANK": "1"}, "WORLD_SIZE is not set"),
    ({"WORLD_SIZE": "2"}, "RANK is not set"),
    ({"RANK": "one", "WORLD_SIZE": "2"}, "must be a number"),
    ({"RANK": "-1", "WORLD_SIZE": "2"}, "must be a number"),
    ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is not set"),
    ({"PMI_SIZE": "2"}, "PMI_RANK is not set"),
    ({"SLURM_PROCID": "1"}, "SLURM_NTASKS is not set"),
    ({"RANK": "0", "WORLD_SIZE": "2", **THERE, "ONWARD_SECRET": "short"}, "has 5 characters"),
    ({"RANK": "0", "WORLD_SIZE": "2", **THERE, "MASTER_PORT": "x"}, "must be a number"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_half_of_a_world_is_refused(values: dict[str, str], message: str) -> None:
    with pytest.raises(DistributedError, match=message):
        read_environment(values)


@pytest.mark.parametrize(
    "values",
    [{}, {"RANK": "0"}, {"WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"SLURM_NTASKS": "4"},
     {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "RANK": "0", "WORLD_SIZE": "1"}],
)  # fmt: skip
def test_one_process_is_alone(values: dict[str, str]) -> None:
    assert (read_environment(values).rank, read_environment(values).world) == (0, 1)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("host0", False)],
)
def test_ranks_of_one_machine_keep_to_loopback(address: str, expected: bool) -> None:
    values = {**variables("ours", 0, 2), **THERE, "MASTER_ADDR": address}
    assert read_environment(values).on_loopback is expected


JOIN = """
import numpy as np
from onward.distributed import connect
comm = connect(timeout=30)
total = np.array([comm.rank + 1.0])
comm.all_reduce(total)
print(comm.rank, comm.world, total[0])
comm.close()
"""


def start(values: dict[str, str]) -> subprocess.Popen[str]:
    names = ("RANK", "WORLD_SIZE", "MASTER_", "OMPI_", "PMI_", "SLURM_", "ONWARD_S", "TORCHELASTIC_")
    base = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    return subprocess.Popen(
        [sys.executable, "-c", JOIN], env={**base, **values},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@pytest.mark.parametrize("launcher", ["Open MPI", "Slurm"])
def test_two_processes_form_one_job(launcher: str) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), **SECRET}
    ranks = [start({**variables(launcher, rank, 2), **meeting}) for rank in range(2)]
    answers = [rank.communicate(timeout=60) for rank in ranks]
    assert [out.strip() for out, _ in answers] == ["0 2 3.0", "1 2 3.0"], answers


def test_no_other_module_reads_the_variables_of_launchers() -> None:
    source = Path(__file__).parents[2] / "src" / "onward"
    readers = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if any(
            name in path.read_text("utf-8") for name in ('"WORLD_SIZE"', '"SLURM_PROCID"', '"MASTER_ADDR"')
        )
    }
    assert readers <= {"distributed/rank_environment.py", "distributed/launch.py", "distributed/comm.py"}
