"""TensorBoard event files, written without TensorBoard: scalars only.

An event file is a row of records: a length, its checksum, a protobuf `Event`, its checksum. The few fields that a
scalar needs are written by hand: tensorboardX, measured beside this, takes several times as long for an update's
figures, and more than a second to load.
"""

from __future__ import annotations

import functools
import math
import os
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from onward.train.callbacks import Callback

if TYPE_CHECKING:
    from onward.train.trainer import Trainer

__all__ = ["EventFile"]


class EventFile(Callback):
    """Writes the figures of every update and epoch of a run into a folder that TensorBoard reads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None

    def on_start(self, trainer: Trainer) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard takes the files that have `tfevents` in their names
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.onward"
        self._file = open(self._folder / name, "wb")  # noqa: SIM115 - closed when the run ends
        # the version of the format, which readers want first
        self._write(_text(3, "brain.Event:2"))

    def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self._scalars("update", row, row["step"])

    def on_epoch(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self._scalars("epoch", row, row["step"])
        if self._file is not None:
            # a run is watched while it goes on
            self._file.flush()

    def on_end(self, trainer: Trainer) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _scalars(self, group: str, row: dict[str, Any], step: int) -> None:
        values = b"".join(
            _part(1, _text(1, f"{group}/{name}") + _float(2, float(value)))
            for name, value in row.items()
            if isinstance(value, int | float) and name not in ("step", "epoch") and math.isfinite(value)
        )
        self._write(_number(2, step) + _part(5, values))

    def _write(self, fields: bytes) -> None:
        if self._file is None:
            return
        event = _double(1, time.time()) + fields
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: str) -> bytes:
    return _part(field, value.encode())


def _part(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@functools.cache
def _remainders() -> list[int]:
    """CRC-32C of each byte: whole bytes at a time take an eighth of the time of bits."""
    remainders = list(range(256))
    for _ in range(8):
        remainders = [crc >> 1 ^ (0x82F63B78 if crc & 1 else 0) for crc in remainders]
    return remainders


def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and offset as the format wants it."""
    crc, remainders = 0xFFFFFFFF, _remainders()
    for byte in data:
        crc = crc >> 8 ^ remainders[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
