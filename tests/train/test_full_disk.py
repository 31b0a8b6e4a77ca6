"""A disk that is full or read-only: one clear error, whichever write it hits, and the run can be resumed."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onward.errors import OnwardError
from small_models import write_classifier
from trainer_runs import data, kept, make

FIT: dict[str, Any] = {"epochs": 1, "batch_size": 24, "resume": True}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Disk:
    """Lets so many writes into a folder succeed, and none after them; an audit hook sees them all."""

    def __init__(self) -> None:
        self.folder, self.left, self.code, self.seen = "", 0, 0, 0
        sys.addaudithook(self._hook)  # for good: Python has no way to take one away

    @contextlib.contextmanager
    def fails(self, folder: Path, *, after: int, code: int) -> Iterator[None]:
        self.folder, self.left, self.code, self.seen = str(folder), after, code, 0
        try:
            yield
        finally:
            self.folder = ""

    def _hook(self, event: str, arguments: tuple) -> None:
        if not self.folder or event not in ("open", "os.rename", "os.mkdir"):
            return
        path = arguments[0]
        if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(self.folder):
            return
        if event == "open" and not arguments[2] & _WRITING:
            return
        self.seen += 1
        if self.seen > self.left:
            raise OSError(self.code, os.strerror(self.code), path)


@pytest.fixture(scope="module")
def disk() -> Disk:
    return Disk()


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("artifacts"), dropout=0.3)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_every_write_of_a_run_may_fail(artifacts: Path, disk: Disk, tmp_path: Path) -> None:
    with disk.fails(tmp_path / "whole", after=10**9, code=0):
        make(artifacts, tmp_path / "whole").fit(data(), **FIT)
    writes = disk.seen
    assert writes > 5
    for after in range(writes):
        output = tmp_path / str(after)
        code = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)[after % 3]
        with disk.fails(output, after=after, code=code):
            trainer = make(artifacts, output, progress=False)
            with pytest.raises(OnwardError) as raised:
                trainer.fit(data(), **FIT)
        assert os.strerror(code) in str(raised.value) or "not committed" in str(raised.value)
        assert str(output) in str(raised.value)
        make(artifacts, output, progress=False).fit(data(), **FIT)
        assert kept(output) == kept(tmp_path / "whole")


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Files cannot grow beyond so many bytes: the system refuses a write in the middle of one."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.skipif(sys.platform == "win32", reason="the system has no limits on the size of files")
def test_every_file_of_a_run_may_be_cut_short(artifacts: Path, tmp_path: Path) -> None:
    make(artifacts, tmp_path / "whole", progress=False).fit(data(), **FIT)
    sizes = {path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    for size in sorted(sizes):
        output = tmp_path / str(size)
        trainer = make(artifacts, output, progress=False)
        with files_up_to(size // 2), pytest.raises(OnwardError, match="too large"):
            trainer.fit(data(), **FIT)
        assert not [path for path in output.rglob(".*") if path.is_file() and path.name != ".lock"]
        make(artifacts, output, progress=False).fit(data(), **FIT)
        assert kept(output) == kept(tmp_path / "whole")


def test_links_out_of_a_run_are_not_followed(artifacts: Path, tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "precious"
    make(artifacts, run, progress=False).fit(data(), **FIT)
    elsewhere.write_text("precious")
    for name in (
        ".lock",
        "history.json",
        ".history.json.new",
        "report.html",
        "history.csv",
        "checkpoint-9999",
    ):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(elsewhere)
        with pytest.raises(OnwardError, match="a link out of the run's folder"):
            make(artifacts, run, progress=False).fit(data(), **{**FIT, "epochs": 3})
        assert elsewhere.read_text() == "precious"
        (run / name).unlink()
    make(artifacts, run, progress=False).fit(data(), **{**FIT, "epochs": 3})


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_in_a_run_does_not_block(artifacts: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "history.json")
    with pytest.raises(OnwardError, match="neither a file nor a folder"):
        make(artifacts, tmp_path).fit(data(), **FIT)
