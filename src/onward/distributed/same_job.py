"""Before the first step: do all ranks have the same models, settings, versions and data?

Ranks that disagree would train on, silently: gradients of one shape add up whatever they are gradients of. So
each rank describes its job in short texts (digests of files, values of settings), all compare with rank 0's, and
a difference is an error on every rank that names the rank and the item.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from onward.distributed.agreement import agree, broadcast_bytes
from onward.distributed.errors import DistributedError
from onward.errors import ModelError
from onward.graph.external import external_range, external_tensors
from onward.graph.gate import read_proto

if TYPE_CHECKING:
    from onward.distributed.comm import Communicator
    from onward.distributed.settings import RunnerSettings

_MODELS = ("training_model", "eval_model", "optimizer_model")
# what may differ between machines: places, and how a rank does its own part
_OWN = frozenset(
    {*_MODELS, "artifacts", "checkpoint", "checkpoint_directory", "timeout", "device", "threads", "callbacks"}
)
_SHOWN = 5


def describe_job(settings: RunnerSettings) -> dict[str, str]:
    """What must be the same on all ranks, by item: versions, models and settings."""
    from onward.artifacts.training_graph import producer

    about = {"onward": producer()[1], "onnxruntime": ort.__version__, "numpy": np.__version__}
    for name in _MODELS:
        path = getattr(settings, name)
        about[name] = "none" if path is None else _digest(path)
    for field in dataclasses.fields(settings):
        if field.name not in _OWN:
            about[field.name] = _spell(getattr(settings, field.name))
    keeps = settings.checkpoint_directory is not None
    return {**about, "checkpoints": "kept" if keeps else "not kept"}


def describe_loader(loader: Any, kind: str) -> dict[str, str]:
    """What must be the same about data that the ranks share; a loader of a rank's own batches may be any."""
    about = {kind: "none" if loader is None else "given"}
    if loader is not None and hasattr(loader, "description"):
        about |= {f"{kind}: {name}": _spell(value) for name, value in loader.description().items()}
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


def _spell(value: Any) -> str:
    """A setting as text that is equal on two machines where the setting is."""
    if callable(value):
        function = getattr(value, "func", value)  # of a partial
        return f"{function.__module__}.{getattr(function, '__qualname__', type(value).__name__)}"
    if isinstance(value, Mapping):
        return json.dumps(sorted((str(key), _spell(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return json.dumps([_spell(item) for item in value])
    return repr(value)
