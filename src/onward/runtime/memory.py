"""Memory of training: tensors on the host or on a device, and operations on them outside of a step.

A `Tensor` is memory that sessions can bind to; a `FlatBuffer` is many tensors in one vector; `ModelMemory` is
everything that a model's training reads and writes. No other module handles addresses.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import onnx
import onnxruntime as ort

from onward.errors import DeviceMemoryError
from onward.runtime.devices import Device

if TYPE_CHECKING:
    from onward.runtime.signature import Signature

__all__ = [
    "DeviceTensor",
    "FlatBuffer",
    "HostTensor",
    "MappedTensor",
    "ModelMemory",
    "Tensor",
    "is_out_of_memory",
    "make_tensor",
    "onnx_type",
    "squared_norm",
]

# Views start at multiples of this many elements, so that each is aligned to a cache line.
_ALIGN = 16
# Some gradient rules clamp infinities to the largest float32: a norm beyond this is one of those.
_OVERFLOW = 1e60
_OPSET = 18
# Bytes that are copied to a part of a vector at a time, and numbers that are summed.
_PIECE, _SUMMED = 1 << 24, 1 << 22


class Tensor(Protocol):
    """Memory on the host or a device: read and written from the host, bound to sessions in place."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Its type."""
        ...

    def read(self) -> np.ndarray:
        """The numbers: on the host the memory itself, from a device a copy."""
        ...

    def write(self, array: np.ndarray) -> None:
        """Replace the numbers, of the same shape; values are converted to the tensor's type."""
        ...

    def view(self, start: int, shape: Sequence[int], dtype: np.dtype | None = None) -> Tensor:
        """A part of a vector, from an element on, in another shape and type; the same memory."""
        ...

    def copy_from(self, other: Tensor) -> None:
        """Take over the numbers of a tensor of the same kind, shape and type."""
        ...

    def clear(self) -> None:
        """Set every number of a float32 vector to zero, whatever it was."""
        ...

    def add(self, other: Tensor) -> None:
        """Add a float32 vector of the same kind and size."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply a float32 vector by a number."""
        ...

    def squared_norm(self) -> float:
        """Σx² of a float32 vector, infinite where a number is not finite or beyond all reason."""
        ...

    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite."""
        ...

    def bind_input(self, binding: Any, name: str) -> None:
        """Let a session read it; `binding` is the runtime's own."""
        ...

    def bind_output(self, binding: Any, name: str) -> None:
        """Let a session write it."""
        ...


class HostTensor:
    """A contiguous numpy array."""

    def __init__(self, array: np.ndarray) -> None:
        if not array.flags.c_contiguous:
            # the runtime silently copies an array that is not contiguous, and then trains the copy
            raise AssertionError("a tensor bound to a session must be contiguous")
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def read(self) -> np.ndarray:
        return self.array

    def write(self, array: np.ndarray) -> None:
        np.copyto(self.array, array, casting="unsafe")

    def view(self, start: int, shape: Sequence[int], dtype: np.dtype | None = None) -> HostTensor:
        if dtype is None or dtype == self.array.dtype:
            return HostTensor(self.array[start : start + math.prod(shape)].reshape(tuple(shape)))
        part = self.array[start:].view(np.uint8)[: math.prod(shape) * dtype.itemsize]
        return HostTensor(part.view(dtype).reshape(tuple(shape)))

    def copy_from(self, other: Tensor) -> None:
        np.copyto(self.array, other.read())

    def clear(self) -> None:
        self.array[...] = 0

    def add(self, other: Tensor) -> None:
        self.array += other.read()

    def scale(self, factor: float) -> None:
        self.array *= np.float32(factor)

    def squared_norm(self) -> float:
        return squared_norm(self.array.reshape(-1))

    def is_finite(self) -> bool:
        return bool(np.isfinite(self.array).all())

    def bind_input(self, binding: Any, name: str) -> None:
        array = self.array
        if array.dtype.isbuiltin == 1:
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        else:
            binding.bind_input(
                name, "cpu", 0, _element_type(array.dtype), list(array.shape), array.ctypes.data
            )

    def bind_output(self, binding: Any, name: str) -> None:
        array = self.array
        kind = _element_type(array.dtype)
        binding.bind_output(name, "cpu", 0, kind, list(array.shape), array.ctypes.data)


