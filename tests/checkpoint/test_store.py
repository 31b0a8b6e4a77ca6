"""Saving: the old checkpoint or the new one is there, whole, whatever fails in between."""

from __future__ import annotations

import errno
import multiprocessing
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from checkpoint.samples import fingerprint, sample
from onward.checkpoint import CheckpointData, atomic, load, save
from onward.checkpoint.atomic import NOT_COMMITTED, UNCERTAIN, temporary_name
from onward.errors import CheckpointError

posix = pytest.mark.skipif(os.name == "nt", reason="POSIX system calls and permissions")
CALLS = [
    "stat",
    "listdir",
    "open",
    "fstat",
    "write",
    "fchmod",
    "fsync",
    "replace",
    "link",
    "unlink",
    "symlink",
]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


class Faults:
    """Lets the n-th call of one function of `os` fail, or that and all later ones; counts calls otherwise."""

    def __init__(self, monkeypatch, call: str, *, code: int = 0, at: int = -1, lasting: bool = False) -> None:
        self.count = 0
        real = getattr(os, call)

        def wrapper(*args, **kwargs):
            index = self.count
            self.count += 1
            if at >= 0 and (index == at or (lasting and index > at)):
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, call, wrapper)


@posix
@pytest.mark.parametrize(
    ("code", "lasting"),
    [(errno.ENOSPC, True), (errno.EIO, False), (errno.EACCES, False)],
    ids=["ENOSPC from then on", "EIO once", "EACCES once"],
)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("keep", [1, 2])
def test_a_failing_system_call_keeps_the_old_file_or_commits_the_new_one(keep, call, code, lasting, tmp_path):
    old, new = fingerprint(sample(1)), fingerprint(sample(2))
    counting = tmp_path / "count"
    counting.mkdir()
    save(sample(1), counting / "c", keep=keep)
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, call)
        save(sample(2), counting / "c", keep=keep, external_threshold=0)
    for at in range(faults.count):
        directory = tmp_path / f"{at}"
        directory.mkdir()
        path = directory / "c"
        save(sample(1), path, keep=keep)
        before = path.read_bytes()
        outcome = ""
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, call, code=code, at=at, lasting=lasting)
            try:
                save(sample(2), path, keep=keep, external_threshold=0)
            except CheckpointError as error:
                outcome = error.reason
                assert os.strerror(code) in outcome
        if outcome.startswith(NOT_COMMITTED):
            assert path.read_bytes() == before
            assert fingerprint(load(path)) == old
            if not lasting and call != "unlink":
                assert names(directory) == ["c"]
        else:
            assert outcome == "" or outcome.startswith(UNCERTAIN)
            assert fingerprint(load(path)) == new
    if call in {"write", "fsync", "replace", "fchmod"}:
        assert faults.count > 0


@posix
@pytest.mark.parametrize(
    ("call", "at", "text"),
    [
        ("open", 0, NOT_COMMITTED),
        ("write", 0, NOT_COMMITTED),
        ("fsync", 0, NOT_COMMITTED),
        ("replace", 0, NOT_COMMITTED),
        ("fsync", 1, UNCERTAIN),
    ],
)
def test_the_error_says_whether_the_new_file_is_there(call, at, text, tmp_path, monkeypatch):
    path = tmp_path / "c"
    save(sample(1), path)
    Faults(monkeypatch, call, code=errno.EIO, at=at)
    with pytest.raises(CheckpointError, match=text):
        save(sample(2), path)
    assert load(path).properties["epoch"] == (2 if text == UNCERTAIN else 1)


@posix
def test_the_file_size_limit_keeps_the_old_file(tmp_path):
    import resource

    path = tmp_path / "c"
    save(sample(1), path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=NOT_COMMITTED):
            save(CheckpointData({"w": np.zeros(1 << 20, np.float32)}), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert fingerprint(load(path)) == fingerprint(sample(1))
    assert names(tmp_path) == ["c"]


def test_a_write_that_the_disk_garbled_is_not_committed(tmp_path, monkeypatch):
    path = tmp_path / "c"
    save(sample(1), path)
    real = os.write

    def garbled(descriptor, data):
        changed = bytearray(data)
        if len(changed) > 60:
            changed[50] ^= 1
        return real(descriptor, bytes(changed))

    monkeypatch.setattr(os, "write", garbled)
    with pytest.raises(CheckpointError, match=NOT_COMMITTED):
        save(sample(2), path)
    assert fingerprint(load(path)) == fingerprint(sample(1))
    assert names(tmp_path) == ["c"]


def test_a_disk_that_cannot_be_read_back_is_not_trusted(tmp_path, monkeypatch):
    path = tmp_path / "c"
    save(sample(1), path)

    def failing(file, view):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "read_into", failing)
        with pytest.raises(CheckpointError, match=NOT_COMMITTED):
            save(sample(2), path)
    assert fingerprint(load(path)) == fingerprint(sample(1))
    assert names(tmp_path) == ["c"]


