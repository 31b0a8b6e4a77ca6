"""The folder in which Onward keeps what it can make or measure again, and large graphs as the runtime optimized them.

Optimizing a training graph of thousands of nodes takes the runtime seconds each time; the result depends on the graph,
the runtime and the processor alone. A file that is damaged or of another version is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from pathlib import Path

import onnxruntime as ort

from onward.files import write_bytes
from onward.runtime.processor import instruction_sets, name_of_processor

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


def graph_path(data: bytes) -> Path | None:
    """Where a graph is kept as the runtime optimized it; None for one that is too large, or without a folder."""
    # An optimized graph holds operators that this build of the runtime has for this processor's instructions.
    machine = f"{ort.__version__} {sys.platform} {name_of_processor()} {' '.join(instruction_sets())}"
    key = hashlib.sha256(machine.encode() + data).hexdigest()[:32]
    root = cache_folder()
    return None if root is None or len(data) > _LARGEST else root / "graphs" / f"{key}.onnx"


def read_graph(path: Path) -> bytes | None:
    """An optimized graph, where it was kept and is whole."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    # The digest comes last, so that a file that was cut off never has one.
    if len(data) <= _DIGEST or hashlib.sha256(data[:-_DIGEST]).digest() != data[-_DIGEST:]:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # the oldest by use is dropped, not the oldest by age
    return data[:-_DIGEST]


def keep_graph(path: Path, data: bytes) -> None:
    """Keep an optimized graph, and drop the oldest of many."""
    if not 0 < len(data) <= _LARGEST:
        return
    with contextlib.suppress(
        OSError
    ):  # a cache that cannot be written costs the next process time, nothing else
        write_bytes(path, data + hashlib.sha256(data).digest())
        by_age = sorted(path.parent.glob("[0-9a-f]*.onnx"), key=lambda file: -file.stat().st_mtime)
        # A cache that only grows would fill the disk of who tries many models.
        for old in by_age[_MOST:]:
            old.unlink()