class MappedTensor(HostTensor):
    """Constants of a model in mapped memory, which is never written; ONNX packs numbers of fewer than eight bits."""

    def __init__(self, data: np.ndarray, shape: Sequence[int], kind: int) -> None:
        super().__init__(data)
        self._dims, self._kind = list(shape), kind

    def bind_input(self, binding: Any, name: str) -> None:
        binding.bind_input(name, "cpu", 0, self._kind, self._dims, self.array.ctypes.data)


class DeviceTensor:
    """Memory of a device by its address; an OrtValue of bytes owns it, or an object of another library."""

    def __init__(
        self, device: Device, owner: Any, address: int, shape: Sequence[int], dtype: np.dtype
    ) -> None:
        self._device, self._owner, self._address = device, owner, address
        self._shape, self._dtype = tuple(shape), np.dtype(dtype)
        self._reductions: dict[str, _Reduction] = {}
        ours = isinstance(owner, ort.OrtValue)
        self._is_whole = ours and address == owner.data_ptr() and self.nbytes == math.prod(owner.shape())

    @classmethod
    def allocate(cls, device: Device, shape: Sequence[int], dtype: np.dtype) -> DeviceTensor:
        """New memory, full of zeros.

        A session makes it, as OrtValue's own allocator grows in powers of two and keeps up to twice as much.
        """
        size = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        kernel = _kernel(device, "zeros")
        binding: Any = kernel.io_binding()
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
            "shape": self._shape, "typestr": self._dtype.str, "data": (self._address, False), "version": 3,
        }  # fmt: skip

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> np.dtype:
        return self._dtype

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self._shape) * self._dtype.itemsize

    def read(self) -> np.ndarray:
        if (
            self._is_whole
        ):  # on the CPU what comes back is the memory itself: the caller gets a copy everywhere
            return self._owner.numpy().view(self._dtype).reshape(self._shape).copy()
        array = np.empty(self._shape, self._dtype)
        if self.nbytes:
            kernel = _kernel(self._device, "copy")
            binding = kernel.io_binding()
            self._bind_bytes(binding.bind_input, "x")
            binding.bind_output("y", "cpu", 0, np.uint8, [self.nbytes], array.ctypes.data)
            kernel.run_with_iobinding(binding)
        return array

    def write(self, array: np.ndarray) -> None:
        given = np.ascontiguousarray(np.broadcast_to(array, self._shape), dtype=self._dtype)
        if not self.nbytes:
            return
        data = given.reshape(-1).view(np.uint8)
        if self._is_whole:
            self._owner.update_inplace(data)
            return
        kernel, device = _kernel(self._device, "copy"), self._device
        for start in range(0, data.size, _PIECE):  # the session keeps a copy on the device: of a piece only
            piece = data[start : start + _PIECE]
            binding: Any = kernel.io_binding()
            binding.bind_cpu_input("x", piece)
            binding.bind_output(
                "y", device.kind, device.number, np.uint8, [piece.size], self._address + start
            )
            kernel.run_with_iobinding(binding)

    def view(self, start: int, shape: Sequence[int], dtype: np.dtype | None = None) -> DeviceTensor:
        address = self._address + start * self._dtype.itemsize
        return DeviceTensor(self._device, self._owner, address, shape, dtype or self._dtype)

    def copy_from(self, other: Tensor) -> None:
        if not isinstance(other, DeviceTensor):
            self.write(other.read())
        elif self.nbytes:
            session = _kernel(self._device, "copy")
            binding = session.io_binding()
            other._bind_bytes(binding.bind_input, "x")
            self._bind_bytes(binding.bind_output, "y")
            session.run_with_iobinding(binding)

    def clear(self) -> None:
        self._elementwise("clear", make_tensor(self._device, np.zeros(1, np.float32)))

    def add(self, other: Tensor) -> None:
        self._elementwise("add", other)

    def scale(self, factor: float) -> None:
        self._elementwise("scale", make_tensor(self._device, np.full(1, factor, np.float32)))

    def squared_norm(self) -> float:
        square = self._reduce("norm")
        return square if math.isfinite(square) else squared_norm(self.read().reshape(-1))

    def is_finite(self) -> bool:
        if self._dtype != np.float32:
            return bool(np.isfinite(self.read()).all())
        return math.isfinite(self._reduce("zero"))

    def bind_input(self, binding: Any, name: str) -> None:
        device = self._device
        binding.bind_input(
            name, device.kind, device.number, _element_type(self._dtype), list(self._shape), self._address
        )

    def bind_output(self, binding: Any, name: str) -> None:
        device = self._device
        binding.bind_output(
            name, device.kind, device.number, _element_type(self._dtype), list(self._shape), self._address
        )

    def _bind_bytes(self, bind: Any, name: str) -> None:
        bind(name, self._device.kind, self._device.number, np.uint8, [self.nbytes], self._address)

    def _elementwise(self, kernel: str, other: Tensor) -> None:
        """Change a vector in place by another, or by one number."""
        if not self.nbytes:
            return
        session = _kernel(self._device, kernel)
        binding = session.io_binding()
        flat = DeviceTensor(self._device, self._owner, self._address, [math.prod(self._shape)], self._dtype)
        flat.bind_input(binding, "x")
        other.bind_input(binding, "s")
        flat.bind_output(binding, "y")
        session.run_with_iobinding(binding)

    def _reduce(self, kernel: str) -> float:
        """One number of a vector; what computes it is kept, since every update asks for the norm."""
        if not self.nbytes:
            return 0.0
        if kernel not in self._reductions:
            size = math.prod(self._shape)
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
                session = _make_kernel(device, kernel, [part.shape[0] for part in parts], capture=True)
                self._bind(session, DeviceTensor.allocate(device, [1], np.dtype(np.float32)))
                self._run()
                recorded = True
        if not recorded:
            self._bind(_kernel(device, kernel, len(parts)), HostTensor(np.zeros(1, np.float32)))

    def _bind(self, session: ort.InferenceSession, result: Tensor) -> None:
        self._session, self._result = session, result
        self._binding: Any = session.io_binding()
        for index, part in enumerate(self._parts):
            part.bind_input(self._binding, f"x{index}")
        result.bind_output(self._binding, "y")

    def _run(self) -> None:
        native: Any = self._session._sess
        native.run_with_iobinding(self._binding._iobinding, None)

    def run(self) -> float:
        """The number of what the vector is now."""
        self._run()
        return float(self._result.read()[0])


