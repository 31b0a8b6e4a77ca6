"""Which rank this process is, and where the ranks meet: the only reader of what launchers write in the environment.

Ours (`onward.distributed.launch`) and torchrun, Kubernetes' PyTorchJob or a user set RANK and WORLD_SIZE; mpirun
sets OMPI_COMM_WORLD_* or PMI_*, srun SLURM_*. Variables that say that there are several processes but not where
they meet are an error: each process would take itself for the only one, and all would write the same files.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

from onward.distributed.errors import DistributedError

# The file through which the ranks of our own launcher meet, and how often it has started them again.
STORE_VARIABLE, ATTEMPT_VARIABLE = "ONWARD_STORE", "ONWARD_ATTEMPT"
# What ranks of several machines know in common: whoever does not know it cannot join, or change where they meet.
SECRET_VARIABLE = "ONWARD_SECRET"
_SHORTEST_SECRET = 16


@dataclasses.dataclass(frozen=True)
class _Names:
    """The names that a launcher gives its variables; of `world` the first that is set holds."""

    launcher: str
    rank: str
    world: tuple[str, ...]
    local_rank: str
    local_world: str


_RANK = _Names("the launcher", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = _Names(
    "mpirun",
    "OMPI_COMM_WORLD_RANK",
    ("OMPI_COMM_WORLD_SIZE",),
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_HYDRA = _Names("mpiexec", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# a step of srun may have fewer tasks than the job
_SLURM = _Names(
    "Slurm",
    "SLURM_PROCID",
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "SLURM_LOCALID",
    "SLURM_NTASKS_PER_NODE",
)
# Most specific first: torchrun or mpirun may run inside of a Slurm step.
_LAUNCHERS = (_RANK, _OPEN_MPI, _HYDRA, _SLURM)


@dataclasses.dataclass(frozen=True)
class RankEnvironment:
    """A rank of a world, and the file or the address where the world meets; neither in a world of one."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int | None = None
    store_file: Path | None = None
    address: str | None = None
    port: int = 0
    secret: bytes = dataclasses.field(default=b"", repr=False)
    # how often all ranks were started again: each attempt has keys of its own in a store that outlives it
    attempt: int = 0
    # torchrun's agent hosts a store at the address; under other launchers rank 0 does
    has_agent_store: bool = False

    @property
    def on_loopback(self) -> bool:
        """Whether all ranks are on this machine and need no other interface."""
        if self.store_file is not None or self.address == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.address or "").is_loopback
        except ValueError:
            return False


def read_environment(variables: Mapping[str, str] | None = None) -> RankEnvironment:
    """This process's rank, from the variables of whichever launcher started it.

    >>> slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
    >>> there = read_environment({**slurm, "ONWARD_SECRET": "what nobody else can guess"})
    >>> there.rank, there.world, there.address
    (1, 2, 'host0')
    >>> read_environment({}).world
    1
    """
    values = os.environ if variables is None else variables
    names = next((names for names in _LAUNCHERS if _names_ranks(values, names)), None)
    if names is None:
        return RankEnvironment()
    world_name = next((name for name in names.world if name in values), names.world[-1])
    world, rank = _integer(values, world_name), _integer(values, names.rank)
    if rank is None and (world or 0) > 1:
        raise _missing(names.rank, f"{world_name} is {world}")
    rank = rank or 0
    if world is None and rank:
        raise _missing(world_name, f"{names.rank} is {rank}")
    world = 1 if world is None else world
    if not rank < max(world, 1):
        raise DistributedError(f"{names.rank} is {rank}, {world_name} {world}: ranks count from 0")
    local_rank = _integer(values, names.local_rank) or 0
    local_world = _integer(values, names.local_world)
    if world <= 1:
        return RankEnvironment(local_rank=local_rank, local_world=local_world)
    if values.get(STORE_VARIABLE):
        attempt = _integer(values, ATTEMPT_VARIABLE) or 0
        store = Path(values[STORE_VARIABLE])
        return RankEnvironment(rank, world, local_rank, local_world, store, attempt=attempt)
    address, port = values.get("MASTER_ADDR"), _integer(values, "MASTER_PORT")
    if not address or port is None:
        raise _missing(
            "MASTER_PORT" if address else "MASTER_ADDR",
            f"{names.launcher} started {world} processes ({world_name}) and this one does not know where they meet",
        )
    agent = values.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = _integer(values, "TORCHELASTIC_RESTART_COUNT" if agent else ATTEMPT_VARIABLE) or 0
    joined = RankEnvironment(
        rank, world, local_rank, local_world, None, address, port, _secret(values), attempt, agent
    )
    if not (joined.secret or agent or joined.on_loopback):
        raise DistributedError(
            f"{SECRET_VARIABLE} is not set: the ranks meet at {address}, which others can reach, and prove with it "
            f"that they belong together. Make one with: python -c 'import secrets; print(secrets.token_hex(32))', "
            "and set it for all ranks. See docs/distributed.md"
        )
    return joined


def _secret(values: Mapping[str, str]) -> bytes:
    secret = values.get(SECRET_VARIABLE, "").strip()
    if secret and len(secret) < _SHORTEST_SECRET:
        raise DistributedError(
            f"{SECRET_VARIABLE} has {len(secret)} characters, at least {_SHORTEST_SECRET} are needed"
        )
    return secret.encode()


def _names_ranks(values: Mapping[str, str], names: _Names) -> bool:
    if names is _SLURM:  # the shell of an allocation has the number of tasks, but only a task has a number
        return names.rank in values
    return names.rank in values or any(name in values for name in names.world)


def _missing(name: str, reason: str) -> DistributedError:
    return DistributedError(
        f"{name} is not set: {reason}. On one machine start with python -m onward.distributed.launch; on several "
        "set MASTER_ADDR and MASTER_PORT to an address of rank 0's machine; for one process alone set WORLD_SIZE=1. "
        "See docs/distributed.md"
    )


def _integer(values: Mapping[str, str], name: str) -> int | None:
    text = values.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise DistributedError(f"{name} is '{text}': it must be a number")
    return int(text)
