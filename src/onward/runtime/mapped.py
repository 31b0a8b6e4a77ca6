"""Constants in files beside a model, mapped once for all sessions of a process.

On the CPU a session takes them as inputs that are bound to the mapped memory. So it makes no copy of them, neither as
they are nor repacked, however many sessions there are, and is ready sooner.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import weakref
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx.external_data_helper import load_external_data_for_tensor

from onward.errors import ModelError
from onward.graph.external import external_range
from onward.runtime.tensors import HostTensor, Tensor

# Smaller ones are read into the model: the runtime simplifies graphs by what it knows to be constant.
_SMALLEST = 2**16


@dataclasses.dataclass(eq=False)
class _File:
    """A mapped file, and copies of what lies in it at addresses that do not fit its type."""

    path: Path
    data: np.ndarray
    copies: dict[tuple[int, int], np.ndarray]


# Weak: the mapping ends with the last session that reads it, so that the file can be replaced (Windows).
_files: weakref.WeakValueDictionary[tuple, _File] = weakref.WeakValueDictionary()


class _Constant(HostTensor):
    """A constant in mapped memory, which is never written; ONNX packs numbers of fewer than eight bits."""

    def __init__(self, file: _File, offset: int, size: int, shape: list[int], kind: int) -> None:
        self._file = file  # keeps the mapping
        width = onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize
        super().__init__(_part(file, offset, size, width))
        self._dims, self._kind = shape, kind

    def bind_input(self, binding: ort.IOBinding, name: str) -> None:
        binding.bind_input(name, "cpu", 0, self._kind, self._dims, self.array.ctypes.data)


def _part(file: _File, offset: int, size: int, width: int) -> np.ndarray:
    """Bytes of a file: the mapping itself, or a copy where numbers of that width would lie across its words."""
    if offset % width == 0:
        return file.data[offset : offset + size]
    for (start, length), aligned in file.copies.items():
        if start <= offset and offset + size <= start + length and (offset - start) % width == 0:
            return aligned[offset - start : offset - start + size]
    # read, not copied from the mapping, whose pages would count as memory too
    aligned = np.fromfile(file.path, np.uint8, size, offset=offset)
    file.copies[offset, size] = aligned
    return aligned


def has_external_constants(model: onnx.ModelProto) -> bool:
    """Whether a model's graph refers to data in other files."""
    return any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer)


def constants_as_inputs(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, dict[str, Tensor]]:
    """A copy of a model that takes its large external constants as inputs, and what to bind to these."""
    changed = copy.deepcopy(model)
    graph = changed.graph
    inline, mapped = [], {}
    # the largest first: others may be parts of them
    for tensor in sorted(graph.initializer, key=lambda tensor: -math.prod(tensor.dims)):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            inline.append(tensor)
            continue
        location, offset, size = external_range(tensor)
        shape, kind = list(tensor.dims), tensor.data_type
        # A mapped constant is an input, and the runtime folds and fuses nothing that it does not know.
        if size < _SMALLEST:
            load_external_data_for_tensor(tensor, os.fspath(folder))
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
            inline.append(tensor)
            continue
        mapped[tensor.name] = _Constant(_mapped(folder / location), offset, size, shape, kind)
        graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, kind, shape))
    graph.initializer.clear()
    graph.initializer.extend(inline)
    return changed, mapped


def _mapped(path: Path) -> _File:
    status = path.stat()
    # a file that was replaced has another inode or time: its old mapping must not be given out for it
    key = (os.path.realpath(path), status.st_ino, status.st_size, status.st_mtime_ns)
    file = _files.get(key)
    if file is None:
        try:
            file = _File(path, np.memmap(path, np.uint8, mode="r"), {})
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot map '{path}', which holds a model's weights: {error}") from error
        _files[key] = file
    return file
