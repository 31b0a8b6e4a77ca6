"""For every test: Ctrl-C means what it means in a terminal, no process outlives the test that started it, and
what was skipped is said at the end, with what would make it run.

A shell's background job (`nohup make test &`) and some CI runners start programs with SIGINT ignored; Python
then ignores it too, and so does every child. The handler is set here, so that tests and their children hear it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Several tests run at a time: threads of torch that wait for one another took most of the time of small models.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept for later runs lies in a folder of this run, not in the user's."""
    before = os.environ.get("ONWARD_CACHE")
    os.environ["ONWARD_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["ONWARD_CACHE"]
    else:
        os.environ["ONWARD_CACHE"] = before


# How long a process may run that a test itself starts; those of fixtures live as long as the fixture.
DEADLINE = float(os.environ.get("ONWARD_TEST_DEADLINE", "300"))


class Child(subprocess.Popen):
    """A process with a deadline, which is told to those who look for what a test left behind."""

    deadline: float | None = None
    started: list[Child] = []  # noqa: RUF012

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        Child.started.append(self)
        if Child.deadline is not None:
            timer = threading.Timer(Child.deadline, self.end)
            timer.daemon = True
            timer.start()

    def end(self) -> bool:
        """Kill the process and what it started; whether there was something to kill."""
        if self.poll() is not None:
            return False
        for pid in reversed(descendants(self.pid)):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(10)
        return True


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and theirs; none where the system has no /proc."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def pytest_configure() -> None:
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    subprocess.Popen = Child  # type: ignore[misc]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = len(Child.started)
    Child.deadline = DEADLINE
    try:
        yield
    finally:
        Child.deadline = None
        left = [child for child in Child.started[before:] if child.end()]
        del Child.started[before:]
    if left:
        pytest.fail(f"the test left a process behind: {left[0].args}")


def pytest_sessionfinish() -> None:
    for child in Child.started:
        child.end()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
