"""Reads the structure of a checkpoint without trusting one byte of it.

`verify` walks every table, vector and string of the FlatBuffer with bounds and alignment checked before each
access, and returns records (names, types, shapes, byte ranges) that `codec` turns into arrays. No two objects
may share bytes, so no small file can describe large data. It never looks at tensor values, except that a
boolean is 0 or 1, and allocates nothing in proportion to what a file merely claims.

The schema has a fixed depth of six tables: there is no recursion that a file could deepen.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import numpy as np

from onward.checkpoint.content import dtype_of
from onward.errors import CheckpointError

_SIZES = {"i": 4, "q": 8, "f": 4, "B": 1}
# A table is a few bytes of a file and an object here: more of them than any model has would only take memory.
MAX_TABLES = 1_000_000


class Reader:
    """A buffer together with what has been claimed of it; `size` is given only to check ranges of a file."""

    def __init__(self, buffer: memoryview, *, path: str, size: int | None = None) -> None:
        self.buffer = buffer
        self.path = path
        self.size = len(buffer) if size is None else size
        # plain arrays: a tuple for each of a million objects would take more than the file
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
        # Without this a file of 668 KB whose 4,000 tensors name the same bytes would take 2.4 GB.
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
        actual = bytes(self.buffer[4:8])
        if actual != identifier:
            raise self.error(
                f"not a checkpoint: identifier {actual!r}, expected {identifier!r}", "identifier", 4
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
        # tables of one kind share a vtable, which may be claimed only once
        if position in self._vtables:
            return self._vtables[position]
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
        # readers in C++ load numbers from where they lie
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

    def follow(self, slot: int, label: str) -> int | None:
        """Return where a field's vector, text or table is, without reading it; None if it is absent."""
        position = self._field(slot, 4, label)
        if position is None:
            return None
        distance = self.reader.unpack("<I", position)[0]
        if not distance:
            raise self.reader.error("an offset is zero", f"{self.where}.{label}", position)
        return position + distance

    def vector(self, slot: int, label: str, *, itemsize: int) -> tuple[int, int] | None:
        """Return (position of the first element, number of elements) of a vector of scalars."""
        position = self.follow(slot, label)
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
        position = self.follow(slot, label)
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
        # readers in C++ take a text as it lies, up to its zero
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
        position = self.follow(slot, label)
        where = f"{self.where}.{label}"
        if position is not None:
            return self.reader.table_at(position, where)
        if required:
            raise self.reader.error("a required table is missing", where, self.position)
        return None

    def tables(self, slot: int, label: str) -> Iterator[Table]:
        """Yield the tables of a vector, each checked when it is reached; nothing if the vector is absent."""
        vector = self.vector(slot, label, itemsize=4)
        if vector is None:
            return
        start, count = vector
        for index in range(count):
            where = f"{self.where}.{label}[{index}]"
            position = start + 4 * index
            distance = self.reader.unpack("<I", position)[0]
            if not distance:
                raise self.reader.error("an offset is zero", where, position)
            yield self.reader.table_at(position + distance, where)


IDENTIFIER = b"ODTC"
VERSION = 2
MAX_RANK = 32
_BOOL = 9


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where one tensor is: `start` counts in the payload, or in the data beside it if `external`."""

    name: str
    code: int
    dims: tuple[int, ...]
    start: int
    nbytes: int
    external: bool


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One optimizer group: `slots` has the tensors of each parameter."""

    name: str
    step: int
    initial_learning_rate: float
    slots: dict[str, list[TensorRecord]]


@dataclass(slots=True)
class Layout:
    """The verified content of a checkpoint file, tensors as byte ranges.

    `data_beside` says that external tensors are in a second file, as the original writes them.
    """

    trainable: list[TensorRecord] = field(default_factory=list)
    frozen: list[TensorRecord] = field(default_factory=list)
    groups: list[GroupRecord] = field(default_factory=list)
    properties: dict[str, int | float | str] = field(default_factory=dict)
    nominal: bool = False
    data_beside: bool = False

    def tensors(self) -> list[TensorRecord]:
        """Return the records of all tensors: parameters, then optimizer state."""
        state = [record for group in self.groups for slots in group.slots.values() for record in slots]
        return [*self.trainable, *self.frozen, *state]


