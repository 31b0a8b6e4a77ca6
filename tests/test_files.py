"""Files placed together: whole before and after, whatever happens in between."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onward import files as staging


def dead_process() -> int:
    """The number of a process that has ended."""
    return int(
        subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True).stdout
    )


def test_files_replace_old_ones_and_leave_nothing_else(tmp_path: Path):
    (tmp_path / "a").write_text("old")
    with staging.staging_folder(tmp_path) as folder:
        (folder / "a").write_text("new")
        (folder / "b").write_text("new")
        placed = staging.place(sorted(folder.iterdir()), tmp_path)
    assert placed == [tmp_path / "a", tmp_path / "b"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "new", "b": "new"}


def test_old_files_come_back_where_a_later_one_cannot_be_moved(tmp_path: Path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").mkdir()
    with pytest.raises(OSError, match="is a directory"), staging.staging_folder(tmp_path) as folder:
        (folder / "a").write_text("new")
        (folder / "b").write_text("new")
        staging.place(sorted(folder.iterdir()), tmp_path)
    assert (tmp_path / "a").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.skipif(os.name != "posix", reason="only POSIX can ask whether a process runs")
def test_folders_of_dead_writers_are_removed_and_of_living_ones_kept(tmp_path: Path):
    stale = tmp_path / f".onward-{dead_process()}-x"
    living = tmp_path / f".onward-{os.getppid()}-x"
    foreign = tmp_path / ".onward-notes"
    for folder in (stale, living, foreign):
        folder.mkdir()
    with staging.staging_folder(tmp_path):
        assert not stale.exists()
        assert living.exists() and foreign.exists()


def test_a_text_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "run.json"
    staging.write_text(path, "old")

    def fail(self: Path, text: str, encoding: str) -> None:
        self.write_bytes(text.encode()[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*run\.json"):
        staging.write_text(path, "new")
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"] and path.read_text() == "old"
