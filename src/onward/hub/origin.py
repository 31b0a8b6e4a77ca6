"""Where a model came from, found while it is made: its base, digests of its data, settings and versions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from onward.export.huggingface.folder import version
from onward.info.model_info import Origin

# what says where files lie on one machine, or who watched, is no part of a model
_PRIVATE = frozenset(
    {
        "data",
        "eval_data",
        "tokenizer",
        "noise",
        "tensorboard",
        "mlflow",
        "wandb",
        "directory",
        "artifacts",
        "mapping",
    }
)


def origin_of(
    base: str | None, data: Iterable[Any] = (), settings: Mapping[str, Any] | None = None
) -> Origin:
    """The origin of a model made of this base, these files of data and these settings; of paths only their names."""
    return Origin(
        base=base,
        data={path.name: digest for path in map(_path, data) if path and (digest := digest_of(path))},
        settings={
            name: value
            for name, value in (settings or {}).items()
            if name not in _PRIVATE and isinstance(value, str | int | float) and value is not False
        },
        versions={name: version(name) for name in ("onward", "onnxruntime")},
    )


def digest_of(path: Path) -> str:
    """SHA-256 of a file, or of the names and contents of all files of a folder."""
    total = hashlib.sha256()
    # sorted: a folder's order differs between file systems
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        if path.is_dir():
            total.update(file.relative_to(path).as_posix().encode() + b"\0")
        # file_digest reads in pieces: data may be larger than memory
        with open(file, "rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def _path(source: Any) -> Path | None:
    """The file of a source: a path, or INPUT=PATH; None for what is neither."""
    if not isinstance(source, str | Path):
        return None
    candidates = (Path(source), Path(str(source).partition("=")[2] or source))
    return next((path for path in candidates if path.exists()), None)