class FlatBuffer:
    """One vector with a named view for each tensor; float32 on the host unless asked otherwise.

    >>> flat = FlatBuffer({"w": (2, 3), "b": (3,)})
    >>> flat.views["w"][:] = 1
    >>> flat.vector.sum()
    np.float32(6.0)
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        *,
        parts: int = 1,
        device: Device | None = None,
        dtype: np.dtype | type = np.float32,
    ) -> None:
        self.device = device or Device("cpu")
        self.spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            self.spans[name] = (end, end + size)
            end += -(-size // _ALIGN) * _ALIGN
        # divisible into equal parts, each aligned
        count = -(-end // (_ALIGN * parts)) * _ALIGN * parts
        self.whole: Tensor = _vector(self.device, count, np.dtype(dtype))
        self.tensors: dict[str, Tensor] = {
            name: self.whole.view(start, shapes[name]) for name, (start, _) in self.spans.items()
        }

    @property
    def on_host(self) -> bool:
        """Whether it is made of numpy arrays."""
        return isinstance(self.whole, HostTensor)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def vector(self) -> np.ndarray:
        """The whole as numpy: the memory itself; on the host only."""
        if not isinstance(self.whole, HostTensor):
            raise AssertionError(f"memory of {self.device} has no numpy vector")
        return self.whole.array

    @functools.cached_property
    def views(self) -> dict[str, np.ndarray]:
        """Each tensor as numpy: the memory itself; on the host only."""
        return {n: tensor.array for n, tensor in self.tensors.items() if isinstance(tensor, HostTensor)}

    def arrays(self) -> dict[str, np.ndarray]:
        """Every tensor's numbers: the memory itself on the host, else one copy of the whole, in parts."""
        if self.on_host:
            return dict(self.views)
        whole = self.whole.read()
        return {
            name: whole[start:stop].reshape(self.tensors[name].shape)
            for name, (start, stop) in self.spans.items()
        }

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace the numbers of some tensors."""
        if self.on_host:
            for name, array in arrays.items():
                self.tensors[name].write(array)
        elif arrays:
            whole = self.whole.read()  # one copy each way instead of one for each tensor
            for name, array in arrays.items():
                start, stop = self.spans[name]
                whole[start:stop] = np.broadcast_to(array, self.tensors[name].shape).reshape(-1)
            self.whole.write(whole)

    def part(self, start: int, stop: int) -> FlatBuffer:
        """The same memory from `start` to `stop` (multiples of 16): what lies there of each tensor, flat.

        >>> flat = FlatBuffer({"w": (20,), "b": (3,)})
        >>> flat.part(16, 48).shapes
        {'w': (4,), 'b': (3,)}
        """
        if start % _ALIGN or stop % _ALIGN:
            raise ValueError(f"a part begins and ends at multiples of {_ALIGN}, not at {start} and {stop}")
        part = FlatBuffer({}, device=self.device, dtype=self.whole.dtype)
        for name, (first, last) in self.spans.items():
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                part.spans[name] = (begin - start, end - start)
                part.tensors[name] = self.whole.view(begin, [end - begin])
        end = max((last for _, last in part.spans.values()), default=0)
        part.whole = self.whole.view(start, [-(-end // _ALIGN) * _ALIGN])
        return part


class ModelMemory:
    """The memory of a model's training: parameters, their gradients, and frozen tensors.

    Batch-norm statistics are among the frozen ones. A step writes their next values elsewhere; `commit` applies
    those, `keep` saves the current ones and `restore` restores them.
    """

    def __init__(self, signature: Signature, device: Device, *, parts: int = 1) -> None:
        self.device = device
        self._parts = parts
        trainable = {name: signature.shapes[name] for name in signature.trainable}
        statistics = {
            n: (signature.shapes[n], signature.dtypes[n])
            for n in signature.statistics
            if n in signature.parameters
        }
        self.parameters = FlatBuffer(trainable, parts=parts, device=device)
        self.gradients = FlatBuffer(trainable, parts=parts, device=device)
        kinds = dict.fromkeys(dtype for _, dtype in statistics.values())

        def flat() -> list[FlatBuffer]:
            return [
                FlatBuffer(
                    {n: s for n, (s, own) in statistics.items() if own == kind}, device=device, dtype=kind
                )
                for kind in kinds
            ]

        self.statistics, self.following = flat(), flat()
        self._before: list[FlatBuffer] = []
        self._new_before = flat
        self.frozen: dict[str, Tensor] = {n: t for part in self.statistics for n, t in part.tensors.items()}

    def add_frozen(self, name: str, array: np.ndarray) -> None:
        """Keep a tensor that is not trained."""
        if name in self.frozen:
            self.frozen[name].write(array)
        else:
            self.frozen[name] = make_tensor(self.device, array)

    def __getitem__(self, name: str) -> Tensor:
        found = self.parameters.tensors.get(name)
        return self.frozen[name] if found is None else found

    def __contains__(self, name: object) -> bool:
        return name in self.parameters.tensors or name in self.frozen

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that a model reads, by name."""
        return {**self.parameters.tensors, **self.frozen}

    def arrays(self) -> dict[str, np.ndarray]:
        """Their numbers; on the host the memory itself."""
        return {**self.parameters.arrays(), **{name: tensor.read() for name, tensor in self.frozen.items()}}

    def following_tensors(self) -> dict[str, Tensor]:
        """Where a step writes the next value of each statistic."""
        return {name: tensor for part in self.following for name, tensor in part.tensors.items()}

    def commit(self) -> None:
        """Apply the statistics that the last step computed."""
        _copy(self.statistics, self.following)

    def keep(self) -> None:
        """Save the current statistics."""
        if self.statistics and not self._before:
            self._before = self._new_before()
        _copy(self._before, self.statistics)

    def restore(self) -> None:
        """Restore the saved statistics, if any."""
        if self._before:
            _copy(self.statistics, self._before)

    def first_nonfinite_statistic(self) -> str | None:
        """The name of a statistic that the last step made NaN or infinite."""
        for part in self.following:
            if not part.whole.is_finite():
                return next((n for n, array in part.arrays().items() if not np.isfinite(array).all()), "?")
        return None

    def arrange(self, order: Iterable[str]) -> bool:
        """Lay out parameters and gradients in an order; False where they lie so already. Bindings must be renewed."""
        order = list(order)
        if order == list(self.parameters.spans):
            return False
        made = []
        for old in (self.parameters, self.gradients):
            shapes = old.shapes
            new = FlatBuffer({name: shapes[name] for name in order}, parts=self._parts, device=self.device)
            new.write(old.arrays())
            made.append(new)
        self.parameters, self.gradients = made  # both or, where there is too little memory, neither
        return True


