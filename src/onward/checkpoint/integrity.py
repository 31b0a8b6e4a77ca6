"""Integrity data around the FlatBuffer: a block after the file identifier and a trailer at the end.

The trailer (magic, payload length, sha256 of everything before the digest) detects corruption: bit rot,
truncation, partial copies. It does not detect tampering: who can change the payload can also recompute the digest.

The block says that there must be a trailer, so that removing it is detected, and where large tensors are.
FlatBuffers readers skip it. It is not a property, because onnxruntime-training copies properties into
the files that it saves itself, and those have no trailer.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from onward.errors import CheckpointError

# a whole line of the alignment, so that offsets only move
BLOCK_SIZE = 64  # keeps the alignment of everything behind it
TRAILER_SIZE = 48
DIGEST_SIZE = 32
MAGIC = b"ONWDSEAL"
DATA_IN_FILE = 1
_BLOCK_MAGIC = b"ONWDHEAD"
_BLOCK_VERSION = 1
_BLOCK = struct.Struct("<8sII")
_BLOCK_START = 8  # behind the root offset and the file identifier
_TRAILER_HEAD = struct.Struct("<8sQ")

_CHUNK = 4 << 20
# Bytes from which it is worth while to hand them to the other thread, and how many times it may lag behind.
_LARGE = 1 << 20
_AHEAD = 16


class Writable(Protocol):
    """Anything with a `write` that takes all the bytes it is given."""

    def write(self, data: memoryview | bytes, /) -> object: ...


class HashingWriter:
    """Writes bytes to a stream in bounded chunks while it counts them and hashes them in a second thread.

    What it is given must not change until the digest is asked for.
    """

    def __init__(self, stream: Writable) -> None:
        self._stream = stream
        self._sha = hashlib.sha256()
        self.length = 0
        # hashlib releases the interpreter's lock: hashing and writing overlap
        self._beside: ThreadPoolExecutor | None = None
        self._hashing: deque[Future[None]] = deque()
        self._waiting: list[memoryview] = []
        self._size_waiting = 0

    def write(self, data: memoryview | bytes) -> None:
        """Write all of `data`."""
        view = memoryview(data)
        self.length += len(view)
        for start in range(0, len(view), _CHUNK):
            piece = view[start : start + _CHUNK]
            self._waiting.append(piece)
            self._size_waiting += len(piece)
            if self._size_waiting >= _LARGE:
                self._hash_beside()
            # after it was handed over: hashing a piece takes about as long as writing it
            self._stream.write(piece)

    def _hash_beside(self) -> None:
        if self._beside is None:
            self._beside = ThreadPoolExecutor(1, thread_name_prefix="onward-hash")
        self._hashing.append(self._beside.submit(self._hash, self._waiting))
        self._waiting, self._size_waiting = [], 0
        # a slow processor must not let the queue hold the whole model
        if len(self._hashing) > _AHEAD:
            self._hashing.popleft().result()

    def _hash(self, pieces: list[memoryview]) -> None:
        for piece in pieces:
            self._sha.update(piece)

    def digest(self) -> bytes:
        """Return the sha256 of what was written so far."""
        if self._beside is not None:
            self._beside.shutdown()
            self._beside = None
        while self._hashing:
            self._hashing.popleft().result()
        self._hash(self._waiting)
        self._waiting, self._size_waiting = [], 0
        return self._sha.digest()

    def write_trailer(self) -> bytes:
        """Write the trailer, which nothing may follow, and return its digest."""
        head = _TRAILER_HEAD.pack(MAGIC, self.length)
        # the digest covers the trailer's own length, so that a cut file cannot pretend
        self._waiting.append(memoryview(head))
        digest = self.digest()
        self._stream.write(head + digest)
        return digest


def add_block(flatbuffer: bytes, *, data_in_file: bool) -> bytes:
    """Return a finished FlatBuffer with Onward's block between its identifier and the rest."""
    # Every offset but the root's is relative to its own place and moves along with its target.
    root = int.from_bytes(flatbuffer[:4], "little") + BLOCK_SIZE
    block = _BLOCK.pack(_BLOCK_MAGIC, _BLOCK_VERSION, DATA_IN_FILE if data_in_file else 0)
    return b"".join(
        (
            root.to_bytes(4, "little"),
            flatbuffer[4:8],
            block.ljust(BLOCK_SIZE, b"\0"),
            flatbuffer[_BLOCK_START:],
        )
    )


def block_flags(payload: memoryview, *, path: str) -> int | None:
    """Return the flags of Onward's block, None if the file has none."""
    if len(payload) < _BLOCK_START + BLOCK_SIZE:
        return None
    magic, version, flags = _BLOCK.unpack_from(payload, _BLOCK_START)
    if magic != _BLOCK_MAGIC:
        return None
    # a flag that we do not know may move the tensors elsewhere
    if version != _BLOCK_VERSION or flags & ~DATA_IN_FILE:
        raise CheckpointError(
            path,
            f"written by a newer Onward (block version {version}, flags {flags:#x}); update to read it",
            field="block",
            offset=_BLOCK_START + len(_BLOCK_MAGIC),
        )
    return flags


def check_length(tail: bytes | memoryview, size: int, *, path: str, required: bool = True) -> bool:
    """Check the head of the last 48 bytes of a file of `size` bytes; return whether there is a trailer."""
    end = size - TRAILER_SIZE
    magic, length = _TRAILER_HEAD.unpack_from(tail) if end >= 0 else (b"", 0)
    if magic != MAGIC:
        if required:
            raise CheckpointError(
                path, "the file is damaged: its trailer is missing", field="trailer", offset=size
            )
        return False
    # before hashing: a truncated file of gigabytes is refused at once
    if length != end:
        raise CheckpointError(
            path,
            f"the file is damaged: its trailer says {length} bytes, there are {end}",
            field="trailer.length",
            offset=end + len(MAGIC),
        )
    return True


def check_digest(computed: bytes, expected: bytes, size: int, *, path: str) -> None:
    """Raise unless the digest that was computed is the one in the trailer."""
    if computed != expected:
        raise CheckpointError(
            path,
            "the file is damaged: its content does not match its checksum",
            field="trailer.sha256",
            offset=size - DIGEST_SIZE,
        )


def check_trailer(buffer: memoryview, *, path: str) -> bool:
    """Return whether there is a trailer, after checking it; raise if it is wrong or missing but promised."""
    # without this, cutting the trailer off would pass as a file of the original
    promised = block_flags(buffer, path=path) is not None
    size = len(buffer)
    if not check_length(buffer[max(size - TRAILER_SIZE, 0) :], size, path=path, required=promised):
        return False
    sha = hashlib.sha256()
    hashed = size - DIGEST_SIZE
    for start in range(0, hashed, _CHUNK):
        sha.update(buffer[start : min(start + _CHUNK, hashed)])
    check_digest(sha.digest(), bytes(buffer[hashed:]), size, path=path)
    return True
