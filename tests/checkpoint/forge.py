"""Builds FlatBuffers with the checkpoint schema's slots that no honest writer would make."""

from __future__ import annotations

import flatbuffers
import numpy as np


class Forge:
    """A builder whose parts can be used twice, left out, or given impossible sizes."""

    def __init__(self) -> None:
        self.builder = flatbuffers.Builder(1 << 16)

    def text(self, value: str) -> int:
        return self.builder.CreateString(value)

    def raw(self, content: bytes) -> int:
        return self.builder.CreateByteVector(content)

    def dims(self, *dims: int) -> int:
        return self.builder.CreateNumpyVector(np.array(dims, np.int64))

    def offsets(self, items: list[int]) -> int:
        self.builder.StartVector(4, len(items), 4)
        for item in reversed(items):
            self.builder.PrependUOffsetTRelative(item)
        return self.builder.EndVector()

    def table(self, slots: int, **fields: tuple[str, int]) -> int:
        """Make a table; fields are given as `s3=("Int32", 1)` or `s0=("Ref", offset)`."""
        self.builder.StartObject(slots)
        for slot, (kind, value) in fields.items():
            if kind == "Ref":
                self.builder.PrependUOffsetTRelativeSlot(int(slot[1:]), value, 0)
            else:
                getattr(self.builder, f"Prepend{kind}Slot")(int(slot[1:]), value, None)
        return self.builder.EndObject()

    def tensor(
        self, name: str, *, dims: int, raw: int | None = None, external: int | None = None, code: int = 1
    ) -> int:
        fields: dict[str, tuple[str, int]] = {
            "s0": ("Ref", self.text(name)),
            "s2": ("Ref", dims),
            "s3": ("Int32", 1),
        }
        if raw is not None:
            fields["s4"] = ("Ref", raw)
        if external is not None:
            fields["s6"] = ("Int64", external)
        return self.table(7, **fields)

    def module(self, trainable: int, frozen: int, *, external: bool = False) -> int:
        return self.table(
            4, s0=("Ref", trainable), s1=("Ref", frozen), s2=("Bool", 0), s3=("Bool", int(external))
        )

    def finish(self, module: int, *, groups: int = 0, bag: int = 0, version: int = 2) -> bytes:
        fields = {"s0": ("Int32", version), "s1": ("Ref", module), "s2": ("Ref", groups), "s3": ("Ref", bag)}
        self.builder.Finish(self.table(4, **fields), file_identifier=b"ODTC")
        return bytes(self.builder.Output())
