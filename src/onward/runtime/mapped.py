"""Constants in files beside a model, mapped once for all sessions of a process.

On the CPU a session takes them as inputs that are bound to the mapped memory. So it makes no copy of them, neither as
they are nor repacked, however many sessions there are, and is ready sooner.
"""

from __future__ import annotations

import dataclasses
import math
import os
import weakref
from pathlib import Path

import numpy as np
import onnx
from onnx.external_data_helper import load_external_data_for_tensor

from onward.errors import ModelError
from onward.graph.external import external_range
from onward.runtime.memory import MappedTensor, Tensor

__all__ = ["constants_as_inputs", "has_external_constants"]

# Smaller ones are read into the model: the runtime simplifies graphs by what it knows to be constant.
_SMALLEST = 2**16


@dataclasses.dataclass(eq=False)
class _File:
    """A mapped file, and copies of what lies in it at addresses that do not fit its type."""

    path: Path
    data: np.ndarray
    copies: dict[tuple[int, int], np.ndarray]


_files: weakref.WeakValueDictionary[tuple, _File] = weakref.WeakValueDictionary()


class _Constant(MappedTensor):
    def __init__(self, file: _File, offset: int, size: int, shape: list[int], kind: int) -> None:
        self._file = file  # keeps the mapping
        width = onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize
        super().__init__(_part(file, offset, size, width), shape, kind)


def _part(file: _File, offset: int, size: int, width: int) -> np.ndarray:
    """Bytes of a file: the mapping itself, or a copy where numbers of that width would lie across its words."""
    if offset % width == 0:
        return file.data[offset : offset + size]
    for (start, length), copy in file.copies.items():
        if start <= offset and offset + size <= start + length and (offset - start) % width == 0:
            return copy[offset - start : offset - start + size]
    # read, not copied from the mapping, whose pages would count as memory too
    copy = np.fromfile(file.path, np.uint8, size, offset=offset)
    file.copies[offset, size] = copy
    return copy


def has_external_constants(model: onnx.ModelProto) -> bool:
    """Whether a model's graph refers to data in other files."""
    return any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer)


def constants_as_inputs(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, dict[str, Tensor]]:
    """A copy of a model that takes its large external constants as inputs, and what to bind to these."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    kept, found = [], {}
    # the largest first: others may be parts of them
    for tensor in sorted(graph.initializer, key=lambda tensor: -math.prod(tensor.dims)):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            kept.append(tensor)
            continue
        location, offset, size = external_range(tensor)
        shape, kind = list(tensor.dims), tensor.data_type
        if size < _SMALLEST:
            load_external_data_for_tensor(tensor, os.fspath(folder))
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
            kept.append(tensor)
            continue
        found[tensor.name] = _Constant(_mapped(folder / location), offset, size, shape, kind)
        graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, kind, shape))
    graph.initializer.clear()
    graph.initializer.extend(kept)
    return changed, found


def _mapped(path: Path) -> _File:
    status = path.stat()
    key = (os.path.realpath(path), status.st_ino, status.st_size, status.st_mtime_ns)
    file = _files.get(key)
    if file is None:
        try:
            file = _File(path, np.memmap(path, np.uint8, mode="r"), {})
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot map '{path}', which holds a model's weights: {error}") from error
        _files[key] = file
    return file
