"""Checkpoints on disk: load and check, atomic save, retention and recovery.

Orders the operations so that there is a good checkpoint at every moment. `codec` encodes the bytes, `atomic` replaces
one file.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from onward.checkpoint import codec, integrity
from onward.checkpoint.atomic import (
    UNCERTAIN,
    open_regular,
    read_all,
    read_into,
    replace_file,
    temporary_name,
)
from onward.checkpoint.codec import EXTERNAL_THRESHOLD
from onward.checkpoint.verify import IDENTIFIER, Layout, verify_external
from onward.errors import CheckpointError

if TYPE_CHECKING:
    from onward.checkpoint.content import CheckpointData

__all__ = [
    "Latest",
    "SkippedCheckpointWarning",
    "check_file",
    "data_path",
    "load",
    "load_latest",
    "rotate",
    "save",
    "save_step",
]


_CHUNK = 4 << 20
# 32-bit offsets with a sign: the original cannot write more
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
        # a copy, at an address that every type is aligned to
        return codec.decode(np.frombuffer(path, np.uint8).copy().data, path="the checkpoint given as bytes")
    name = os.fspath(path)
    try:
        with open_regular(name) as file:
            size = _plausible_size(file, name)
            view = read_all(file, size).data
    except OSError as error:
        raise CheckpointError(name, error.strerror or str(error)) from error
    payload, layout, has_trailer = codec.open_layout(view, path=name)
    data = _read_beside(layout, name).data if layout.data_beside else None
    result = codec.arrays(layout, payload, data, path=name)
    if not has_trailer:
        codec.warn_unchecked(name)
    return result


def check_file(path: str | os.PathLike[str], *, digest: bytes | None = None) -> tuple[Layout, bool]:
    """Verify a file as `load` would, without taking memory for it; return its layout and if it has a trailer.

    With `digest` the file must have a trailer with exactly that one, and its bytes are known to be right.
    """
    name = os.fspath(path)
    try:
        with open_regular(name) as file:
            size = _plausible_size(file, name)
            has_trailer = _check_trailer(file, size, name, digest)
        # The pages were just read, so looking at the few that hold structure does not touch the disk again.
        mapped = np.memmap(name, np.uint8, mode="r", shape=(size,)).data
        layout = codec.layout_of(mapped, has_trailer=has_trailer, path=name)
        if layout.data_beside:
            with _open_beside(name) as beside:
                _check_beside(layout, os.fstat(beside.fileno()), name)
    except OSError as error:
        raise CheckpointError(name, error.strerror or str(error)) from error
    return layout, has_trailer


def data_path(path: str | os.PathLike[str]) -> Path:
    """Return where onnxruntime-training looks for the large tensors of a checkpoint."""
    return Path(os.fspath(path) + ".data")


def _plausible_size(file: IO[bytes], path: str) -> int:
    """Return the file's size after a look at its first and last bytes; a sparse giant is refused here."""
    size = os.fstat(file.fileno()).st_size
    # a sparse file claims terabytes and takes no disk; memory for it is taken only after its ends look right
    head = file.read(8 + integrity.BLOCK_SIZE) or b""
    if head[4:8] != IDENTIFIER:
        raise CheckpointError(
            path, f"not a checkpoint: identifier {head[4:8]!r}", field="identifier", offset=4
        )
    if integrity.block_flags(memoryview(head), path=path) is None:
        if size >= _FLATBUFFER_LIMIT:
            raise CheckpointError(
                path, f"{size} bytes are more than a checkpoint without a checksum can have"
            )
    else:
        file.seek(max(size - integrity.TRAILER_SIZE, 0))
        integrity.check_length(file.read(integrity.TRAILER_SIZE), size, path=path)
    file.seek(0)
    return size


def _check_trailer(file: IO[bytes], size: int, path: str, digest: bytes | None) -> bool:
    """Hash a file in pieces and compare; return whether it has a trailer."""
    file.seek(max(size - integrity.TRAILER_SIZE, 0))
    tail = file.read(integrity.TRAILER_SIZE)
    has_trailer = integrity.check_length(tail, size, path=path, required=digest is not None)
    if not has_trailer:
        return False
    # the writer has read every byte back: hashing the file again would tell nothing new
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


def _check_beside(layout: Layout, status: os.stat_result, path: str) -> int:
    """Check size and links of the second file; return how many of its bytes are used."""
    # another name of the file could change it while its tensors are in use
    if status.st_nlink > 1:
        raise CheckpointError(
            path, f"'{data_path(path)}' has several names (hard links); copy it", field="external data"
        )
    verify_external(layout, status.st_size, path=str(data_path(path)))
    external = [record for record in layout.tensors() if record.external]
    used = max(record.start + record.nbytes for record in external)
    # the original aligns to pages at most; a file with holes would be read whole for a few tensors
    if used > sum(record.nbytes for record in external) + 4096 * len(external):
        raise CheckpointError(
            path, f"'{data_path(path)}' has gaps between its tensors", field="external data"
        )
    return used


