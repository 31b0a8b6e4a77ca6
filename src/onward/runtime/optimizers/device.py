"""An elementwise rule over all parameters as one vector on a device: one run for each group of parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from onward import contract
from onward.errors import ModelError
from onward.graph.passes.scalars import split_scalars, to_single, without_scaling
from onward.runtime.bound import RecordingError, inputs_on_host, preserve, warn_unrecorded
from onward.runtime.memory import FlatBuffer, Tensor, make_tensor
from onward.runtime.optimizers.updater import SCALARS, ElementwiseUpdater, runs_of, settings_of
from onward.runtime.sessions import make_session

__all__ = ["DeviceUpdater"]


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
        self._runs = runs_of(options, parameters)
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
            self._bound[scaled] = _Bound(self, self._models[scaled])
        bound = self._bound[scaled]
        if bound.reads_step:
            self._count.write(self._step)
        try:
            bound.run()
        except RecordingError as error:
            warn_unrecorded("update", error)
            bound = self._bound[scaled] = _Bound(self, self._models[scaled], record=False)
            bound.run()

    def vectors(self, start: int, stop: int) -> dict[str, Tensor]:
        """What an update changes of a stretch: the parameters and their state."""
        size = [stop - start]
        state = {name: flat.whole.view(start, size) for name, flat in self._slots.items()}
        return {"parameter": self._parameters.whole.view(start, size), **state}

    def scalars(self, setting: int) -> dict[str, Tensor]:
        """The numbers of a group, and the step."""
        first = setting * len(self._names)
        found = {name: self._numbers.view(first + i, [1]) for i, name in enumerate(self._names)}
        return {**found, "step": self._count}


class _Bound:
    """A session of the rule with a binding for each group; recorded where the device can."""

    def __init__(self, owner: DeviceUpdater, model: onnx.ModelProto, *, record: bool = True) -> None:
        self._owner = owner
        device = owner._parameters.device
        self._capture = device.captures and record
        try:
            self._session = make_session(model, device=device, what="optimizer model", capture=self._capture)
        except ModelError:
            if not self._capture:
                raise
            self._capture = False
            self._session = make_session(model, device=device, what="optimizer model")
        self._native: Any = self._session._sess
        given = {value.name for value in self._session.get_inputs()}
        self.reads_step = "step" in given
        on_host = inputs_on_host(self._session, device)
        self._rebinds = on_host is None or bool(on_host)
        if self._rebinds and self._capture:
            self._capture = False
            self._session = make_session(model, device=device, what="optimizer model")
            self._native = self._session._sess
        self._work: list[tuple[Any, dict[str, Tensor], dict[str, Tensor], Any]] = []
        for index, (start, stop, setting) in enumerate(owner._runs):
            changed = owner.vectors(start, stop)
            inputs = {**changed, **owner.scalars(setting)}
            inputs["gradient"] = owner._gradients.whole.view(start, [stop - start])
            inputs = {name: tensor for name, tensor in inputs.items() if name in given}
            binding = self._session.io_binding()
            for name, tensor in inputs.items():
                tensor.bind_input(binding, name)
            for name, tensor in changed.items():
                tensor.bind_output(binding, f"{name}{contract.NEXT}")
            options = ort.RunOptions()
            options.add_run_config_entry("gpu_graph_id", str(index + 1))
            self._work.append((binding, inputs, changed, options if self._capture else None))
        self._recorded = not self._capture

    def run(self) -> None:
        """One update of all groups."""
        if not self._recorded:
            # recording executes more than once: do it, and then undo what it did
            before = preserve(tensor for _, _, changed, _ in self._work for tensor in changed.values())
            try:
                self._run_all()
            except Exception as error:
                raise RecordingError(str(error)) from error
            finally:
                for tensor, array in before:
                    tensor.write(array)
            self._recorded = True
        self._run_all()

    def _run_all(self) -> None:
        for binding, inputs, _, options in self._work:
            if self._rebinds:  # what the session reads on the host, it copies when it is bound
                for name, tensor in inputs.items():
                    tensor.bind_input(binding, name)
            self._native.run_with_iobinding(binding._iobinding, options)
