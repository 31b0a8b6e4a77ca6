"""The content of a checkpoint as plain data: parameters, optimizer state, properties.

Checks names and types. `codec` converts this to bytes and back, `store` reads and writes files.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import isfinite, prod
from typing import TypeAlias

import numpy as np

from onward.errors import OnwardError

__all__ = [
    "ACCUMULATION_GROUP",
    "ACCUMULATION_SLOT",
    "EXTRA_PREFIX",
    "PREFIX",
    "CheckpointData",
    "NominalTensor",
    "OptimizerGroup",
    "PropertyValue",
    "Tensors",
    "check_property",
    "code_of",
    "dtype_of",
    "little_endian_bytes",
    "native_array",
    "parse_extra",
    "spell_extra",
    "supported_codes",
]


# strings (8) and complex numbers (14, 15) are left out: no parameter has them, and a string has no fixed size
_NUMPY = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
}
_ML_DTYPES = {
    16: "bfloat16",
    17: "float8_e4m3fn",
    18: "float8_e4m3fnuz",
    19: "float8_e5m2",
    20: "float8_e5m2fnuz",
}


@cache
def _table() -> dict[int, np.dtype]:
    # late: a device that trains in float32 need not load it
    import ml_dtypes

    table = {code: np.dtype(name) for code, name in _NUMPY.items()}
    table.update({code: np.dtype(getattr(ml_dtypes, name)) for code, name in _ML_DTYPES.items()})
    return table


@cache
def _codes() -> dict[np.dtype, int]:
    return {dtype: code for code, dtype in _table().items()}


def supported_codes() -> tuple[int, ...]:
    """Return the ONNX data type codes that a checkpoint may hold, in ascending order.

    >>> 1 in supported_codes(), 8 in supported_codes()
    (True, False)
    """
    return tuple(_table())


def dtype_of(code: int) -> np.dtype:
    """Return the numpy type of an ONNX data type code; `ValueError` if a checkpoint cannot hold it.

    >>> dtype_of(1)
    dtype('float32')
    """
    try:
        return _table()[code]
    except KeyError:
        raise ValueError(f"a checkpoint cannot hold the ONNX data type {code}") from None


def code_of(dtype: np.dtype) -> int:
    """Return the ONNX data type code of a numpy type; `TypeError` if a checkpoint cannot hold it.

    >>> code_of(np.dtype("int64"))
    7
    """
    try:
        # the order of bytes is the file's matter: always little-endian
        return _codes()[dtype.newbyteorder("=")]
    except KeyError:
        raise TypeError(
            f"a checkpoint cannot hold arrays of type {dtype}; convert to one of "
            + ", ".join(map(str, _codes()))
        ) from None


PREFIX = "onward."
EXTRA_PREFIX = "onward.extra."
ACCUMULATION_GROUP = "onward.accumulation"
ACCUMULATION_SLOT = "gradient"


def spell_extra(value: PropertyValue) -> str:
    """Return a scalar as text with its type, so that 64-bit floats and long integers survive exactly.

    >>> spell_extra(0.1), spell_extra(3), spell_extra("cosine")
    ('f:0.1', 'i:3', 's:cosine')
    """
    if isinstance(value, str):
        return "s:" + value
    # ints before floats: a seed beyond 2⁵³ is not a float
    if isinstance(value, (int, np.integer, np.bool_)):
        return f"i:{int(value)}"
    # repr is the shortest text that reads back as the same 64 bits
    return f"f:{float(value)!r}"


def parse_extra(text: str) -> PropertyValue:
    """Return the scalar that `spell_extra` spelled; `ValueError` for anything else.

    >>> parse_extra("f:0.1")
    0.1
    """
    kind, colon, body = text.partition(":")
    if not colon or kind not in ("s", "i", "f"):
        raise ValueError("expected 's:', 'i:' or 'f:' and a value")
    if kind == "s":
        # as it stands: a text may have colons of its own
        return body
    return int(body) if kind == "i" else float(body)


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

    def require_values(self) -> None:
        """An error where only names and types of the parameters are known."""
        if self.nominal:
            raise OnwardError(
                "The state is nominal: it has no parameter values. Please load the model parameters first."
            )

    def number(self, name: str, default: float) -> float:
        """One of the extras that is a finite number; an error where a file has something else there.

        >>> CheckpointData(extras={"learning_rate": 0.5}).number("learning_rate", 1e-3)
        0.5
        """
        value = self.extras.get(name, default)
        if isinstance(value, str) or not isfinite(value):
            raise OnwardError(
                f"the checkpoint is damaged: its '{name}' is {str(value)[:40]!r}, which is not a finite number; take "
                "another copy of the file"
            )
        return value

    def whole_number(self, name: str, default: int = 0) -> int:
        """One of the extras that counts something, or is a seed.

        >>> CheckpointData(extras={"train_step": 7}).whole_number("train_step")
        7
        """
        # as it is: a float would not hold a seed beyond 2⁵³
        return int(self.number(name, default))


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
        # the schema's own limit; extras, which are texts, have none
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"property '{name}': {number} does not fit into 64 bits")
        return number
    if isinstance(value, (float, np.floating)):  # the schema's properties have 32 bits
        number = float(value)
        # inf and nan are kept: a loss may be one
        if np.isfinite(number) and abs(number) > float(np.finfo(np.float32).max):
            raise ValueError(f"property '{name}': {number} does not fit into a 32-bit float")
        return number
    raise TypeError(f"property '{name}': a checkpoint holds int, float and str, not {type(value).__name__}")


def check(data: CheckpointData) -> None:
    """Raise `TypeError` or `ValueError` for data that no checkpoint can hold: bad names or types."""
    # the state would load one of the two, by chance
    both = data.trainable.keys() & data.frozen.keys()
    if both:
        raise ValueError(f"parameters cannot be trainable and frozen at the same time: {sorted(both)}")
    for kind, tensors in (("trainable", data.trainable), ("frozen", data.frozen)):
        _check_names(f"{kind} parameter", tensors)
        for name, tensor in tensors.items():
            if isinstance(tensor, NominalTensor) != data.nominal:
                expected = "NominalTensor" if data.nominal else "numpy array"
                raise TypeError(
                    f"{kind} parameter '{name}': expected a {expected}, not {type(tensor).__name__}"
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
    # what numpy 1 can hold: a reader there must not fail
    if array.ndim > 32:
        raise ValueError(f"{what}: {array.ndim} dimensions; a checkpoint holds at most 32")


def native_array(source: memoryview, start: int, *, code: int, dims: tuple[int, ...]) -> np.ndarray:
    """Return a read-only array over little-endian bytes that were checked; copied only if unaligned."""
    dtype = dtype_of(code)
    # no bytes to view, and an offset that may lie at the end of the file
    if 0 in dims:
        values = np.zeros(dims, dtype)
    else:
        raw = np.frombuffer(source, np.uint8, count=prod(dims) * dtype.itemsize, offset=start)
        values = raw.view(dtype).reshape(dims)
        if sys.byteorder == "big" and dtype.itemsize > 1:
            values = values.byteswap()
        if not values.flags.aligned:
            values = values.copy()
    # several arrays may view one buffer, whose digest was checked: nobody changes it unseen
    values.flags.writeable = False
    return values


def little_endian_bytes(tensor: np.ndarray) -> memoryview:
    """Return a contiguous array's own bytes; only other layouts and byte orders are copied."""
    flat = np.ascontiguousarray(tensor).reshape(-1)
    if not flat.dtype.isnative:
        flat = flat.astype(flat.dtype.newbyteorder("="))
    if sys.byteorder == "big" and flat.dtype.itemsize > 1:
        flat = flat.byteswap()
    return flat.view(np.uint8).data
