"""The campaign of `campaign.py`: one case for each place where a file is read here, all of them by `make fuzz`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))

import hostile_files

LONG = "ONWARD_FUZZ" in os.environ
PARTS = 16
SLICES = [["--every", str(PARTS), "--first", str(part)] for part in range(PARTS)] if LONG else [["--few"]]


def test_two_hundred_hostile_tokenizers_templates_pictures_sounds_and_tables_are_tried() -> None:
    """Each within 20 s and 2 GB: the campaign ends a case beyond that, and calls it a problem."""
    kinds = ("tokenizers", "templates", "pictures", "sounds", "tables")
    assert sum(len({**hostile_files.anything(), **getattr(hostile_files, kind)()}) for kind in kinds) >= 200
    text = Path(__file__).with_name("campaign.py").read_text("utf-8")
    assert "SECONDS = 20 " in text and "RESIDENT = 1500 << 20" in text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each case runs in a fork of one process")
@pytest.mark.parametrize("chosen", SLICES, ids=" ".join)
def test_hostile_files_do_no_harm(chosen: list[str]) -> None:
    script = Path(__file__).with_name("campaign.py")
    ran = subprocess.run([sys.executable, script, *chosen], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
    assert "cases, 0 problems" in ran.stdout
