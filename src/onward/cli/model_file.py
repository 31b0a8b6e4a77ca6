"""A model file as a protobuf, or one line that says why it is none. Weights outside of the file are not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onward.cli.errors import CommandError

__all__ = ["read_model"]


def read_model(path: Path) -> Any:
    """The model of a file, without external data."""
    from onward.graph.gate import read_proto

    if path.is_dir():
        raise CommandError(f"no model at '{path}': it is a folder", "name an ONNX file")
    if not path.exists():
        raise CommandError(f"no model at '{path}'", "is the path right?")
    return read_proto(path, read_data=False)
