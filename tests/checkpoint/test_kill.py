"""kill -9 at a hundred random moments of saving: no checkpoint is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from onward.checkpoint import CheckpointData, save

KILLS = 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_killing_a_save_loses_nothing(tmp_path):
    script = Path(__file__).with_name("killed_saver.py")
    arguments = [sys.executable, str(script), str(tmp_path), str(KILLS), "0"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["torn"] == 0 and found["lost"] == 0
    assert found["unfinished"] > KILLS // 10  # the kills did hit saves
    assert found["saves"] > 0
    assert found["left"] == []


def test_a_link_that_a_killed_save_left_for_an_older_version_is_swept(tmp_path):
    target = tmp_path / "checkpoint"
    data = CheckpointData(trainable={"w": np.ones(3, np.float32)})
    save(data, target, keep=2)
    left = tmp_path / ".checkpoint.1.0123456789abcdef.onward-tmp"
    try:
        left.symlink_to("checkpoint.1")
    except OSError:
        pytest.skip("this file system or user may not make symbolic links")
    foreign = tmp_path / ".checkpoint.notes.0123456789abcdef.onward-tmp"
    foreign.write_text("mine")
    save(data, target, keep=2)
    assert not left.is_symlink()
    assert foreign.read_text() == "mine"
