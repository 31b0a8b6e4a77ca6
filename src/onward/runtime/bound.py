"""Sessions with io binding to the memory of training: fixed tensors once, the user's inputs at every run.

`HostBound` reads and writes numpy memory in place; where a provider copies what it is given at the binding, it
binds anew at every run. `DeviceBound` keeps everything at fixed addresses of a device, so that a run can be
recorded and replayed.
"""

from __future__ import annotations

import abc
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from onward.contract import BUFFER
from onward.errors import DeviceError, DeviceMemoryError, hinted
from onward.ort_session import array_of, shape_of, shorten_error
from onward.runtime.device_tensor import DeviceTensor, is_out_of_memory
from onward.runtime.devices import is_checked
from onward.runtime.resident import run_resident
from onward.runtime.tensors import Tensor, run_bound

if TYPE_CHECKING:
    from onward.ort_session import Feed
    from onward.runtime.devices import Device
    from onward.runtime.signature import Signature

# Bytes of an input up to which copying it takes less time than binding it.
_SMALL = 1 << 14
# Where an input may begin in a block of several.
_ALIGN = 256
_TYPES = {
    "tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16,
    "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(int16)": np.int16, "tensor(int8)": np.int8,
    "tensor(uint64)": np.uint64, "tensor(uint32)": np.uint32, "tensor(uint16)": np.uint16,
    "tensor(uint8)": np.uint8, "tensor(bool)": np.bool_,
}  # fmt: skip


def bind(
    session: ort.InferenceSession,
    signature: Signature,
    device: Device,
    *,
    rows: Mapping[str, str] | None = None,
    capture: bool = False,
) -> Bound:
    """The way that fits where the memory is."""
    if device.memory == "device":
        return DeviceBound(session, signature, device, capture=capture)
    if device.memory == "resident":
        bound: Bound = ResidentBound(session, signature)
    else:
        bound = HostBound(session, signature, rows=rows, copied=device.memory == "copied")
    bound.checked = device if is_checked(device) else None
    return bound


class Bound(abc.ABC):
    """A session with its binding. `rows` are parameters of whose gradients a run writes some rows only."""

    rows: Mapping[str, str]
    written: dict[str, np.ndarray]
    # the device whose kernels were compared with the CPU's: a run that fails there may well be its fault
    checked: Device | None = None

    def __init__(self, session: ort.InferenceSession, signature: Signature) -> None:
        self.session, self._signature = session, signature
        self.rows, self.written = {}, {}
        self.binding: ort.IOBinding = session.io_binding()
        self._outputs = {value.name: value for value in session.get_outputs()}
        self._inputs = {value.name for value in session.get_inputs()}
        self._own = [(i, name) for i, name in enumerate(signature.inputs) if name in self._inputs]
        self._read_tensors: dict[str, Tensor] = {}
        # draws what the device cannot, before a run, from the step's seed
        self.draw: Callable[[np.ndarray], None] | None = None
        self._fixed: dict[str, Tensor] = {}
        self._fresh: list[str] = []
        self._positions: list[int] = []
        self._returned: list[str] = []
        # gradients of the user's own inputs are not kept, so they are never added up either
        self._empty = {n: f"{n}{BUFFER}" for n in signature.input_gradients if f"{n}{BUFFER}" in self._inputs}

    def bind_input(self, name: str, tensor: Tensor) -> None:
        """Let the session read a tensor, if it has an input of that name."""
        if name in self._inputs:
            self._read_tensors[name] = tensor
            tensor.bind_input(self.binding, name)

    def bind_output(self, name: str, tensor: Tensor) -> None:
        """Let the session write a tensor."""
        self._fixed[name] = tensor
        tensor.bind_output(self.binding, name)

    def finish(self, returned: list[str]) -> None:
        """Outputs that are not bound to memory get new memory at every run."""
        self._fresh = [name for name in self._outputs if name not in self._fixed]
        for name in self._fresh:
            self.binding.bind_output(name, "cpu")
        bound = [*self._fixed, *self._fresh]  # get_outputs returns them in the order of binding
        self._positions = [bound.index(name) if name in self._fresh else -1 for name in returned]
        self._returned = returned

    @abc.abstractmethod
    def run(self, feeds: list[Feed]) -> list[np.ndarray]:
        """Run with the user's inputs; what the signature returns."""

    def _results(self, values: Sequence[ort.OrtValue]) -> list[np.ndarray]:
        """What the signature returns, from the run's outputs in the order in which they were bound."""
        return [
            self._fixed[name].read().copy() if position < 0 else values[position].numpy()
            for name, position in zip(self._returned, self._positions)
        ]

    def _zeros(self, feeds: list[Feed]) -> dict[str, np.ndarray]:
        """What gradients of the user's own inputs are added to."""
        if not self._empty:
            return {}
        shapes = {name: shape_of(value) for name, value in zip(self._signature.inputs, feeds)}
        return {buffer: np.zeros(shapes[name], np.float32) for name, buffer in self._empty.items()}


