"""Collective communication of numpy arrays.

`LocalCommunicator` is a world of one and needs no torch. `TorchCommunicator` is a group of torch.distributed:
gloo on the CPU, NCCL with CUDA. Nothing is pickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import numpy as np

from onward.distributed.errors import DistributedError

__all__ = ["Communicator", "LocalCommunicator", "TorchCommunicator", "connect", "device_of_rank"]


class Communicator(Protocol):
    """The interface of a process group; every method but `send` and `receive` is collective."""

    rank: int
    world: int

    def all_reduce(self, array: np.ndarray, *, compress: bool = False) -> None:
        """Replace the array by its sum over the ranks; `compress` sends float32 as bfloat16."""
        ...

    def reduce_scatter(self, array: np.ndarray, bounds: Sequence[int], *, compress: bool = False) -> None:
        """Replace this rank's part, `array[bounds[rank]:bounds[rank + 1]]`, by its sum; parts are equal."""
        ...

    def all_gather(self, array: np.ndarray, bounds: Sequence[int]) -> None:
        """Fill the array from each rank's part of it."""
        ...

    def broadcast(self, array: np.ndarray, *, root: int = 0) -> None:
        """Replace the array by the root's."""
        ...

    def send(self, array: np.ndarray, *, to: int) -> None:
        """Send an array to one rank."""
        ...

    def receive(self, array: np.ndarray, *, source: int) -> None:
        """Fill an array with what one rank sends."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class LocalCommunicator:
    """A world of one rank.

    >>> comm = LocalCommunicator()
    >>> total = np.ones(2)
    >>> comm.all_reduce(total)
    >>> comm.world, total.tolist()
    (1, [1.0, 1.0])
    """

    rank = 0
    world = 1

    def all_reduce(self, array: np.ndarray, *, compress: bool = False) -> None:
        """The sum over one rank is what is there."""

    def reduce_scatter(self, array: np.ndarray, bounds: Sequence[int], *, compress: bool = False) -> None:
        """The only part is the whole."""

    def all_gather(self, array: np.ndarray, bounds: Sequence[int]) -> None:
        """The only part is the whole."""

    def broadcast(self, array: np.ndarray, *, root: int = 0) -> None:
        """The root is this rank."""

    def send(self, array: np.ndarray, *, to: int) -> None:
        """There is nobody to send to."""
        raise DistributedError(f"a world of one rank has no rank {to}")

    def receive(self, array: np.ndarray, *, source: int) -> None:
        """There is nobody to receive from."""
        raise DistributedError(f"a world of one rank has no rank {source}")

    def close(self) -> None:
        """Nothing to leave."""


class TorchCommunicator:
    """A process group of torch.distributed; `group=None` is the whole world.

    `sent` counts what this rank gave to all-reduces in bytes, a reduce-scatter or all-gather as one half of
    one: an N-rank ring moves 2(N−1)/N times that.
    """

    def __init__(
        self, group: Any = None, *, device: str = "cpu", timeout: float = 0.0, owned: bool = False
    ) -> None:
        import torch.distributed as dist

        self._dist = dist
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.device = device
        self._timeout = timeout
        self._owned = owned
        self.sent = 0

    def all_reduce(self, array: np.ndarray, *, compress: bool = False) -> None:
        if compress and array.dtype == np.float32:
            import torch

            whole = torch.from_numpy(array)
            small = whole.to(self.device, torch.bfloat16)
            self._count(small.numel() * 2)
            with self.explained("all-reduce"):
                self._dist.all_reduce(small, group=self.group)
            whole.copy_(small)
            return
        with self._tensor(array) as tensor, self.explained("all-reduce"):
            self._dist.all_reduce(tensor, group=self.group)

    def reduce_scatter(self, array: np.ndarray, bounds: Sequence[int], *, compress: bool = False) -> None:
        import torch

        whole = torch.from_numpy(array).to(self.device, torch.bfloat16 if compress else None)
        own = torch.empty_like(whole[bounds[self.rank] : bounds[self.rank + 1]])
        self._count(whole.numel() * whole.element_size() // 2)
        with self.explained("reduce-scatter"):
            _newest(self._dist, "reduce_scatter_single", "reduce_scatter_tensor")(
                own, whole, group=self.group
            )
        torch.from_numpy(array)[bounds[self.rank] : bounds[self.rank + 1]] = own.to("cpu")

    def all_gather(self, array: np.ndarray, bounds: Sequence[int]) -> None:
        import torch

        whole = torch.from_numpy(array).to(self.device)
        own = whole[bounds[self.rank] : bounds[self.rank + 1]].clone()
        self._count(array.nbytes // 2)
        with self.explained("all-gather"):
            _newest(self._dist, "all_gather_single", "all_gather_into_tensor")(whole, own, group=self.group)
        torch.from_numpy(array).copy_(whole)

    def broadcast(self, array: np.ndarray, *, root: int = 0) -> None:
        with self._tensor(array) as tensor, self.explained("broadcast"):
            self._dist.broadcast(tensor, self._global(root), group=self.group)

    def send(self, array: np.ndarray, *, to: int) -> None:
        with self._tensor(array) as tensor, self.explained(f"send to rank {to}"):
            self._dist.send(tensor, self._global(to), group=self.group)

    def receive(self, array: np.ndarray, *, source: int) -> None:
        with self._tensor(array) as tensor, self.explained(f"receive from rank {source}"):
            self._dist.recv(tensor, self._global(source), group=self.group)

    def close(self) -> None:
        if self._owned and self._dist.is_initialized():
            self._dist.destroy_process_group()

    def _global(self, rank: int) -> int:
        return rank if self.group is None else self._dist.get_global_rank(self.group, rank)

    def _count(self, size: int) -> None:
        self.sent += size

    @contextmanager
    def _tensor(self, array: np.ndarray) -> Iterator[Any]:
        """The array as a tensor: the same memory on the CPU, a round trip elsewhere."""
        import torch

        if not array.flags.c_contiguous:
            raise AssertionError("an array that is communicated must be contiguous")
        self._count(array.nbytes)
        here = torch.from_numpy(array)
        if self.device == "cpu":
            yield here
            return
        there = here.to(self.device)
        yield there
        here.copy_(there)

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Say what a failure of torch's means here."""
        try:
            yield
        except RuntimeError as error:
            raise DistributedError(
                f"rank {self.rank} of {self.world}: {what} failed: another rank died, or did not respond within "
                f"{self._timeout:g} s. See that rank's own error; restart with torchrun --max-restarts. ({error})"
            ) from error


