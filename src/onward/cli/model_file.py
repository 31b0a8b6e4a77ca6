"""A model file as a protobuf, or one line that says why it is none. Weights outside of the file are not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onward.cli.errors import CommandError

__all__ = ["read_model"]


def read_model(path: Path) -> Any:
    """The model of a file, without external data."""
    import onnx

    if path.is_dir():
        raise CommandError(f"no model at '{path}': it is a folder", "name an ONNX file")
    if not path.is_file():
        raise CommandError(f"no model at '{path}'", "is the path right?")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except OSError:
        raise
    except Exception as error:
        raise CommandError(
            f"'{path}' is not an ONNX model, or is cut short", "export one first: onward export --help"
        ) from error
    if not model.graph.node and not model.graph.output:
        raise CommandError(f"'{path}' is not an ONNX model: it is empty", "is the file whole?")
    return model
