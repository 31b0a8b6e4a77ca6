"""Encodes checkpoint data as bytes and decodes it, in the layout that SPEC.md describes.

The writer builds the small FlatBuffer of names and shapes in memory and streams the arrays behind it, so it
needs no second copy of the parameters. The reader returns views over bytes that `verify` has accepted.
`store` handles files.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import flatbuffers
import numpy as np

from onward.checkpoint import content, integrity
from onward.checkpoint.content import (
    ACCUMULATION_GROUP,
    ACCUMULATION_SLOT,
    EXTRA_PREFIX,
    PREFIX,
    CheckpointData,
    NominalTensor,
    OptimizerGroup,
    PropertyValue,
    code_of,
    little_endian_bytes,
    native_array,
    parse_extra,
    spell_extra,
)
from onward.checkpoint.verify import IDENTIFIER, VERSION, Layout, TensorRecord, verify, verify_external
from onward.errors import CheckpointError

ALIGNMENT = 64  # of tensor bytes in the file


@dataclass(slots=True)
class Entry:
    """One tensor to write and the place that was chosen for it."""

    name: str
    tensor: np.ndarray | NominalTensor
    external: bool = False
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return 0 if isinstance(self.tensor, NominalTensor) else self.tensor.nbytes


@dataclass(slots=True)
class Group:
    name: str
    step: int
    rate: float
    slots: list[tuple[str, list[Entry]]]


@dataclass(slots=True)
class Plan:
    """All tensors of a checkpoint with their places inside the FlatBuffer's tail or behind it."""

    trainable: list[Entry]
    frozen: list[Entry]
    groups: list[Group]
    nominal: bool = False
    inline_size: int = 0
    external_size: int = 0

    def parameters(self) -> list[Entry]:
        return self.trainable + self.frozen

    def state(self) -> list[Entry]:
        return [entry for group in self.groups for _, entries in group.slots for entry in entries]


def build_metadata(plan: Plan, properties: dict[str, PropertyValue], *, external_base: int) -> bytes:
    """Return the FlatBuffer up to where tensor bytes begin; its length is a multiple of the alignment.

    A builder works from the end of the buffer to its start and counts positions from the end. Here it starts
    at the end of the metadata, so the tensor bytes that follow in the file have negative positions.
    """
    builder = flatbuffers.Builder(1024)
    builder.Prep(ALIGNMENT, 0)
    groups = [_build_group(builder, group, external_base) for group in plan.groups]
    group_vector = _offset_vector(builder, groups) if groups else 0
    module = _build_module(builder, plan, external_base)
    bag = _build_properties(builder, properties)
    builder.StartObject(4)
    # slot numbers are the schema's order of fields; they are the format, and never change
    builder.PrependInt32Slot(0, VERSION, 0)
    builder.PrependUOffsetTRelativeSlot(1, module, 0)
    builder.PrependUOffsetTRelativeSlot(2, group_vector, 0)
    builder.PrependUOffsetTRelativeSlot(3, bag, 0)
    builder.Finish(builder.EndObject(), file_identifier=IDENTIFIER)
    return integrity.add_block(bytes(builder.Output()), data_in_file=bool(plan.external_size))


def _build_module(builder: flatbuffers.Builder, plan: Plan, external_base: int) -> int:
    # children come before their table: a builder cannot begin one inside another
    frozen = _offset_vector(builder, [_build_tensor(builder, entry, external_base) for entry in plan.frozen])
    trainable = _offset_vector(
        builder, [_build_tensor(builder, entry, external_base) for entry in plan.trainable]
    )
    builder.StartObject(4)
    builder.PrependUOffsetTRelativeSlot(0, trainable, 0)
    builder.PrependUOffsetTRelativeSlot(1, frozen, 0)
    builder.PrependBoolSlot(2, plan.nominal, False)
    builder.PrependBoolSlot(3, bool(plan.external_size), False)
    return builder.EndObject()


