"""An elementwise rule over all parameters as one vector on a device: one run for all of it.

The rule is repeated for stretches of the vector, so that what is in between stays in the device's cache and takes
little memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime as ort

from onward.errors import ModelError
from onward.graph.proto.optimizer_models import repeat
from onward.runtime.bound import RecordingError, inputs_on_host, make_recording, warn_unrecorded
from onward.runtime.memory import FlatBuffer, Tensor, make_tensor
from onward.runtime.optimizers.updater import ElementwiseUpdater, Rule, runs_of
from onward.runtime.sessions import make_session
from onward.runtime.tensors import run_bound

if TYPE_CHECKING:
    from onward.runtime.devices import Device

# Elements of a stretch, which begins at a multiple of so many.
_MOST, _ALIGN = 1 << 21, 1 << 10


class DeviceUpdater(ElementwiseUpdater):
    """Applies an elementwise optimizer model in place, on the parameters' device.

    What a step's scalars come to is computed on the host and copied as one small vector.
    """

    def __init__(self, rule: Rule, parameters: FlatBuffer, gradients: FlatBuffer) -> None:
        super().__init__(rule, parameters, gradients)
        self._runs = [
            (first, last, setting)
            for start, stop, setting in runs_of(rule.options, parameters)
            for first, last in _stretches(start, stop)
        ]
        self._numbers: Tensor = make_tensor(parameters.device, np.concatenate(self._scalars))
        self._count: Tensor = make_tensor(parameters.device, self._step)
        self._bound: dict[bool, _Bound] = {}

    def _apply(self) -> None:
        scaled = self._set_scalars()
        self._numbers.write(np.concatenate(self._scalars))
        if scaled not in self._bound:
            self._bound[scaled] = self._bind(scaled, record=True)
        if self._bound[scaled].reads("step"):  # most rules read it by way of the program alone
            self._count.write(self._step)
        try:
            self._bound[scaled].run()
        except RecordingError as error:
            warn_unrecorded("update", error)
            self._bound[scaled] = self._bind(scaled, record=False)
            self._bound[scaled].run()

    def _bind(self, scaled: bool, *, record: bool) -> _Bound:
        """A session of the rule for every stretch, bound to the vectors."""
        names = self._scalar_names
        model = repeat(
            self._models[scaled],
            shared=[{name: f"{name}.{setting}" for name in names} for _, _, setting in self._runs],
            own=["parameter", "gradient", *self._slots],
            shapes=[[stop - start] for start, stop, _ in self._runs],
        )
        whole = {"parameter": self._parameters, **self._slots}
        inputs: dict[str, Tensor] = {"step": self._count}
        outputs: dict[str, Tensor] = {}
        for index, (start, stop, setting) in enumerate(self._runs):
            for name, flat in whole.items():
                part = flat.whole.view(start, [stop - start])
                inputs[f"{name}.{index}"] = outputs[f"{name}.next.{index}"] = part
            inputs[f"gradient.{index}"] = self._gradients.whole.view(start, [stop - start])
            for position, name in enumerate(names, setting * len(names)):
                inputs[f"{name}.{setting}"] = self._numbers.view(position, [1])
        changed = [flat.whole for flat in whole.values()]
        return _Bound(model, self._parameters.device, inputs, outputs, changed, record=record)


def _stretches(start: int, stop: int) -> list[tuple[int, int]]:
    """Cut a part of the vector into stretches of about the same length.

    >>> _stretches(0, 5_000_000)
    [(0, 1667072), (1667072, 3334144), (3334144, 5000000)]
    """
    count = max(1, -(-(stop - start) // _MOST))
    size = -(-(stop - start) // (count * _ALIGN)) * _ALIGN
    return [(first, min(first + size, stop)) for first in range(start, stop, size)] if size else []


class _Bound:
    """A session with its binding; recorded where the device can. `changed` is what a run changes."""

    def __init__(
        self,
        model: onnx.ModelProto,
        device: Device,
        inputs: dict[str, Tensor],
        outputs: dict[str, Tensor],
        changed: Sequence[Tensor],
        *,
        record: bool,
    ) -> None:
        self._changed = changed
        self._recorded = not (device.captures and record)
        try:
            self._session = make_session(
                model, device=device, what="optimizer model", capture=not self._recorded
            )
            self._rebinds = bool(inputs_on_host(self._session, device))
        except ModelError:
            if self._recorded:
                raise
            self._rebinds = True
        # A replay reads addresses: what the host holds would be the first step's numbers for ever.
        if self._rebinds and not self._recorded:
            self._recorded = True
            self._session = make_session(model, device=device, what="optimizer model")
            self._rebinds = bool(inputs_on_host(self._session, device))
        self._inputs = {value.name: inputs[value.name] for value in self._session.get_inputs()}
        self._outputs = outputs  # a binding holds addresses only
        self._binding: ort.IOBinding = self._session.io_binding()
        for name, tensor in self._inputs.items():
            tensor.bind_input(self._binding, name)
        for name, tensor in outputs.items():
            tensor.bind_output(self._binding, name)

    def reads(self, name: str) -> bool:
        """Whether the session has an input of this name."""
        return name in self._inputs

    def run(self) -> None:
        """One update."""
        if not self._recorded:
            make_recording(self._run, self._changed)
            self._recorded = True
        self._run()

    def _run(self) -> None:
        if self._rebinds:  # what the session reads on the host, it copies when it is bound
            for name, tensor in self._inputs.items():
                tensor.bind_input(self._binding, name)
        run_bound(self._session, self._binding)
