"""Bounds-checked access to the bytes of any FlatBuffer: tables, vectors, strings, scalars.

It knows the FlatBuffers encoding and nothing of checkpoints. Every read is checked against the size of the
buffer first, and every object claims its bytes: `check_overlaps` refuses a buffer in which two objects share
some, and no more may be claimed in total than there is.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from typing import Any, Literal, overload

import numpy as np

from onward.errors import CheckpointError

__all__ = ["Reader", "Table"]

_SIZES = {"i": 4, "q": 8, "f": 4, "B": 1}
MAX_TABLES = 1_000_000


class Reader:
    """A buffer together with what has been claimed of it; `size` is given only to check ranges of a file."""

    def __init__(self, buffer: memoryview, *, path: str, size: int | None = None) -> None:
        self.buffer = buffer
        self.path = path
        self.size = len(buffer) if size is None else size
        self._starts = array("q")
        self._lengths = array("q")
        self._claimed = 0
        self._vtables: dict[int, tuple[int, ...]] = {}
        self._tables = 0

    def error(self, reason: str, field: str, offset: int) -> CheckpointError:
        """Return (not raise) the error for what is wrong at `offset`."""
        return CheckpointError(self.path, reason, field=field, offset=offset)

    def unpack(self, code: str, position: int) -> tuple[Any, ...]:
        """Unpack at a position that `claim` or `within` has checked."""
        return struct.unpack_from(code, self.buffer, position)

    def within(self, position: int, length: int, where: str) -> None:
        """Raise unless `length` bytes at `position` are inside the buffer."""
        if position < 0 or length < 0 or position + length > self.size:
            raise self.error(
                f"{length} bytes at {position} are outside of the {self.size} there are", where, position
            )

    def claim(self, position: int, length: int, where: str) -> None:
        """Take `length` bytes for one object."""
        self.within(position, length, where)
        if not length:
            return
        self._claimed += length
        if self._claimed > self.size:
            raise self.error("objects share bytes: together they are larger than the file", where, position)
        self._starts.append(position)
        self._lengths.append(length)

    def check_overlaps(self) -> None:
        """Raise if two claimed objects share bytes."""
        starts = np.frombuffer(self._starts, np.int64) if self._starts else np.zeros(0, np.int64)
        ends = starts + (np.frombuffer(self._lengths, np.int64) if self._lengths else 0)
        order = np.argsort(starts, kind="stable")
        shared = np.flatnonzero(ends[order][:-1] > starts[order][1:])
        if shared.size:
            position = int(starts[order][shared[0] + 1])
            raise self.error("two objects share bytes", "layout", position)

    def root(self, identifier: bytes) -> Table:
        """Return the root table after checking the file identifier."""
        if self.size < 12:
            raise self.error(f"only {self.size} bytes: too short", "root", 0)
        found = bytes(self.buffer[4:8])
        if found != identifier:
            raise self.error(
                f"not a checkpoint: identifier {found!r}, expected {identifier!r}", "identifier", 4
            )
        self.claim(0, 8, "root")
        return self.table_at(self.unpack("<I", 0)[0], "root")

    def table_at(self, position: int, where: str) -> Table:
        """Check a table's head, claim it and return it."""
        self._tables += 1
        if self._tables > MAX_TABLES:
            raise self.error(f"more than {MAX_TABLES} tables", where, position)
        self._aligned(position, 4, where)
        self.within(position, 4, where)
        vtable = position - self.unpack("<i", position)[0]
        slots = self._vtable(vtable, where)
        self.claim(position, slots[0], where)
        return Table(self, position, slots, where)

    def _vtable(self, position: int, where: str) -> tuple[int, ...]:
        known = self._vtables.get(position)
        if known is not None:
            return known
        where = f"{where}.vtable"
        self._aligned(position, 2, where)
        self.within(position, 4, where)
        length, table_size = self.unpack("<HH", position)
        if length < 4 or length % 2 or table_size < 4:
            raise self.error(f"sizes {length} and {table_size} are impossible", where, position)
        self.claim(position, length, where)
        offsets = self.unpack(f"<{(length - 4) // 2}H", position + 4)
        if any(offset and not 4 <= offset < table_size for offset in offsets):
            raise self.error("a field is outside of its table", where, position)
        slots = (table_size, *offsets)
        self._vtables[position] = slots
        return slots

    def _aligned(self, position: int, alignment: int, where: str) -> None:
        if position % alignment:
            raise self.error(f"position {position} is not a multiple of {alignment}", where, position)


