"""Collective communication of numpy arrays and of tensors in the memory of training.

`LocalCommunicator` is a world of one and needs no torch. `TorchCommunicator` is a group of torch.distributed:
gloo for the host's memory, NCCL for a GPU's, which it reads and writes in place. Nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np

from onward.distributed.errors import DistributedError, RankLost
from onward.distributed.rank_environment import RankEnvironment, read_environment
from onward.runtime.device_tensor import DeviceTensor
from onward.runtime.devices import Device, DeviceLike, find_device
from onward.runtime.tensors import HostTensor, Tensor

# What ranks exchange, in place: an array, or a tensor of the memory of training, on the host or a device.
Buffer = np.ndarray | Tensor


class Communicator:
    """A process group; here a world of one rank. Every method but `send` and `receive` is collective."""

    rank, world = 0, 1

    def all_reduce(self, array: Buffer, *, compress: bool = False) -> None:
        """Replace the array by its sum over the ranks; `compress` sends float32 as bfloat16."""

    def reduce_scatter(self, array: Buffer, bounds: Sequence[int], *, compress: bool = False) -> None:
        """Replace this rank's part, `array[bounds[rank]:bounds[rank + 1]]`, by its sum; parts are equal."""

    def all_gather(self, array: Buffer, bounds: Sequence[int]) -> None:
        """Fill the array from each rank's part of it."""

    def broadcast(self, array: Buffer, *, root: int = 0) -> None:
        """Replace the array by the root's."""

    def send(self, array: Buffer, *, to: int) -> None:
        """Send an array to one rank."""
        raise DistributedError(f"a world of one rank has no rank {to}")

    def receive(self, array: Buffer, *, source: int) -> None:
        """Fill an array with what one rank sends."""
        raise DistributedError(f"a world of one rank has no rank {source}")

    def close(self) -> None:
        """Leave the group."""


class LocalCommunicator(Communicator):
    """A world of one rank.

    >>> comm = LocalCommunicator()
    >>> total = np.ones(2)
    >>> comm.all_reduce(total)
    >>> comm.world, total.tolist()
    (1, [1.0, 1.0])
    """


class TorchCommunicator(Communicator):
    """A process group of torch.distributed; `group=None` is the whole world.

    `sent` counts what this rank gave to all-reduces in bytes, a reduce-scatter or all-gather as one half of
    one: an N-rank ring moves 2(N−1)/N times that.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        nccl: bool = False,
        timeout: float = 0.0,
        owned: bool = False,
        store: Any = None,
    ) -> None:
        import torch.distributed as dist

        self._dist = dist
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.nccl = nccl
        self.timeout = timeout
        self.owned = owned
        # torch holds only its own half of a store that is written in Python, and calls it for each new group
        self.store = store
        self.sent = 0

    def all_reduce(self, array: Buffer, *, compress: bool = False) -> None:
        with self._tensor(array) as tensor, self.explained("all-reduce"):
            # half the bytes; sums of bfloat16 have 8 bits, so that it is asked for and never chosen
            small = _compressed(tensor, compress)
            self._count(small)
            self._dist.all_reduce(small, group=self.group)
            if small is not tensor:
                tensor.copy_(small)

    def reduce_scatter(self, array: Buffer, bounds: Sequence[int], *, compress: bool = False) -> None:
        import torch

        with self._tensor(array) as tensor, self.explained("reduce-scatter"):
            whole = _compressed(tensor, compress)
            # memory of its own: the collective must not write what it reads
            own = torch.empty_like(whole[bounds[self.rank] : bounds[self.rank + 1]])
            self._count(whole, share=2)
            _newest(self._dist, "reduce_scatter_single", "reduce_scatter_tensor")(
                own, whole, group=self.group
            )
            tensor[bounds[self.rank] : bounds[self.rank + 1]] = own

    def all_gather(self, array: Buffer, bounds: Sequence[int]) -> None:
        with self._tensor(array) as tensor, self.explained("all-gather"):
            # a copy: the collective writes all of the tensor, this part as well
            own = tensor[bounds[self.rank] : bounds[self.rank + 1]].clone()
            self._count(tensor, share=2)
            _newest(self._dist, "all_gather_single", "all_gather_into_tensor")(tensor, own, group=self.group)

    def broadcast(self, array: Buffer, *, root: int = 0) -> None:
        with self._tensor(array) as tensor, self.explained("broadcast"):
            self._count(tensor)
            self._dist.broadcast(tensor, self._global(root), group=self.group)

    def send(self, array: Buffer, *, to: int) -> None:
        with self._tensor(array) as tensor, self.explained(f"send to rank {to}"):
            self._count(tensor)
            self._dist.send(tensor, self._global(to), group=self.group)

    def receive(self, array: Buffer, *, source: int) -> None:
        with self._tensor(array) as tensor, self.explained(f"receive from rank {source}"):
            self._count(tensor)
            self._dist.recv(tensor, self._global(source), group=self.group)

    def close(self) -> None:
        if self.owned and self._dist.is_initialized():
            self._dist.destroy_process_group()
            if hasattr(self.store, "close"):
                self.store.close()

    def _global(self, rank: int) -> int:
        return rank if self.group is None else self._dist.get_global_rank(self.group, rank)

    def _count(self, tensor: Any, *, share: int = 1) -> None:
        self.sent += tensor.numel() * tensor.element_size() // share

    @contextmanager
    def _tensor(self, array: Buffer) -> Iterator[Any]:
        """The same memory as torch's; a round trip through the host's where gloo is to carry a GPU's."""
        import torch

        if isinstance(array, DeviceTensor) and hasattr(array, "__cuda_array_interface__"):
            if not self.nccl:
                staged = array.read()
                yield torch.from_numpy(staged)
                array.write(staged)
                return
            on_gpu = torch.as_tensor(array, device="cuda")
            # onnxruntime's runs end with their work done; torch's collectives end in a stream of its own
            yield on_gpu
            torch.cuda.synchronize(on_gpu.device)
            return
        on_host = array.array if isinstance(array, HostTensor) else np.asarray(array)
        if not on_host.flags.c_contiguous:
            raise AssertionError("an array that is communicated must be contiguous")
        yield torch.from_numpy(on_host)

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Say what a failure of torch's means here."""
        try:
            yield
        except RuntimeError as error:
            # torch says "connection reset by peer": which rank, and what to do, is what helps
            raise RankLost(
                f"rank {self.rank} of {self.world}: {what} failed: another rank died, or did not respond within "
                f"{self.timeout:g} s. See that rank's own error; --max-restarts starts all ranks again. ({error})"
            ) from error


