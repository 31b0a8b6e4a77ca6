"""Element types of checkpoint tensors: ONNX TensorProto codes to numpy types and back.

It knows the list of types that a checkpoint may hold. Strings, complex numbers and packed sub-byte types
are not on it: the original format has no room for the first two in parameters and no rule for the last.
"""

from __future__ import annotations

from functools import cache

import numpy as np

__all__ = ["code_of", "dtype_of", "supported_codes"]

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
        return _codes()[dtype.newbyteorder("=")]
    except KeyError:
        raise TypeError(
            f"a checkpoint cannot hold arrays of type {dtype}; convert to one of "
            + ", ".join(str(known) for known in _codes())
        ) from None
