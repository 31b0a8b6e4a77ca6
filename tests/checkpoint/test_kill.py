"""kill -9 at a hundred random moments of saving: no checkpoint is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