class HostBound(Bound):
    """Bound to numpy memory; `copied` where the provider keeps a copy of what is bound."""

    def __init__(
        self,
        session: ort.InferenceSession,
        signature: Signature,
        *,
        rows: Mapping[str, str] | None = None,
        copied: bool = False,
    ) -> None:
        super().__init__(session, signature)
        self.rows = rows or {}
        self._copied = copied
        self._landings: list[np.ndarray | None] = [None] * len(signature.inputs)

    def run(self, feeds: list[Feed]) -> list[np.ndarray]:
        if self._copied:
            for name, tensor in self._read_tensors.items():
                tensor.bind_input(self.binding, name)
        for index, name in self._own:
            value, landing = feeds[index], self._landings[index]
            if (
                landing is not None
                and type(value) is np.ndarray
                and value.shape == landing.shape
                and value.dtype == landing.dtype
            ):
                landing[...] = value
            elif type(value) is np.ndarray and value.dtype == np.object_:
                return self._run_copying(feeds)
            else:
                self._bind_own(index, name, value)
        if self._empty:
            for name, value in self._zeros(feeds).items():
                self.binding.bind_cpu_input(name, value)
        for name in self._fresh:
            self.binding.bind_output(name, "cpu")
        try:
            run_bound(self.session, self.binding)
        except Exception as error:
            raise _explain(error, self._signature, feeds, self.checked) from error
        outputs = self.binding.get_outputs() if self._fresh else []
        if self.rows:
            # only these rows are not zero: the next step clears them alone
            start = len(self._fixed)
            self.written = {
                parameter: outputs[start + self._fresh.index(output)].numpy()
                for parameter, output in self.rows.items()
            }
        return self._results(outputs)

    def _bind_own(self, index: int, name: str, value: Feed) -> None:
        """Bind a user's input."""
        if isinstance(value, ort.OrtValue):
            self._landings[index] = None
            self.binding.bind_ortvalue_input(name, value)
            return
        # Binding makes an OrtValue and looks at the array; for a few kilobytes copying into memory that stays
        # bound is faster.
        landing = value.copy() if value.nbytes <= _SMALL and not self._copied else None
        self._landings[index] = landing
        self.binding.bind_cpu_input(name, value if landing is None else landing)

    def _run_copying(self, feeds: list[Feed]) -> list[np.ndarray]:
        """The same without a binding, which cannot hold strings."""
        own = {name: array_of(value) for name, value in zip(self._signature.inputs, feeds)}
        arrays = {
            **{name: tensor.read() for name, tensor in self._read_tensors.items()},
            **self._zeros(feeds),
            **{name: value for name, value in own.items() if name in self._inputs},
        }
        names = list(self._outputs)
        try:
            results: dict[str, Any] = dict(zip(names, self.session.run(names, arrays)))
        except Exception as error:
            raise _explain(error, self._signature, feeds, self.checked) from error
        for name, tensor in self._fixed.items():
            tensor.write(results[name])
        self.written = {parameter: results[output] for parameter, output in self.rows.items()}
        return [results[name] for name in self._returned]


