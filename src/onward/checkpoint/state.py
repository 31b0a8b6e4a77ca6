"""What a checkpoint says, as plain data: parameters, optimizer state, properties.

Knows names, arrays and their rules (unique, typed). Knows nothing about bytes or files: `codec` turns this
into bytes and back, `store` puts those on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from onward.checkpoint.dtypes import code_of, dtype_of

__all__ = ["CheckpointData", "NominalTensor", "OptimizerGroup", "PropertyValue", "Tensors", "check_property"]

PropertyValue: TypeAlias = int | float | str


@dataclass(frozen=True, slots=True)
class NominalTensor:
    """A parameter of which only the ONNX element type is known: it has a name, but no shape or values."""

    dtype: int


Tensors: TypeAlias = dict[str, "np.ndarray | NominalTensor"]


@dataclass(slots=True)
class OptimizerGroup:
    """The state of one group of parameters: `slots[parameter]["momentum0"]` is an array."""

    name: str = "group0"
    step: int = 0
    initial_learning_rate: float = 0.001
    slots: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)


@dataclass(slots=True)
class CheckpointData:
    """Everything that a checkpoint holds; every dictionary keeps its order in the file.

    `properties` are the user's. `extras` are Onward's own scalars (learning rate, scheduler, random state),
    stored exactly and kept out of `properties`. `accumulation` has the gradients of a step that was saved in
    mid-accumulation.

    >>> data = CheckpointData(trainable={"w": np.zeros(3, np.float32)}, properties={"epoch": 2})
    >>> list(data.trainable), data.nominal
    (['w'], False)
    """

    trainable: Tensors = field(default_factory=dict)
    frozen: Tensors = field(default_factory=dict)
    optimizer: list[OptimizerGroup] = field(default_factory=list)
    properties: dict[str, PropertyValue] = field(default_factory=dict)
    nominal: bool = False
    extras: dict[str, PropertyValue] = field(default_factory=dict)
    accumulation: dict[str, np.ndarray] = field(default_factory=dict)

    def parameters(self) -> Tensors:
        """Return trainable and frozen parameters in one dictionary, trainable first.

        >>> list(CheckpointData(trainable={"w": np.zeros(1)}, frozen={"b": np.zeros(1)}).parameters())
        ['w', 'b']
        """
        return {**self.trainable, **self.frozen}


def check_property(name: str, value: object) -> PropertyValue:
    """Return a property's value as the int, float or str that the file will hold.

    Raises `TypeError` for any other type and `ValueError` for a number that int64 or float32 cannot hold.

    >>> check_property("done", True)
    1
    """
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, np.bool_, int, np.integer)):
        number = int(value)
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"property '{name}': {number} does not fit into 64 bits")
        return number
    if isinstance(value, (float, np.floating)):
        number = float(value)
        if np.isfinite(number) and abs(number) > float(np.finfo(np.float32).max):
            raise ValueError(f"property '{name}': {number} does not fit into a 32-bit float")
        return number
    raise TypeError(f"property '{name}': a checkpoint holds int, float and str, not {type(value).__name__}")


def check(data: CheckpointData) -> None:
    """Raise `TypeError` or `ValueError` for data that no checkpoint can hold: bad names or types."""
    both = data.trainable.keys() & data.frozen.keys()
    if both:
        raise ValueError(f"parameters cannot be trainable and frozen at the same time: {sorted(both)}")
    for kind, tensors in (("trainable", data.trainable), ("frozen", data.frozen)):
        _check_names(f"{kind} parameter", tensors)
        for name, tensor in tensors.items():
            if isinstance(tensor, NominalTensor) != data.nominal:
                wanted = "NominalTensor" if data.nominal else "numpy array"
                raise TypeError(
                    f"{kind} parameter '{name}': expected a {wanted}, not {type(tensor).__name__}"
                )
            if isinstance(tensor, NominalTensor):
                dtype_of(tensor.dtype)
            else:
                _check_array(f"{kind} parameter '{name}'", tensor)
    names = [group.name for group in data.optimizer]
    if len(set(names)) != len(names):
        raise ValueError(f"optimizer groups must have different names: {names}")
    _check_names("optimizer group", dict.fromkeys(names))
    for group in data.optimizer:
        _check_names(f"parameter in optimizer group '{group.name}'", group.slots)
        for parameter, slots in group.slots.items():
            _check_names(f"state of '{parameter}'", slots)
            for slot, array in slots.items():
                _check_array(f"optimizer state '{parameter}'.'{slot}'", array)
    _check_names("accumulated gradient", data.accumulation)
    for name, array in data.accumulation.items():
        _check_array(f"accumulated gradient '{name}'", array)
    _check_names("property", data.properties)
    _check_names("extra", data.extras)
    for name, value in data.extras.items():
        if not isinstance(value, (str, int, float, np.bool_, np.integer, np.floating)):
            raise TypeError(
                f"extra '{name}': a checkpoint holds int, float and str, not {type(value).__name__}"
            )


def _check_names(what: str, names: Mapping[str, object]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{what}: a name must be a str, not {type(name).__name__}")
        if not name:
            raise ValueError(f"{what}: a name must not be empty")


def _check_array(what: str, array: object) -> None:
    if not isinstance(array, (np.ndarray, np.generic)):  # numpy turns results without axes into scalars
        raise TypeError(f"{what}: expected a numpy array, not {type(array).__name__}")
    code_of(array.dtype)
    if array.ndim > 32:
        raise ValueError(f"{what}: {array.ndim} dimensions; a checkpoint holds at most 32")
