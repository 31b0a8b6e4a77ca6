"""A lock on a run's folder: only one process at a time writes into it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from onward.errors import LimitError, OnwardError
from onward.reading import read_json

_LOCK, _HOLDER = ".lock", ".holder"
# what a file system without locks answers
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
# folders that this process holds: a command holds one around a trainer that does
_held: set[Path] = set()


@contextlib.contextmanager
def run_lock(folder: Path | None) -> Iterator[None]:
    """Hold a run's folder for the block; an error that names the holder where another process does.

    The system lets go of the lock when a process ends, however it ends. Where a file system has no locks, none is held.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, run_lock(Path(folder)):
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['.holder', '.lock']
    """
    # a lock of the system is the process's: taking it twice would wait for ourselves
    if folder is None or folder.resolve() in _held:
        yield
        return
    # before the lock's own file is written
    _require_own(folder)
    lock = _acquire(folder)
    resolved = folder.resolve()
    _held.add(resolved)
    try:
        # a file of its own, because Windows lets nobody read a locked one
        holder = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T")}
        with contextlib.suppress(OSError):  # a full disk: the lock holds without saying whose it is
            (folder / _HOLDER).write_text(json.dumps(holder), encoding="utf-8")
        yield
    finally:
        _held.discard(resolved)
        with contextlib.suppress(OSError):
            (folder / _HOLDER).unlink(missing_ok=True)
            # The lock's file is removed while it is locked, never after: who opened it before sees that it is gone
            # from its path and opens the new one (filelock 4). Windows leaves an open file where it is.
            (folder / _LOCK).unlink()
        lock.release()


def _acquire(folder: Path) -> FileLock:
    # no waiting: a run takes hours, and the user knows better what to do
    lock = FileLock(folder / _LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise OnwardError(
            f"'{folder}' is being written by {_holder(folder / _HOLDER)}: wait for it, or choose another folder"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise OnwardError(
                f"cannot write to '{folder}': {error.strerror or error}",
                hint="free some space, or choose another folder with -o",
            ) from error
    return lock


def _require_own(folder: Path) -> None:
    """Refuse a run whose files are links to elsewhere or no files: a run from a stranger would write there."""
    inside = folder.resolve()
    for path in folder.iterdir():
        if path.is_symlink() and inside not in _target(path).parents:
            raise OnwardError(
                f"'{path}' is a link out of the run's folder: put a copy in its place, or remove it"
            )
        try:
            # asked once: another process may remove its .holder between two questions
            mode = path.stat().st_mode
        except OSError:
            continue
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise OnwardError(f"'{path}' is neither a file nor a folder: remove it")


def _target(link: Path) -> Path:
    try:
        return link.resolve()
    except (OSError, RuntimeError):  # links in a circle
        return Path()


def _holder(path: Path) -> str:
    try:
        holder = read_json(path)
        return f"process {int(holder['process'])} on {holder['host']}, since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError, LimitError):
        return "another process"
