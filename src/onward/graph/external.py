"""Checks a model's references to external data before anything reads them.

A model file is untrusted: its references may point anywhere. A valid reference names exactly the tensor's bytes in
a regular file inside the model's own directory, with no link on the path. Reads no tensor data.
"""

from __future__ import annotations

import functools
import math
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx

from onward.errors import ModelError

_KEYS = frozenset({"location", "offset", "length", "checksum"})
# No file system has larger files; larger numbers are attempts at integer overflow.
_LARGEST = 2**62


def tensor_bytes(dims: Iterable[int], dtype: int, name: str) -> int:
    """The number of bytes of a tensor of this shape and type; raises an error for impossible sizes."""
    sizes = list(dims)
    if any(size < 0 for size in sizes):
        raise ModelError(f"tensor '{name}' has a negative dimension: {sizes}")
    bits = _bits(dtype)
    if bits is None:
        raise ModelError(f"tensor '{name}' has element type {dtype}, which has no fixed size here")
    total = math.prod(sizes) * bits
    if total > _LARGEST:
        raise ModelError(f"tensor '{name}' of shape {sizes} is larger than any memory")
    return (total + 7) // 8


@functools.cache
def _bits(dtype: int) -> int | None:
    """How many bits an element of a type takes in a file; None for strings and what is no type."""
    kinds = onnx.TensorProto.DataType
    if dtype not in kinds.values() or dtype in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
        return None
    name = kinds.Name(dtype)
    for text, bits in (("INT4", 4), ("FLOAT4", 4), ("FLOAT6", 6), ("INT2", 2)):
        if name.startswith((text, f"U{text}")):
            return bits
    return 8 * onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize


def check_external(tensor: onnx.TensorProto, base: Path) -> None:
    """Reject a reference that does not name exactly this tensor's bytes in a regular file under `base`."""
    entries: dict[str, str] = {}
    for entry in tensor.external_data:
        if entry.key not in _KEYS:
            raise _bad(tensor.name, f"unknown key {entry.key!r}")
        if entry.key in entries:
            raise _bad(tensor.name, f"key {entry.key!r} is given twice")
        entries[entry.key] = entry.value
    if "location" not in entries:
        raise _bad(tensor.name, "no location")
    # Which of the two a reader takes differs between libraries: a file that looks harmless to one checks out in
    # another.
    if tensor.raw_data:
        raise _bad(tensor.name, "the tensor carries data of its own as well")
    check_location(
        tensor.name,
        entries["location"],
        base,
        offset=_number(tensor.name, "offset", entries.get("offset", "0")),
        length=_number(tensor.name, "length", entries["length"]) if "length" in entries else None,
        expected=tensor_bytes(tensor.dims, tensor.data_type, tensor.name),
    )


def external_range(tensor: onnx.TensorProto) -> tuple[str, int, int]:
    """The file, offset and length that a checked reference names."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if "location" not in entries:
        raise _bad(tensor.name, "no location")
    size = tensor_bytes(tensor.dims, tensor.data_type, tensor.name)
    return os.path.normpath(entries["location"]), int(entries.get("offset", "0")), size


def check_location(
    name: str, location: str, base: Path, *, offset: int, length: int | None, expected: int
) -> None:
    """Reject a location outside `base`, behind a link, that is not a regular file, or out of the file's bounds."""
    if not location or "\0" in location:
        raise _bad(name, "the location is empty or holds a NUL character")
    # Both spellings on every system: a file that is safe here may be opened there.
    for path in (PurePosixPath(location), PureWindowsPath(location)):
        if path.is_absolute() or path.drive or path.root or ".." in path.parts or not path.parts:
            raise _bad(name, f"location {location!r} is not a plain path below the model's directory")
    root = os.path.realpath(base)
    target = os.path.normpath(os.path.join(root, location))
    # realpath follows links in folders on the way, too.
    if os.path.normcase(os.path.realpath(target)) != os.path.normcase(target):
        raise _bad(name, f"location {location!r} goes through a link; copy the real file beside the model")
    try:
        status = os.lstat(target)
    except (OSError, ValueError) as error:
        raise _bad(name, f"cannot open {location!r} beside the model: {error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise _bad(name, f"{location!r} is not a regular file")
    # A hard link to a secret beside the model reads like a file of the model's own.
    if status.st_nlink > 1:
        raise _bad(name, f"{location!r} has {status.st_nlink} hard links; copy the file")
    if offset > status.st_size:
        raise _bad(name, f"offset {offset} lies past the end of {location!r} ({status.st_size} bytes)")
    size = status.st_size - offset if length is None else length
    if size != expected:
        raise _bad(name, f"{size} bytes are named in {location!r}, but its shape and type need {expected}")
    if offset + size > status.st_size:
        raise _bad(name, f"{location!r} ends at byte {status.st_size}, before offset {offset} + {size}")


def external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model, subgraphs and attributes included, whose data is in another file."""
    for tensor in tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            yield tensor


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model, wherever it is held."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        yield from _node_tensors(function.node)
        for attribute in function.attribute_proto:
            yield from _attribute_tensors(attribute)
    # Deprecated and read by nobody here, but a loader may still fetch what it refers to.
    for info in model.training_info:
        yield from _graph_tensors(info.initialization)
        yield from _graph_tensors(info.algorithm)


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            yield from _attribute_tensors(attribute)


def _attribute_tensors(attribute: onnx.AttributeProto) -> Iterator[onnx.TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    sparse = [
        *attribute.sparse_tensors,
        *([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []),
    ]
    for held in sparse:
        yield from (held.values, held.indices)
    if attribute.HasField("g"):
        yield from _graph_tensors(attribute.g)
    for graph in attribute.graphs:
        yield from _graph_tensors(graph)


def _number(name: str, key: str, text: str) -> int:
    # int() takes signs, underscores and other scripts' digits, which other readers take otherwise or not at all.
    if not (text.isascii() and text.isdigit()) or int(text[:20]) > _LARGEST or len(text) > 20:
        raise _bad(name, f"{key} {text[:40]!r} is not a byte count")
    return int(text)


def _bad(name: str, reason: str) -> ModelError:
    return ModelError(
        f"external data of tensor '{name}' is rejected: {reason}",
        hint="the file with the weights belongs beside the model",
    )