def _build_tensor(builder: flatbuffers.Builder, entry: Entry, external_base: int) -> int:
    # strings and vectors before their table: flatbuffers refuses to nest objects that are being built
    name = builder.CreateString(entry.name)
    nominal = isinstance(entry.tensor, NominalTensor)
    shape = () if isinstance(entry.tensor, NominalTensor) else entry.tensor.shape
    code = entry.tensor.dtype if isinstance(entry.tensor, NominalTensor) else code_of(entry.tensor.dtype)
    # as the original writes it: an empty vector, not none
    no_values = _offset_vector(builder, []) if nominal else 0
    builder.StartVector(8, len(shape), 8)
    # prepended one by one, so the last comes first
    for dim in reversed(shape):
        builder.PrependInt64(dim)
    dims = builder.EndVector()
    builder.StartObject(7)
    builder.PrependUOffsetTRelativeSlot(0, name, 0)
    builder.PrependUOffsetTRelativeSlot(2, dims, 0)
    builder.PrependInt32Slot(3, code, 0)
    if nominal:
        builder.PrependUOffsetTRelativeSlot(4, no_values, 0)
    elif entry.external:
        # the schema's default, -1, means that there is none: an offset of 0 has to be written
        builder.PrependInt64Slot(6, external_base + entry.offset, -1)
    else:
        # the vector begins at its length, four bytes before the values
        builder.PrependUOffsetTRelativeSlot(4, 4 - entry.offset, 0)
    return builder.EndObject()


def _build_group(builder: flatbuffers.Builder, group: Group, external_base: int) -> int:
    states = []
    for parameter, entries in group.slots:
        name = builder.CreateString(parameter)
        tensors = _offset_vector(builder, [_build_tensor(builder, entry, external_base) for entry in entries])
        builder.StartObject(2)
        builder.PrependUOffsetTRelativeSlot(0, name, 0)
        builder.PrependUOffsetTRelativeSlot(1, tensors, 0)
        states.append(builder.EndObject())
    vector = _offset_vector(builder, states)
    name = builder.CreateString(group.name)
    builder.StartObject(4)
    builder.PrependUOffsetTRelativeSlot(0, name, 0)
    builder.PrependInt64Slot(1, group.step, 0)
    # 32 bits is the schema's; the exact rate is among the extras
    builder.PrependFloat32Slot(2, group.rate, 0.0)
    builder.PrependUOffsetTRelativeSlot(3, vector, 0)
    return builder.EndObject()


def _build_properties(builder: flatbuffers.Builder, properties: dict[str, PropertyValue]) -> int:
    ints, floats, strings = [], [], []
    for key, value in properties.items():
        name = builder.CreateString(key)
        text = builder.CreateString(value) if isinstance(value, str) else 0
        builder.StartObject(2)
        builder.PrependUOffsetTRelativeSlot(0, name, 0)
        if isinstance(value, str):
            builder.PrependUOffsetTRelativeSlot(1, text, 0)
            strings.append(builder.EndObject())
        # bools have become ints in check_property
        elif isinstance(value, int):
            builder.PrependInt64Slot(1, value, 0)
            ints.append(builder.EndObject())
        else:
            builder.PrependFloat32Slot(1, value, 0.0)
            floats.append(builder.EndObject())
    vectors = [_offset_vector(builder, part) if part else 0 for part in (ints, floats, strings)]
    builder.StartObject(3)
    for slot, vector in enumerate(vectors):
        builder.PrependUOffsetTRelativeSlot(slot, vector, 0)
    return builder.EndObject()


