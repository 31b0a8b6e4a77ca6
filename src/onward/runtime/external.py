"""Sessions of changed models whose weights lie in a file beside the original."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import onnx
import onnxruntime as ort

from onward.runtime.sessions import make_session

__all__ = ["session_beside"]


def session_beside(
    model: onnx.ModelProto, path: str, *, providers: list[str], options: ort.SessionOptions | None
) -> ort.InferenceSession:
    """Load a changed model as if it lay where `path` does; the file made for that is removed at once."""
    handle, name = tempfile.mkstemp(prefix=".onward-", suffix=".onnx", dir=Path(path).resolve().parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(model.SerializeToString())
        return make_session(name, providers=providers, options=options, what=f"training model '{path}'")
    finally:
        os.unlink(name)
