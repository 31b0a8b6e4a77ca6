"""Tests that start processes: whoever starts the suite, Ctrl-C reaches them, and none is left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT that can be ignored")

HERE = Path(__file__).parent


def suite(folder: Path, text: str, *, deadline: float = 60) -> str:
    """What pytest says of a test file, started as a background job is: with SIGINT ignored."""
    shutil.copyfile(HERE / "conftest.py", folder / "conftest.py")
    (folder / "test_inner.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder, folder]
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *map(str, command)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        ignoring, cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        env={**clean, "ONWARD_TEST_DEADLINE": str(deadline)},
    )  # fmt: skip
    return done.stdout + done.stderr


SLEEP = "[sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(600)']"


def test_ctrl_c_is_heard_where_the_suite_was_started_with_sigint_ignored(tmp_path: Path) -> None:
    said = suite(
        tmp_path,
        f"""
import signal, subprocess, sys, pytest
def test_here():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
def test_in_a_child():
    child = subprocess.Popen({SLEEP}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    child.stdout.readline()
    child.send_signal(signal.SIGINT)
    assert child.wait(30) != 0
""",
    )
    assert "2 passed" in said, said


def test_a_process_that_a_test_leaves_behind_fails_it_and_ends_with_what_it_started(tmp_path: Path) -> None:
    said = suite(
        tmp_path,
        """
import pathlib, subprocess, sys
def test_leaves():
    grandchild = (
        "import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(os.getpid(), p.pid, flush=True); p.wait()"
    )
    child = subprocess.Popen([sys.executable, '-c', grandchild], stdout=subprocess.PIPE, text=True)
    pathlib.Path('pids').write_text(child.stdout.readline())
""",
    )
    assert "left a process behind" in said, said
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    alive = pids
    for _ in range(100):
        alive = [pid for pid in pids if running(int(pid))]
        if not alive:
            break
        time.sleep(0.1)
    assert not alive


def test_a_child_has_a_deadline(tmp_path: Path) -> None:
    said = suite(
        tmp_path,
        f"""
import subprocess, sys
def test_waits_for_ever():
    done = subprocess.run({SLEEP}, capture_output=True)
    assert done.returncode != 0
""",
        deadline=1,
    )
    assert "1 passed" in said, said


def running(pid: int) -> bool:
    """Whether a process is there, and not only waiting for its parent to hear of its end."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")
    except OSError:
        return False
