"""CheckpointState: parameters by name and properties; loads and saves checkpoint files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from onward.api.convert_inputs import refuse_masked
from onward.checkpoint import store
from onward.checkpoint.content import CheckpointData, NominalTensor, check_property
from onward.errors import OnwardError

if TYPE_CHECKING:
    from onward.api.module import Module

__all__ = ["CheckpointState", "Parameter", "Parameters", "Properties"]


class Parameter:
    """One parameter: its name, values and gradient."""

    def __init__(self, name: str, state: CheckpointState) -> None:
        self._name = name
        self._state = state

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self._name

    @property
    def data(self) -> np.ndarray:
        """A copy of the parameter's values; assign to change them."""
        return self._state._array(self._name).copy()

    @data.setter
    def data(self, value: np.ndarray) -> None:
        self._state._assign(self._name, value)

    @property
    def grad(self) -> np.ndarray | None:
        """A copy of the accumulated gradient: zeros before the first step, None where frozen."""
        return self._state._gradient(self._name)

    @property
    def requires_grad(self) -> bool:
        """Whether training changes this parameter."""
        return self._name in self._state._data.trainable

    def __repr__(self) -> str:
        return f"Parameter('{self._name}', requires_grad={self.requires_grad})"


class Parameters:
    """The parameters of a state, by name."""

    def __init__(self, state: CheckpointState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Parameter:
        if name not in self:
            raise KeyError(f"Parameter {name} not found.")
        if self._state._data.nominal:
            raise _no_value(name)
        return Parameter(name, self._state)

    def __setitem__(self, name: str, value: np.ndarray) -> None:
        if name not in self:
            raise KeyError(f"Parameter {name} not found.")
        if self._state._data.nominal:
            raise OnwardError(
                f"The state is nominal: '{name}' cannot be set alone. Please load all the parameter states first."
            )
        self._state._assign(name, value)

    def __contains__(self, name: object) -> bool:
        return name in self._state._data.trainable or name in self._state._data.frozen

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        for name in self._state._names():
            yield name, Parameter(name, self._state)

    def __len__(self) -> int:
        return len(self._state._data.trainable) + len(self._state._data.frozen)

    def __repr__(self) -> str:
        return f"Parameters({self._state._names()})"


class Properties:
    """The user's own values in a checkpoint: int, float or str by name."""

    def __init__(self, values: dict[str, int | float | str]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> int | float | str:
        if name not in self._values:
            raise KeyError(f"Property {name} not found.")
        return self._values[name]

    def __setitem__(self, name: str, value: int | float | str) -> None:
        self._values[name] = check_property(name, value)

    def __delitem__(self, name: str) -> None:
        if name not in self._values:
            raise KeyError(f"Property {name} not found.")
        del self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[tuple[str, int | float | str]]:
        return iter(self._values.items())

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Properties({self._values})"


class CheckpointState:
    """The state of training: parameters, optimizer state and properties. Created by `load_checkpoint`."""

    def __init__(self, state: CheckpointData) -> None:
        if not isinstance(state, CheckpointData):
            raise TypeError(f"Invalid argument for CheckpointState received {type(state)}")
        self._data = state
        self._module: Module | None = None
        self.parameters = Parameters(self)
        self.properties = Properties(state.properties)

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str] | bytes) -> CheckpointState:
        """Read a checkpoint file, or its bytes, verified before anything of it is used."""
        return cls(store.load(checkpoint_uri))

    @classmethod
    def save_checkpoint(
        cls,
        state: CheckpointState,
        checkpoint_uri: str | os.PathLike[str],
        include_optimizer_state: bool = False,
    ) -> None:
        """Save a checkpoint file atomically: the old one is kept until the new one is complete."""
        if not isinstance(state, CheckpointState):
            raise TypeError(f"Invalid argument for CheckpointState received {type(state)}")
        store.save(state.to_data(include_optimizer_state=include_optimizer_state), checkpoint_uri)

    def to_data(self, *, include_optimizer_state: bool = False) -> CheckpointData:
        """The state as plain data, as it would be saved; arrays are not copied."""
        data = self._data
        trainable, frozen = data.trainable, data.frozen
        if self._module is not None and not data.nominal:
            # What the state shows is stale on a device, where training changes memory that is not here.
            held = self._module.memory.arrays()  # on the host, the memory itself
            trainable, frozen = (
                {n: held.get(n, v) for n, v in group.items()} for group in (trainable, frozen)
            )
        saved = CheckpointData(
            trainable=trainable,
            frozen=frozen,
            properties=dict(data.properties),
            nominal=data.nominal,
        )
        if include_optimizer_state and not data.nominal:
            if self._module is not None:
                self._module._describe_progress(saved)
            else:
                saved.optimizer, saved.extras, saved.accumulation = (
                    data.optimizer,
                    data.extras,
                    data.accumulation,
                )
        return saved

    @property
    def is_nominal(self) -> bool:
        """Whether only names and types of the parameters are known."""
        return self._data.nominal

    def _names(self) -> list[str]:
        return [*self._data.trainable, *self._data.frozen]

    def _array(self, name: str) -> np.ndarray:
        trainable = self._data.trainable.get(name)
        value = self._data.frozen[name] if trainable is None else trainable
        if self._module is not None and not self._data.nominal and name in self._module.memory:
            return self._module.memory[name].read()
        if isinstance(value, NominalTensor):
            raise _no_value(name)
        return value

    def _assign(self, name: str, value: np.ndarray) -> None:
        tensor = None if self._module is None else self._module.memory[name]
        current = self._array(name) if tensor is None else tensor
        refuse_masked(value, name)
        array = np.asarray(value)
        if array.shape != current.shape:
            raise OnwardError(
                f"Parameter data shape mismatch. Expected: {_braces(current.shape)}, Got: {_braces(array.shape)} "
                f"(parameter '{name}')"
            )
        if array.dtype != current.dtype:
            raise OnwardError(
                f"Parameter data type mismatch. Expected: {current.dtype}, Got: {array.dtype} (parameter '{name}')"
            )
        if tensor is None:
            group = self._data.trainable if name in self._data.trainable else self._data.frozen
            # The caller may go on to change theirs.
            group[name] = array.copy()
        else:
            tensor.write(array)

    def _gradient(self, name: str) -> np.ndarray | None:
        if name not in self._data.trainable:
            return None
        if self._module is None:
            # as onnxruntime-training: a gradient exists before the first step
            return np.zeros_like(self._array(name))
        return self._module.memory.gradients.tensors[name].read().copy()


def _no_value(name: str) -> OnwardError:
    return OnwardError(
        f"The state is nominal: it has no value for '{name}'. Please load the parameter states first."
    )


def _braces(shape: tuple[int, ...]) -> str:
    return "{" + ",".join(map(str, shape)) + "}"