def connect(
    *, timeout: float = 600.0, backend: str | None = None, device: DeviceLike = "cpu"
) -> Communicator:
    """Join the world that the launcher describes (see `rank_environment`), or be alone.

    `timeout` is how many seconds a rank waits for the others before it gives up. The memory of GPUs goes through
    NCCL where each rank of a machine has a GPU of its own, else through the host and gloo; `backend` decides
    otherwise. torch is imported only where there is more than one rank.

    >>> connect().world if "WORLD_SIZE" not in os.environ else 1
    1
    """
    if timeout <= 0:
        raise ValueError(f"timeout is {timeout}: it must be a positive number of seconds")
    environment = read_environment()
    rank, world = environment.rank, environment.world
    # before torch is looked for: one process needs none of it
    if world == 1:
        return LocalCommunicator()
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise DistributedError(
            f"{world} ranks need torch.distributed: pip install onward[distributed]"
        ) from error
    nccl = _takes_nccl(backend, device, environment)
    if nccl:
        import torch

        torch.cuda.set_device(find_device(device_of_rank(device)).number)
    span = timedelta(seconds=timeout)
    owned, store = not dist.is_initialized(), None
    if owned:
        _keep_to_loopback(environment)
        try:
            store = _store(dist, environment, span)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if nccl else "gloo",
                store=store,
                rank=rank,
                world_size=world,
                timeout=span,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise DistributedError(
                f"rank {rank} of {world} could not join the others within {timeout:g} s: are all ranks started, "
                f"and is MASTER_ADDR:MASTER_PORT reachable from each? ({error})"
            ) from error
    return TorchCommunicator(nccl=nccl, timeout=timeout, owned=owned, store=store)


def _takes_nccl(backend: str | None, device: DeviceLike, environment: RankEnvironment) -> bool:
    """Whether NCCL carries the memory of GPUs; it does not let two ranks share one."""
    import torch
    import torch.distributed as dist

    kind = device.kind if isinstance(device, Device) else device.partition(":")[0]
    possible = torch.cuda.is_available() and dist.is_nccl_available()
    if backend == "nccl" and not possible:
        raise DistributedError("backend='nccl' needs a torch with CUDA and a GPU: use backend='gloo'")
    if backend is not None or kind not in ("cuda", "auto"):
        return backend == "nccl"
    # NCCL refuses two ranks on one GPU
    return possible and (environment.local_world or environment.world) <= torch.cuda.device_count()


def _keep_to_loopback(environment: RankEnvironment) -> None:
    """Let gloo and NCCL listen on the loopback interface only, where all ranks are on this machine.

    They listen where the host's name leads to otherwise, which is an address that others can reach.
    """
    if not environment.on_loopback:
        return
    interface = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if interface is None:  # Windows names none of its own; gloo's Windows build takes the host's name
        return
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ[variable] = interface


def _store(dist: Any, environment: RankEnvironment, timeout: timedelta) -> Any:
    """Where the ranks leave their addresses for each other."""
    # a file of the one who started the ranks: no port at all on one machine
    if environment.store_file is not None:
        store = dist.FileStore(str(environment.store_file), environment.world)
        store.set_timeout(timeout)
        return store
    address, port = environment.address, environment.port
    if environment.has_agent_store:
        store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
        # keys that a dead attempt left in the agent's store must not be taken for ours
        return dist.PrefixStore(f"attempt_{environment.attempt}", store)
    from onward.distributed.secret_store import SecretStore

    return SecretStore(
        address or "", port, environment.secret,
        attempt=environment.attempt, is_server=environment.rank == 0, timeout=timeout,
    )  # fmt: skip


def _newest(module: Any, *names: str) -> Any:
    """The first of several names that a function has had."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def _compressed(tensor: Any, compress: bool) -> Any:
    """A float32 tensor as bfloat16, if that is asked for; else the tensor itself."""
    import torch

    return tensor.to(torch.bfloat16) if compress and tensor.dtype == torch.float32 else tensor


def device_of_rank(device: DeviceLike) -> DeviceLike:
    """The device of this rank: where a machine has several GPUs, "cuda" gives each of its ranks another."""
    chosen = Device("cuda") if device == "cuda" else device
    if not isinstance(chosen, Device) or chosen.kind != "cuda" or chosen.number:
        return device
    import torch

    count = torch.cuda.device_count()
    return dataclasses.replace(chosen, number=read_environment().local_rank % count) if count > 1 else chosen
