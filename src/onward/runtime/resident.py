"""Memory of a device that Python cannot address, like WebGPU's: what one run wrote there, the next one reads.

Knows no model. Its tensors are bound by value at every run, so nothing crosses to the host but what is read or written
by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime as ort

from onward.errors import DeviceError
from onward.runtime import kernels
from onward.runtime.tensors import HostTensor, Tensor, onnx_type, run_bound, squared_norm

if TYPE_CHECKING:
    from onward.runtime.devices import Device

# As in a `FlatBuffer`, whose place these take.
_ALIGN = 16


class ResidentTensor(Tensor):
    """Memory of a device that has no address: an OrtValue, replaced by the one that a run wrote.

    Values are never written in place, so copies share them. What a run is to write, `take` hands over after it.
    """

    def __init__(self, device: Device, array: np.ndarray) -> None:
        self.device, self.shape, self.dtype = device, array.shape, array.dtype
        self.write(array)

    def read(self) -> np.ndarray:
        # on the CPU what comes back is the memory itself: the caller gets a copy everywhere
        return self._value.numpy().astype(self.dtype, copy=True).reshape(self.shape)

    def write(self, array: np.ndarray) -> None:
        numbers = np.ascontiguousarray(np.broadcast_to(array, self.shape), dtype=self.dtype)
        kind = onnx.TensorProto.DataType.Name(onnx_type(self.dtype)).lower()
        kernel = kernels.upload(self.device, kind)
        binding: ort.IOBinding = kernel.io_binding()
        HostTensor(numbers.reshape(self.shape)).bind_input(binding, "x")
        binding.bind_output("y", self.device.kind, self.device.number)
        kernel.run_with_iobinding(binding)
        self._value = binding.get_outputs()[0]

    def view(self, start: int, shape: Sequence[int], dtype: np.dtype | None = None) -> Tensor:
        raise DeviceError(f"parts of a tensor cannot be bound on {self.device}: train on the CPU or on CUDA")

    def copy_from(self, other: Tensor) -> None:
        if isinstance(other, ResidentTensor):
            self._value = other._value
        else:
            super().copy_from(other)

    def bind_input(self, binding: ort.IOBinding, name: str) -> None:
        binding.bind_ortvalue_input(name, self._value)

    def bind_output(self, binding: ort.IOBinding, name: str) -> None:
        binding.bind_output(name, self.device.kind, self.device.number)

    def take(self, value: ort.OrtValue) -> None:
        """Hold what a run wrote from now on."""
        self._value = value


class ResidentTensors(Tensor):
    """Resident tensors as what stands for one vector; `spans` says where each would lie in it."""

    def __init__(self, tensors: Mapping[str, ResidentTensor], spans: Mapping[str, tuple[int, int]]) -> None:
        self._tensors, self._spans = list(tensors.values()), list(spans.values())
        count = -(-max((stop for _, stop in self._spans), default=0) // _ALIGN) * _ALIGN
        self.shape, self.dtype = (count,), np.dtype(np.float32)
        if self._tensors:
            self.dtype = self._tensors[0].dtype

    def read(self) -> np.ndarray:
        vector = np.zeros(self.shape, self.dtype)
        for tensor, (start, stop) in zip(self._tensors, self._spans):
            vector[start:stop] = tensor.read().reshape(-1)
        return vector

    def write(self, array: np.ndarray) -> None:
        vector = np.broadcast_to(array, self.shape)
        for tensor, (start, stop) in zip(self._tensors, self._spans):
            tensor.write(vector[start:stop].reshape(tensor.shape))

    def view(self, start: int, shape: Sequence[int], dtype: np.dtype | None = None) -> Tensor:
        for tensor, (first, _) in zip(self._tensors, self._spans):
            if first == start and tensor.shape == tuple(shape):
                return tensor
        raise DeviceError(
            "a vector cannot be cut on this device, as sharded and pipeline training do: train on the CPU or on CUDA"
        )

    def copy_from(self, other: Tensor) -> None:
        if isinstance(other, ResidentTensors):
            for tensor, source in zip(self._tensors, other._tensors):
                tensor.copy_from(source)
        else:
            super().copy_from(other)

    def scale(self, factor: float) -> None:
        number = HostTensor(np.array(factor, np.float32))
        outputs = {f"y{index}": tensor for index, tensor in enumerate(self._tensors)}
        self._run(kernels.scale_all, {"factor": number}, outputs)

    def squared_norm(self) -> float:
        square = HostTensor(np.zeros(1, np.float32))
        self._run(kernels.norm_of_all, {}, {"y": square})
        value = square.array.item()
        # float32 on the device: where it overflows, the host sums in float64
        return value if math.isfinite(value) else squared_norm(self.read())

    def bind_input(self, binding: ort.IOBinding, name: str) -> None:
        raise AssertionError("tensors of their own are no vector that a session could read")

    bind_output = bind_input

    def _run(
        self,
        kernel: Callable[..., ort.InferenceSession],
        others: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
    ) -> None:
        if self._tensors:
            session = kernel(self._tensors[0].device, tuple(tensor.shape for tensor in self._tensors))
            inputs = {f"x{index}": tensor for index, tensor in enumerate(self._tensors)}
            run_resident(session, session.io_binding(), {**inputs, **others}, outputs)


def run_resident(
    session: ort.InferenceSession,
    binding: ort.IOBinding,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    fresh: Sequence[str] = (),
) -> list[ort.OrtValue]:
    """Run with what tensors hold now, and let the outputs' tensors hold what it wrote; returns all outputs.

    Those named in `fresh` come to the host, after the others. Outputs must be named in the same order
    at every run of a binding.
    """
    for name, tensor in inputs.items():
        tensor.bind_input(binding, name)
    for name, tensor in outputs.items():
        # memory of its own: WebGPU refuses a run that writes what it reads
        tensor.bind_output(binding, name)
    for name in fresh:
        binding.bind_output(name, "cpu")
    run_bound(session, binding)
    values = binding.get_outputs()
    for tensor, value in zip(outputs.values(), values):
        if isinstance(tensor, ResidentTensor):
            tensor.take(value)
    return values
