"""Tensors that sessions can bind to: what all of them offer, and those of the host's memory."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

# Some gradient rules clamp infinities to the largest float32, whose square is 1e77: a norm beyond this is one of those.
_OVERFLOW = 1e60


class Tensor(abc.ABC):
    """Memory on the host or a device: read and written from the host, bound to sessions in place.

    What a kind of memory does not do by itself goes by way of the host.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @abc.abstractmethod
    def read(self) -> np.ndarray:
        """The numbers: on the host the memory itself, from a device a copy."""

    @abc.abstractmethod
    def write(self, array: np.ndarray) -> None:
        """Replace the numbers, of the same shape; values are converted to the tensor's type."""

    @abc.abstractmethod
    def view(self, start: int, shape: Sequence[int], dtype: np.dtype | None = None) -> Tensor:
        """A part of a vector, from an element on, in another shape and type; the same memory."""

    @abc.abstractmethod
    def bind_input(self, binding: ort.IOBinding, name: str) -> None:
        """Let a session read it; `binding` is the runtime's own."""

    @abc.abstractmethod
    def bind_output(self, binding: ort.IOBinding, name: str) -> None:
        """Let a session write it."""

    def copy_from(self, other: Tensor) -> None:
        """Take over the numbers of a tensor of the same shape."""
        self.write(other.read())

    def clear(self) -> None:
        """Set every number of a float32 vector to zero, whatever it was."""
        self.write(np.zeros((), self.dtype))

    def add(self, other: Tensor) -> None:
        """Add a float32 vector of the same size."""
        self.write(self.read() + other.read())

    def scale(self, factor: float) -> None:
        """Multiply a float32 vector by a number."""
        self.write(self.read() * np.float32(factor))

    def squared_norm(self) -> float:
        """Σx² of a float32 vector, infinite where a number is not finite or beyond all reason."""
        return squared_norm(self.read().reshape(-1))

    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite."""
        return bool(np.isfinite(self.read()).all())


class HostTensor(Tensor):
    """A contiguous numpy array."""

    def __init__(self, array: np.ndarray) -> None:
        if not array.flags.c_contiguous:
            # the runtime silently copies an array that is not contiguous, and then trains the copy
            raise AssertionError("a tensor bound to a session must be contiguous")
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def read(self) -> np.ndarray:
        return self.array

    def write(self, array: np.ndarray) -> None:
        # into the memory that sessions are bound to: a new array would be trained by nobody
        np.copyto(self.array, array, casting="unsafe")

    def view(self, start: int, shape: Sequence[int], dtype: np.dtype | None = None) -> HostTensor:
        if dtype is None or dtype == self.array.dtype:
            return HostTensor(self.array[start : start + math.prod(shape)].reshape(tuple(shape)))
        # by bytes: the parts of a block may have types of other widths
        part = self.array[start:].view(np.uint8)[: math.prod(shape) * dtype.itemsize]
        return HostTensor(part.view(dtype).reshape(tuple(shape)))

    def add(self, other: Tensor) -> None:
        self.array += other.read()

    def scale(self, factor: float) -> None:
        self.array *= np.float32(factor)

    def bind_input(self, binding: ort.IOBinding, name: str) -> None:
        array = self.array
        # an OrtValue over the array costs less to bind; it takes numpy's own types only
        if array.dtype.isbuiltin == 1:
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        else:
            binding.bind_input(
                name, "cpu", 0, element_type(array.dtype), list(array.shape), array.ctypes.data
            )

    def bind_output(self, binding: ort.IOBinding, name: str) -> None:
        array = self.array
        kind = element_type(array.dtype)
        binding.bind_output(name, "cpu", 0, kind, list(array.shape), array.ctypes.data)


def squared_norm(vector: np.ndarray) -> float:
    """Σg², infinite where a gradient is not finite or beyond all reason.

    >>> squared_norm(np.array([3, 4], np.float32))
    25.0
    """
    with np.errstate(over="ignore"):  # float32 overflows before the sum is really infinite
        square = float(np.dot(vector, vector))
    if not math.isfinite(square):
        square = float(np.sum(np.square(vector, dtype=np.float64)))
        if square > _OVERFLOW:
            return math.inf
    return square


def run_bound(session: ort.InferenceSession, binding: ort.IOBinding) -> None:
    """Run with a binding, past the wrapper's checks, which cost a tiny model's step several percent."""
    native: Any = session._sess
    native.run_with_iobinding(binding._iobinding, None)


def element_type(dtype: np.dtype) -> Any:
    """What a binding calls a type: those that numpy itself has, by that; others by ONNX's number."""
    if dtype.kind in "fiub" and dtype.isbuiltin == 1:
        return dtype.type
    return onnx_type(dtype)


def onnx_type(dtype: np.dtype) -> int:
    """ONNX's number of a type.

    >>> onnx_type(np.dtype(np.float32))
    1
    """
    return int(onnx.helper.np_dtype_to_tensor_dtype(dtype))
