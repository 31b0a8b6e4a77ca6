"""The lock on a run's folder never has two holders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TIMES = 10_000 if "ONWARD_FUZZ" in os.environ else 200

# "inside" is made exclusively and removed while the lock is held: a second holder fails to make it
_CONTENDER = """
import os, sys
from pathlib import Path
from onward.errors import OnwardError
from onward.train.lock import run_lock

folder, inside, held = Path(sys.argv[1]), Path(sys.argv[2]), 0
while held < int(sys.argv[3]):
    try:
        with run_lock(folder):
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
            os.unlink(inside)
            held += 1
    except OnwardError as error:
        assert "is being written by" in str(error), error
"""


def test_four_processes_never_hold_a_run_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", _CONTENDER, str(folder), str(tmp_path / "inside"), str(TIMES)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    messages = [contender.communicate(timeout=1800)[1] for contender in contenders]
    assert [contender.returncode for contender in contenders] == [0] * 4, messages
