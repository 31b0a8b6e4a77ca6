"""Damaged and hostile files, made by chance: each reader gives one of our errors, or reads on.

A fixed seed and a few files in CI; `make fuzz` sets ONWARD_FUZZ to many more and another seed each time. A file that
gives another error, or takes long, is kept in `build/fuzz`: add it to the corpus as a bad one.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import typer
from readers import CORPUS, TARGETS, seeds

from onward.cli.errors import CommandError
from onward.errors import OnwardError

COUNT = int(os.environ.get("ONWARD_FUZZ", "60"))
SEED = 18 if COUNT == 60 else int.from_bytes(os.urandom(4), "little")
OURS = (OnwardError, CommandError, typer.BadParameter)
SECONDS = 20.0


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with what lies beside a target's file."""
    name = request.node.callspec.params["name"]
    for file in (CORPUS / name).iterdir():
        if not file.name.startswith(("good", "bad")):
            shutil.copy(file, tmp_path)
    return tmp_path


def read(name: str, folder: Path, data: bytes) -> None:
    path = folder / TARGETS[name].file
    path.write_bytes(data)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        TARGETS[name].read(path)


@pytest.mark.parametrize("name", TARGETS)
def test_good_files_are_read(name: str, folder: Path) -> None:
    assert seeds(name)
    for seed in seeds(name):
        read(name, folder, seed.read_bytes())


@pytest.mark.parametrize("name", [name for name in TARGETS if seeds(name, "bad")])
def test_files_that_broke_a_reader_once(name: str, folder: Path) -> None:
    for seed in seeds(name, "bad"):
        with pytest.raises(OURS):
            read(name, folder, seed.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_give_our_errors(name: str, folder: Path) -> None:
    random = np.random.default_rng(SEED)
    good = [seed.read_bytes() for seed in seeds(name)]
    refused = 0
    for _ in range(COUNT):
        data = TARGETS[name].make(good[int(random.integers(len(good)))], random)
        start = time.monotonic()
        try:
            read(name, folder, data)
        except OURS:
            refused += 1
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error}; the file is {keep(name, data)}")
        if time.monotonic() - start > SECONDS:
            pytest.fail(f"it took {time.monotonic() - start:.0f} s; the file is {keep(name, data)}")
    assert name == "history" or refused > COUNT // 20  # a history that is damaged is an empty one


def keep(name: str, data: bytes) -> Path:
    path = Path("build/fuzz") / name / sha256(data).hexdigest()[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
