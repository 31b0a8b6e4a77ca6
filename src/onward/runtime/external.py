"""Sessions of modified models whose weights are in a file beside the original."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import onnxruntime as ort

from onward.errors import ModelError
from onward.runtime.sessions import make_session

if TYPE_CHECKING:
    from onward.runtime.devices import Device

__all__ = ["session_beside"]


def session_beside(
    model: onnx.ModelProto,
    path: str,
    *,
    device: Device,
    options: ort.SessionOptions | None,
    capture: bool = False,
) -> ort.InferenceSession:
    """Load a changed model as if it lay where `path` does; the file made for that is removed at once."""
    try:
        handle, name = tempfile.mkstemp(prefix=".onward-", suffix=".onnx", dir=Path(path).resolve().parent)
    except OSError as error:
        raise ModelError(
            f"'{path}' has external data, so its folder must be writable to load it for training: "
            f"{error.strerror or error}"
        ) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(model.SerializeToString())
        what = f"training model '{path}'"
        return make_session(name, device=device, options=options, what=what, capture=capture)
    finally:
        os.unlink(name)
