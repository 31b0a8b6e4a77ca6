"""The base classes of updaters: the scalars of an update, loading and saving the state, groups of parameters."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import numpy as np

from onward.errors import MAKE_ARTIFACTS, DeviceMemoryError, ModelError, OnwardError
from onward.runtime.memory import FlatBuffer, is_out_of_memory

if TYPE_CHECKING:
    from onward.runtime.memory import Tensor

__all__ = ["SCALARS", "ElementwiseUpdater", "Slots", "Updater", "group_of", "runs_of", "settings_of"]

# The scalar inputs of an optimizer model.
SCALARS = ("learning_rate", "step", "gradient_scale", "weight_decay")

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


class ElementwiseUpdater(Updater):
    """An elementwise rule over all parameters as one vector."""

    def __init__(self, options: dict, parameters: FlatBuffer, gradients: FlatBuffer) -> None:
        super().__init__(options["clip_norm"])
        self._parameters, self._gradients = parameters, gradients
        self._slots = {
            name: FlatBuffer(parameters.shapes, device=parameters.device) for name in options["slots"]
        }

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
    decays = [group["weight_decay"] for group in options["groups"]]
    default = options["weight_decay"]
    return [
        (1.0, default),
        *(
            (group["learning_rate_scale"], default if decay is None else decay)
            for group, decay in zip(options["groups"], decays)
        ),
    ]


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