def verify(payload: memoryview, *, path: str, data_in_file: bool = False) -> Layout:
    """Return the layout of a checkpoint's bytes (without trailer); `CheckpointError` if anything is off.

    `data_in_file` says that external tensors are behind the FlatBuffer, not in a second file.
    """
    reader = Reader(payload, path=path)
    # identifier before version: another kind of file has no version
    root = reader.root(IDENTIFIER)
    version = root.scalar(0, "i", "version", default=0)
    if version != VERSION:
        raise reader.error(f"version {version}; only version {VERSION} is known", "version", root.position)
    layout = Layout()
    layout.properties = _properties(root)
    walk = _Walk(reader, in_file=data_in_file)
    _module_state(root, layout, walk)
    _groups(root, layout, walk)
    layout.data_beside = walk.external_seen
    reader.check_overlaps()
    return layout


def verify_external(layout: Layout, size: int, *, path: str) -> None:
    """Check that the external tensors of a layout lie within a data file of `size` bytes, without overlap."""
    reader = Reader(memoryview(b""), path=path, size=size)
    for record in layout.tensors():
        if record.external:
            reader.claim(record.start, record.nbytes, f"external data of '{record.name}'")
    reader.check_overlaps()


@dataclass(slots=True)
class _Walk:
    """What the walk over tensors has to remember: where external data is and whether any was seen."""

    reader: Reader
    in_file: bool
    external_allowed: bool = False
    external_seen: bool = False

    def tensor(self, table: Table, *, nominal: bool) -> TensorRecord:
        reader = self.reader
        name = table.string(0, "name", required=True)
        table.where += f" '{name}'"
        code = table.scalar(3, "i", "data_type", default=0)
        try:
            itemsize = dtype_of(code).itemsize
        except ValueError as error:
            raise reader.error(str(error), f"{table.where}.data_type", table.position) from None
        # no training state has strings, and their sizes would need a check of their own
        if table.follow(5, "string_data") is not None:
            raise reader.error("string tensors are not allowed", f"{table.where}.string_data", table.position)
        raw = table.vector(4, "raw_data", itemsize=1)
        external = table.scalar(6, "q", "external_data_offset", default=-1)
        if nominal:  # the original leaves placeholders here when it saves a nominal state again
            table.vector(2, "dims", itemsize=8)
            return TensorRecord(name, code, (), 0, 0, False)
        nbytes, dims = self._extent(table, itemsize)
        if external == -1:
            if raw is None and nbytes:
                raise reader.error("there is no data", f"{table.where}.raw_data", table.position)
            start, length = raw if raw is not None else (0, 0)
            if length != nbytes:
                raise reader.error(
                    f"shape {list(dims)} needs {nbytes} bytes, there are {length}",
                    f"{table.where}.raw_data",
                    start,
                )
            if code == _BOOL:
                _check_booleans(reader, start, length, f"{table.where}.raw_data")
            return TensorRecord(name, code, dims, start, nbytes, False)
        return self._external(table, TensorRecord(name, code, dims, external, nbytes, not self.in_file), raw)

    def _extent(self, table: Table, itemsize: int) -> tuple[int, tuple[int, ...]]:
        vector = table.vector(2, "dims", itemsize=8)
        where = f"{table.where}.dims"
        if vector is None:
            raise self.reader.error("there is no shape", where, table.position)
        start, count = vector
        if count > MAX_RANK:
            raise self.reader.error(f"{count} dimensions; at most {MAX_RANK} are allowed", where, start)
        dims = tuple(self.reader.unpack(f"<{count}q", start))
        # Python integers do not overflow; zeros are left out so that (0, 2**62) is refused like (1, 2**62).
        elements = itemsize
        for dim in dims:
            if dim < 0:
                raise self.reader.error(f"negative dimension {dim}", where, start)
            elements *= max(dim, 1)
        if elements >= 2**62:
            raise self.reader.error(f"shape {list(dims)} is too large", where, start)
        return (0 if 0 in dims else elements), dims

    def _external(self, table: Table, record: TensorRecord, raw: tuple[int, int] | None) -> TensorRecord:
        where = f"{table.where}.external_data_offset"
        if raw is not None and raw[1]:
            raise self.reader.error("data both inside and outside", where, table.position)
        if not self.external_allowed:
            raise self.reader.error("external data in a file that says it has none", where, table.position)
        if record.start < 0:
            raise self.reader.error(f"negative offset {record.start}", where, table.position)
        if record.external:
            self.external_seen = True
        else:
            self.reader.claim(record.start, record.nbytes, where)
            if record.code == _BOOL:
                _check_booleans(self.reader, record.start, record.nbytes, where)
        return record


