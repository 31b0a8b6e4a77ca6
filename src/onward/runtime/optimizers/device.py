"""An elementwise rule over all parameters as one vector on a device: one run for all of it.

The rule is repeated for stretches of the vector, so that what is in between stays in the device's cache and takes
little memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from onward.errors import ModelError
from onward.graph.passes.repeat import repeat
from onward.graph.passes.scalars import split_scalars, to_single, without_scaling
from onward.runtime.bound import RecordingError, inputs_on_host, preserve, warn_unrecorded
from onward.runtime.memory import FlatBuffer, Tensor, make_tensor
from onward.runtime.optimizers.updater import SCALARS, ElementwiseUpdater, runs_of, settings_of
from onward.runtime.sessions import make_session

__all__ = ["DeviceUpdater"]

# Elements of a stretch, which begins at a multiple of so many.
_MOST, _ALIGN = 1 << 21, 1 << 10


class DeviceUpdater(ElementwiseUpdater):
    """Applies an elementwise optimizer model in place, on the parameters' device.

    What a step's scalars come to is computed on the host and copied as one small vector.
    """

    def __init__(
        self, model: onnx.ModelProto, options: dict, parameters: FlatBuffer, gradients: FlatBuffer
    ) -> None:
        super().__init__(options, parameters, gradients)
        self._program, plain = split_scalars(model, SCALARS)
        self._models = {True: plain, False: without_scaling(plain)}
        self._settings = settings_of(options)
        self._runs = [
            (first, last, setting)
            for start, stop, setting in runs_of(options, parameters)
            for first, last in _stretches(start, stop)
        ]
        # for each group: the rate, the scale, the decay, and what the program computes
        self._names = ["learning_rate", "gradient_scale", "weight_decay", *self._program.results]
        self._numbers: Tensor = make_tensor(
            parameters.device, np.zeros(len(self._settings) * len(self._names), np.float32)
        )
        self._count: Tensor = make_tensor(parameters.device, self._step)
        self._bound: dict[bool, _Bound] = {}

    def _apply(self) -> None:
        scale = self._scale.item()
        numbers: list[float] = []
        for factor, decay in self._settings:
            rate, decay = to_single(self._learning_rate * factor), to_single(decay)
            numbers += [rate, scale, decay, *self._program.run(rate, self.step, scale, decay)]
        self._numbers.write(np.array(numbers, np.float32))
        scaled = scale != 1.0
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
        model = repeat(
            self._models[scaled],
            shared=[{name: f"{name}.{setting}" for name in self._names} for _, _, setting in self._runs],
            own=["parameter", "gradient", *self._slots],
            sizes=[stop - start for start, stop, _ in self._runs],
        )
        whole = {"parameter": self._parameters, **self._slots}
        inputs: dict[str, Tensor] = {"step": self._count}
        outputs: dict[str, Tensor] = {}
        for index, (start, stop, setting) in enumerate(self._runs):
            for name, flat in whole.items():
                part = flat.whole.view(start, [stop - start])
                inputs[f"{name}.{index}"] = outputs[f"{name}.next.{index}"] = part
            inputs[f"gradient.{index}"] = self._gradients.whole.view(start, [stop - start])
            for place, name in enumerate(self._names, setting * len(self._names)):
                inputs[f"{name}.{setting}"] = self._numbers.view(place, [1])
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
        device: Any,
        inputs: dict[str, Tensor],
        outputs: dict[str, Tensor],
        changed: Sequence[Tensor],
        *,
        record: bool,
    ) -> None:
        self._changed = changed
        self._capture = device.captures and record
        try:
            self._session = make_session(model, device=device, what="optimizer model", capture=self._capture)
        except ModelError:
            if not self._capture:
                raise
            self._capture = False
            self._session = make_session(model, device=device, what="optimizer model")
        on_host = inputs_on_host(self._session, device)
        self._rebinds = on_host is None or bool(on_host)
        if self._rebinds and self._capture:
            self._capture = False
            self._session = make_session(model, device=device, what="optimizer model")
        self._native: Any = self._session._sess
        self._inputs = {value.name: inputs[value.name] for value in self._session.get_inputs()}
        self._outputs = outputs  # a binding holds addresses only
        self._binding: Any = self._session.io_binding()
        for name, tensor in self._inputs.items():
            tensor.bind_input(self._binding, name)
        for name, tensor in outputs.items():
            tensor.bind_output(self._binding, name)
        self._recorded = not self._capture

    def reads(self, name: str) -> bool:
        """Whether the session has an input of this name."""
        return name in self._inputs

    def run(self) -> None:
        """One update."""
        if not self._recorded:
            # recording executes more than once: do it, and then undo what it did
            before = preserve(self._changed)
            try:
                self._run()
            except Exception as error:
                raise RecordingError(str(error)) from error
            finally:
                for tensor, array in before:
                    tensor.write(array)
            self._recorded = True
        self._run()

    def _run(self) -> None:
        if self._rebinds:  # what the session reads on the host, it copies when it is bound
            for name, tensor in self._inputs.items():
                tensor.bind_input(self._binding, name)
        self._native.run_with_iobinding(self._binding._iobinding, None)