class Table:
    """One checked table; `where` is its path from the root, for messages."""

    __slots__ = ("_slots", "position", "reader", "where")

    def __init__(self, reader: Reader, position: int, slots: tuple[int, ...], where: str) -> None:
        self.reader = reader
        self.position = position
        self.where = where
        self._slots = slots

    def _field(self, slot: int, size: int, label: str) -> int | None:
        """Return where a field's bytes are, None if it is absent."""
        if slot + 1 >= len(self._slots) or not self._slots[slot + 1]:
            return None
        offset = self._slots[slot + 1]
        where = f"{self.where}.{label}"
        if offset + size > self._slots[0]:
            raise self.reader.error("a field is outside of its table", where, self.position)
        self.reader._aligned(self.position + offset, size, where)
        return self.position + offset

    def scalar(self, slot: int, code: str, label: str, *, default: Any) -> Any:
        """Return a scalar field by its struct code."""
        position = self._field(slot, _SIZES[code], label)
        return default if position is None else self.reader.unpack("<" + code, position)[0]

    def boolean(self, slot: int, label: str) -> bool:
        """Return a boolean field; anything but 0 and 1 is refused."""
        value = self.scalar(slot, "B", label, default=0)
        if value > 1:
            raise self.reader.error(f"a boolean is {value}", f"{self.where}.{label}", self.position)
        return bool(value)

    def _follow(self, slot: int, label: str) -> int | None:
        position = self._field(slot, 4, label)
        if position is None:
            return None
        distance = self.reader.unpack("<I", position)[0]
        if not distance:
            raise self.reader.error("an offset is zero", f"{self.where}.{label}", position)
        return position + distance

    def vector_position(self, slot: int, label: str) -> int | None:
        """Return where a vector would be, without reading it."""
        return self._follow(slot, label)

    def vector(self, slot: int, label: str, *, itemsize: int) -> tuple[int, int] | None:
        """Return (position of the first element, number of elements) of a vector of scalars."""
        position = self._follow(slot, label)
        if position is None:
            return None
        where = f"{self.where}.{label}"
        reader = self.reader
        reader._aligned(position, 4, where)
        reader.within(position, 4, where)
        count = reader.unpack("<I", position)[0]
        if count:
            reader._aligned(position + 4, itemsize, where)
        reader.claim(position, 4 + count * itemsize, where)
        return position + 4, count

    @overload
    def string(self, slot: int, label: str, *, required: Literal[True], empty: bool = False) -> str: ...
    @overload
    def string(self, slot: int, label: str) -> str | None: ...
    def string(self, slot: int, label: str, *, required: bool = False, empty: bool = False) -> str | None:
        """Return a string field; required ones must not be empty unless `empty`."""
        position = self._follow(slot, label)
        where = f"{self.where}.{label}"
        reader = self.reader
        if position is None:
            if required:
                raise reader.error("a required text is missing", where, self.position)
            return None
        reader._aligned(position, 4, where)
        reader.within(position, 4, where)
        length = reader.unpack("<I", position)[0]
        reader.claim(position, 4 + length + 1, where)
        if reader.buffer[position + 4 + length]:
            raise reader.error("a text does not end with a zero byte", where, position)
        if required and not length and not empty:
            raise reader.error("a required text is empty", where, position)
        try:
            return str(reader.buffer[position + 4 : position + 4 + length], "utf-8")
        except UnicodeDecodeError as error:
            raise reader.error("a text is not UTF-8", where, position + 4 + error.start) from None

    @overload
    def table(self, slot: int, label: str, *, required: Literal[True]) -> Table: ...
    @overload
    def table(self, slot: int, label: str) -> Table | None: ...
    def table(self, slot: int, label: str, *, required: bool = False) -> Table | None:
        """Return a child table."""
        position = self._follow(slot, label)
        where = f"{self.where}.{label}"
        if position is not None:
            return self.reader.table_at(position, where)
        if required:
            raise self.reader.error("a required table is missing", where, self.position)
        return None

    def tables(self, slot: int, label: str) -> Iterator[Table]:
        """Yield the tables of a vector, each checked when it is reached; nothing if the vector is absent."""
        found = self.vector(slot, label, itemsize=4)
        if found is None:
            return
        start, count = found
        for index in range(count):
            where = f"{self.where}.{label}[{index}]"
            position = start + 4 * index
            distance = self.reader.unpack("<I", position)[0]
            if not distance:
                raise self.reader.error("an offset is zero", where, position)
            yield self.reader.table_at(position + distance, where)
