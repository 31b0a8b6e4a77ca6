"""State files of the portable step: what is refused, and that nothing is half written."""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onward.checkpoint import NominalTensor, OptimizerGroup, from_portable, to_portable
from onward.checkpoint.portable import read_layout
from onward.errors import CheckpointError
from state_files import FORGED, forge, make_data, make_layout


@pytest.fixture
def path(tmp_path: Path) -> Path:
    to_portable(make_data(), tmp_path / "state.bin", layout=make_layout())
    return tmp_path / "state.bin"


def test_what_was_saved_is_loaded(path: Path) -> None:
    data, wanted = from_portable(path), make_data()
    for name, array in wanted.parameters().items():
        np.testing.assert_array_equal(data.parameters()[name], array)
    np.testing.assert_array_equal(data.optimizer[0].slots["w"]["momentum0"], wanted.trainable["w"] * 2)
    assert (data.optimizer[0].step, data.optimizer[0].initial_learning_rate) == (7, 0.01)
    assert data.properties == wanted.properties
    assert data.extras == {"seed": -5, "train_step": 9, "learning_rate": 0.1}  # not the machine it ran on
    assert read_layout(path) == make_layout()


def test_the_bytes_are_those_of_the_specification(path: Path) -> None:
    file, layout = path.read_bytes(), make_layout()
    magic, version, flags, end, text, digest = struct.unpack_from("<8sIIQQ32s", file)
    assert (magic, version, flags) == (b"ONWDSTAT", 1, 0)
    assert len(file) == end + text + 32 and end % 64 == 0
    table = file[end : end + len(layout.text().encode())]
    assert hashlib.sha256(table).digest() == digest and hashlib.sha256(file[:-32]).digest() == file[-32:]
    assert b"trainable\todd\\tname\\\\\t2\t192\n" in table
    np.testing.assert_array_equal(
        np.frombuffer(file, "<f4", 15, 128).reshape(3, 5), make_data().trainable["w"]
    )
    assert b"property\tnote\ts:two\\nlines\\t\\\\\n" in file
    assert layout.weights_size == 256


def test_saving_again_gives_the_same_bytes(path: Path) -> None:
    to_portable(from_portable(path), path.with_name("again"), layout=path)
    assert path.with_name("again").read_bytes() == path.read_bytes()


def test_a_nominal_state_has_names_and_types_and_no_tensors(path: Path) -> None:
    data = make_data()
    trainable, frozen = dict.fromkeys(data.trainable, NominalTensor(1)), {"scale": NominalTensor(10)}
    nominal = path.with_name("nominal_state.bin")
    to_portable(
        replace(data, nominal=True, trainable=trainable, frozen=frozen, optimizer=[]), nominal, layout=path
    )
    file = nominal.read_bytes()
    assert struct.unpack_from("<8sIIQ", file) == (b"ONWDSTAT", 1, 1, 64)
    assert file[32:64] == bytes(32)  # the digest of no model: programs refuse it
    loaded = from_portable(nominal)
    assert loaded.nominal and (loaded.trainable, loaded.frozen) == (trainable, frozen)
    assert loaded.properties == data.properties and not loaded.optimizer
    assert read_layout(nominal) == make_layout()
    for offset in (12, 16, 40):  # without the flag, with another end, with a digest
        forged = bytearray(file[:-32])
        forged[offset] ^= 1
        nominal.write_bytes(forged + hashlib.sha256(forged).digest())
        with pytest.raises(CheckpointError):
            from_portable(nominal)


# ---- damage and malice -----------------------------------------------------------------------------------


def test_every_truncation_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            from_portable(path)


def test_every_changed_byte_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        with pytest.raises(CheckpointError):
            from_portable(path)


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_table_is_refused(name: str, path: Path) -> None:
    whole = path.read_bytes()
    forged = forge(whole, FORGED[name])
    assert forged != whole and forge(whole, lambda text: text) == whole
    path.write_bytes(forged)
    with pytest.raises(CheckpointError):
        from_portable(path)


def test_a_sparse_giant_takes_no_memory(path: Path) -> None:
    header = bytearray(path.read_bytes()[:64])
    header[24:32] = struct.pack("<Q", 1 << 40)
    path.write_bytes(header)
    os.truncate(path, struct.unpack_from("<Q", header, 16)[0] + (1 << 40) + 32)
    with pytest.raises(CheckpointError, match="damaged"):
        from_portable(path)


def test_a_newer_version_says_so(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:8] + b"\2" + whole[9:])
    with pytest.raises(CheckpointError, match="newer Onward"):
        from_portable(path)


@pytest.mark.parametrize("content", [b"", b"neither this nor that" * 9], ids=["empty", "other"])
def test_a_file_that_is_none(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a state file"):
        from_portable(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        from_portable(tmp_path / "missing")


# ---- what does not belong together ------------------------------------------------------------------------


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


MISFITS: dict[str, tuple[dict, str]] = {
    "another shape": ({"trainable": {"w": zeros(5, 3), "odd\tname\\": zeros(2)}}, "belong together"),
    "another type": ({"frozen": {"scale": zeros()}}, "belong together"),
    "a parameter less": ({"trainable": {"w": zeros(3, 5)}}, "lacks the trainable parameter 'odd"),
    "a parameter more": (
        {"frozen": {"scale": np.array(0.5, np.float16), "more": zeros(1)}},
        "'more' as frozen besides",
    ),
    "another optimizer": (
        {"optimizer": [OptimizerGroup(slots={"w": {"momentum1": zeros(3, 5)}})]},
        "another optimizer",
    ),
    "gradients": ({"accumulation": {"w": zeros(3, 5)}}, "between a training step and the optimizer's"),
    "no values": ({"nominal": True, "trainable": {"w": NominalTensor(1)}, "frozen": {}}, "belong together"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_checkpoint_of_another_model_is_refused(name: str, path: Path) -> None:
    changes, message = MISFITS[name]
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        to_portable(replace(make_data(), **changes), path, layout=make_layout())
    assert path.read_bytes() == before and os.listdir(path.parent) == ["state.bin"]


def test_a_full_disk_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match=r"not committed, the old one is kept.*No space left"):
        to_portable(make_data(), path, layout=make_layout())
    monkeypatch.undo()
    assert path.read_bytes() == before and os.listdir(path.parent) == ["state.bin"]
