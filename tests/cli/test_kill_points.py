"""Commands that are killed, or whose disk is full or read-only, at an event of the file system: one point of each.

All points of all commands are `python benchmarks/kill_points.py`, and `make fuzz` here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
def test_a_killed_command_leaves_the_old_result_or_the_new_one() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "kill_points.py"
    options = [] if "ONWARD_FUZZ" in os.environ else ["--few"]
    # a process of its own: the forks of one that has open sessions would wait for their threads
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "cases, 0 problems" in done.stdout