_STEP = re.compile(r"checkpoint-(\d+)")
_CHUNK = 4 << 20


class SkippedCheckpointWarning(UserWarning):
    """A damaged checkpoint was skipped for an older one, or could not be removed."""


@dataclass(slots=True)
class Latest:
    """The newest good checkpoint, where it was, and the errors of newer ones that were not good."""

    data: CheckpointData
    path: Path
    skipped: list[CheckpointError] = field(default_factory=list)


def save(
    data: CheckpointData,
    path: str | os.PathLike[str],
    *,
    keep: int = 1,
    external_threshold: int = EXTERNAL_THRESHOLD,
) -> None:
    """Save a checkpoint atomically: whatever happens, either the old one or the new one is complete.

    With `keep` above 1 the replaced file stays as `<path>.1`, the one before as `<path>.2` and so on; a file
    that is damaged is replaced, not kept. Raises `CheckpointError` ("not committed, the old one is kept" or
    "committed, durability uncertain"); `TypeError` or `ValueError` for data that no checkpoint can hold.

    >>> from onward.checkpoint.content import CheckpointData
    >>> import tempfile, numpy
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save(CheckpointData(trainable={"w": numpy.ones(2, "float32")}), directory + "/checkpoint")
    ...     load(directory + "/checkpoint").trainable["w"].tolist()
    [1.0, 1.0]
    """
    _check_keep(keep)
    digest = b""
    old: _Replaced | None = None

    def write(stream: integrity.Writable) -> None:
        nonlocal digest
        digest = codec.encode(data, stream, external_threshold=external_threshold)

    def check(temporary: Path) -> None:
        check_file(temporary, digest=digest)

    def hold(target: Path) -> None:
        nonlocal old
        # the last moment: until the new file is known to be good, nothing of the old one is touched
        old = _hold_old(target, keep)

    try:
        target = replace_file(path, write, check=check, before_commit=hold)
    except BaseException:
        if old is not None and old.path is not None:
            with contextlib.suppress(OSError):
                os.unlink(old.path)
        raise
    try:
        if old is not None:
            _shift(target, old, keep)
    except (OSError, CheckpointError) as error:
        reason = error.reason if isinstance(error, CheckpointError) else error.strerror or str(error)
        raise CheckpointError(target, f"{UNCERTAIN}: older ones could not be kept: {reason}") from error
    _point_data_at(target)


def save_step(
    data: CheckpointData,
    directory: str | os.PathLike[str],
    *,
    step: int,
    keep: int = 2,
    external_threshold: int = EXTERNAL_THRESHOLD,
) -> Path:
    """Save as `<directory>/checkpoint-<step>`, then remove all but the `keep` good ones of highest step.

    >>> from onward.checkpoint.content import CheckpointData
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     for step in (10, 20, 30):
    ...         path = save_step(CheckpointData(properties={"step": step}), directory, step=step)
    ...     sorted(os.listdir(directory)), load_latest(directory).data.properties
    (['checkpoint-000000000020', 'checkpoint-000000000030'], {'step': 30})
    """
    if step < 0:
        raise ValueError(f"step must not be negative: {step}")
    _check_keep(keep)
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(folder, f"the directory cannot be made: {error.strerror or error}") from error
    path = folder / f"checkpoint-{step:012d}"
    save(data, path, external_threshold=external_threshold)
    _remove_old(folder, keep, known_good=path)
    return path


def rotate(directory: str | os.PathLike[str], *, keep: int = 2) -> list[Path]:
    """Remove step checkpoints older than the newest `keep` that verify; return what was removed.

    Nothing is removed while fewer than `keep` verify, and no damaged one in front of them.

    >>> from onward.checkpoint.content import CheckpointData
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     rotate(directory)
    []
    """
    _check_keep(keep)
    return _remove_old(Path(directory), keep, known_good=None)


def load_latest(path: str | os.PathLike[str]) -> Latest:
    """Load the newest checkpoint that verifies, and report (in the result and as warnings) what was skipped.

    `path` is a directory of `save_step`, highest step first, or a file that `save` keeps older versions of.

    >>> from onward.checkpoint.content import CheckpointData
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = save_step(CheckpointData(), directory, step=7)
    ...     load_latest(directory).path.name
    'checkpoint-000000000007'
    """
    skipped: list[CheckpointError] = []
    candidates = _steps(Path(path)) if os.path.isdir(path) else _versions(Path(path))
    for candidate in candidates:
        try:
            data = load(candidate)
        except CheckpointError as error:
            skipped.append(error)
            continue
        for error in skipped:
            warnings.warn(f"skipped: {error}", SkippedCheckpointWarning, stacklevel=2)
        return Latest(data, candidate, skipped)
    reasons = "; ".join(f"{os.path.basename(error.path)}: {error.reason}" for error in skipped)
    raise CheckpointError(
        os.fspath(path), f"no checkpoint verifies ({reasons})" if reasons else "no checkpoint is there"
    )


