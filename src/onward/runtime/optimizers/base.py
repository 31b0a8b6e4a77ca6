"""The base class of updaters: the scalars of an update, and loading and saving the state."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import numpy as np

from onward.errors import OnwardError

if TYPE_CHECKING:
    from onward.runtime.memory import Tensor

__all__ = ["Slots", "Updater"]

# The numbers of the state by parameter and slot.
Slots = dict[str, dict[str, np.ndarray]]


class Updater(abc.ABC):
    """Applies an optimizer model to the parameters; the scalars are in memory that bindings alias."""

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
        """One update."""
        self._step[0] += 1
        self._scale[0] = gradient_scale
        self._apply()

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


def _copy_state(target: Tensor, saved: np.ndarray, parameter: str, slot: str) -> None:
    if saved.shape != target.shape:
        raise OnwardError(
            f"the checkpoint's {slot} of '{parameter}' has shape {saved.shape}, the optimizer keeps {target.shape}: "
            "was it saved with another optimizer?"
        )
    target.write(saved)
