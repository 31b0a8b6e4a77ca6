"""The folder in which Onward keeps what it can make or measure again, and large graphs as the runtime optimized them.

Optimizing a training graph of thousands of nodes takes the runtime seconds each time; the result depends on the graph,
the runtime and the processor alone. A file that is damaged or of another version is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from pathlib import Path

import onnxruntime as ort

from onward.runtime.processor import instruction_sets, name_of_processor

__all__ = ["OptimizedGraph", "cache_folder"]

_FOLDER = "ONWARD_CACHE"
# graphs that are kept, and the bytes of the largest
_MOST, _LARGEST = 16, 64 * 2**20
_DIGEST = hashlib.sha256().digest_size


def cache_folder() -> Path | None:
    """Where that is: $ONWARD_CACHE, or the system's folder for caches; None without a home."""
    if os.environ.get(_FOLDER):
        return Path(os.environ[_FOLDER])
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "onward"


class OptimizedGraph:
    """A graph as the runtime optimized it: read before a session is made, or written by one."""

    def __init__(self, data: bytes) -> None:
        machine = f"{ort.__version__} {sys.platform} {name_of_processor()} {' '.join(instruction_sets())}"
        key = hashlib.sha256(machine.encode() + data).hexdigest()[:32]
        root = cache_folder()
        self._path = None if root is None or len(data) > _LARGEST else root / "graphs" / f"{key}.onnx"
        self._stage: Path | None = None

    def read(self) -> bytes | None:
        """The graph, where it was kept and is whole."""
        try:
            data = b"" if self._path is None else self._path.read_bytes()
        except OSError:
            return None
        if len(data) <= _DIGEST or hashlib.sha256(data[:-_DIGEST]).digest() != data[-_DIGEST:]:
            return None
        with contextlib.suppress(OSError):
            os.utime(self._path)  # type: ignore[arg-type]
        return data[:-_DIGEST]

    def stage(self) -> str | None:
        """Where a session is to write it."""
        if self._path is None:
            return None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=".new-", suffix=".onnx", dir=self._path.parent)
            os.close(handle)
        except OSError:
            return None
        self._stage = Path(name)
        return name

    def keep(self) -> None:
        """Keep what the session wrote, and drop the oldest of many."""
        if self._stage is None or self._path is None:
            return
        with contextlib.suppress(OSError):
            data = self._stage.read_bytes()
            if 0 < len(data) <= _LARGEST:
                with open(self._stage, "ab") as file:
                    file.write(hashlib.sha256(data).digest())
                os.replace(self._stage, self._path)
                kept = sorted(
                    self._path.parent.glob("[0-9a-f]*.onnx"), key=lambda path: -path.stat().st_mtime
                )
                for path in kept[_MOST:]:
                    path.unlink()

    def clean(self) -> None:
        """Remove what was staged and not kept."""
        if self._stage is not None:
            self._stage.unlink(missing_ok=True)
