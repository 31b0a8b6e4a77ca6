"""The FlatBuffer of a checkpoint: names, types, shapes and places of tensors, but not their bytes.

Knows the schema's slots and how to point a FlatBuffer at bytes that will follow it in the file. Where each
tensor goes is decided in `codec`.
"""

from __future__ import annotations

from dataclasses import dataclass

import flatbuffers
import numpy as np

from onward.checkpoint import integrity
from onward.checkpoint.dtypes import code_of
from onward.checkpoint.state import NominalTensor, PropertyValue
from onward.checkpoint.verify import IDENTIFIER, VERSION

__all__ = ["ALIGNMENT", "Entry", "Group", "Plan", "build_metadata"]

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
    builder.PrependInt32Slot(0, VERSION, 0)
    builder.PrependUOffsetTRelativeSlot(1, module, 0)
    builder.PrependUOffsetTRelativeSlot(2, group_vector, 0)
    builder.PrependUOffsetTRelativeSlot(3, bag, 0)
    builder.Finish(builder.EndObject(), file_identifier=IDENTIFIER)
    return integrity.add_block(bytes(builder.Output()), data_in_file=bool(plan.external_size))


def _build_module(builder: flatbuffers.Builder, plan: Plan, external_base: int) -> int:
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
    name = builder.CreateString(entry.name)
    nominal = isinstance(entry.tensor, NominalTensor)
    shape = () if isinstance(entry.tensor, NominalTensor) else entry.tensor.shape
    code = entry.tensor.dtype if isinstance(entry.tensor, NominalTensor) else code_of(entry.tensor.dtype)
    no_values = _offset_vector(builder, []) if nominal else 0
    builder.StartVector(8, len(shape), 8)
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
        builder.PrependInt64Slot(6, external_base + entry.offset, -1)
    else:
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
        elif isinstance(value, int):
            builder.PrependInt64Slot(1, value, 0)
            ints.append(builder.EndObject())
        else:
            builder.PrependFloat32Slot(1, value, 0.0)
            floats.append(builder.EndObject())
    vectors = [_offset_vector(builder, found) if found else 0 for found in (ints, floats, strings)]
    builder.StartObject(3)
    for slot, vector in enumerate(vectors):
        builder.PrependUOffsetTRelativeSlot(slot, vector, 0)
    return builder.EndObject()


def _offset_vector(builder: flatbuffers.Builder, offsets: list[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return builder.EndVector()
