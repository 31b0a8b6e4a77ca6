"""Replaces several files together: written to a temporary folder, moved together, rolled back if a move fails.

A process that dies in between leaves every file complete, old or new, and at most a hidden folder, which the next
writer removes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["place", "staging_folder", "write_text"]

_NAME = re.compile(r"\.onward-(\d+)-")


@contextlib.contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """A temporary folder on the same file system as `parent`; removed afterwards, as are those of dead processes."""
    _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=f".onward-{os.getpid()}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def place(files: Sequence[Path], directory: Path) -> list[Path]:
    """Move files into a directory, in order; if one cannot be moved, the old files are restored.

    Each is replaced in one step, so that a reader finds the old file or the new one, never none.
    """
    placed = [directory / file.name for file in files]
    saved: dict[Path, Path] = {}
    moved: list[Path] = []
    try:
        for file, target in zip(files, placed):
            if target.is_dir():
                raise OSError(f"'{target}' is a directory")
            if target.exists():
                saved[target] = file.with_name(f".old-{file.name}")
                _copy(target, saved[target])
            moved.append(target)
            move(file, target)
    except BaseException:  # an interrupt too
        for target in moved:
            if target in saved:
                os.replace(saved[target], target)
            else:
                target.unlink(missing_ok=True)
        raise
    return placed


def move(source: Path, target: Path) -> None:
    """Give a file its final name."""
    os.replace(source, target)


def _copy(source: Path, target: Path) -> None:
    """A second name for the same content, or a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _sweep(parent: Path) -> None:
    for path in parent.glob(".onward-*-*"):
        found = _NAME.match(path.name)
        if found and path.is_dir() and not _alive(int(found.group(1))):
            shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    """Whether a process of this number runs here; where that cannot be asked, assume so."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all: an older one stays till then, and nothing else after a failure."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
