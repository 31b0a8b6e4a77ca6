"""The example under torchrun, with a rank that is killed on the way."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "distributed_digits.py"


def undisturbed(output: str) -> None:
    """The example as it is, on a rank of the tests' own launcher."""
    runpy.run_path(str(EXAMPLE))["main"](["--output", output, "--epochs", "2"])


@pytest.mark.skipif(os.name != "posix", reason="a rank is killed with SIGKILL")
def test_the_example_with_a_killed_rank_exports_what_it_would_have(tmp_path):
    ranks.run(2, undisturbed, output=str(tmp_path / "whole"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", str(HERE / "dying_digits.py")]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "killed"), "--epochs", "2"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks, 60 updates (30 in this attempt)" in done.stdout
    accuracy = re.search(r"accuracy ([\d.]+)%", done.stdout)
    assert accuracy is not None and float(accuracy[1]) > 80
    whole, killed = (tmp_path / name / "digits.onnx" for name in ("whole", "killed"))
    assert whole.read_bytes() == killed.read_bytes()
