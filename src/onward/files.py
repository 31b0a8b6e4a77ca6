"""Writes a file, a set of files or a folder so that a kill at any moment leaves the old one or the new one, whole.

New files are written to a staging folder inside the directory that they are for. Once all are on the disk, a record
that names them is written to `.onward-commit`: from then on the set is the new one. The files are moved, and the
record is removed. Whoever next reads a file of that directory through Onward, or writes one, finishes the moves of a
writer that died (`finish_interrupted`). Readers that know nothing of the record are safe with a model and its data:
the data's name holds its digest, so that the rename of the graph, the last one, replaces both at once.

Whether a writer lives is told by the lock that it holds on a file in its staging folder, which works across containers
and hosts that share a volume; process numbers do not. No other module asks for temporary files but
`checkpoint.atomic`, which says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import json
import os
import platform
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_RECORD = ".onward-commit"
_STAGING = re.compile(r"\.onward-([0-9a-f]{8})[0-9a-f]{8}")
_DATA = re.compile(r"(.+)\.[0-9a-f]{16}\.data")
_LARGEST_RECORD = 2**20
# Windows locks ranges of bytes and refuses to read them; nothing is ever written as far as this.
_LOCKED_BYTE = 2**30
# Some shared file systems keep locks on each host for itself: folders of other hosts go only when they are this old.
_ABANDONED_SECONDS = 24 * 3600
_FLAGS = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class CommittedError(OSError):
    """A set is committed, but not all of its files could be moved: the next reader or writer moves them."""


def write_bytes(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write one file: an older one stays until the new one is on the disk, and after a failure.

    >>> with scratch_folder() as folder:
    ...     write_bytes(folder / "run.json", b"{}").read_bytes()
    b'{}'
    """
    target = Path(path)
    try:
        with write_set(target.parent) as folder:
            (folder / target.name).write_bytes(content)
    except OSError as error:
        raise type(error)(error.errno, error.strerror or str(error), str(target)) from error
    return target


@contextlib.contextmanager
def write_set(directory: str | os.PathLike[str], *, older: Sequence[str] = ()) -> Iterator[Path]:
    """Yield an empty folder; what is written there moves to the directory at the end, all of it or nothing.

    A folder among the files replaces the folder of its name. Of an older set go the data files of models that are
    replaced, and what is named in `older` and the new set has not.
    """
    target = Path(directory)
    with new_directories(target), _staging(target) as folder:
        yield folder / "files"
        _commit(target, folder, older)


