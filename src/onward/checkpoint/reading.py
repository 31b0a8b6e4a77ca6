"""Reading checkpoint files safely: whole into memory, or streamed to check them.

Knows which file belongs to which: large checkpoints of the original keep their values in `<checkpoint>.data`.
Sizes are checked against what the file says about itself before memory is taken for them.
"""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from typing import IO

import numpy as np

from onward.checkpoint import codec, integrity
from onward.checkpoint.atomic import open_regular, read_all, read_into
from onward.checkpoint.state import CheckpointData
from onward.checkpoint.verify import IDENTIFIER, Layout, verify_external
from onward.errors import CheckpointError

__all__ = ["check_file", "data_path", "load"]

_CHUNK = 4 << 20
_FLATBUFFER_LIMIT = 2**31


def load(path: str | os.PathLike[str] | bytes | bytearray | memoryview) -> CheckpointData:
    """Return the content of a checkpoint file, or of its bytes, after verifying all of it; arrays are read-only.

    Files of the original runtime are read too, with a warning because they carry no checksum. Raises
    `CheckpointError` for anything that is missing, damaged or not a checkpoint.

    >>> load("missing")
    Traceback (most recent call last):
    onward.errors.CheckpointError: checkpoint 'missing': No such file or directory
    """
    if isinstance(path, bytes | bytearray | memoryview):
        # a copy with an address that every type is aligned to
        name, view = "the bytes given", np.frombuffer(path, np.uint8).copy().data
    else:
        name = os.fspath(path)
        try:
            with open_regular(name) as file:
                size = _plausible_size(file, name)
                view = read_all(file, size).data
        except OSError as error:
            raise CheckpointError(name, error.strerror or str(error)) from error
    payload, layout, sealed = codec.open_layout(view, path=name)
    if layout.data_beside and not isinstance(path, str | os.PathLike):
        raise CheckpointError(name, "its values lie in a file beside it: pass the path")
    data = _read_beside(layout, name).data if layout.data_beside else None
    result = codec.arrays(layout, payload, data, path=name)
    if not sealed:
        codec.warn_unsealed(name)
    return result


def check_file(path: str | os.PathLike[str], *, digest: bytes | None = None) -> tuple[Layout, bool]:
    """Verify a file as `load` would, without taking memory for it; return its layout and if it is sealed.

    With `digest` the file must be sealed with exactly that one, and its bytes are known to be right.
    """
    name = os.fspath(path)
    try:
        with open_regular(name) as file:
            size = _plausible_size(file, name)
            sealed = _check_trailer(file, size, name, digest)
        # The pages were just read, so looking at the few that hold structure does not touch the disk again.
        mapped = np.memmap(name, np.uint8, mode="r", shape=(size,)).data
        layout = codec.layout_of(mapped, sealed=sealed, path=name)
        if layout.data_beside:
            with _open_beside(name) as beside:
                _check_beside(layout, os.fstat(beside.fileno()), name)
    except OSError as error:
        raise CheckpointError(name, error.strerror or str(error)) from error
    return layout, sealed


def data_path(path: str | os.PathLike[str]) -> Path:
    """Return where the original runtime looks for the large values of a checkpoint."""
    return Path(os.fspath(path) + ".data")


def _plausible_size(file: IO[bytes], path: str) -> int:
    """Return the file's size after a look at its first and last bytes; a sparse giant is refused here."""
    size = os.fstat(file.fileno()).st_size
    head = file.read(8 + integrity.BLOCK_SIZE) or b""
    if head[4:8] != IDENTIFIER:
        raise CheckpointError(
            path, f"not a checkpoint: identifier {head[4:8]!r}", field="identifier", offset=4
        )
    if integrity.block_flags(memoryview(head), path=path) is None:
        if size >= _FLATBUFFER_LIMIT:
            raise CheckpointError(path, f"{size} bytes are more than a checkpoint without seal can have")
    else:
        file.seek(max(size - integrity.TRAILER_SIZE, 0))
        integrity.check_length(file.read(integrity.TRAILER_SIZE), size, path=path)
    file.seek(0)
    return size


def _check_trailer(file: IO[bytes], size: int, path: str, digest: bytes | None) -> bool:
    """Hash a file in pieces and compare; return whether it has a trailer."""
    file.seek(max(size - integrity.TRAILER_SIZE, 0))
    tail = file.read(integrity.TRAILER_SIZE)
    sealed = integrity.check_length(tail, size, path=path, required=digest is not None)
    if not sealed:
        return False
    if digest is not None:
        integrity.check_digest(digest, tail[-integrity.DIGEST_SIZE :], size, path=path)
        return True
    file.seek(0)
    sha = sha256()
    chunk = memoryview(bytearray(_CHUNK))
    left = size - integrity.DIGEST_SIZE
    while left:
        count = read_into(file, chunk[: min(left, _CHUNK)])
        sha.update(chunk[:count])
        left -= count
    integrity.check_digest(sha.digest(), tail[-integrity.DIGEST_SIZE :], size, path=path)
    return True


def _open_beside(path: str):
    return open_regular(data_path(path), follow=False)


def _read_beside(layout: Layout, path: str) -> np.ndarray:
    beside = str(data_path(path))
    try:
        with _open_beside(path) as file:
            used = _check_beside(layout, os.fstat(file.fileno()), path)
            return read_all(file, used)
    except OSError as error:
        raise CheckpointError(path, f"its values are in '{beside}': {error.strerror or error}") from error


def _check_beside(layout: Layout, found: os.stat_result, path: str) -> int:
    """Check size and links of the second file; return how many of its bytes are used."""
    if found.st_nlink > 1:
        raise CheckpointError(
            path, f"'{data_path(path)}' has several names (hard links); copy it", field="external data"
        )
    verify_external(layout, found.st_size, path=str(data_path(path)))
    external = [record for record in layout.tensors() if record.external]
    used = max(record.start + record.nbytes for record in external)
    if used > sum(record.nbytes for record in external) + 4096 * len(external):
        raise CheckpointError(
            path, f"'{data_path(path)}' has gaps between its tensors", field="external data"
        )
    return used
