"""Reads the structure of a checkpoint without trusting one byte of it.

`verify` walks every table, vector and string of the FlatBuffer with bounds and alignment checked before each
access, and returns records (names, types, shapes, byte ranges) that `codec` turns into arrays. No two objects
may share bytes, so no small file can describe large data. It never looks at tensor values, except that a
boolean is 0 or 1, and allocates nothing in proportion to what a file merely claims.

The schema has a fixed depth of six tables: there is no recursion that a file could deepen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from onward.checkpoint.dtypes import dtype_of
from onward.checkpoint.flatbuffer import Reader, Table

__all__ = ["GroupRecord", "Layout", "TensorRecord", "verify", "verify_external"]

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
        if table.vector_position(5, "string_data") is not None:
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
        found = table.vector(2, "dims", itemsize=8)
        where = f"{table.where}.dims"
        if found is None:
            raise self.reader.error("there is no shape", where, table.position)
        start, count = found
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
    values = (
        np.frombuffer(reader.buffer, np.uint8, count=length, offset=start)
        if length
        else np.zeros(0, np.uint8)
    )
    if values.size and values.max() > 1:
        raise reader.error("a boolean is neither 0 nor 1", where, start)
