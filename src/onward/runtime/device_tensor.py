"""Tensors of a device's memory, by their addresses."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from onward.runtime import kernels
from onward.runtime.tensors import HostTensor, Tensor, element_type, run_bound

if TYPE_CHECKING:
    from onward.runtime.devices import Device

# Bytes that are copied to a part of a vector at a time, and numbers that are summed.
_PIECE, _SUMMED = 1 << 24, 1 << 22


class DeviceTensor(Tensor):
    """Memory of a device by its address; an OrtValue of bytes owns it, or an object of another library."""

    def __init__(
        self, device: Device, owner: Any, address: int, shape: Sequence[int], dtype: np.dtype
    ) -> None:
        self._device, self._owner, self._address = device, owner, address
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        # cached, since every update asks for the norm and making a session takes milliseconds
        self._reductions: dict[str, _Reduction] = {}
        ours = isinstance(owner, ort.OrtValue)
        self._is_whole = ours and address == owner.data_ptr() and self.nbytes == math.prod(owner.shape())

    @classmethod
    def allocate(cls, device: Device, shape: Sequence[int], dtype: np.dtype) -> DeviceTensor:
        """New memory, full of zeros.

        A session makes it, as OrtValue's own allocator grows in powers of two and keeps up to twice as much.
        """
        size = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        kernel = kernels.kernel(device, "zeros")
        binding: ort.IOBinding = kernel.io_binding()
        # the size is read on the host to allocate the rest
        binding.bind_cpu_input("n", np.array([size], np.int64))
        binding.bind_output("y", device.kind, device.number)
        kernel.run_with_iobinding(binding)
        owner = binding.get_outputs()[0]
        return cls(device, owner, owner.data_ptr(), shape, dtype)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The memory itself for numpy, where it is the CPU's."""
        return self._interface("cpu", "__array_interface__")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory itself for libraries on CUDA, where it is a GPU's."""
        return self._interface("cuda", "__cuda_array_interface__")

    def _interface(self, kind: str, name: str) -> dict[str, Any]:
        if self._device.kind != kind:
            raise AttributeError(name)
        return {
            "shape": self.shape, "typestr": self.dtype.str, "data": (self._address, False), "version": 3,
        }  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        # on the CPU what comes back is the memory itself: the caller gets a copy everywhere
        if self._is_whole:
            return self._owner.numpy().view(self.dtype).reshape(self.shape).copy()
        array = np.empty(self.shape, self.dtype)
        if self.nbytes:
            kernel = kernels.kernel(self._device, "copy")
            binding = kernel.io_binding()
            self._bind_bytes(binding.bind_input, "x")
            binding.bind_output("y", "cpu", 0, np.uint8, [self.nbytes], array.ctypes.data)
            kernel.run_with_iobinding(binding)
        return array

    def write(self, array: np.ndarray) -> None:
        numbers = np.ascontiguousarray(np.broadcast_to(array, self.shape), dtype=self.dtype)
        if not self.nbytes:
            return
        data = numbers.reshape(-1).view(np.uint8)
        if self._is_whole:
            self._owner.update_inplace(data)
            return
        kernel, device = kernels.kernel(self._device, "copy"), self._device
        for start in range(0, data.size, _PIECE):  # the session keeps a copy on the device: of a piece only
            piece = data[start : start + _PIECE]
            binding: ort.IOBinding = kernel.io_binding()
            binding.bind_cpu_input("x", piece)
            binding.bind_output(
                "y", device.kind, device.number, np.uint8, [piece.size], self._address + start
            )
            kernel.run_with_iobinding(binding)

    def view(self, start: int, shape: Sequence[int], dtype: np.dtype | None = None) -> DeviceTensor:
        address = self._address + start * self.dtype.itemsize
        return DeviceTensor(self._device, self._owner, address, shape, dtype or self.dtype)

    def copy_from(self, other: Tensor) -> None:
        if not isinstance(other, DeviceTensor):
            super().copy_from(other)
        elif self.nbytes:
            session = kernels.kernel(self._device, "copy")
            binding = session.io_binding()
            other._bind_bytes(binding.bind_input, "x")
            self._bind_bytes(binding.bind_output, "y")
            session.run_with_iobinding(binding)

    def clear(self) -> None:
        self._elementwise("clear", self._number(0.0))

    def add(self, other: Tensor) -> None:
        self._elementwise("add", other)

    def scale(self, factor: float) -> None:
        self._elementwise("scale", self._number(factor))

    def squared_norm(self) -> float:
        square = self._reduce("norm")
        return square if math.isfinite(square) else super().squared_norm()

    def is_finite(self) -> bool:
        return math.isfinite(self._reduce("zero")) if self.dtype == np.float32 else super().is_finite()

    def bind_input(self, binding: ort.IOBinding, name: str) -> None:
        self._bind(binding.bind_input, name, element_type(self.dtype), self.shape)

    def bind_output(self, binding: ort.IOBinding, name: str) -> None:
        self._bind(binding.bind_output, name, element_type(self.dtype), self.shape)

    def _bind_bytes(self, bind: Callable[..., None], name: str) -> None:
        self._bind(bind, name, np.uint8, [self.nbytes])

    def _bind(self, bind: Callable[..., None], name: str, kind: Any, shape: Sequence[int]) -> None:
        bind(name, self._device.kind, self._device.number, kind, list(shape), self._address)

    def _number(self, value: float) -> DeviceTensor:
        tensor = DeviceTensor.allocate(self._device, [1], np.dtype(np.float32))
        tensor.write(np.array(value))
        return tensor

    def _elementwise(self, kernel: str, other: Tensor) -> None:
        """Change a vector in place by another, or by one number."""
        if not self.nbytes:
            return
        session = kernels.kernel(self._device, kernel)
        binding = session.io_binding()
        flat = DeviceTensor(self._device, self._owner, self._address, [math.prod(self.shape)], self.dtype)
        flat.bind_input(binding, "x")
        other.bind_input(binding, "s")
        flat.bind_output(binding, "y")
        session.run_with_iobinding(binding)

    def _reduce(self, kernel: str) -> float:
        """One number of a vector."""
        if not self.nbytes:
            return 0.0
        if kernel not in self._reductions:
            # in stretches: a reduction takes as much memory again as it reads
            size = math.prod(self.shape)
            parts = [self.view(start, [min(_SUMMED, size - start)]) for start in range(0, size, _SUMMED)]
            # a recorded session has memory of its own: for whole vectors, not for each tensor in one
            record = self._device.captures and self._is_whole
            self._reductions[kernel] = _Reduction(self._device, kernel, parts, record=record)
        return self._reductions[kernel].run()


