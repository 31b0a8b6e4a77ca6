"""The one gate through which every model enters: a path, bytes, a ModelProto or an onnx-ir model."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_ir as ir

from onward.errors import ModelError

__all__ = ["ModelSource", "load_model"]

ModelSource = str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model


def load_model(source: ModelSource) -> ir.Model:
    """Read a model; the caller owns the result and may change it."""
    if isinstance(source, ir.Model):
        return source.clone()
    if isinstance(source, onnx.ModelProto):
        return ir.from_proto(source)
    if isinstance(source, bytes):
        return ir.from_proto(onnx.load_model_from_string(source))
    path = Path(source)
    if not path.is_file():
        raise ModelError(f"no model file at '{path}'")
    return ir.load(path)