class DeviceBound(Bound):
    """Bound to addresses of a device; with `capture`, every run but the first replays that one."""

    def __init__(
        self, session: ort.InferenceSession, signature: Signature, device: Device, *, capture: bool = False
    ) -> None:
        super().__init__(session, signature)
        self._device, self.capture = device, capture
        # what a session reads in the host's memory, it copies when it is bound: bind those at every run
        self.inputs_on_host = inputs_on_host(session, device)
        self._landings: dict[str, DeviceTensor] = {}
        self._packed: _Packed | None = None
        self._captured = False

    def finish(self, returned: list[str]) -> None:
        if self.capture:  # a recorded run writes where it wrote when it was recorded
            for name, value in self._outputs.items():
                if name not in self._fixed:
                    shape, kind = [int(dim) for dim in value.shape], np.dtype(_TYPES[value.type])
                    self.bind_output(name, DeviceTensor.allocate(self._device, shape, kind))
        super().finish(returned)

    def run(self, feeds: list[Feed]) -> list[np.ndarray]:
        try:
            packed = self._pack(feeds)
            for index, name in self._own:
                if name not in packed:
                    self._put(name, feeds[index])
            for name, value in self._zeros(feeds).items():
                self._put(name, value)
        except Exception as error:
            if is_out_of_memory(error):
                raise _explain(error, self._signature, feeds, self.checked) from error
            raise
        for name, tensor in self._read_tensors.items():
            if name in self.inputs_on_host:
                self.binding.bind_cpu_input(name, tensor.read())
        for name in self._fresh:
            self.binding.bind_output(name, "cpu")
        try:
            if self.capture and not self._captured:
                self._capture()
            else:
                run_bound(self.session, self.binding)
        except Exception as error:
            if isinstance(error, RecordingError) and not is_out_of_memory(error):
                raise
            raise _explain(error, self._signature, feeds, self.checked) from error
        return self._results(self.binding.get_outputs() if self._fresh else [])

    def _pack(self, feeds: list[Feed]) -> Collection[str]:
        """Copy small inputs to the device together, as each copy costs more than its bytes; returns their names."""
        small = {
            name: value
            for name, value in ((name, feeds[index]) for index, name in self._own)
            if type(value) is np.ndarray
            and value.nbytes <= _SMALL
            and value.dtype != np.object_
            and name not in self.inputs_on_host
        }
        if len(small) < 2:
            self._packed = None  # each is bound to memory of its own from here on
            return ()
        if self._packed is None or not self._packed.fits(small):
            self._packed = _Packed(self._device, small)
            for name, tensor in self._packed.tensors.items():
                self._landings.pop(name, None)
                tensor.bind_input(self.binding, name)
        self._packed.write(small)
        return small

    def _put(self, name: str, value: Feed) -> None:
        """Copy a user's input to where the session reads it."""
        if isinstance(value, ort.OrtValue) and not self.capture and value.device_name() == self._device.kind:
            self._landings.pop(name, None)
            self.binding.bind_ortvalue_input(name, value)
            return
        # an OrtValue of another device goes through the host: onnxruntime has no copy between devices here
        array = array_of(value)
        if array.dtype == np.object_:
            raise ValueError(f"input '{name}' has strings, which only the CPU reads: train with device='cpu'")
        if name in self.inputs_on_host:
            self.binding.bind_cpu_input(name, array)
            return
        landing = self._landings.get(name)
        if landing is None or landing.shape != array.shape or landing.dtype != array.dtype:
            landing = self._landings[name] = DeviceTensor.allocate(self._device, array.shape, array.dtype)
            landing.bind_input(self.binding, name)
        landing.write(array)

    def _capture(self) -> None:
        """The first run of a recording."""
        read = {id(tensor) for tensor in self._read_tensors.values()}
        added = [tensor for tensor in self._fixed.values() if id(tensor) in read]
        make_recording(lambda: run_bound(self.session, self.binding), added)
        self._captured = True
        if added:
            run_bound(self.session, self.binding)


class ResidentBound(Bound):
    """Bound to values of a device that have no address: what a run writes, the next one reads."""

    def bind_input(self, name: str, tensor: Tensor) -> None:
        if name in self._inputs:
            self._read_tensors[name] = tensor  # bound at each run, as its value is another one then

    def run(self, feeds: list[Feed]) -> list[np.ndarray]:
        own = {name: array_of(feeds[index]) for index, name in self._own}
        for name, value in {**own, **self._zeros(feeds)}.items():
            if value.dtype == np.object_:
                raise ValueError(
                    f"input '{name}' has strings, which only the CPU reads: train with device='cpu'"
                )
            self.binding.bind_cpu_input(name, np.ascontiguousarray(value))
        try:
            values = run_resident(self.session, self.binding, self._read_tensors, self._fixed, self._fresh)
        except Exception as error:
            raise _explain(error, self._signature, feeds, self.checked) from error
        return self._results(values)


