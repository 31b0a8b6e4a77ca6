"""Damaged files: refused or read with exactly the old content, never a crash, never other values."""

from __future__ import annotations

import hashlib
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from checkpoint.samples import encoded, fingerprint, sample
from onward.checkpoint import decode, load
from onward.checkpoint.integrity import MAGIC, TRAILER_SIZE
from onward.errors import CheckpointError

FIXTURES = Path(__file__).parent / "fixtures"
MUTATIONS_PER_KIND = 72


def flip_bit(content: bytearray, rng: np.random.Generator) -> None:
    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))


def truncate(content: bytearray, rng: np.random.Generator) -> None:
    del content[rng.integers(len(content)) :]


def zero_block(content: bytearray, rng: np.random.Generator) -> None:
    start = int(rng.integers(len(content)))
    stop = min(len(content), start + int(rng.integers(1, 512)))
    content[start:stop] = bytes(stop - start)


def replace_word(content: bytearray, rng: np.random.Generator) -> None:
    start = 4 * int(rng.integers(min(len(content), 2048) // 4))
    value = rng.choice([0, 1, 2**31 - 1, 2**32 - 1, len(content), int(rng.integers(2**32))])
    content[start : start + 4] = struct.pack("<I", value)


def insert_bytes(content: bytearray, rng: np.random.Generator) -> None:
    at = int(rng.integers(len(content) + 1))
    content[at:at] = rng.bytes(int(rng.integers(1, 64)))


def remove_bytes(content: bytearray, rng: np.random.Generator) -> None:
    at = int(rng.integers(len(content)))
    del content[at : at + int(rng.integers(1, 64))]


def overwrite(content: bytearray, rng: np.random.Generator) -> None:
    at = int(rng.integers(len(content)))
    piece = rng.bytes(min(len(content) - at, int(rng.integers(1, 256))))
    content[at : at + len(piece)] = piece


KINDS = [flip_bit, truncate, zero_block, replace_word, insert_bytes, remove_bytes, overwrite]
Mutation = Callable[[bytearray, np.random.Generator], None]


def mutants(content: bytes, kind: Mutation, seed: int, count: int = MUTATIONS_PER_KIND):
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    for _ in range(count):
        changed = bytearray(content)
        kind(changed, rng)
        yield bytes(changed)


def resealed(payload: bytes) -> bytes:
    head = payload + MAGIC + struct.pack("<Q", len(payload))
    return head + hashlib.sha256(head).digest()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_our_files_are_refused_or_unchanged(kind, tmp_path):
    content = encoded(sample(1), external_threshold=1200)
    expected = fingerprint(sample(1))
    path = tmp_path / "checkpoint"
    refused = 0
    for changed in mutants(content, kind, seed=0):
        path.write_bytes(changed)
        try:
            found = load(path)
        except CheckpointError:
            refused += 1
        else:
            assert fingerprint(found) == expected
    assert refused >= MUTATIONS_PER_KIND - 12  # a zeroed block or word may have been zero before


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_verifier_stands_alone_when_the_checksum_was_forged(kind):
    content = encoded(sample(1), external_threshold=1200)[:-TRAILER_SIZE]
    outcomes = set()
    for changed in mutants(content, kind, seed=1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                decode(resealed(changed))
                outcomes.add("read")
            except CheckpointError:
                outcomes.add("refused")
    assert "refused" in outcomes


@pytest.mark.filterwarnings("ignore::onward.checkpoint.UncheckedCheckpointWarning")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", ["original.ckpt", "original_external.ckpt"])
def test_files_without_checksum_are_refused_or_have_sound_structure(name, kind, tmp_path):
    shutil.copy(FIXTURES / "original_external.ckpt.data", tmp_path / "checkpoint.data")
    content = (FIXTURES / name).read_bytes()
    path = tmp_path / "checkpoint"
    refused = 0
    for changed in mutants(content, kind, seed=2):
        path.write_bytes(changed)
        try:
            data = load(path)
        except CheckpointError:
            refused += 1
        else:
            held = sum(array.nbytes for array in data.parameters().values() if isinstance(array, np.ndarray))
            assert held <= len(changed) + (tmp_path / "checkpoint.data").stat().st_size
    assert refused


def test_cutting_off_the_trailer_is_noticed():
    content = encoded(sample(1))
    for cut in range(1, TRAILER_SIZE + 1):
        with pytest.raises(CheckpointError, match="trailer"):
            decode(content[:-cut])


def test_an_error_says_which_file_which_field_and_which_byte(tmp_path):
    path = tmp_path / "checkpoint"
    content = bytearray((FIXTURES / "original.ckpt").read_bytes())
    content[content.index(b"fc1.bias")] = 0xFF
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not UTF-8 .*name at byte \d+") as caught:
        load(path)
    assert caught.value.path == str(path)
    assert "requires_grad_params[0]" in caught.value.field or "optimizer_states" in caught.value.field
    assert content[caught.value.offset or 0] == 0xFF


@pytest.mark.parametrize("content", [b"", b"ODTC", b"\0" * 8, b"\0\0\0\0ODTC", b"PK\3\4" + bytes(100)])
def test_what_is_no_checkpoint_is_refused(content, tmp_path):
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(CheckpointError):
        load(tmp_path / "c")