def _offset_vector(builder: flatbuffers.Builder, offsets: list[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return builder.EndVector()


# below the 2 GiB that 32-bit offsets reach, with room for names and shapes
EXTERNAL_THRESHOLD = 1800 << 20
_EXTERNAL_MINIMUM = 64  # smaller tensors stay inside, as in the original
_LIMIT = 2**31 - 4096  # FlatBuffer offsets are 32 bits; readers in C++ refuse from 2 GiB


class UncheckedCheckpointWarning(UserWarning):
    """A checkpoint without integrity trailer was loaded: its structure was checked, its values cannot be."""


def encode(
    data: CheckpointData, stream: integrity.Writable, *, external_threshold: int = EXTERNAL_THRESHOLD
) -> bytes:
    """Write `data` to a binary stream, trailer included, and return its sha256; equal data gives equal bytes.

    Tensors go behind the FlatBuffer when they are larger than `external_threshold` bytes together. Raises
    `TypeError` or `ValueError`, before the first byte, for data that a checkpoint cannot hold.

    >>> import io
    >>> stream = io.BytesIO()
    >>> digest = encode(CheckpointData(trainable={"w": np.ones(2, np.float32)}), stream)
    >>> decode(stream.getvalue()).trainable["w"]
    array([1., 1.], dtype=float32)
    """
    # before the first byte: a stream that is half written cannot be taken back
    content.check(data)
    plan = _place(_plan(data), external_threshold)
    properties = _all_properties(data)
    metadata = build_metadata(plan, properties, external_base=0)
    if plan.external_size:
        # The offsets are fixed-width, so the second build has the length of the first.
        metadata = build_metadata(plan, properties, external_base=len(metadata) + plan.inline_size)
    if len(metadata) + plan.inline_size > _LIMIT:
        raise ValueError(
            f"{len(metadata) + plan.inline_size} bytes of names, shapes and small tensors do not fit into "
            "one checkpoint; save fewer parameters together or lower external_threshold"
        )
    # one pass over the arrays: written and hashed at once, never joined into one buffer
    out = integrity.HashingWriter(stream)
    out.write(metadata)
    _write_region(out, (e for e in plan.parameters() + plan.state() if not e.external), prefixed=True)
    _pad_to(out, len(metadata) + plan.inline_size)
    _write_region(out, (e for e in plan.parameters() + plan.state() if e.external), prefixed=False)
    return out.write_trailer()


def decode(
    buffer: bytes | bytearray | memoryview,
    *,
    path: str = "<bytes>",
    data: memoryview | None = None,
) -> CheckpointData:
    """Return the content of a checkpoint's bytes; arrays are read-only views over them where aligned.

    `data` is the content of the second file that the original writes for large models. Everything is verified
    before it is used; anything wrong raises `CheckpointError`. `path` is for messages.
    """
    # the digest before the structure: a damaged file is called damaged, not strange
    payload, layout, has_trailer = open_layout(memoryview(buffer).cast("B"), path=path)
    if layout.data_beside:
        if data is None:
            raise CheckpointError(
                path, "its values are in a second file, which was not given", field="external data"
            )
        verify_external(layout, len(data), path=path)
    result = arrays(layout, payload, data, path=path)
    if not has_trailer:
        warn_unchecked(path)
    return result


def open_layout(buffer: memoryview, *, path: str) -> tuple[memoryview, Layout, bool]:
    """Check trailer and structure; return the payload, its layout and whether there is a trailer."""
    has_trailer = integrity.check_trailer(buffer, path=path)
    layout = layout_of(buffer, has_trailer=has_trailer, path=path)
    return buffer[: len(buffer) - integrity.TRAILER_SIZE] if has_trailer else buffer, layout, has_trailer


def warn_unchecked(path: str) -> None:
    """Warn that a file without a checksum was loaded."""
    warnings.warn(
        f"checkpoint '{path}' has no checksum (Onward did not write it): its structure is sound, "
        "but damaged values would go unnoticed; save it again with Onward to protect it",
        UncheckedCheckpointWarning,
        stacklevel=3,
    )


def layout_of(buffer: memoryview, *, has_trailer: bool, path: str) -> Layout:
    """Verify the structure of a checkpoint whose trailer, if it `has_trailer`, has been checked."""
    payload = buffer[: len(buffer) - integrity.TRAILER_SIZE] if has_trailer else buffer
    # files of the original have no block, and their large tensors beside them
    flags = integrity.block_flags(payload, path=path) or 0
    return verify(payload, path=path, data_in_file=bool(flags & integrity.DATA_IN_FILE))


def arrays(layout: Layout, payload: memoryview, data: memoryview | None, *, path: str) -> CheckpointData:
    """Return checkpoint data whose arrays view the verified bytes."""

    def tensor(record: TensorRecord) -> np.ndarray:
        # ours are external to the FlatBuffer, but in the same file
        source = data if record.external and data is not None else payload
        return native_array(source, record.start, code=record.code, dims=record.dims)

    result = CheckpointData(nominal=layout.nominal)
    for records, tensors in ((layout.trainable, result.trainable), (layout.frozen, result.frozen)):
        for record in records:
            tensors[record.name] = NominalTensor(record.code) if layout.nominal else tensor(record)
    for group in layout.groups:
        slots = {name: {r.name: tensor(r) for r in records} for name, records in group.slots.items()}
        # the schema has no place for gradients; as a group of optimizer state the original keeps them when it
        # saves
        if group.name == ACCUMULATION_GROUP:
            for name, arrays_by_slot in slots.items():
                if list(arrays_by_slot) != [ACCUMULATION_SLOT]:
                    raise CheckpointError(
                        path, f"accumulated gradient of '{name}' is malformed", field=group.name
                    )
                result.accumulation[name] = arrays_by_slot[ACCUMULATION_SLOT]
        else:
            result.optimizer.append(
                OptimizerGroup(group.name, group.step, group.initial_learning_rate, slots)
            )
    _split_properties(layout.properties, result, path)
    return result


def _split_properties(properties: dict[str, PropertyValue], result: CheckpointData, path: str) -> None:
    for name, value in properties.items():
        if name.startswith(EXTRA_PREFIX):
            try:
                result.extras[name.removeprefix(EXTRA_PREFIX)] = parse_extra(str(value))
            except ValueError as error:
                raise CheckpointError(path, f"property '{name}' is malformed: {error}", field=name) from None
        # refused, not ignored: it may change what the rest means
        elif name.startswith(PREFIX):
            raise CheckpointError(
                path,
                f"property '{name}' is unknown: a newer Onward wrote this file; update to read it",
                field=name,
            )
        else:
            result.properties[name] = value


def _all_properties(data: CheckpointData) -> dict[str, PropertyValue]:
    properties: dict[str, PropertyValue] = {}
    for name, value in data.properties.items():
        if name.startswith(PREFIX):
            raise ValueError(f"property '{name}': names that start with '{PREFIX}' are reserved")
        properties[name] = content.check_property(name, value)
    for name, value in data.extras.items():
        properties[EXTRA_PREFIX + name] = spell_extra(value)
    return properties


def _plan(data: CheckpointData) -> Plan:
    groups = []
    for group in data.optimizer:
        if group.name.startswith(PREFIX):
            raise ValueError(f"optimizer group '{group.name}': names that start with '{PREFIX}' are reserved")
        slots = [
            (parameter, [Entry(slot, np.asarray(array)) for slot, array in arrays_by_slot.items()])
            for parameter, arrays_by_slot in group.slots.items()
        ]
        groups.append(Group(group.name, group.step, group.initial_learning_rate, slots))
    if data.accumulation:
        buffers = [
            (name, [Entry(ACCUMULATION_SLOT, np.asarray(array))]) for name, array in data.accumulation.items()
        ]
        groups.append(Group(ACCUMULATION_GROUP, 0, 0.0, buffers))
    return Plan(
        [_entry(name, tensor) for name, tensor in data.trainable.items()],
        [_entry(name, tensor) for name, tensor in data.frozen.items()],
        groups,
        nominal=data.nominal,
    )


def _entry(name: str, tensor: np.ndarray | NominalTensor) -> Entry:
    return Entry(name, tensor if isinstance(tensor, NominalTensor) else np.asarray(tensor))


def _place(plan: Plan, threshold: int) -> Plan:
    """Choose each tensor's place: inside; else parameters outside; else optimizer state outside as well."""
    for candidates in (plan.parameters(), plan.state()):
        if sum(entry.nbytes for entry in plan.parameters() + plan.state() if not entry.external) <= threshold:
            break
        for entry in candidates:
            entry.external = entry.nbytes >= _EXTERNAL_MINIMUM
    inline = external = 0
    for entry in plan.parameters() + plan.state():
        if isinstance(entry.tensor, NominalTensor):
            continue
        if entry.external:
            entry.offset = _round_up(external, ALIGNMENT)
            external = entry.offset + entry.nbytes
        else:
            # Four bytes in front hold the vector's length, so the first offset is never 0.
            entry.offset = _round_up(inline + 4, ALIGNMENT if entry.nbytes >= ALIGNMENT else 8)
            inline = entry.offset + entry.nbytes
    plan.inline_size = _round_up(inline, ALIGNMENT)
    plan.external_size = external
    return plan


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _write_region(out: integrity.HashingWriter, entries: Iterable[Entry], *, prefixed: bool) -> None:
    """Write tensors at their offsets from here, each after its length if `prefixed`."""
    base = out.length
    for entry in entries:
        if isinstance(entry.tensor, NominalTensor):
            continue
        if prefixed:
            _pad_to(out, base + entry.offset - 4)
            out.write(entry.nbytes.to_bytes(4, "little"))
        else:
            _pad_to(out, base + entry.offset)
        out.write(little_endian_bytes(entry.tensor))


def _pad_to(out: integrity.HashingWriter, position: int) -> None:
    out.write(bytes(position - out.length))