def connect(*, timeout: float = 600.0, backend: str | None = None) -> Communicator:
    """Join the world that the launcher describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or be alone.

    `timeout` is how many seconds a rank waits for the others before it gives up. torch is imported only
    where there is more than one rank.

    >>> connect().world if "WORLD_SIZE" not in os.environ else 1
    1
    """
    if timeout <= 0:
        raise ValueError(f"timeout is {timeout}: it must be a positive number of seconds")
    world = _integer("WORLD_SIZE", 1)
    if world == 1:
        return LocalCommunicator()
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise DistributedError(
            f"{world} ranks need torch.distributed: pip install onward[distributed]"
        ) from error
    chosen = backend or ("nccl" if _has_cuda() and dist.is_nccl_available() else "gloo")
    rank = _integer("RANK", None)
    device = "cpu"
    if chosen == "nccl":
        device = f"cuda:{_integer('LOCAL_RANK', rank) % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    span = timedelta(seconds=timeout)
    owned = not dist.is_initialized()
    if owned:
        try:
            dist.init_process_group(
                chosen, store=_store(dist, rank, span), rank=rank, world_size=world, timeout=span
            )
        except (RuntimeError, ValueError) as error:
            raise DistributedError(
                f"rank {rank} of {world} could not join the others within {timeout:g} s: are all ranks started, "
                f"and is MASTER_ADDR:MASTER_PORT reachable from each? ({error})"
            ) from error
    return TorchCommunicator(device=device, timeout=timeout, owned=owned)


def _store(dist: Any, rank: int, timeout: timedelta) -> Any:
    """A store of this attempt's own: keys that a dead attempt left must not be taken for ours."""
    address = os.environ.get("MASTER_ADDR")
    if address is None:
        raise DistributedError("MASTER_ADDR is not set: start with torchrun, or see docs/distributed.md")
    # torchrun's agent already hosts a store at the address; under other launchers rank 0 does
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        address, _integer("MASTER_PORT", None), is_master=rank == 0 and not hosted, timeout=timeout
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt_{attempt}", store)


def _newest(module: Any, *names: str) -> Any:
    """The first of several names that a function has had."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def _has_cuda() -> bool:
    import onnxruntime

    providers: Callable[[], list[str]] = onnxruntime.get_available_providers
    return "CUDAExecutionProvider" in providers()


def _integer(name: str, default: int | None) -> int:
    text = os.environ.get(name)
    if text is None:
        if default is None:
            raise DistributedError(f"{name} is not set: start with torchrun, or see docs/distributed.md")
        return default
    if not text.isdecimal():
        raise DistributedError(f"{name} is '{text}': it must be a number")
    return int(text)


def device_of_rank(device: str) -> str:
    """The device of this rank: where a machine has several GPUs, "cuda" gives each of its ranks another."""
    if device != "cuda":
        return device
    import torch

    count = torch.cuda.device_count()
    return f"cuda:{_integer('LOCAL_RANK', 0) % count}" if count > 1 else device
