"""A lock on a run's folder: only one process at a time writes into it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from onward.errors import LimitError, OnwardError
from onward.reading import read_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["run_lock"]

_NAME = ".lock"
# folders that this process holds: a command holds one around a trainer that does
_held: set[Path] = set()


@contextlib.contextmanager
def run_lock(folder: Path | None) -> Iterator[None]:
    """Hold a run's folder for the block; an error that names the holder where another process does.

    The system lets go of the lock when a process ends, however it ends. Where a file system has no locks, none is held.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, run_lock(Path(folder)):
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['.lock']
    """
    if folder is None or folder.resolve() in _held:
        yield
        return
    _require_own(folder)
    path = folder / _NAME
    try:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - closed below, before it is removed
    except OSError as error:
        raise OnwardError(
            f"cannot write to '{folder}': {error.strerror or error}",
            hint="free some space, or choose another folder with -o",
        ) from error
    if not _take(file):
        file.close()
        raise OnwardError(
            f"'{folder}' is being written by {_holder(path)}: wait for it, or choose another folder"
        )
    place = folder.resolve()
    _held.add(place)
    try:
        held = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T")}
        with contextlib.suppress(OSError):  # a full disk: the lock holds without saying whose it is
            file.seek(0)
            file.truncate()
            json.dump(held, file)
            file.flush()
        yield
    finally:
        _held.discard(place)
        _release(file)
        with contextlib.suppress(OSError):
            file.close()
        with contextlib.suppress(OSError):
            path.unlink()


def _require_own(folder: Path) -> None:
    """Refuse a run whose files are links to elsewhere or no files: a run from a stranger would write there."""
    inside = folder.resolve()
    for path in folder.iterdir():
        if path.is_symlink() and inside not in _target(path).parents:
            raise OnwardError(
                f"'{path}' is a link out of the run's folder: put a copy in its place, or remove it"
            )
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OnwardError(f"'{path}' is neither a file nor a folder: remove it")


def _target(link: Path) -> Path:
    try:
        return link.resolve()
    except (OSError, RuntimeError):  # links in a circle
        return Path()


def _holder(path: Path) -> str:
    try:
        found = read_json(path)
        return f"process {int(found['process'])} on {found['host']}, since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError, LimitError):
        return "another process"


def _take(file: IO[str]) -> bool:
    if fcntl is not None:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True
    import msvcrt

    try:
        file.seek(1 << 30)  # far behind the text, which stays readable for others
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except OSError:
        return False
    return True


def _release(file: IO[str]) -> None:
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file.fileno(), fcntl.LOCK_UN)
        return
    import msvcrt

    with contextlib.suppress(OSError):
        file.seek(1 << 30)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined]
