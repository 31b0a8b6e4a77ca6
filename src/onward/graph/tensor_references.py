"""Reads a model file without the data of its large tensors, which then refer to their place in the file itself.

A language model of 500 MB would otherwise be in memory three times before anything runs: as bytes, as protobuf and as
arrays. What is returned looks like a model with external data in its own file: the data is mapped when it is needed.
Knows protobuf's wire format and nothing of ONNX but the numbers of four fields.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import google.protobuf.message
import onnx

from onward.limits import require

# Files that are smaller are simply read, and smaller tensors stay in the model.
_LARGE_FILE, _LARGE_TENSOR = 32 * 2**20, 2**16
# fields of ModelProto, GraphProto and TensorProto
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _Malformed(ValueError):
    """Not protobuf's wire format."""


def parse_with_references(path: Path) -> onnx.ModelProto | None:
    """The model of a file without its large tensors; None where it is to be read as a whole: small, or malformed.

    A link, or a file with several names, is read as a whole: references to external data may not go through them.
    """
    try:
        if not path.is_file() or path.is_symlink() or path.parent.resolve() / path.name != path.resolve():
            return None
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            # External data may not have a second name, and this file is about to become external data.
            if status.st_size < _LARGE_FILE or status.st_nlink > 1:
                return None
            require("model_bytes", status.st_size, f"'{path}'")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                parts = bytearray()
                for field, begin, first, last in _fields(data, 0, len(data)):
                    # protobuf merges several fields of one number; a file that has two graphs is left to its parser.
                    if field == _GRAPH and first is not None:
                        parts += _message(_GRAPH, _graph_without_data(data, first, last, path.name))
                    else:
                        parts += data[begin:last]
        model = onnx.ModelProto()
        model.ParseFromString(bytes(parts))
    except (OSError, _Malformed, google.protobuf.message.DecodeError):
        return None
    return model


def _graph_without_data(data: mmap.mmap, start: int, stop: int, location: str) -> bytes:
    parts = bytearray()
    for field, begin, first, last in _fields(data, start, stop):
        if field == _INITIALIZER and first is not None and last - first >= _LARGE_TENSOR:
            parts += _message(_INITIALIZER, _tensor(data, first, last, location))
        else:
            parts += data[begin:last]
    return bytes(parts)


def _tensor(data: mmap.mmap, start: int, stop: int, location: str) -> bytes:
    parts, raw = bytearray(), []
    for field, begin, first, last in _fields(data, start, stop):
        if field == _RAW_DATA and first is not None:
            raw.append((first, last))
        else:
            parts += data[begin:last]
    # Twice the same field is legal protobuf, of which the last counts: that, too, is the parser's to read.
    if len(raw) != 1 or raw[0][1] - raw[0][0] < _LARGE_TENSOR:
        return data[start:stop]
    reference = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    (first, last) = raw[0]
    for key, value in (("location", location), ("offset", str(first)), ("length", str(last - first))):
        reference.external_data.add(key=key, value=value)
    return bytes(parts) + reference.SerializeToString()


def _fields(data: mmap.mmap, start: int, stop: int) -> Iterator[tuple[int, int, int | None, int]]:
    """(number, where it starts, where its bytes start if it has such, where it ends) of each field."""
    position = start
    while position < stop:
        begin = position
        tag, position = _varint(data, position, stop)
        kind, first = tag & 7, None
        if kind == _VARINT:
            _, position = _varint(data, position, stop)
        elif kind == _BYTES:
            length, first = _varint(data, position, stop)
            position = first + length
        elif kind in (_FIXED32, _FIXED64):
            position += 4 if kind == _FIXED32 else 8
        else:
            raise _Malformed
        if position > stop:
            raise _Malformed
        yield tag >> 3, begin, first, position


def _varint(data: mmap.mmap, position: int, stop: int) -> tuple[int, int]:
    number = shift = 0
    # A varint has ten bytes at most; more are an attempt to run past the end.
    while position < stop and shift < 64:
        byte = data[position]
        position += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, position
        shift += 7
    raise _Malformed


def _message(field: int, content: bytes) -> bytes:
    head = bytearray([field << 3 | _BYTES])
    length = len(content)
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    head.append(length)
    return bytes(head) + content
