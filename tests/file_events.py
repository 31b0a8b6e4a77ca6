"""What a writer does to the file system, counted; the event of a number fails, or the process ends there."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onward import files


class Killed(BaseException):
    """The process is gone: no later event of it happens either."""


class Events:
    """Counts events, all or those inside of one folder, and lets the one of a number fail, or all from it on.

    `failure`: "killed" raises and goes on raising, "exit" ends this process at once, "one error" fails once;
    "full disk" and "read-only" last. `look` is called before every event: what is on the disk then is what a process
    leaves that ends there.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        number: int,
        failure: str,
        *,
        inside: Path | None = None,
        look: Callable[[int, str], object] | None = None,
    ) -> None:
        self.names: list[str] = []
        self._number, self._failure, self._inside, self._look = number, failure, inside, look
        for name in (
            "replace",
            "rename",
            "fsync",
            "unlink",
            "remove",
            "rmdir",
            "ftruncate",
            "truncate",
            "link",
        ):
            patch.setattr(os, name, self._watch(name, getattr(os, name), needs_space=False))
        # copies of files: sendfile and copy_file_range write to the first of their arguments on Linux alone
        copies = [name for name in ("sendfile", "copy_file_range", "symlink") if hasattr(os, name)]
        for name in ("mkdir", "write", *copies):
            subject = 1 if name in ("copy_file_range", "symlink") else 0
            patch.setattr(os, name, self._watch(name, getattr(os, name), subject=subject))
        patch.setattr(files, "_exchange", self._watch("exchange", files._exchange, needs_space=False))
        creates = self._watch("open", os.open, counts=lambda args: bool(args[1] & os.O_CREAT))
        patch.setattr(os, "open", creates)
        opened = self._watch(
            "open",
            io.open,
            counts=lambda args: len(args) > 1 and bool(set(args[1]) & set("wxa+")),
            empties=True,
        )
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)

    @property
    def count(self) -> int:
        """How many events there were."""
        return len(self.names)

    def _watch(
        self,
        name: str,
        real: Callable[..., Any],
        *,
        needs_space: bool = True,
        subject: int = 0,
        empties: bool = False,
        counts: Callable[[Any], bool] = lambda args: True,
    ) -> Callable[..., Any]:
        """A function that counts first; one that `empties` a file counts again once the file is empty."""

        def call(*args: Any, **options: Any) -> Any:
            if not (counts(args) and self._is_inside(args[subject], options.get("dir_fd"))):
                return real(*args, **options)
            self._happen(name, args[subject], needs_space=needs_space)
            result = real(*args, **options)
            if empties and self._failure in ("exit", "killed"):
                self._happen("opened", args[subject], needs_space=False)
            return result

        return call

    def _happen(self, name: str, subject: Any, *, needs_space: bool) -> None:
        self.names.append(name)
        if self._look is not None:
            self._look(self.count, name)
        if self.count >= self._number:
            if self._failure == "exit":
                os._exit(9)
            if self._failure == "killed":
                raise Killed
            if self._failure == "full disk" and needs_space:
                raise OSError(errno.ENOSPC, "No space left on device", _name(subject))
            if self._failure == "read-only":
                raise OSError(errno.EROFS, "Read-only file system", _name(subject))
        if self.count == self._number and self._failure == "one error":
            raise OSError(errno.EIO, "Input/output error")

    def _is_inside(self, subject: Any, folder: int | None) -> bool:
        """Whether a path, or an open file, is in the folder of interest."""
        if self._inside is None:
            return True
        with contextlib.suppress(OSError):
            if isinstance(subject, int):
                subject = os.readlink(f"/proc/self/fd/{subject}")
            elif folder is not None:
                subject = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), subject)
            return self._inside in Path(os.path.abspath(os.fsdecode(subject))).parents
        return False


def _name(subject: Any) -> str | None:
    return None if isinstance(subject, int) else os.fspath(subject)
