"""The base classes of updaters: the scalars of an update, loading and saving the state, groups of parameters."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx

from onward.contract import SCALARS
from onward.errors import MAKE_ARTIFACTS, DeviceMemoryError, ModelError, OnwardError
from onward.graph.proto.optimizer_models import split_scalars, to_single, without_scaling
from onward.runtime.device_tensor import is_out_of_memory
from onward.runtime.memory import FlatBuffer

if TYPE_CHECKING:
    from onward.runtime.memory import Tensor

# The numbers of the state by parameter and slot.
Slots = dict[str, dict[str, np.ndarray]]


class Updater(abc.ABC):
    """Applies an optimizer model to the parameters; the scalars are in memory that bindings alias."""

    is_host_vector = False  # whether all it updates is one vector of host memory

    def __init__(self, clip_norm: float | None = None) -> None:
        self.clip_norm = clip_norm
        self._learning_rate = 1e-3
        self._rate = np.full(1, 1e-3, np.float32)
        self._step = np.zeros(1, np.int64)
        self._scale = np.ones(1, np.float32)

    @property
    def learning_rate(self) -> float:
        """The rate of the next update."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._learning_rate = value
        self._rate[0] = value

    @property
    def step(self) -> int:
        """How many updates were made."""
        return self._step.item()

    def run(self, gradient_scale: float) -> None:
        """One update; one that fails does not count."""
        # before the run: rules count from 1, for the bias correction of Adam
        self._step[0] += 1
        self._scale[0] = gradient_scale
        try:
            self._apply()
        except Exception as error:
            self._step[0] -= 1
            if isinstance(error, OnwardError):
                raise
            if is_out_of_memory(error):
                raise DeviceMemoryError(
                    f"there is too little memory for an update of the parameters: {str(error).splitlines()[0]}"
                ) from error
            raise ModelError(
                f"the optimizer model failed in an update: {error}", hint=MAKE_ARTIFACTS
            ) from error

    def load(self, step: int, slots: Slots) -> None:
        """Load the state of an earlier run."""
        self._step[0] = step
        for parameter, state in self.slot_tensors().items():
            for name, tensor in state.items():
                # what a checkpoint lacks starts from zero, with a warning of `Optimizer`
                if parameter in slots and name in slots[parameter]:
                    _copy_state(tensor, slots[parameter][name], parameter, name)

    @abc.abstractmethod
    def _apply(self) -> None: ...

    @abc.abstractmethod
    def slot_tensors(self) -> dict[str, dict[str, Tensor]]:
        """The state's tensors, by parameter and slot."""

    def slots_by_parameter(self) -> Slots:
        """The state's numbers, by parameter and slot; on the host the memory itself."""
        return {
            parameter: {slot: tensor.read() for slot, tensor in state.items()}
            for parameter, state in self.slot_tensors().items()
        }


class Rule(NamedTuple):
    """An optimizer model, and what its metadata says of it."""

    model: onnx.ModelProto
    options: dict[str, Any]


class ElementwiseUpdater(Updater):
    """An elementwise rule over all parameters as one vector."""

    def __init__(self, rule: Rule, parameters: FlatBuffer, gradients: FlatBuffer) -> None:
        super().__init__(rule.options["clip_norm"])
        self._parameters, self._gradients = parameters, gradients
        self._program, plain = split_scalars(rule.model, SCALARS)
        # Mostly nothing is clipped: a product with 1 would be a pass over all gradients.
        self._models = {True: plain, False: without_scaling(plain)}
        self._settings = settings_of(rule.options)
        self._scalars = self._new_scalars()
        self._slots = {
            name: FlatBuffer(parameters.shapes, device=parameters.device) for name in rule.options["slots"]
        }

    @property
    def _scalar_names(self) -> list[str]:
        return ["learning_rate", "gradient_scale", "weight_decay", *self._program.results]

    def _new_scalars(self) -> list[np.ndarray]:
        """Memory for the scalars of an update: a row for each group of parameters."""
        return [np.zeros(len(self._scalar_names), np.float32) for _ in self._settings]

    def _scalar_views(self, setting: int) -> dict[str, np.ndarray]:
        """The memory of a group's scalars, by the names of the model's inputs."""
        row = self._scalars[setting]
        return {name: row[index : index + 1] for index, name in enumerate(self._scalar_names)}

    def _scalar_values(self, setting: int, rate: float, step: int, scale: float) -> list[float]:
        """What a group's update reads: the rate, the scale, the decay, and what the program computes of them."""
        factor, decay = self._settings[setting]
        rate, decay = to_single(rate * factor), to_single(decay)
        return [rate, scale, decay, *self._program.run(rate, step, scale, decay)]

    def _set_scalars(self) -> bool:
        """Compute the scalars of this update; whether its gradients are to be scaled."""
        rate, step, scale = self._learning_rate, self.step, self._scale.item()
        for setting, row in enumerate(self._scalars):
            row[:] = self._scalar_values(setting, rate, step, scale)
        return scale != 1.0

    def slot_tensors(self) -> dict[str, dict[str, Tensor]]:
        return {
            parameter: {name: flat.tensors[parameter] for name, flat in self._slots.items()}
            for parameter in self._parameters.spans
        }

    def slots_by_parameter(self) -> Slots:
        arrays = {name: flat.arrays() for name, flat in self._slots.items()}
        return {
            parameter: {name: array[parameter] for name, array in arrays.items()}
            for parameter in self._parameters.spans
        }

    def slot_vectors(self) -> dict[str, np.ndarray]:
        """Each slot of all parameters as one vector."""
        return {name: flat.whole.read() for name, flat in self._slots.items()}


def settings_of(options: dict) -> list[tuple[float, float]]:
    """The learning rate's factor and the weight decay: of parameters in no group, then of each group."""
    settings = [(1.0, options["weight_decay"])]
    for group in options["groups"]:
        decay = group["weight_decay"]
        settings.append((group["learning_rate_scale"], options["weight_decay"] if decay is None else decay))
    return settings


def group_of(options: dict) -> dict[str, int]:
    """The place among the settings of each parameter that is in a group."""
    return {name: i + 1 for i, group in enumerate(options["groups"]) for name in group["parameters"]}


def runs_of(options: dict, parameters: FlatBuffer) -> list[tuple[int, int, int]]:
    """Stretches of the vector that share their settings: start, stop, and the place of the settings."""
    of_parameter = group_of(options)
    starts = [start for start, _ in parameters.spans.values()]
    runs: list[tuple[int, int, int]] = []
    for name, start, stop in zip(parameters.spans, starts, [*starts[1:], parameters.whole.shape[0]]):
        index = of_parameter.get(name, 0)
        if runs and runs[-1][2] == index:
            runs[-1] = (runs[-1][0], stop, index)
        else:
            runs.append((start, stop, index))
    return runs


def _copy_state(target: Tensor, saved: np.ndarray, parameter: str, slot: str) -> None:
    if saved.shape != target.shape:
        raise OnwardError(
            f"the checkpoint's {slot} of '{parameter}' has shape {saved.shape}, the optimizer keeps {target.shape}: "
            "was it saved with another optimizer?"
        )
    target.write(saved)