def test_a_flush_that_failed_while_more_was_written_is_not_forgotten(tmp_path, monkeypatch):
    path = tmp_path / "c"
    save(sample(1), path)
    real, calls = os.fsync, []

    def failing_once(descriptor):
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing_once)
        patch.setattr(atomic, "_FLUSH", 100)
        with pytest.raises(CheckpointError, match=NOT_COMMITTED):
            save(sample(2), path)
    assert len(calls) > 1
    assert fingerprint(load(path)) == fingerprint(sample(1))
    assert names(tmp_path) == ["c"]


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:97]))
    save(sample(1), tmp_path / "c")
    assert fingerprint(load(tmp_path / "c")) == fingerprint(sample(1))


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError, ZeroDivisionError])
def test_an_interrupted_save_leaves_nothing_behind(interruption, tmp_path, monkeypatch):
    path = tmp_path / "c"
    save(sample(1), path)

    def interrupted(descriptor):
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(interruption):
            save(sample(2), path)
    assert names(tmp_path) == ["c"]
    assert fingerprint(load(path)) == fingerprint(sample(1))


@pytest.mark.parametrize(
    "data", [CheckpointData(properties={"p": []}), CheckpointData({"w": np.array(["a"])})]
)
def test_bad_data_leaves_the_old_file_and_nothing_else(data, tmp_path):
    path = tmp_path / "c"
    save(sample(1), path)
    with pytest.raises(TypeError):
        save(data, path)
    assert names(tmp_path) == ["c"]
    assert fingerprint(load(path)) == fingerprint(sample(1))


def test_temporaries_of_dead_processes_are_swept(tmp_path):
    path = tmp_path / "c"
    stale = temporary_name(path)
    other = temporary_name(tmp_path / "cc")
    unrelated = tmp_path / ".c.notes.onward-tmp"
    for left_over in (stale, other, unrelated):
        left_over.write_bytes(b"half")
    save(sample(1), path)
    assert names(tmp_path) == sorted(["c", other.name, unrelated.name])


@posix
def test_temporaries_of_living_processes_are_left_alone(tmp_path):
    import fcntl

    path = tmp_path / "c"
    living = temporary_name(path)
    with open(living, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        save(sample(1), path)
        assert living.exists()
    save(sample(1), path)
    assert not living.exists()


@posix
def test_a_new_file_has_the_mode_of_the_umask_and_an_old_ones_permissions_stay(tmp_path):
    path = tmp_path / "c"
    before = os.umask(0o027)
    try:
        save(sample(1), path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o600)
    save(sample(2), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@posix
def test_saving_through_a_link_replaces_what_it_points_at(tmp_path):
    (tmp_path / "real").mkdir()
    save(sample(1), tmp_path / "real" / "c")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "c")
    save(sample(2), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert fingerprint(load(tmp_path / "real" / "c")) == fingerprint(sample(2))


@pytest.mark.parametrize("where", ["missing/c", "directory"])
def test_places_that_cannot_be_written_are_refused(where, tmp_path):
    (tmp_path / "directory").mkdir()
    with pytest.raises(CheckpointError, match=NOT_COMMITTED):
        save(sample(1), tmp_path / where)
    assert names(tmp_path) == ["directory"]


def test_long_names_work(tmp_path):
    path = tmp_path / ("n" * 250)
    save(sample(1), path)
    save(sample(2), path)
    assert names(tmp_path) == [path.name]


def write_often(path: str, seed: int, times: int) -> None:
    for index in range(times):
        save(sample(seed, width=4000 + index), path, external_threshold=0 if index % 2 else 1 << 30)


@pytest.mark.skipif(os.name == "nt", reason="Windows does not let a file be replaced while it is read")
def test_two_writers_and_a_reader_never_see_a_torn_file(tmp_path):
    path = tmp_path / "c"
    save(sample(0, width=4000), path)
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_often, args=(str(path), seed, 25)) for seed in (1, 2)]
    for writer in writers:
        writer.start()
    reads = 0
    while any(writer.is_alive() for writer in writers) or not reads:
        found = load(path)
        seed, width = found.properties["epoch"], found.trainable["encoder.bias"].shape[0]
        assert isinstance(seed, int)
        assert fingerprint(found) == fingerprint(sample(seed, width=width))
        reads += 1
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert load(path).properties["epoch"] in (1, 2)
    assert [name for name in names(tmp_path) if name.endswith("onward-tmp")] == []
