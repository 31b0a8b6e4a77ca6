"""Converts parameters to and from safetensors files, by name.

Only parameters are converted: that format does not hold optimizer state, properties and random state. Which ones
are frozen is kept in the file's metadata. The format is a length, a JSON header and the bytes, so this needs
no package for it, streams, and carries bfloat16 and float8, which that package's numpy side does not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from onward import contract
from onward.checkpoint import content, integrity
from onward.checkpoint.atomic import open_regular, read_all, replace_file
from onward.checkpoint.content import (
    CheckpointData,
    NominalTensor,
    Tensors,
    code_of,
    dtype_of,
    little_endian_bytes,
    native_array,
)
from onward.checkpoint.store import load
from onward.errors import CheckpointError

__all__ = ["from_safetensors", "to_safetensors"]

_FROZEN_KEY = contract.FROZEN
_METADATA = "__metadata__"
_MAX_HEADER = 100_000_000  # the limit of the format's own readers
# the format's names; its F8_E4M3 is ONNX's FLOAT8E4M3FN, the one without infinities
_CODES = {
    "F64": 11,
    "I64": 7,
    "U64": 13,
    "F32": 1,
    "I32": 6,
    "U32": 12,
    "BF16": 16,
    "F16": 10,
    "I16": 5,
    "U16": 4,
    "BOOL": 9,
    "I8": 3,
    "U8": 2,
    "F8_E4M3": 17,
    "F8_E5M2": 19,
}
_NAMES = {code: name for name, code in _CODES.items()}


def to_safetensors(source: CheckpointData | str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Save the parameters of a checkpoint, given as data or as a path, as a safetensors file, atomically.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = directory + "/w.safetensors"
    ...     to_safetensors(CheckpointData(trainable={"w": np.ones(2, np.float32)}), path)
    ...     from_safetensors(path).trainable["w"].tolist()
    [1.0, 1.0]
    """
    data = source if isinstance(source, CheckpointData) else load(source)
    if data.nominal:
        raise ValueError("a nominal checkpoint has no values to save; load the parameters first")
    content.check(data)
    parameters = {name: t for name, t in data.parameters().items() if not isinstance(t, NominalTensor)}
    header, ordered = _header(parameters, frozen=list(data.frozen))

    def write(stream: integrity.Writable) -> None:
        stream.write(header)
        for array in ordered:
            stream.write(little_endian_bytes(array))

    replace_file(path, write)


def from_safetensors(
    path: str | os.PathLike[str], *, into: CheckpointData | None = None, frozen: Iterable[str] | None = None
) -> CheckpointData:
    """Return the parameters of a safetensors file as checkpoint data; arrays are read-only.

    `frozen` names the parameters that are not trained; by default those that the file's metadata names. With
    `into`, a copy of that data is returned in which parameters of the same name have the file's values;
    shapes and types must agree, and a name that `into` does not have is an error.
    """
    name = os.fspath(path)
    try:
        with open_regular(name) as file:
            size = os.fstat(file.fileno()).st_size
            metadata, entries, base = _read_header(file.read(8), file.read, size, name)
            arrays = _views(read_all(file, size - base), entries)
    except OSError as error:
        raise CheckpointError(name, error.strerror or str(error)) from error
    if into is not None:
        return _merge(into, arrays, name)
    names = set(frozen) if frozen is not None else set(_frozen_names(metadata, name))
    unknown = names - arrays.keys()
    if unknown and frozen is None:
        raise CheckpointError(
            name, f"its metadata names frozen parameters that it lacks: {sorted(unknown)[:5]}"
        )
    if unknown:
        raise ValueError(f"frozen parameters that '{name}' does not have: {sorted(unknown)}")
    return CheckpointData(
        trainable={key: array for key, array in arrays.items() if key not in names},
        frozen={key: array for key, array in arrays.items() if key in names},
    )