def _module_state(root: Table, layout: Layout, walk: _Walk) -> None:
    state = root.table(1, "module_state", required=True)
    # before the tensors: it says whether they have values
    layout.nominal = state.boolean(2, "is_nominal_state")
    walk.external_allowed = state.boolean(3, "has_external_data")
    names: set[str] = set()
    for slot, label, records in (
        (0, "requires_grad_params", layout.trainable),
        (1, "frozen_params", layout.frozen),
    ):
        for table in state.tables(slot, label):
            record = walk.tensor(table, nominal=layout.nominal)
            _unique(names, record.name, table)
            records.append(record)


def _groups(root: Table, layout: Layout, walk: _Walk) -> None:
    names: set[str] = set()
    for table in root.tables(2, "optimizer_groups"):
        name = table.string(0, "group_name", required=True)
        table.where += f" '{name}'"
        _unique(names, name, table)
        step = table.scalar(1, "q", "step", default=0)
        rate = table.scalar(2, "f", "initial_learning_rate", default=0.0)
        slots: dict[str, list[TensorRecord]] = {}
        for state in table.tables(3, "optimizer_states"):
            parameter = state.string(0, "param_name", required=True)
            state.where += f" '{parameter}'"
            if parameter in slots:
                raise walk.reader.error(f"'{parameter}' occurs twice", state.where, state.position)
            seen: set[str] = set()
            slots[parameter] = []
            for momentum in state.tables(1, "momentums"):
                record = walk.tensor(momentum, nominal=False)
                _unique(seen, record.name, momentum)
                slots[parameter].append(record)
        layout.groups.append(GroupRecord(name, step, rate, slots))


def _properties(root: Table) -> dict[str, int | float | str]:
    properties: dict[str, int | float | str] = {}
    bag = root.table(3, "property_bag")
    if bag is None:
        return properties
    names: set[str] = set()
    for slot, label, kind in ((0, "ints", "q"), (1, "floats", "f"), (2, "strings", "s")):
        for table in bag.tables(slot, label):
            name = table.string(0, "name", required=True)
            _unique(names, name, table)
            if kind == "s":
                properties[name] = table.string(1, "value", required=True, empty=True)
            else:
                properties[name] = table.scalar(1, kind, "value", default=0 if kind == "q" else 0.0)
    return properties


def _unique(names: set[str], name: str, table: Table) -> None:
    if name in names:
        raise table.reader.error(f"'{name}' occurs twice", table.where, table.position)
    names.add(name)


def _check_booleans(reader: Reader, start: int, length: int, where: str) -> None:
    # numpy reads a 2 as a bool that equals neither True nor False
    if length and np.frombuffer(reader.buffer, np.uint8, count=length, offset=start).max() > 1:
        raise reader.error("a boolean is neither 0 nor 1", where, start)
