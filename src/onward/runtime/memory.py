"""Memory of training: tensors on the host or on a device, and operations on them outside of a step.

A `Tensor` is memory that sessions can bind to; a `FlatBuffer` is many tensors in one vector; `ModelMemory` is
everything that a model's training reads and writes. No other module handles addresses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from onward.errors import DeviceMemoryError
from onward.runtime.device_tensor import DeviceTensor, is_out_of_memory
from onward.runtime.devices import Device
from onward.runtime.resident import ResidentTensor, ResidentTensors
from onward.runtime.tensors import HostTensor, Tensor

if TYPE_CHECKING:
    from onward.runtime.signature import Signature

# Views start at multiples of this many elements, so that each is aligned to a cache line: sixteen float32.
_ALIGN = 16


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
        # ranks that shard the vector hold equal parts of it, each aligned
        count = -(-end // (_ALIGN * parts)) * _ALIGN * parts
        self.whole: Tensor
        self.tensors: dict[str, Tensor]
        if self.device.memory == "resident":
            # such memory has no address, so no tensor can be a part of another
            zeros = {name: np.zeros(tuple(shapes[name]), dtype) for name in self.spans}
            resident = {name: ResidentTensor(self.device, array) for name, array in zeros.items()}
            self.tensors, self.whole = {**resident}, ResidentTensors(resident, self.spans)
            return
        self.whole = _vector(self.device, count, np.dtype(dtype))
        self.tensors = {name: self.whole.view(start, shapes[name]) for name, (start, _) in self.spans.items()}

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
        # Apart from the parameters: a step writes their next values while it still reads these.
        statistics = {
            n: (signature.shapes[n], signature.dtypes[n])
            for n in signature.statistics
            if n in signature.parameters
        }
        # one type for all that trains: the updates run over one vector
        kind = next((signature.dtypes[name] for name in trainable), np.dtype(np.float32))
        self.parameters = FlatBuffer(trainable, parts=parts, device=device, dtype=kind)
        self.gradients = FlatBuffer(trainable, parts=parts, device=device, dtype=kind)
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
        trainable = self.parameters.tensors.get(name)
        return self.frozen[name] if trainable is None else trainable

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
        # Only once the step is known to be good; until then the old ones are what evaluation reads.
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
        buffers = []
        for old in (self.parameters, self.gradients):
            shapes = old.shapes
            named = {name: shapes[name] for name in order}
            new = FlatBuffer(named, parts=self._parts, device=self.device, dtype=old.whole.dtype)
            new.write(old.arrays())
            buffers.append(new)
        self.parameters, self.gradients = buffers  # both or, where there is too little memory, neither
        return True


def make_tensor(device: Device, array: np.ndarray) -> Tensor:
    """A tensor of these numbers, in memory of its own."""
    if device.memory == "resident":
        return ResidentTensor(device, np.asarray(array))
    if device.memory != "device":
        return HostTensor(np.array(array, order="C", copy=True))
    numbers = np.asarray(array)
    tensor = _allocate_lasting(device, numbers.shape, numbers.dtype)
    tensor.write(numbers)
    return tensor


def make_small_tensor(device: Device, array: np.ndarray) -> Tensor:
    """A tensor of a few numbers that the host writes or reads at every run: where binding those costs least."""
    return (
        HostTensor(np.array(array, order="C")) if device.memory == "resident" else make_tensor(device, array)
    )


def _copy(targets: Sequence[FlatBuffer], sources: Sequence[FlatBuffer]) -> None:
    for target, source in zip(targets, sources):
        target.whole.copy_from(source.whole)


def _vector(device: Device, count: int, dtype: np.dtype) -> Tensor:
    """A vector of zeros that begins at a cache line."""
    if device.memory == "device":
        return _allocate_lasting(device, (count,), dtype)
    try:
        # Room to begin at a cache line, which numpy does not promise.
        raw = np.zeros(count + _ALIGN, dtype)
    except MemoryError:
        size = f"{count * dtype.itemsize / 2**30:.1f} GiB"
        raise DeviceMemoryError(
            f"the training model's tensors take {size}, which this machine does not have"
        ) from None
    offset = (-raw.ctypes.data // dtype.itemsize) % _ALIGN
    return HostTensor(raw[offset : offset + count])


def _allocate_lasting(device: Device, shape: Sequence[int], dtype: np.dtype) -> DeviceTensor:
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