def _check_keep(keep: int) -> None:
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")


@dataclass(slots=True)
class _Replaced:
    """The file that is about to be replaced: its second name, if any, and if its values are in a second file."""

    path: Path | None
    beside: bool


def _hold_old(target: Path, keep: int) -> _Replaced | None:
    """Give the current file a second name, so that it outlives its replacement; damaged ones are let go."""
    if keep == 1 and not _is_real_file(data_path(target)):
        return None
    try:
        # a damaged file is no version worth keeping, and would push a good one out
        layout, _ = check_file(target)
    except CheckpointError:
        return None
    if keep == 1:
        return _Replaced(None, layout.data_beside)
    held = temporary_name(target)
    try:
        # a second name costs nothing and cannot fail half-way, as a copy of gigabytes can
        os.link(target, held)
    except OSError:  # no hard links on this file system
        _copy(target, held)
    return _Replaced(held, layout.data_beside)


def _is_real_file(path: Path) -> bool:
    return os.path.isfile(path) and not os.path.islink(path)


def _copy(source: Path, destination: Path) -> None:
    def write(stream: integrity.Writable) -> None:
        with open_regular(source) as file:
            while piece := file.read(_CHUNK):
                stream.write(piece)

    replace_file(destination, write)


def _shift(target: Path, old: _Replaced, keep: int) -> None:
    """Move `<target>.1` to `.2` and so on, and the file that was replaced to `.1`; drop the oldest."""
    # oldest first: no name is taken before it is free
    for number in range(keep - 1, 1, -1):
        for suffix in ("", ".data"):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{target}.{number - 1}{suffix}", f"{target}.{number}{suffix}")
    if old.path is None:
        if old.beside:  # nothing refers to it any more
            os.unlink(data_path(target))
        return
    if old.beside:
        os.replace(data_path(target), data_path(f"{target}.1"))
    with contextlib.suppress(FileNotFoundError):  # another save may have swept it as a left-over
        os.replace(old.path, f"{target}.1")
    for version in _versions(target):
        number = version.name.removeprefix(f"{target.name}.")
        if number.isdecimal() and int(number) >= keep:
            _remove(version)
        elif version != target:
            _point_data_at(version)


def _point_data_at(target: Path) -> None:
    """Let `<target>.data` name the file itself if large values are in it: the original looks for them there.

    A convenience for the original only, so a file system without symbolic links is no error.
    """
    link = data_path(target)
    with contextlib.suppress(OSError, CheckpointError):
        with open_regular(target) as file:
            flags = integrity.block_flags(memoryview(file.read(8 + integrity.BLOCK_SIZE)), path=str(target))
        if flags is None:
            return
        if _is_real_file(link):  # somebody else's: the file that a replaced checkpoint used is gone by now
            return
        ours = os.path.islink(link)
        if not flags & integrity.DATA_IN_FILE:
            if ours:
                os.unlink(link)
        elif not ours or os.readlink(link) != target.name:
            # a link cannot be changed in place: a reader would see none for a moment
            temporary = temporary_name(target)
            os.symlink(target.name, temporary)
            os.replace(temporary, link)


def _steps(directory: Path) -> list[Path]:
    """Return the step checkpoints of a directory, highest step first."""
    steps = [(int(match[1]), name) for name in _list(directory) if (match := _STEP.fullmatch(name))]
    return [directory / name for _, name in sorted(steps, reverse=True)]


def _list(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError as error:
        raise CheckpointError(directory, error.strerror or str(error)) from error


def _versions(path: Path) -> list[Path]:
    """Return a file and the older versions that `save` kept of it, newest first."""
    pattern = re.compile(re.escape(path.name) + r"\.(\d+)")
    numbers = [int(match[1]) for name in _list(path.parent) if (match := pattern.fullmatch(name))]
    current = [path] if os.path.lexists(path) else []
    return current + [path.with_name(f"{path.name}.{number}") for number in sorted(numbers)]


def _remove_old(directory: Path, keep: int, *, known_good: Path | None) -> list[Path]:
    good = 0
    removed = []
    for path in _steps(directory):
        if path == known_good:
            good += 1
        # only those that verify count: three damaged ones must not push out the last that is whole
        elif good >= keep:
            _remove(path)
            removed.append(path)
        else:
            with contextlib.suppress(CheckpointError):
                check_file(path)
                good += 1
    return removed


def _remove(path: Path) -> None:
    try:
        os.unlink(path)
        if os.path.lexists(data_path(path)):
            os.unlink(data_path(path))
    except OSError as error:
        warnings.warn(
            f"an old checkpoint could not be removed: {error}", SkippedCheckpointWarning, stacklevel=3
        )