class _Packed:
    """Small inputs side by side in one block of a device's memory, which one copy fills."""

    def __init__(self, device: Device, arrays: Mapping[str, np.ndarray]) -> None:
        starts, end = {}, 0
        for name, array in arrays.items():
            starts[name] = end
            end += -(-max(1, array.nbytes) // _ALIGN) * _ALIGN
        self._block = DeviceTensor.allocate(device, [end], np.dtype(np.uint8))
        self._host = np.zeros(end, np.uint8)
        self.tensors: dict[str, DeviceTensor] = {}
        self._parts: dict[str, np.ndarray] = {}
        for name, array in arrays.items():
            start, kind = starts[name], array.dtype
            self.tensors[name] = self._block.view(start, array.shape, kind)
            self._parts[name] = self._host[start : start + array.nbytes].view(kind).reshape(array.shape)

    def fits(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Whether these inputs have the names, shapes and types that it was made for."""
        return arrays.keys() == self._parts.keys() and all(
            array.shape == self._parts[name].shape and array.dtype == self._parts[name].dtype
            for name, array in arrays.items()
        )

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy the inputs to the device."""
        for name, array in arrays.items():
            self._parts[name][...] = array
        self._block.write(self._host)


class RecordingError(Exception):
    """A run that could not be recorded; it may run without."""


def warn_unrecorded(what: str, error: RecordingError) -> None:
    """Say that something runs without being recorded."""
    reason = str(error).splitlines()[0] if str(error) else "no reason given"
    warnings.warn(
        f"the {what} could not be recorded as a CUDA graph and runs without one: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )


def make_recording(run: Callable[[], None], changed: Iterable[Tensor]) -> None:
    """Make a recording by its first run, which executes several times: bring back the tensors that it changes."""
    # on the host: the device may not have room for all of it twice
    before = [(tensor, tensor.read().copy()) for tensor in changed]
    try:
        run()
    except Exception as error:
        raise RecordingError(str(error)) from error
    finally:
        for tensor, array in before:
            tensor.write(array)


def inputs_on_host(session: ort.InferenceSession, device: Device) -> set[str]:
    """Inputs that the session reads in the host's memory."""
    if device.kind == "cpu":
        return set()
    places = {
        value.name: info.name.lower()
        for value, info in zip(session.get_inputs(), session.get_input_memory_infos())
    }
    return {name for name, place in places.items() if device.kind not in place or "pinned" in place}


def _explain(error: Exception, signature: Signature, feeds: list[Feed], checked: Device | None) -> Exception:
    shapes = ", ".join(f"{name} {list(shape_of(value))}" for name, value in zip(signature.inputs, feeds))
    if is_out_of_memory(error):
        reason = str(error).splitlines()[0]
        return DeviceMemoryError(
            f"the device has too little memory for a step on inputs {shapes}: {reason}. Parameters are "
            "unchanged; lower the batch size (and accumulate gradients), or generate the artifacts with recompute=…"
        )
    if checked is not None:
        return DeviceError(
            f"device='{checked}' failed in a step on inputs {shapes}: {shorten_error(error)}. Parameters are "
            f"unchanged; `onward conform --device {checked}` shows every operator; use device='cpu'"
        )
    if any(0 in shape_of(value) for value in feeds):
        return ValueError(f"the step failed on inputs {shapes}: the batch is empty. Leave such batches out")
    fixed = re.search(r"for input: (\S+) .*?index: (\d+) Got: \d+ Expected: (\d+)", str(error), re.DOTALL)
    if fixed is None:
        return hinted(
            ValueError(f"the step failed on inputs {shapes}: {error}"),
            "onward inspect shows which shapes the model takes",
        )
    name, axis, size = fixed.groups()
    return hinted(
        ValueError(f"the model fixes axis {axis} of '{name}' at {size}; the step got inputs {shapes}"),
        f"the model takes batches of {size} alone: --batch-size {size}, or export it for any"
        if axis == "0"  # the batch, which the user can set
        else "export the model for any size of that axis, or give it this one",
    )
