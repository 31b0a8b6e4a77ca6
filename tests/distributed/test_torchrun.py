"""The example under our launcher and under torchrun, with a rank that is killed on the way."""

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


LAUNCHERS = {
    "ours": ["onward.distributed.launch", "-n", "2"],
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    ranks.run(2, undisturbed, output=str(folder))
    return folder


@pytest.mark.skipif(os.name != "posix", reason="a rank is killed with SIGKILL")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_example_with_a_killed_rank_exports_what_it_would_have(launcher, whole, tmp_path):
    command = [sys.executable, "-m", *LAUNCHERS[launcher], "--max-restarts", "1"]
    done = subprocess.run(
        [*command, str(HERE / "dying_digits.py"), "--output", str(tmp_path / "killed"), "--epochs", "2"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks, 60 updates (30 in this attempt)" in done.stdout
    accuracy = re.search(r"accuracy ([\d.]+)%", done.stdout)
    assert accuracy is not None and float(accuracy[1]) > 80
    models = [folder / "digits.onnx" for folder in (whole, tmp_path / "killed")]
    assert models[0].read_bytes() == models[1].read_bytes()
