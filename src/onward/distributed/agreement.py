"""Keeps ranks consistent: an error on one rank is raised on all, and states are compared.

A rank that fails alone leaves the others waiting for it. So errors are first exchanged, as text of a fixed
size, and then raised by all ranks, with the same class and message. Before the first step they compare what they
are to train.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from onward.checkpoint import codec
from onward.distributed.errors import DistributedError, OtherStageFailed
from onward.errors import CheckpointError, ExportError, ModelError, NonFiniteError, OnwardError
from onward.graph.external import external_range, external_tensors
from onward.graph.gate import read_proto
from onward.model_metadata import producer

if TYPE_CHECKING:
    from onward.checkpoint.content import CheckpointData
    from onward.distributed.comm import Communicator
    from onward.distributed.settings import RunnerSettings
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
    # the common case is one number: texts are sent only where there is a failure
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
        # a fixed size: the others must know how much to receive
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


# --- Before the first step: do all ranks have the same models, settings, versions and data?
#
# Ranks that disagree would train on, silently: gradients of one shape add up whatever they are gradients of. So
# each rank describes its job in short texts (digests of files, values of settings), all compare with rank 0's, and
# a difference is an error on every rank that names the rank and the item.

_MODELS = ("training_model", "eval_model", "optimizer_model")
# what may differ between machines: places, and how a rank does its own part
_OWN = frozenset(
    {*_MODELS, "artifacts", "checkpoint", "checkpoint_directory", "timeout", "device", "threads", "callbacks"}
)
_SHOWN = 5


def describe_job(settings: RunnerSettings) -> dict[str, str]:
    """What must be the same on all ranks, by item: versions, models and settings."""
    # other versions may round otherwise, or draw other random numbers: the ranks would drift apart
    about = {"onward": producer()[1], "onnxruntime": ort.__version__, "numpy": np.__version__}
    for name in _MODELS:
        path = getattr(settings, name)
        # by content: the same path may hold different files on two machines
        about[name] = "none" if path is None else _digest(path)
    for field in dataclasses.fields(settings):
        if field.name not in _OWN:
            about[field.name] = _spell_setting(getattr(settings, field.name))
    keeps = settings.checkpoint_directory is not None
    return {**about, "checkpoints": "kept" if keeps else "not kept"}


def describe_loader(loader: Any, kind: str) -> dict[str, str]:
    """What must be the same about data that the ranks share; a loader of a rank's own batches may be any."""
    about = {kind: "none" if loader is None else "given"}
    if loader is not None and hasattr(loader, "description"):
        about |= {f"{kind}: {name}": _spell_setting(value) for name, value in loader.description().items()}
    return about


def require_same(comm: Communicator, about: Mapping[str, str]) -> None:
    """Raise on all ranks where one describes its job in other words than rank 0; collective."""
    if comm.world == 1:
        return
    own = dict(about)
    first = json.loads(broadcast_bytes(comm, json.dumps(own).encode() if comm.rank == 0 else None))
    items = dict.fromkeys([*first, *own])
    different = [item for item in items if first.get(item) != own.get(item)]
    failure = None
    if different:
        shown = "; ".join(
            f"{item} is {own.get(item, 'not there')}, rank 0 has {first.get(item, 'nothing')}"
            for item in different[:_SHOWN]
        )
        more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        failure = DistributedError(
            f"rank {comm.rank} has another job than rank 0: {shown}{more}. "
            "Start all ranks with the same files, settings and versions"
        )
    agree(comm, failure)


def _digest(path: str | os.PathLike[str]) -> str:
    """The beginning of the SHA-256 of a model's file and of the data files that it names."""
    digest = hashlib.sha256()
    try:
        _add(digest, Path(path))
        model = read_proto(path)
    except OSError as error:
        return f"not readable ({error.strerror or error})"
    except ModelError:  # what is wrong with it is said where it is loaded
        return digest.hexdigest()[:16]
    for location in sorted({external_range(tensor)[0] for tensor in external_tensors(model)}):
        _add(digest, Path(path).parent / location)
    return digest.hexdigest()[:16]


def _add(digest: Any, path: Path) -> None:
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)


def _spell_setting(value: Any) -> str:
    """A setting as text that is equal on two machines where the setting is."""
    if callable(value):
        function = getattr(value, "func", value)  # of a partial
        return f"{function.__module__}.{getattr(function, '__qualname__', type(value).__name__)}"
    if isinstance(value, Mapping):
        return json.dumps(sorted((str(key), _spell_setting(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return json.dumps([_spell_setting(item) for item in value])
    return repr(value)
