"""Matches arrays to the inputs of a model: by name, by --map, or by type and shape; reports assumptions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onward.errors import DataError
from onward.train.batches import Rows

# arrays among which to look for the ones that fit: all orders of them are tried
_MOST = 5


@dataclass(frozen=True)
class InputSpec:
    """An input of a model: its name, type, and dimensions (None where it may vary)."""

    name: str
    dtype: np.dtype
    dims: tuple[int | None, ...] | None

    def __str__(self) -> str:
        dims = "" if self.dims is None else f"[{', '.join('*' if d is None else str(d) for d in self.dims)}]"
        return f"{self.dtype}{dims}"

    @property
    def is_integer(self) -> bool:
        """Whether it takes whole numbers, as labels are."""
        return self.dtype.kind in "iu"


def specs_of(graph: Any, names: Sequence[str] | None = None) -> list[InputSpec]:
    """The inputs of a graph, all or those of these names, in that order."""
    import onnx

    constant = {tensor.name for tensor in graph.initializer}
    specs = {}
    for value in graph.input:
        kind = value.type.tensor_type
        if value.name in constant or not kind.elem_type:
            continue
        dims = [d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else None for d in kind.shape.dim]
        specs[value.name] = InputSpec(
            value.name,
            np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)),
            tuple(dims) if kind.HasField("shape") else None,
        )
    return list(specs.values()) if names is None else [specs[name] for name in names if name in specs]


def calibration_rows(specs: Iterable[InputSpec]) -> int:
    """How many samples of these inputs show the ranges of activations: pictures have many numbers each, texts few."""
    return 1024 if all(spec.is_integer for spec in specs) else 256


def fit(
    arrays: Mapping[str, Any],
    inputs: Sequence[InputSpec],
    *,
    mapping: Mapping[str, str] | None = None,
    where: str = "the data",
) -> tuple[dict[str, Any], list[str]]:
    """Arrays for all inputs, in their types and shapes, and remarks on what was assumed."""
    mapping = mapping or {}
    if not arrays:
        raise DataError(f"'{where}' has no array", "is it the right file?")
    input_names = {spec.name for spec in inputs}
    for name, array_name in mapping.items():
        if name not in input_names:
            raise DataError(
                f"--map {name}={array_name}: the model has no input '{name}'", f"it takes {_list(inputs)}"
            )
        if array_name not in arrays:
            raise DataError(
                f"--map {name}={array_name}: the data has no '{array_name}'", f"it has {', '.join(arrays)}"
            )
    chosen = {spec.name: mapping.get(spec.name, spec.name) for spec in inputs}
    chosen = {name: source for name, source in chosen.items() if source in arrays}
    open_inputs = [spec for spec in inputs if spec.name not in chosen]
    spare = [name for name in arrays if name not in chosen.values()]
    notes = []
    if open_inputs:
        for spec, name in zip(open_inputs, _guess(arrays, open_inputs, spare, where)):
            chosen[spec.name] = name
            notes.append(f"taking '{name}' of the data as the model's '{spec.name}'")
    fitted = {
        spec.name: array
        if isinstance(array := arrays[chosen[spec.name]], Rows)
        else _shaped(array, spec, chosen[spec.name])
        for spec in inputs
    }
    sizes = {name: len(array) for name, array in fitted.items()}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise DataError(f"the arrays have different numbers of samples: {counts}", "one row for each sample")
    if 0 in sizes.values():
        raise DataError(f"'{where}' has no sample", "is it the right file?")
    return fitted, notes


def _guess(
    arrays: Mapping[str, Any], inputs: Sequence[InputSpec], spare: Sequence[str], where: str
) -> tuple[str, ...]:
    """The one assignment of spare arrays that fits; the order of the file decides if none is left over."""
    problem = f"'{where}' has no {' and no '.join(repr(spec.name) for spec in inputs)}, which the model takes"
    hint = f"it has {', '.join(arrays)}: say which is which with --map INPUT=ARRAY"
    if not len(inputs) <= len(spare) <= _MOST:
        raise DataError(problem, hint)
    fitting = [
        order
        for order in itertools.permutations(spare, len(inputs))
        if all(_why_not(arrays[name], spec) is None for name, spec in zip(order, inputs))
    ]
    if len(fitting) == 1 or (fitting and len(spare) == len(inputs)):
        return fitting[0]
    if fitting:
        raise DataError(f"{problem}, and several arrays could be it", hint)
    reasons = [
        f"'{name}' as '{spec.name}': {reason}"
        for name, spec in zip(spare, inputs)
        if (reason := _why_not(arrays[name], spec))
    ]
    raise DataError(f"{problem}, and the others do not fit ({'; '.join(reasons)})", hint)


def _why_not(array: Any, spec: InputSpec) -> str | None:
    if isinstance(array, Rows):
        return "it is made of files for another input"
    try:
        # the first rows are enough to see whether types and shapes go together
        _shaped(array[:64] if array.ndim else array, spec, "it")
    except DataError as error:
        return str(error)
    return None


def _shaped(array: np.ndarray, spec: InputSpec, name: str) -> np.ndarray:
    """The array in the type and shape of an input, where that loses nothing."""
    if array.ndim == 0:
        raise DataError(f"'{name}' is a single number", "data has one row for each sample")
    if array.dtype.kind not in "biuf":
        raise DataError(f"'{name}' is {array.dtype}, not numbers", f"'{spec.name}' takes {spec}")
    array = _typed(array, spec, name)
    dims = spec.dims
    if dims is None or _agrees(array.shape, dims):
        return array
    row_dims = dims[1:]
    per_row = int(np.prod(array.shape[1:]))
    unknown = [i for i, dim in enumerate(row_dims) if dim is None]
    fixed = int(np.prod([dim for dim in row_dims if dim is not None]))
    if not unknown and per_row == fixed:
        return array.reshape(len(array), *(dim or 0 for dim in row_dims))
    raise DataError(
        f"'{name}' has shape {list(array.shape)}, the input '{spec.name}' takes {spec}",
        "change the data, or say which array is which with --map INPUT=ARRAY",
    )


def _typed(array: np.ndarray, spec: InputSpec, name: str) -> np.ndarray:
    if array.dtype == spec.dtype:
        return array
    if spec.is_integer and array.dtype.kind == "f":
        whole = array.astype(spec.dtype)
        if not np.array_equal(whole, array):
            raise DataError(f"'{name}' has fractions, the input '{spec.name}' takes {spec}")
        return whole
    if spec.dtype.kind == "b" and not np.isin(array, (0, 1)).all():
        raise DataError(f"'{name}' is not only 0 and 1, the input '{spec.name}' takes {spec}")
    with np.errstate(over="ignore"):  # what is too large is found where it is used
        return array.astype(spec.dtype)


def _agrees(shape: Sequence[int], dims: Sequence[int | None]) -> bool:
    # the first dimension is the batch's, even where an exporter wrote a number for it
    return len(shape) == len(dims) and all(d is None or d == s for s, d in list(zip(shape, dims))[1:])


def _list(inputs: Sequence[InputSpec]) -> str:
    return ", ".join(f"{spec.name} ({spec})" for spec in inputs)
