"""Our launcher: every rank is told who it is, all end as one, and no process stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from onward.distributed import launch
from onward.distributed.launch import LOST, World, read_address, run_ranks

posix = pytest.mark.skipif(os.name != "posix", reason="signals and /proc")


def program(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "rank.py"
    path.write_text("import os, signal, subprocess, sys, time, pathlib\n" + text)
    return [sys.executable, str(path)]


def started(*options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "onward.distributed.launch", *map(str, options)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path, lines: int = 1) -> list[str]:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if path.is_file() and len(texts := path.read_text().splitlines()) >= lines:
            return texts
        time.sleep(0.02)
    raise AssertionError(f"{path} did not appear")


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(processes: list[int]) -> None:
    end = time.monotonic() + 10
    while running := [process for process in processes if is_running(process)]:
        assert time.monotonic() < end, running
        time.sleep(0.05)


def test_each_rank_is_told_who_it_is_and_nothing_of_torchruns(tmp_path: Path) -> None:
    text = """
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE ONWARD_ATTEMPT MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID"
values = [os.environ.get(name, "-") for name in names.split()]
pathlib.Path(__file__).with_name("rank" + values[0]).write_text(" ".join([*values, str("ONWARD_STORE" in os.environ)]))
"""
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "an outer job", "RANK": "7"}
    assert run_ranks(program(tmp_path, text), World(2), environment=environment).code == 0
    assert (tmp_path / "rank0").read_text() == "0 2 0 2 0 - - - True"
    assert (tmp_path / "rank1").read_text() == "1 2 1 2 0 - - - True"
    second = World(2, machines=2, machine=1, address=("host0", 29500))
    assert run_ranks(program(tmp_path, text), second, environment=environment).code == 0
    assert (tmp_path / "rank3").read_text() == "3 4 1 2 0 host0 29500 - False"


ENDS = {
    "all are done": ("0", "0", 0, None),
    "one fails": ("3", "0", 3, None),
    "one sees the other die of an error": (str(LOST), "2", 2, None),
    "one is killed": ("'kill'", "0", 9, "rank 0 was killed (SIGKILL)"),
    "one is killed, the other sees it": ("'kill'", str(LOST), 9, "rank 0 was killed (SIGKILL)"),
    "one is lost on another machine": ("0", str(LOST), LOST, "rank 1 lost contact with another rank"),
}


@posix
@pytest.mark.parametrize("name", ENDS)
def test_all_ranks_end_as_one(tmp_path: Path, name: str) -> None:
    first, second, code, lost = ENDS[name]
    text = f"""
code = [{first}, {second}][int(os.environ["RANK"])]
os.kill(os.getpid(), signal.SIGKILL) if code == "kill" else sys.exit(code)
"""
    ended = run_ranks(program(tmp_path, text), World(2))
    assert (ended.code, ended.lost, ended.restarts) == (code, lost, 0)


@posix
@pytest.mark.parametrize(("deaths", "code", "restarts"), [(1, 0, 1), (2, 0, 2), (9, 9, 2)])
def test_a_killed_rank_starts_all_again(tmp_path: Path, deaths: int, code: int, restarts: int) -> None:
    text = f"""
attempt, rank = int(os.environ["ONWARD_ATTEMPT"]), os.environ["RANK"]
store = pathlib.Path(os.environ["ONWARD_STORE"])
assert not store.exists()  # what the attempt before left there would be taken for this one's
store.with_name(rank).write_text("")
if attempt < {deaths} and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    events: list[int] = []
    ended = run_ranks(
        program(tmp_path, text), World(2), max_restarts=2, before_restart=lambda: events.append(1)
    )
    assert (ended.code, ended.restarts, len(events)) == (code, restarts, restarts)


def test_an_error_of_the_program_starts_nothing_again(tmp_path: Path) -> None:
    ended = run_ranks(program(tmp_path, "sys.exit(1)"), World(2), max_restarts=3)
    assert (ended.code, ended.restarts, ended.lost) == (1, 0, None)


