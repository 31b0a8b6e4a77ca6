"""Training models of language models, kept in the user's cache folder for the next run with the same base.

Making them takes longer than loading them, and depends only on the base's graph and the settings. The weights stay in
the base's own folder: what is kept refers to them. Anything unreadable is made again; the oldest sets are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import google.protobuf.message
import onnx

import onward
from onward.checkpoint import store
from onward.errors import OnwardError
from onward.graph.external import external_range, external_tensors
from onward.graph.tensor_references import parse_with_references
from onward.reading import read_json
from onward.runtime.cache import cache_folder
from onward.runtime.sessions import ModelBeside
from onward.train.artifact_set import ArtifactFiles, about

# sets that are kept
_MOST = 8
_MODELS = ("training", "evaluation", "optimizer")


def digest_of(model: Path, *settings: Any, program: bool = True) -> str | None:
    """What the training models of a base depend on: its graph, where its weights lie, settings, this program."""
    digest = hashlib.sha256(repr(settings).encode())
    try:
        proto = parse_with_references(model)
        data = model.read_bytes() if proto is None else proto.SerializeToString(deterministic=True)
        digest.update(data)
        if proto is None:
            proto = onnx.ModelProto.FromString(data)
        files = {external_range(tensor)[0] for tensor in external_tensors(proto)}
        for path in sorted([model, *(model.parent / name for name in files)]):
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        # an edited or upgraded program makes other models of the same base
        for path in sorted(Path(onward.__file__).parent.rglob("*.py")) if program else ():
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        for name in ("onnx", "onnx-ir"):
            digest.update(metadata.version(name).encode())
    except (
        OSError,
        ValueError,
        OnwardError,
        google.protobuf.message.DecodeError,
        metadata.PackageNotFoundError,
    ):
        return None  # whoever opens the model says what is wrong with it
    return digest.hexdigest()[:32]


def find_models(key: str, folder: Path) -> tuple[ArtifactFiles, Mapping[str, Any]] | None:
    """The models that were kept under a key, over the weights in `folder`; and what is known of the base."""
    root = cache_folder()
    if root is None or not (root / "language" / key / "facts.json").is_file():
        return None
    stored = root / "language" / key
    try:
        facts = read_json(stored / "facts.json")
        protos = {
            name: onnx.ModelProto.FromString((stored / f"{name}.onnx").read_bytes()) for name in _MODELS
        }
        state = store.load(stored / "checkpoint")
        beside = folder / facts["beside"]
        if not isinstance(facts["targets"], list):
            return None
    except (OSError, ValueError, KeyError, TypeError, OnwardError, google.protobuf.message.DecodeError):
        return None
    files = ArtifactFiles(
        name="artifacts in memory",
        training=ModelBeside(protos["training"], beside),
        evaluation=ModelBeside(protos["evaluation"], beside),
        optimizer=protos["optimizer"],
        state=state,
        **about(protos["training"], protos["optimizer"]),
    )
    # the oldest sets go, and one that is in use is not old
    with contextlib.suppress(OSError):
        os.utime(stored)
    return files, facts


def keep_models(key: str, files: ArtifactFiles, facts: Mapping[str, Any], folder: Path) -> None:
    """Keep the models for the next run; where that is not possible, it makes them again."""
    root = cache_folder()
    models = {"training": files.training, "evaluation": files.evaluation}
    if root is None or isinstance(files.state, Path) or not isinstance(files.optimizer, onnx.ModelProto):
        return
    with contextlib.suppress(OSError, ValueError):
        (root / "language").mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=".new-", dir=root / "language"))
        try:
            beside = folder
            for name, model in models.items():
                if isinstance(model, ModelBeside):
                    beside, model = model.folder, model.proto
                assert isinstance(model, onnx.ModelProto)
                (stage / f"{name}.onnx").write_bytes(model.SerializeToString())
            (stage / "optimizer.onnx").write_bytes(files.optimizer.SerializeToString())
            store.save(files.state, stage / "checkpoint")
            relative = os.path.relpath(beside, folder.resolve())
            (stage / "facts.json").write_text(json.dumps({**facts, "beside": relative}), encoding="utf-8")
            # two runs may make the same set: the second rename fails, and the first set stays
            os.rename(stage, root / "language" / key)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
        newest = sorted((root / "language").glob("[0-9a-f]*"), key=lambda path: -path.stat().st_mtime)
        for path in newest[_MOST:]:
            shutil.rmtree(path, ignore_errors=True)