@contextlib.contextmanager
def replace_folder(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty folder that takes the target's name at the end; what was there goes, as a whole."""
    path = Path(os.path.realpath(target))
    with write_set(path.parent) as folder:
        (folder / path.name).mkdir()
        yield folder / path.name


@contextlib.contextmanager
def scratch_folder(parent: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """A folder that nothing stays of, in the system's place for such, or on the file system of `parent`."""
    if parent is not None:
        with _staging(Path(parent)) as folder:
            yield folder / "files"
        return
    shared = Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):
        _sweep(shared)
    folder, lock = _create(shared)
    try:
        yield folder / "files"
    finally:
        _remove(folder, lock)


def name_by_content(data: Path, stem: str) -> str:
    """Give external data the name that it has beside its model: the model's, or another stem, with its digest."""
    with open(data, "rb") as file:
        digest = sha256()
        while piece := file.read(4 * 2**20):
            digest.update(piece)
    name = f"{stem}.{digest.hexdigest()[:16]}.data"
    rename(data, data.with_name(name))
    return name


def finish_interrupted(directory: str | os.PathLike[str]) -> None:
    """Finish what a writer that died had committed to a directory, or to one above; waits for one that is at it."""
    path = Path(directory)
    for _ in range(3):  # folders of a set are moved by the record of the directory above them
        if os.path.lexists(path / _RECORD):
            _finish(path)
        path = path / ".." if path.name in ("", "..") else path.parent


def _finish(directory: Path) -> None:
    try:
        with _exclusive(directory):
            pass
    except OSError as error:
        if _committed(directory) is None:
            return  # the old files are whole
        raise OSError(
            error.errno,
            f"a writer was interrupted, and its files cannot be moved ({error.strerror or error}): "
            "make the folder writable and open it again",
            str(directory),
        ) from error


# ---- the commit ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Moves:
    """One line of the record: what leaves a staging folder for the directory, and what then leaves the directory."""

    staging: str
    names: Sequence[str]
    removed: Sequence[str]
    # "files", or "old" to take back what was moved
    source: str = "files"

    def line(self) -> bytes:
        text = json.dumps(dataclasses.asdict(self)).encode()
        return sha256(text).hexdigest().encode() + b" " + text + b"\n"


def _last_moves(record: bytes) -> _Moves | None:
    """What the last whole line of a record says; None where it is torn, or names anything outside its directory."""
    moves = None
    for line in record.splitlines():
        digest, _, text = line.partition(b" ")
        if sha256(text).hexdigest().encode() == digest:
            try:
                moves = _Moves(**json.loads(text))
                names = (*moves.names, *moves.removed)
                plain = all(map(_is_plain, names)) and _STAGING.fullmatch(moves.staging)
                if not plain or moves.source not in ("files", "old"):
                    return None
            except (ValueError, TypeError, RecursionError):
                return None
    return moves


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..", _RECORD) and not set(name) & set("/\\:\0")


def _committed(directory: Path) -> _Moves | None:
    with contextlib.suppress(OSError):
        record = os.open(directory / _RECORD, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _FLAGS)
        with open(record, "rb") as file:
            _require_trusted(record, directory)
            return _last_moves(file.read(_LARGEST_RECORD))


def _require_trusted(record: int, directory: Path) -> None:
    """In a folder that all may write to, such as /tmp, another user's record would have our files replaced."""
    owner = os.fstat(record).st_uid
    if os.name != "nt" and owner not in (os.geteuid(), os.stat(directory).st_uid):
        raise PermissionError(errno.EPERM, f"its {_RECORD} belongs to another user")


def _commit(directory: Path, folder: Path, older: Sequence[str]) -> None:
    files = folder / "files"
    # A graph comes after the data that it names: its rename is what other readers see as the commit.
    names = sorted(os.listdir(files), key=lambda name: (name.endswith(".onnx"), name))
    for name in names:
        target = directory / name
        if target.is_dir() != (files / name).is_dir() and target.exists():
            raise OSError(errno.EISDIR, f"'{target}' is a {'directory' if target.is_dir() else 'file'}")
    for path in files.rglob("*"):
        if path.is_file():
            _sync(path)
    models = {name for name in names if name.endswith(".onnx")}
    data = [name for name in os.listdir(directory) if (m := _DATA.fullmatch(name)) and m[1] in models]
    moves = _Moves(folder.name, names, sorted({*data, *older} - set(names)))
    if len(names) == 1 and not moves.removed:  # one step is enough
        source, target = files / names[0], directory / names[0]
        if not target.is_dir():
            rename(source, target)
        elif not _exchange(source, target):
            _commit_moves(directory, moves)
    elif names:
        _commit_moves(directory, moves)
    with contextlib.suppress(OSError):
        sync_directory(directory)


def _commit_moves(directory: Path, moves: _Moves) -> None:
    old = directory / moves.staging / "old"
    replaced = [name for name in moves.names if os.path.lexists(directory / name)]
    restorable, restored = True, False
    for name in replaced:
        if not (directory / name).is_dir():
            try:
                os.link(directory / name, old / name)
            except (OSError, NotImplementedError):  # a file system without hard links
                restorable = False
    with _exclusive(directory) as record:
        _append(record, moves)
        try:
            _apply(directory, moves)
        except OSError as error:
            if restorable:
                # Windows refuses to replace files that are open elsewhere, and would refuse every later reader too.
                created = sorted(set(moves.names) - set(replaced))
                back = _Moves(moves.staging, replaced, created, source="old")
                with contextlib.suppress(OSError):
                    _append(record, back)
                    _apply(directory, back)
                    os.ftruncate(record, 0)
                    restored = True
            if restored:
                raise
            state = f"{error.strerror or error}; the files are committed, the next reader moves them"
            raise CommittedError(error.errno, state, str(directory)) from error
        os.ftruncate(record, 0)


def _apply(directory: Path, moves: _Moves) -> None:
    """Make the moves that are not made yet; may be called any number of times."""
    folder = directory / moves.staging
    source = folder / moves.source
    other = folder / ("old" if moves.source == "files" else "files")
    # a record may come with a folder from elsewhere: links lead out of it
    for path in (folder, source, other):
        if path.is_symlink() or not path.is_dir():
            raise OSError(errno.ENOTDIR, "it is not a folder", str(path))
    for name in moves.names:
        target = directory / name
        if os.path.lexists(source / name) and not _is_same(source / name, target):
            if target.is_dir() and not target.is_symlink():  # a folder cannot be renamed over another
                shutil.rmtree(other / name, ignore_errors=True)
                rename(target, other / name)
            rename(source / name, target)
    with contextlib.suppress(OSError):  # some network file systems cannot
        sync_directory(directory)  # before anything is removed, the names of the new files are on the disk
    for name in moves.removed:
        with contextlib.suppress(OSError):  # it harms nobody, and the next writer tries again
            rename(directory / name, other / name)


@contextlib.contextmanager
def _exclusive(directory: Path) -> Iterator[int]:
    """Hold the directory's record, empty; what a dead writer recorded is finished first."""
    path = directory / _RECORD
    record = _hold(path)
    try:
        moves = _last_moves(os.read(record, _LARGEST_RECORD))
        if moves:
            _apply(directory, moves)
        os.ftruncate(record, 0)
        _sweep(directory)
        yield record
    finally:
        try:
            finished = os.fstat(record).st_size == 0
            if finished and os.name != "nt":
                os.unlink(path)  # while it is locked: nobody else can have begun
        finally:
            os.close(record)
        if finished and os.name == "nt":  # open files cannot be removed there; an empty one harms nobody
            with contextlib.suppress(OSError):
                os.unlink(path)


def _hold(path: Path) -> int:
    while True:
        record = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o666)
        try:
            _require_trusted(record, path.parent)
            lock_file(record, wait=True)
            # Its last holder may have removed the file while this one waited: then others lock another file.
            if _is_at(record, path):
                os.lseek(record, 0, os.SEEK_SET)
                return record
        except BaseException:
            os.close(record)
            raise
        os.close(record)