class _Reduction:
    """One number from the stretches of a vector: the runtime takes as much memory as it reduces at a time.

    With `record` its run is recorded where it can be; the number is then in the device's memory, as a recorded
    run writes there alone.
    """

    def __init__(self, device: Device, kernel: str, parts: Sequence[DeviceTensor], *, record: bool) -> None:
        self._parts = parts  # a binding holds addresses only
        recorded = False
        if record:
            with contextlib.suppress(Exception):  # what cannot be recorded runs without
                session = kernels.reduction(device, kernel, [part.shape[0] for part in parts], capture=True)
                self._bind(session, DeviceTensor.allocate(device, [1], np.dtype(np.float32)))
                run_bound(session, self._binding)
                recorded = True
        if not recorded:
            self._bind(
                kernels.shared_reduction(device, kernel, len(parts)), HostTensor(np.zeros(1, np.float32))
            )

    def _bind(self, session: ort.InferenceSession, result: Tensor) -> None:
        self._session, self._result = session, result
        self._binding: ort.IOBinding = session.io_binding()
        for index, part in enumerate(self._parts):
            part.bind_input(self._binding, f"x{index}")
        result.bind_output(self._binding, "y")

    def run(self) -> float:
        """The number of what the vector is now."""
        run_bound(self._session, self._binding)
        return float(self._result.read()[0])


def is_out_of_memory(error: Exception) -> bool:
    """Whether the runtime failed for want of memory.

    >>> is_out_of_memory(RuntimeError("CUDA failure 2: out of memory"))
    True
    """
    # onnxruntime has no class of error for it: its allocator and CUDA each have words of their own
    text = str(error)
    return "Failed to allocate memory" in text or "out of memory" in text.lower()
