"""The model that blocks build into: per thread and per task; contexts can be nested."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from onward.contract import OPSET
from onward.errors import ModelError
from onward.graph.dialect.normalize import normalize

IR_VERSION = 10


class Accessor:
    """Holds the model that is being built."""

    def __init__(self, model: onnx.ModelProto, path: str | None = None) -> None:
        self.model = model
        self.path = path


# Per thread and per task, unlike the module-wide model of onnxruntime-training, where two builds mixed.
_current: contextvars.ContextVar[Accessor | None] = contextvars.ContextVar("onward_base", default=None)
_library: contextvars.ContextVar[Path | None] = contextvars.ContextVar("onward_custom_ops", default=None)


def current_model() -> onnx.ModelProto:
    """The model of the innermost `base` or `empty_base`."""
    accessor = _current.get()
    if accessor is None:
        raise ModelError(
            "no base model: build blocks inside `with onnxblock.base(model):` or `with onnxblock.empty_base():`"
        )
    return accessor.model


@contextlib.contextmanager
def sharing(model: onnx.ModelProto) -> Iterator[Accessor]:
    """Build into `model` as it is, inside whatever is being built already."""
    accessor = Accessor(model)
    token = _current.set(accessor)
    try:
        yield accessor
    finally:
        _current.reset(token)


@contextlib.contextmanager
def base(model: onnx.ModelProto, model_path: str | os.PathLike[str] | None = None) -> Iterator[Accessor]:
    """Build blocks into an existing model, which is changed in place and converted to Onward's opset.

    >>> model = onnx.ModelProto()
    >>> with base(model) as accessor:
    ...     accessor.model is model
    True
    """
    if _current.get() is not None:
        raise ModelError(
            "Base onnx model already exists. Leave the outer `with onnxblock.base(…)` before entering another."
        )
    if model is None:
        raise ModelError("Base onnx model cannot be None. Pass an onnx.ModelProto.")
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"Base onnx model must be an onnx.ModelProto, got {type(model).__name__}.")
    # In place, as the caller holds this object and looks at it afterwards.
    to_dialect(model)
    with sharing(model) as accessor:
        accessor.path = None if model_path is None else os.fspath(model_path)
        yield accessor


@contextlib.contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[Accessor]:
    """Build blocks into a new model; its opset is Onward's, or a newer one where asked for."""
    if _current.get() is not None:
        raise ModelError(
            "Base onnx model already exists. Leave the outer `with onnxblock.base(…)` before entering another."
        )
    model = onnx.ModelProto(ir_version=IR_VERSION, producer_name="onward")
    model.graph.name = "onward"
    model.opset_import.append(onnx.helper.make_opsetid("", max(OPSET, opset_version or OPSET)))
    with sharing(model) as accessor:
        yield accessor


@contextlib.contextmanager
def custom_op_library(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Allow custom operators of a shared library while building; sessions made meanwhile register it."""
    if _library.get() is not None:
        raise ModelError(
            "CustomOp library already set. Leave the outer `with onnxblock.custom_op_library(…)`."
        )
    library = Path(path)
    if not library.exists():
        raise ModelError(f"Custom op library path {library} does not exist.")
    token = _library.set(library)
    try:
        yield library
    finally:
        _library.reset(token)


def to_dialect(model: onnx.ModelProto) -> None:
    """Convert in place; a model without an opset is still being put together by its owner."""
    versions = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    # Converting renames inner values: not where there is nothing to convert.
    if not versions or (versions == [OPSET] and not model.functions):
        return
    if not model.graph.node:
        for entry in model.opset_import:
            if entry.domain in ("", "ai.onnx"):
                entry.version = OPSET
        # onnx writes the newest IR version it knows, which the oldest runtime that we support refuses
        model.ir_version = min(model.ir_version or IR_VERSION, IR_VERSION)
        return
    # CopyFrom keeps the identity of the message, which blocks hold.
    model.CopyFrom(ir.to_proto(normalize(model)))