def _append(record: int, moves: _Moves) -> None:
    end = os.lseek(record, 0, os.SEEK_END)
    try:
        line = moves.line()
        if os.write(record, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(record)
    except OSError:
        os.ftruncate(record, end)
        raise


# ---- staging folders -----------------------------------------------------------------------------


@contextlib.contextmanager
def _staging(parent: Path) -> Iterator[Path]:
    """A new folder with subfolders and a lock that is held; removed afterwards, as are those of the dead."""
    if os.path.lexists(parent / _RECORD) or any(_STAGING.fullmatch(name) for name in os.listdir(parent)):
        _finish(parent)
    folder, lock = _create(parent)
    try:
        yield folder
    finally:
        moves = _committed(parent)
        if moves and moves.staging == folder.name:  # files still wait there to be moved
            os.close(lock)
        else:
            _remove(folder, lock)


def _create(parent: Path) -> tuple[Path, int]:
    for _ in range(100):
        folder = parent / f".onward-{_machine()}{secrets.token_hex(4)}"
        os.mkdir(folder, 0o700)
        lock = None
        try:
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)
            # Another writer's sweep may come before the lock is held: then there is no folder any more.
            if lock_file(lock) is not False and _is_at(lock, folder / "lock"):
                for name in ("files", "old"):
                    os.mkdir(folder / name)
                return folder, lock
        except FileNotFoundError:
            pass
        except BaseException:
            _remove(folder, lock)
            raise
        if lock is not None:
            os.close(lock)
    raise OSError(errno.EAGAIN, "no temporary folder could be created")