@posix
def test_a_rank_that_hangs_after_anothers_error_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 0.3)
    text = """
if os.environ["RANK"] == "1":
    sys.exit(4)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(__file__).with_name("processes").write_text(f"{os.getpid()}\\n{child.pid}")
time.sleep(600)
"""
    # rank 1 waits for the children of rank 0 to be there
    text = text.replace(
        "sys.exit(4)",
        'while not pathlib.Path(__file__).with_name("processes").exists(): time.sleep(0.05)\n    sys.exit(4)',
    )
    assert run_ranks(program(tmp_path, text), World(2)).code == 4
    wait_until_gone([int(line) for line in (tmp_path / "processes").read_text().split()])


RANKS = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(pathlib.Path(__file__).with_name("processes"), "a") as file:
    file.write(f"{os.getpid()}\\n{child.pid}\\n")
try:
    time.sleep(600)
except KeyboardInterrupt:
    pathlib.Path(__file__).with_name("saved" + os.environ["RANK"]).write_text("")
    raise
"""


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_ends_all_and_lets_them_save(tmp_path: Path, number: int) -> None:
    path = program(tmp_path, RANKS)[1]
    launcher = started("-n", 2, path)
    processes = [int(line) for line in wait_for(tmp_path / "processes", lines=4)]
    launcher.send_signal(number)
    launcher.communicate(timeout=30)
    assert launcher.returncode == (-number if number == signal.SIGKILL else 130)
    wait_until_gone(processes)
    saved = {path.name for path in tmp_path.glob("saved*")}
    assert saved == (set() if number == signal.SIGKILL else {"saved0", "saved1"})


def test_the_command_runs_programs_and_modules_with_their_own_options(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("word = 'from beside'")
    path = program(
        tmp_path, "import beside; sys.stdout.write(f'{beside.word} {sys.argv[1:]} {__name__}\\n')"
    )[1]
    output, errors = started("-n", 2, path, "--rank", "-n", 3).communicate(timeout=60)
    assert output.splitlines() == ["from beside ['--rank', '-n', '3'] __main__"] * 2, errors
    output, errors = started("-n", 1, "-m", "platform", "terse").communicate(timeout=60)
    assert output.strip(), errors


@posix
def test_the_command_says_what_was_lost(tmp_path: Path) -> None:
    path = program(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")[1]
    launcher = started("-n", 1, "--max-restarts", 1, path)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 9
    assert errors.splitlines() == [
        "a rank was lost: all start again",
        "error: rank 0 was killed (SIGKILL), 2 times",
    ]


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"master": "host0:1", "machines": 1, "machine": 0}, "for several machines"),
    ({"master": None, "machines": 1, "machine": 1}, "for several machines"),
    ({"master": None, "machines": 2, "machine": 0}, "need --master HOST:PORT"),
    ({"master": "host0:1", "machines": 2, "machine": 2}, "machines are 0 to 1"),
    ({"master": "host0:1", "machines": 2, "machine": -1}, "machines are 0 to 1"),
    ({"master": "host0:", "machines": 2, "machine": 0}, "not HOST:PORT"),
    ({"master": ":29500", "machines": 2, "machine": 0}, "not HOST:PORT"),
    ({"master": "host0:99999", "machines": 2, "machine": 0}, "not HOST:PORT"),
]


@pytest.mark.parametrize(("values", "message"), MISTAKES)
def test_machines_that_cannot_meet_are_refused(
    values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONWARD_SECRET", "what nobody else can guess")
    with pytest.raises(ValueError, match=message):
        read_address(**values)


def test_several_machines_need_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONWARD_SECRET", raising=False)
    with pytest.raises(ValueError, match="ONWARD_SECRET is not set"):
        read_address("host0:29500", machines=2, machine=0)
    monkeypatch.setenv("ONWARD_SECRET", "what nobody else can guess")
    assert read_address("host0", machines=2, machine=0) == ("host0", 29500)
    assert read_address("[::1]:29501", machines=2, machine=0) == ("::1", 29501)