def make_tensor(device: Device, array: np.ndarray) -> Tensor:
    """A tensor of these numbers, in memory of its own."""
    if device.memory != "device":
        return HostTensor(np.array(array, order="C", copy=True))
    given = np.asarray(array)
    tensor = _kept(device, given.shape, given.dtype)
    tensor.write(given)
    return tensor


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


def _copy(targets: Sequence[FlatBuffer], sources: Sequence[FlatBuffer]) -> None:
    for target, source in zip(targets, sources):
        target.whole.copy_from(source.whole)


def _vector(device: Device, count: int, dtype: np.dtype) -> Tensor:
    """A vector of zeros that begins at a cache line."""
    if device.memory == "device":
        return _kept(device, (count,), dtype)
    try:
        raw = np.zeros(count + _ALIGN, dtype)
    except MemoryError:
        size = f"{count * dtype.itemsize / 2**30:.1f} GiB"
        raise DeviceMemoryError(
            f"the training model's tensors take {size}, which this machine does not have"
        ) from None
    offset = (-raw.ctypes.data // dtype.itemsize) % _ALIGN
    return HostTensor(raw[offset : offset + count])


def _kept(device: Device, shape: Sequence[int], dtype: np.dtype) -> DeviceTensor:
    """Memory of a device that training keeps from step to step, full of zeros."""
    try:
        return DeviceTensor.allocate(device, shape, dtype)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        size = math.prod(shape) * np.dtype(dtype).itemsize
        raise DeviceMemoryError(
            f"{device} has too little memory for {size:,} bytes of parameters, gradients or optimizer state: "
            f"{str(error).splitlines()[0]}. Nothing was trained; a smaller batch does not help. Train fewer "
            "parameters (frozen_params=…, LoRA), take an optimizer with less state (SGD), or end other processes "
            "on the device"
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether the runtime failed for want of memory.

    >>> is_out_of_memory(RuntimeError("CUDA failure 2: out of memory"))
    True
    """
    text = str(error)
    return "Failed to allocate memory" in text or "out of memory" in text.lower()


def _element_type(dtype: np.dtype) -> Any:
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


@functools.cache
def _kernel(device: Device, name: str, parts: int = 1) -> ort.InferenceSession:
    """A session of one or two operators on a device; those that reduce take a vector in so many parts."""
    return _make_kernel(device, name, [f"n{i}" for i in range(parts)])


def _make_kernel(
    device: Device, name: str, parts: Sequence[int | str], *, capture: bool = False
) -> ort.InferenceSession:
    make, value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    bytes_only = name in ("copy", "zeros")
    kind = onnx.TensorProto.UINT8 if bytes_only else onnx.TensorProto.FLOAT
    size: int | str = "n"
    inputs, constants = [value("x", kind, ["n"])], []
    if name in ("scale", "clear", "add"):
        inputs.append(value("s", kind, ["m"]))
    if name == "copy":
        nodes = [make("Identity", ["x"], ["y"])]
    elif name == "zeros":
        inputs = [value("n", onnx.TensorProto.INT64, [1])]
        zero = onnx.helper.make_tensor("", kind, [1], [0])
        nodes = [make("ConstantOfShape", ["n"], ["y"], value=zero)]
    elif name in ("scale", "add"):
        nodes = [make("Mul" if name == "scale" else "Add", ["x", "s"], ["y"])]
    elif name == "clear":
        constants = [onnx.helper.make_tensor("yes", onnx.TensorProto.BOOL, [1], [True])]
        nodes = [make("Where", ["yes", "s", "x"], ["y"])]
    else:
        size, count = 1, len(parts)
        inputs = [value(f"x{i}", kind, [part]) for i, part in enumerate(parts)]
        if name == "norm":
            nodes = [make("ReduceSumSquare", [f"x{i}"], [f"y{i}"], keepdims=1) for i in range(count)]
        else:  # 0·x is 0, or NaN where x is not finite
            constants = [onnx.helper.make_tensor("none", onnx.TensorProto.FLOAT, [1], [0.0])]
            nodes = []
            for i in range(count):
                nodes.append(make("Mul", [f"x{i}", "none"], [f"m{i}"]))
                nodes.append(make("ReduceSum", [f"m{i}"], [f"y{i}"], keepdims=1))
        nodes.append(make("Sum", [f"y{i}" for i in range(count)], ["y"]))
    graph = onnx.helper.make_graph(nodes, name, inputs, [value("y", kind, [size])], constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", _OPSET)], ir_version=8)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=device.providers(capture=capture)
    )
