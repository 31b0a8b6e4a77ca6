"""Validates and converts the inputs of a call for a session, and what it hands out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from onward.ort_session import array_of, shape_of

if TYPE_CHECKING:
    from onward.ort_session import Feed
    from onward.runtime.signature import Signature

# Numbers of types that numpy does not have itself. (`isbuiltin` is also wrong of arrays from another process.)
_OTHERS = 256


def prepare(signature: Signature, inputs: Sequence[Any]) -> tuple[list[Feed], bool]:
    """Arrays or OrtValues in the order of the signature's inputs, and whether to return numpy arrays."""
    # onnxruntime would name the first missing input by its place; the caller needs all of them by name.
    if len(inputs) != len(signature.inputs):
        raise ValueError(
            f"the model takes {len(signature.inputs)} inputs ({', '.join(signature.inputs)}), got {len(inputs)}"
        )
    as_numpy = not inputs
    ready: list[Feed] = []
    for value, name in zip(inputs, signature.inputs):
        if (
            type(value) is np.ndarray
            and value.dtype == signature.dtypes.get(name)
            and value.flags.c_contiguous
            and value.dtype.num < _OTHERS
        ):
            as_numpy = True
        elif not isinstance(value, ort.OrtValue):
            as_numpy = True
            value = convert(value, signature.dtypes.get(name), name)
        ready.append(value)
    return ready, as_numpy


def refuse_masked(value: Any, name: str) -> None:
    """Refuse a masked array with masked elements: numpy would hand on what lies under the mask, silently."""
    if np.ma.is_masked(value):
        raise ValueError(
            f"'{name}' is a masked array with {np.ma.count_masked(value)} masked elements, which the model would read "
            "as numbers: fill them first, with .filled(…)"
        )


def _to_array(value: Any, name: str) -> np.ndarray:
    refuse_masked(value, name)
    if hasattr(value, "detach"):  # a torch tensor, perhaps one that has a gradient or lies on a GPU
        value = value.detach().cpu()
    try:
        return np.asarray(value)
    except Exception as error:
        raise TypeError(
            f"input '{name}' is a {type(value).__name__} that is not an array: {error}"
        ) from error


def _convert(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Only harmless conversions: float64 → float32, integers that fit."""
    if dtype == np.object_ and array.dtype.kind in "UO":
        return array.astype(np.object_)
    if array.dtype.kind == "f" and dtype.kind == "f":
        return array.astype(dtype)
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        # Whole numbers are looked at: class numbers often come as int32 or uint8 and fit, an overflow would
        # train on others.
        limits = np.iinfo(dtype)
        if array.size and not np.can_cast(array.dtype, dtype):
            least, most = int(array.min()), int(array.max())
            if least < limits.min or most > limits.max:
                raise ValueError(
                    f"input '{name}' has values from {least} to {most}: {dtype} cannot hold them"
                )
        return array.astype(dtype)
    raise TypeError(f"input '{name}' is {array.dtype}, the model takes {dtype}: convert it with .astype")


def convert(value: Any, dtype: np.dtype | None, name: str) -> np.ndarray:
    """One input as a contiguous array of the model's input type, if the conversion is safe.

    >>> convert([1.0, 2.0], np.dtype(np.float32), "x")
    array([1., 2.], dtype=float32)
    """
    # `type … is`: subclasses such as matrices and masked arrays mean something else by their operators.
    array = value if type(value) is np.ndarray else _to_array(value, name)
    if dtype is not None and array.dtype != dtype:
        array = _convert(array, dtype, name)
    if array.dtype.num >= _OTHERS:  # bfloat16, float8, int4 …
        raise TypeError(f"input '{name}' is {array.dtype}, which onnxruntime takes as an OrtValue only")
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def check_labels(signature: Signature, feeds: Sequence[Feed], *, stacked: bool = False) -> None:
    """Reject labels out of range, and a number of labels other than the number of samples.

    `stacked` inputs have an axis before their own, with the batches of several steps.
    """
    for index, axis, other, along in signature.same:
        axis, along = axis + stacked, along + stacked
        one, two = shape_of(feeds[index]), shape_of(feeds[other])
        if axis < len(one) and along < len(two) and one[axis] != two[along]:
            raise ValueError(
                f"'{signature.inputs[index]}' {list(one)} and '{signature.inputs[other]}' {list(two)} belong together: "
                f"axis {axis} of the one and axis {along} of the other must have the same size"
            )
    for index, classes, ignored in signature.labels:
        labels = array_of(feeds[index])
        kind = labels.dtype
        if labels.size == 0 or kind.kind != "i" or kind.itemsize < 4:
            continue
        # negative numbers are huge when read as unsigned: one pass finds both ends; argmax has the least overhead
        unsigned = labels.view(np.uint64 if kind.itemsize == 8 else np.uint32)
        if unsigned.item(unsigned.argmax()) < classes:
            continue
        bad = (labels < 0) | (labels >= classes)
        if ignored is not None:
            bad &= labels != ignored
        if bad.any():
            where = tuple(int(i) for i in np.argwhere(bad)[0])
            hint = "" if ignored is None else f" (or {ignored}, which is ignored)"
            raise ValueError(
                f"'{signature.inputs[index]}' has label {int(labels[where])} at {where}: "
                f"the model has {classes} classes, so labels are 0 to {classes - 1}{hint}"
            )


def hand_out(results: list[np.ndarray], as_numpy: bool) -> Any:
    """What a call returns: one value, or a tuple."""
    values = results if as_numpy else [owned_value(r) for r in results]
    return values[0] if len(values) == 1 else tuple(values)


def owned_value(array: np.ndarray) -> ort.OrtValue:
    """A value with memory of its own: one made from an array dies with it, even while `.numpy()` shows it."""
    # Not from the array: onnxruntime does not hold a reference to it.
    value = ort.OrtValue.ortvalue_from_shape_and_type(list(array.shape), array.dtype.type)
    value.update_inplace(np.ascontiguousarray(array))
    return value