def _header(parameters: dict[str, np.ndarray], *, frozen: list[str]) -> tuple[bytes, list[np.ndarray]]:
    """Return the file's head and the arrays in the order of their bytes: widest first, so that all align."""
    spelled: dict[str, Any] = {_METADATA: {_FROZEN_KEY: json.dumps(frozen)}} if frozen else {}
    offsets: dict[str, list[int]] = {}
    position = 0
    ordered = []
    # as the package does it: readers that map the file then need no copy of any tensor
    for name, array in sorted(parameters.items(), key=lambda item: -item[1].dtype.itemsize):
        offsets[name] = [position, position + array.nbytes]
        position += array.nbytes
        ordered.append(array)
    for name, array in parameters.items():
        kind = _NAMES.get(code_of(array.dtype))
        if kind is None or name == _METADATA:
            raise TypeError(f"parameter '{name}' of type {array.dtype} cannot be saved as safetensors")
        spelled[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": offsets[name]}
    text = json.dumps(spelled, separators=(",", ":"), ensure_ascii=False).encode()
    # spaces: the format lets a header end in them, and data must begin at a multiple of eight
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text, ordered


def _read_header(prefix: bytes, read: Any, size: int, path: str) -> tuple[Any, dict[str, Any], int]:
    length = int.from_bytes(prefix, "little")
    # before reading: eight bytes may claim 2⁶⁴
    if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER):
        raise CheckpointError(
            path, "not a safetensors file: its header is longer than it may be", field="header"
        )
    try:
        # of two equal names readers take different ones: what one checks another would not use
        header = json.loads(read(length).decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"not a safetensors file: {error}", field="header", offset=8) from None
    if not isinstance(header, dict):
        raise CheckpointError(
            path, "not a safetensors file: its header is not an object", field="header", offset=8
        )
    metadata = header.pop(_METADATA, {})
    end = 0
    # in the order of bytes, each must begin where the last ended: no overlap and no gap to hide something in
    for name, entry in sorted(header.items(), key=lambda item: _offsets(item[1], item[0], path)):
        start, stop = _offsets(entry, name, path)
        if start != end or stop != start + _nbytes(entry, name, path):
            raise CheckpointError(path, f"'{name}' has bytes {start} to {stop}, which cannot be", field=name)
        end = stop
    # what follows the last tensor would be a second file for those who look
    if end != size - 8 - length:
        raise CheckpointError(
            path, f"{end} bytes of tensors expected, {size - 8 - length} found", field="data"
        )
    return metadata, header, 8 + length


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name occurs twice")
    return names


def _offsets(entry: Any, name: str, path: str) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(value) is not int for value in offsets):
        raise CheckpointError(path, f"'{name}' has no valid data_offsets", field=name)
    return offsets[0], offsets[1]


def _nbytes(entry: dict[str, Any], name: str, path: str) -> int:
    code, shape = _CODES.get(str(entry.get("dtype"))), entry.get("shape")
    if code is None:
        raise CheckpointError(path, f"'{name}' has the unsupported type {entry.get('dtype')!r}", field=name)
    if (
        not isinstance(shape, list)
        or len(shape) > 32
        or any(type(dim) is not int or not 0 <= dim < 2**62 for dim in shape)
    ):
        raise CheckpointError(path, f"'{name}' has the invalid shape {shape!r}", field=name)
    # zeros count as one: (0, 2**60) has no bytes, and numpy cannot make its strides
    if prod(max(dim, 1) for dim in shape) >= 2**58:
        raise CheckpointError(path, f"'{name}' has the shape {shape!r}, which is too large", field=name)
    return prod(shape) * dtype_of(code).itemsize


def _views(buffer: np.ndarray, entries: dict[str, Any]) -> dict[str, np.ndarray]:
    return {
        name: native_array(
            buffer.data,
            entry["data_offsets"][0],
            code=_CODES[entry["dtype"]],
            dims=tuple(entry["shape"]),
        )
        for name, entry in entries.items()
    }


def _frozen_names(metadata: Any, path: str) -> list[str]:
    text = metadata.get(_FROZEN_KEY, "[]") if isinstance(metadata, dict) else "[]"
    try:
        names = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(path, f"metadata '{_FROZEN_KEY}' is not a list of names", field=_FROZEN_KEY)
    return names


def _merge(data: CheckpointData, arrays: dict[str, np.ndarray], path: str) -> CheckpointData:
    unknown = arrays.keys() - data.parameters().keys()
    if unknown:
        raise CheckpointError(path, f"parameters that the checkpoint does not have: {sorted(unknown)}")

    def merged(tensors: Tensors) -> Tensors:
        return {name: _agreeing(name, old, arrays.get(name), path) for name, old in tensors.items()}

    trainable, frozen = merged(data.trainable), merged(data.frozen)
    if data.nominal and any(isinstance(tensor, NominalTensor) for tensor in (trainable | frozen).values()):
        raise CheckpointError(
            path, "a nominal checkpoint needs all of its parameters; some are not in the file"
        )
    return replace(data, trainable=trainable, frozen=frozen, nominal=False)


def _agreeing(
    name: str, old: np.ndarray | NominalTensor, new: np.ndarray | None, path: str
) -> np.ndarray | NominalTensor:
    if new is None:
        return old
    dtype = dtype_of(old.dtype) if isinstance(old, NominalTensor) else old.dtype
    shape = new.shape if isinstance(old, NominalTensor) else old.shape
    if new.dtype != dtype or new.shape != shape:
        raise CheckpointError(
            path,
            f"'{name}': expected {dtype} {list(shape)}, found {new.dtype} {list(new.shape)}",
            field=name,
        )
    return new
