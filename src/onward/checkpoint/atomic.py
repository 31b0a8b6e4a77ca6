"""Atomic file replacement: after any crash there is the old file or the new one.

The new content goes to a temporary file beside the target, is flushed to the disk, read again and checked by the
caller, and only then takes the target's name. Temporary files that a killed process left behind are removed by
the next save to the same name; those of a living one are locked and stay.

`onward.files` writes sets of files. A checkpoint asks for more than it gives: what was written is read back, the
permissions of the old file stay, and an error says whether the new file is there.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from onward.errors import CheckpointError
from onward.files import finish_interrupted, lock_file, rename, sync_directory

if TYPE_CHECKING:
    from onward.checkpoint.integrity import Writable

NOT_COMMITTED = "not committed, the old one is kept"
UNCERTAIN = "committed, durability uncertain"
_SUFFIX = ".onward-tmp"
# large enough that a call costs nothing beside its bytes, small enough to stay in a cache between write and
# read
_CHUNK = 4 << 20
_FLUSH = 8 << 20


def replace_file(
    path: str | os.PathLike[str],
    write: Callable[[Writable], object],
    *,
    check: Callable[[Path], None] | None = None,
    before_commit: Callable[[Path], None] | None = None,
) -> Path:
    """Save what `write` produces under `path`, atomically, and return the real path.

    What is written is read back and compared. `check` gets the temporary file after it was flushed and raises
    if it is not good. `before_commit` gets the real path and runs last before the new file takes its name. A
    failure raises `CheckpointError` whose text says "not committed, the old one is kept" or "committed,
    durability uncertain".
    """
    path = Path(path)
    # a link stays a link: what it leads to is replaced
    target = Path(os.path.realpath(path))
    try:
        mode = _replaceable(target)
        # before writing, not after: what a killed save left may be the space that this one needs
        _sweep(target)
        # beside the target: a rename is atomic within one file system only
        with _temporary(target) as (file, temporary), ThreadPoolExecutor(1) as beside:
            stream = _ReadBack(file, beside)
            write(stream)
            if mode is not None and hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), mode)
            # the content before the name: a rename may reach the disk first, and leave an empty file
            os.fsync(file.fileno())
            stream.finish()
            if check is not None:
                check(temporary)
            if before_commit is not None:
                before_commit(target)
            if os.name == "nt":  # does not rename open files
                file.close()
            rename(temporary, target)
    except OSError as error:
        raise CheckpointError(path, f"{NOT_COMMITTED}: {error.strerror or error}") from error
    except CheckpointError as error:
        raise CheckpointError(
            path, f"{NOT_COMMITTED}: {error.reason}", field=error.field, offset=error.offset
        ) from error
    try:
        # the new name is an entry of the folder, which has its own place on the disk
        sync_directory(target.parent)
    except OSError as error:
        raise CheckpointError(path, f"{UNCERTAIN}: {error.strerror or error}") from error
    return target


@contextlib.contextmanager
def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> Iterator[IO[bytes]]:
    """Open a regular file to read it without a buffer; never waits on a pipe and never reads a device."""
    finish_interrupted(os.path.dirname(os.fspath(path)) or ".")
    # non-blocking: opening a pipe would wait for somebody to write to it
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    if not follow:
        flags |= getattr(os, "O_NOFOLLOW", 0)
        if os.path.islink(path):
            raise OSError("it is a symbolic link")
    with open(os.open(path, flags), "rb", buffering=0) as file:
        # of the open file: a check by name could be answered for another one
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is not a regular file")
        yield file


def read_all(file: IO[bytes], size: int) -> np.ndarray:
    """Return the next `size` bytes of a file as an array."""
    buffer = np.empty(size, np.uint8)
    view = buffer.data
    position = 0
    while position < size:
        position += read_into(file, view[position : position + _CHUNK])
    return buffer


def read_into(file: IO[bytes], view: memoryview) -> int:
    """Read some bytes, at least one, into a buffer and return how many."""
    count = file.readinto(view)  # type: ignore[attr-defined]
    if not count:
        raise OSError("the file became shorter while it was read")
    return count


class _ReadBack:
    """Writes everything it is given, however little the system takes at once, and reads it back.

    Now and then it has what is written flushed to the disk in another thread, while more is written.
    """

    def __init__(self, file: IO[bytes], beside: Executor) -> None:
        self._file, self._beside = file, beside
        self._flushes: list[Future[None]] = []
        self._position = self._flushed = 0
        self._buffer = np.empty(0, np.uint8)

    def write(self, data: memoryview | bytes) -> None:
        whole = memoryview(data).cast("B")
        for start in range(0, len(whole), _CHUNK):
            piece = whole[start : start + _CHUNK]
            left = piece
            # a disk that fills takes a part and says so only at the next call
            while left:
                left = left[os.write(self._file.fileno(), left) :]
            self._compare(piece)
            self._position += len(piece)
            # the disk is busy while the next pieces are hashed and written; the last fsync then has little to wait for
            if self._position - self._flushed >= _FLUSH:
                self._flushes.append(self._beside.submit(os.fsync, self._file.fileno()))
                self._flushed = self._position

    def finish(self) -> None:
        """Raise what a flush raised: the system says so only once."""
        for flush in self._flushes:
            flush.result()

    def _compare(self, piece: memoryview) -> None:
        if len(self._buffer) < len(piece):
            self._buffer = np.empty(len(piece), np.uint8)
        # from the page cache mostly: this finds what memory, a driver or a network share changed on the way,
        # not the platter
        self._file.seek(self._position)
        read = 0
        while read < len(piece):
            read += read_into(self._file, self._buffer.data[read : len(piece)])
        # the caller's own bytes are compared, not a digest of them: those may have been damaged before they
        # were hashed
        if not _equal(self._buffer[:read], np.frombuffer(piece, np.uint8)):
            raise OSError("the file reads back different from what was written")


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of as many bytes are equal; eight at a time, which is twice as fast."""
    whole = len(a) // 8 * 8
    return np.array_equal(a[:whole].view(np.uint64), b[:whole].view(np.uint64)) and np.array_equal(
        a[whole:], b[whole:]
    )