def _remove(folder: Path, lock: int | None) -> None:
    """Remove a staging folder, its lock last: while anything is there, it tells whether the writer lives."""
    try:
        for name in ("files", "old"):
            shutil.rmtree(folder / name, ignore_errors=True)
        if os.name == "nt" and lock is not None:  # open files cannot be removed there
            os.close(lock)
            lock = None
        with contextlib.suppress(OSError):
            # What could not be removed stays with its lock: the next writer tries again.
            if os.listdir(folder) == ["lock"]:
                os.unlink(folder / "lock")
            os.rmdir(folder)
    finally:
        if lock is not None:
            os.close(lock)


def _sweep(directory: Path) -> None:
    """Remove the staging folders of dead writers; only while the record is held, so that none is being committed."""
    for name in os.listdir(directory):
        folder = directory / name
        match = _STAGING.fullmatch(name)
        if match is None or folder.is_symlink() or not folder.is_dir():
            continue
        with contextlib.suppress(OSError):  # another user's, or another sweep was faster
            if match[1] != _machine() and time.time() - folder.stat().st_mtime < _ABANDONED_SECONDS:
                continue
            try:
                lock = os.open(folder / "lock", os.O_RDWR | _FLAGS)
            except FileNotFoundError:  # it is empty, or its writer is creating the lock
                os.rmdir(folder)
                continue
            if lock_file(lock):
                _remove(folder, lock)
            else:
                os.close(lock)


@cache
def _machine() -> str:
    """Eight digits for this machine since it was started: containers on it have the same, and see its locks."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
    except OSError:  # no Linux
        name = platform.node()
    return sha256(name.encode()).hexdigest()[:8]


def lock_file(descriptor: int, *, wait: bool = False) -> bool | None:
    """Whether this process now holds the file's lock; None where the file system has none."""
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True
    import msvcrt

    while True:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            return True
        except OSError:
            if not wait:
                return False
            time.sleep(0.01)


def _is_same(first: Path, second: Path) -> bool:
    """Whether two names are links to one file: taking back a file that was never replaced needs no rename."""
    try:
        return os.path.samestat(os.lstat(first), os.lstat(second))
    except FileNotFoundError:
        return False


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


# ---- the file system -----------------------------------------------------------------------------


@contextlib.contextmanager
def new_directories(directory: Path) -> Iterator[None]:
    """Create a directory and its parents; new ones that stay empty go after a failure."""
    missing = [path for path in (directory, *directory.absolute().parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in missing:
            with contextlib.suppress(OSError):
                os.rmdir(path)
        raise


def rename(source: Path, target: Path) -> None:
    """Let a file take its name; Windows refuses while somebody reads the target, so wait."""
    if os.name == "nt":
        for delay in (0.01, 0.05, 0.25, 1.0):
            with contextlib.suppress(PermissionError):
                os.replace(source, target)
                return
            time.sleep(delay)
    os.replace(source, target)


def _exchange(first: Path, second: Path) -> bool:
    """Let two folders change names in one step; False where the system cannot."""
    name = "renamex_np" if sys.platform == "darwin" else "renameat2"
    if os.name == "nt" or not hasattr(libc := ctypes.CDLL(None, use_errno=True), name):
        return False
    paths = os.fsencode(first.absolute()), os.fsencode(second.absolute())
    swap = 2  # RENAME_SWAP there, RENAME_EXCHANGE here
    if name == "renamex_np":
        return libc.renamex_np(*paths, swap) == 0
    current = -100  # AT_FDCWD
    return libc.renameat2(current, paths[0], current, paths[1], swap) == 0


def _sync(path: Path) -> None:
    # Windows flushes only what is open for writing; elsewhere the file may be read-only.
    with open(path, "rb+" if os.name == "nt" else "rb") as file:
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to the disk, where the system can (not on Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
