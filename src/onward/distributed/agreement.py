"""Keeps ranks consistent: an error on one rank is raised on all, and states are compared.

A rank that fails alone leaves the others waiting for it. So errors are first exchanged, as text of a fixed
size, and then raised by all ranks, with the same class and message.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from onward.checkpoint import codec
from onward.distributed.errors import DistributedError, OtherStageFailed
from onward.errors import CheckpointError, ExportError, ModelError, NonFiniteError, OnwardError

if TYPE_CHECKING:
    from onward.checkpoint.content import CheckpointData
    from onward.distributed.comm import Communicator
    from onward.runtime.memory import Tensor

_TEXT = 2000
# What can be raised by its own name on a rank where it did not happen; anything else is a DistributedError.
_KINDS: tuple[type[Exception], ...] = (
    DistributedError,
    OnwardError,
    ModelError,
    NonFiniteError,
    ExportError,
    ValueError,
    TypeError,
    KeyError,
    FileNotFoundError,
    CheckpointError,
)


@contextmanager
def all_or_none(comm: Communicator) -> Iterator[None]:
    """Run a block that does not communicate; if it fails on any rank, raise that failure on all."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    agree(comm, failure)


def agree(comm: Communicator, failure: Exception | None) -> None:
    """Say whether this rank failed; raises on every rank if any did."""
    failed = np.array([failure is not None], np.int64)
    comm.all_reduce(failed)
    if failed[0]:
        raise_together(comm, failure)


def raise_together(comm: Communicator, failure: Exception | None) -> None:
    """Raise the failure of the lowest rank that has one, on all ranks; at least one must have one."""
    if comm.world == 1 and failure is not None:
        raise failure
    reasons = np.zeros(comm.world, np.int64)
    if failure is not None:
        # an error of a rank's own comes before the echo of another's
        reasons[comm.rank] = 1 if isinstance(failure, OtherStageFailed) else 2
    comm.all_reduce(reasons)
    if not reasons.any():
        raise AssertionError("no rank has a failure to raise")
    source = int(np.argmax(reasons))
    message = np.zeros(_TEXT + 1, np.uint8)
    if comm.rank == source:
        assert failure is not None
        data = _spell(failure).encode()[:_TEXT]
        message[0] = _kind(failure)
        message[1 : 1 + len(data)] = np.frombuffer(data, np.uint8)
    comm.broadcast(message, root=source)
    if failure is not None and reasons[comm.rank] == 2:  # its own, with its own traceback
        raise failure
    text = message[1:].tobytes().rstrip(b"\0").decode(errors="replace") + f" (on rank {source})"
    # only its place in a table is sent: no class is made from what another machine says
    kind = _KINDS[int(message[0])]
    raise CheckpointError(*text.split("\n", 1)) if kind is CheckpointError else kind(text)


def _spell(failure: Exception) -> str:
    """The words of an error, from which another rank can make the same one."""
    if isinstance(failure, CheckpointError):
        return f"{failure.path}\n{failure.reason}"
    return str(failure.args[0]) if isinstance(failure, KeyError) and failure.args else str(failure)


def _kind(failure: Exception) -> int:
    exact = [i for i, kind in enumerate(_KINDS) if type(failure) is kind]
    if exact:
        return exact[0]
    near = [i for i, kind in enumerate(_KINDS) if isinstance(failure, kind)]
    return near[-1] if near else 0


def broadcast_bytes(comm: Communicator, data: bytes | None) -> bytes:
    """Rank 0's bytes, on every rank."""
    size = np.array([len(data) if data is not None else 0], np.int64)
    comm.broadcast(size)
    whole = np.frombuffer(data, np.uint8).copy() if data is not None else np.empty(int(size[0]), np.uint8)
    comm.broadcast(whole)
    return whole.tobytes()


def send_bytes(comm: Communicator, data: bytes, *, to: int) -> None:
    """Send bytes to a rank that does not know how many there are."""
    comm.send(np.array([len(data)], np.int64), to=to)
    comm.send(np.frombuffer(data, np.uint8).copy(), to=to)


def receive_bytes(comm: Communicator, *, source: int) -> bytes:
    """What `send_bytes` sends."""
    size = np.zeros(1, np.int64)
    comm.receive(size, source=source)
    content = np.empty(size[0], np.uint8)
    comm.receive(content, source=source)
    return content.tobytes()


def encode_state(data: CheckpointData) -> bytes:
    """A state as the bytes of a checkpoint file, which `codec.decode` verifies."""
    stream = io.BytesIO()
    codec.encode(data, stream)
    return stream.getvalue()


def same_everywhere(comm: Communicator, tensors: Sequence[Tensor]) -> bool:
    """Check that the ranks hold the same bytes; otherwise broadcast rank 0's, with a warning.

    On equal processors they never differ; different ones may round differently.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        # digests are compared, not tensors: 32 bytes cross the wire where all is well
        digest.update(np.ascontiguousarray(tensor.read()).data)
    own = np.frombuffer(digest.digest(), np.uint8)
    first = own.copy()
    comm.broadcast(first)
    differs = np.array([not np.array_equal(own, first)], np.int64)
    comm.all_reduce(differs)
    if not differs[0]:
        return True
    for tensor in tensors:
        comm.broadcast(tensor)
    if comm.rank == 0:
        warnings.warn(
            f"the parameters of {int(differs[0])} of {comm.world} ranks had drifted from rank 0's and were "
            "replaced by them: are the processors of one kind?",
            RuntimeWarning,
            stacklevel=2,
        )
    return False