def temporary_name(target: Path) -> Path:
    """Return a new name beside the target that later saves to it recognise as left over."""
    return target.parent / f"{_prefix(target)}{secrets.token_hex(8)}{_SUFFIX}"


def _replaceable(target: Path) -> int | None:
    """Return the permissions of the file to be replaced, None if there is none; reject other kinds of files."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise OSError("there is something that is not a regular file")
    return stat.S_IMODE(mode)


def _prefix(target: Path) -> str:
    """Return how the names of a target's temporaries begin; long names are hashed to stay within limits."""
    name = target.name
    # file systems end at 255 bytes, and the suffix takes 30
    if len(os.fsencode(name)) > 200:
        name = sha256(os.fsencode(name)).hexdigest()
    return f".{name}."


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """Create and lock a file beside the target; it is removed unless it was renamed."""
    file, path = _create(target)
    try:
        yield file, path
    except BaseException:
        _discard(file, path)
        raise
    # closing may report an old error once more
    with contextlib.suppress(OSError):  # everything was flushed before
        file.close()


def _create(target: Path) -> tuple[IO[bytes], Path]:
    # a name that is taken, or a link that somebody put there, would lead the write elsewhere
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
    for _ in range(100):
        path = temporary_name(target)
        file = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
        try:
            # Another save's sweep may have come between creation and lock: then the file is gone, try again.
            # Windows needs no lock: it does not remove files that are open.
            if os.name == "nt" or (
                lock_file(file.fileno()) is not False and os.fstat(file.fileno()).st_nlink
            ):
                return file, path
        except BaseException:
            _discard(file, path)
            raise
        _discard(file, path)
    raise OSError("no temporary file could be created")


def _discard(file: IO[bytes], path: Path) -> None:
    with contextlib.suppress(OSError):
        file.close()
    with contextlib.suppress(OSError):
        os.unlink(path)


def _sweep(target: Path) -> None:
    """Remove temporaries of this target that no living process holds; never fails.

    Links of its older versions (`<target>.1`) count as its own: nothing else would ever remove them.
    """
    ours = re.compile(rf"{re.escape(_prefix(target))}(\d+\.)?[0-9a-f]{{16}}{re.escape(_SUFFIX)}")
    try:
        matches = [match for name in os.listdir(target.parent) if (match := ours.fullmatch(name))]
    except OSError:
        return
    for match in matches:
        path = target.parent / match.string
        with contextlib.suppress(OSError):
            # links take no lock and hold no data
            if os.path.islink(path) or (os.name == "nt" and not match.group(1)):
                os.unlink(path)
                continue
            if match.group(1):
                continue
            # the name may be a stranger's link or pipe by now
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                # held while it is removed, so that its writer cannot begin in between
                if lock_file(descriptor):
                    os.unlink(path)
            finally:
                os.close(descriptor)
