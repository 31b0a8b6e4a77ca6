"""Damaged and hostile files, made by chance: each reader gives one of our errors, or reads on. A fixed seed in CI.

`make fuzz` sets ONWARD_FUZZ to many more; a file that gives another error is kept, to become a case of its own.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
import typer

from onward import checkpoint
from onward.checkpoint import CheckpointData
from onward.cli.errors import CommandError
from onward.cli.run_folder import read_run
from onward.errors import OnwardError
from onward.graph.gate import read_proto
from onward.graph.load import load_model

COUNT = int(os.environ.get("ONWARD_FUZZ", "150"))
MODEL = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 21, "f": 1]> g (float[N, 3] x) => (float[N, 2] y)'
    "<float[3, 2] w = {1, 2, 3, 4, 5, 6}, int64[1] s = {2}>"
    "{ m = MatMul(x, w) e = ConstantOfShape(s) a = Add(m, e) y = f.Twice(a) }"
    '<domain: "f", opset_import: ["": 21]> Twice (x) => (y) { y = Add(x, x) }'
).SerializeToString()
RUN = (
    b'{"artifacts": "artifacts", "options": {"epochs": 3, "data": ["d.npz"], "prefix": ""}, "classes": ["a"]}'
)


def saved_checkpoint(folder: Path) -> bytes:
    path = folder / "checkpoint"
    checkpoint.save(CheckpointData(trainable={"w": np.ones((3, 2), np.float32)}, frozen={}), path)
    return path.read_bytes()


def saved_safetensors(folder: Path) -> bytes:
    path = folder / "w.safetensors"
    checkpoint.to_safetensors(CheckpointData(trainable={"w": np.ones((3, 2), np.float32)}, frozen={}), path)
    return path.read_bytes()


def in_file(name: str, read: Callable[[Path], object]) -> Callable[[Path, bytes], object]:
    def attempt(folder: Path, data: bytes) -> object:
        (folder / name).write_bytes(data)
        return read(folder / name)

    return attempt


TARGETS: dict[str, tuple[Callable[[Path], bytes], Callable[[Path, bytes], object]]] = {
    "gate": (lambda folder: MODEL, lambda folder, data: read_proto(data)),
    "model": (lambda folder: MODEL, lambda folder, data: load_model(data)),
    "checkpoint": (saved_checkpoint, in_file("c", checkpoint.load)),
    "safetensors": (saved_safetensors, in_file("c.safetensors", checkpoint.from_safetensors)),
    "run": (lambda folder: RUN, in_file("run.json", lambda path: read_run(path.parent))),
}


def damage(data: bytes, random: np.random.Generator) -> bytes:
    """Bytes changed, cut out, doubled, or exchanged for ones that parsers trip over."""
    made = bytearray(data)
    for _ in range(random.integers(1, 5)):
        place = int(random.integers(len(made) or 1))
        match int(random.integers(5)):
            case 0 if made:
                made[place] = int(random.integers(256))
            case 1:
                del made[place : place + int(random.integers(1, 9))]
            case 2:
                made[place:place] = made[place : place + int(random.integers(1, 33))]
            case 3:
                made[place : place + 4] = [b"\xff\xff\xff\xff", b"\0\0\0\0", b"[[[[", b"\x7f\xff\xff\xff"][
                    int(random.integers(4))
                ]
            case _:
                del made[place:]
    return bytes(made)


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_give_our_errors(name: str, tmp_path: Path) -> None:
    make, read = TARGETS[name]
    good = make(tmp_path)
    read(tmp_path, good)
    random = np.random.default_rng(18)
    refused = 0
    for _ in range(COUNT):
        data = damage(good, random)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(tmp_path, data)
        except (OnwardError, CommandError, typer.BadParameter):
            refused += 1
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error} for {data!r}")
    assert refused > COUNT // 3
