"""State files of the portable step: what is refused, and that nothing is half written."""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onward.checkpoint import CheckpointData, NominalTensor, OptimizerGroup, from_portable, to_portable
from onward.checkpoint.portable import StateLayout, StatePart, StateTensor, read_layout, weights_of
from onward.errors import CheckpointError

FLOAT, INT = np.dtype(np.float32), np.dtype(np.int64)


def make_layout(w: tuple[int, ...] = (3, 5)) -> StateLayout:
    """Two parameters in one tensor, a frozen one, one slot, the counters."""
    packed = (StatePart("trainable", "w", w), StatePart("trainable", "odd\tname\\", (2,), start=64))
    slots = tuple(StatePart("slot", p.name, p.shape, "momentum0", p.start) for p in packed)
    return StateLayout(
        [
            StateTensor("scale", np.dtype(np.float16), (), (StatePart("frozen", "scale", ()),)),
            StateTensor("packed0", FLOAT, (18,), packed),
            StateTensor("packed0.momentum0", FLOAT, (18,), slots),
            *(
                StateTensor(role, INT, (1,), (StatePart(role, role, (1,)),))
                for role in ("optimizer_step", "train_step", "random_seed")
            ),
        ]
    )


def make_data() -> CheckpointData:
    rng = np.random.default_rng(0)
    w, odd = rng.normal(size=(3, 5)).astype(np.float32), np.array([1.5, -2.0], np.float32)
    return CheckpointData(
        trainable={"w": w, "odd\tname\\": odd},
        frozen={"scale": np.array(0.5, np.float16)},
        optimizer=[
            OptimizerGroup(
                "group0", 7, 0.01, {"w": {"momentum0": w * 2}, "odd\tname\\": {"momentum0": odd * 2}}
            )
        ],
        properties={"epoch": 3, "note": "two\nlines\t\\", "share": 0.25},
        extras={"seed": -5, "train_step": 9, "learning_rate": 0.1, "environment": "here"},
    )


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
    weights = b"".join(weights_of(make_data(), layout))
    assert weights[64:] == file[64 : layout.weights_size] and layout.weights_size == 256


def test_saving_again_gives_the_same_bytes(path: Path) -> None:
    to_portable(from_portable(path), path.with_name("again"), layout=path)
    assert path.with_name("again").read_bytes() == path.read_bytes()


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


def forge(whole: bytes, change: Callable[[str], str]) -> bytes:
    """The file with another text, and with all sizes and digests put right: only its meaning is wrong."""
    end, text = struct.unpack_from("<QQ", whole, 16)
    changed = change(whole[end : end + text].decode())
    table = "".join(
        line for line in changed.splitlines(keepends=True) if not line.startswith(("property", "extra"))
    )
    digest = hashlib.sha256(table.encode()).digest()
    made = whole[:24] + struct.pack("<Q", len(changed.encode())) + digest + whole[64:end] + changed.encode()
    return made + hashlib.sha256(made).digest()


FORGED = {
    "a tensor elsewhere": lambda text: text.replace("float32\t18\t128", "float32\t18\t192", 1),
    "a tensor past the end": lambda text: text.replace("float32\t18\t128", "float32\t1800\t128", 1),
    "a size beyond 64 bits": lambda text: text.replace("\t18\t128", "\t4294967296,4294967296,18\t128", 1),
    "a size that is no number": lambda text: text.replace("\t18\t128", "\t-18\t128", 1),
    "a size in other digits": lambda text: text.replace("\t18\t128", "\t１８\t128", 1),
    "forty dimensions": lambda text: text.replace("\t18\t128", "\t18" + ",1" * 40 + "\t128", 1),
    "a part that is larger": lambda text: text.replace("trainable\tw\t3,5", "trainable\tw\t3,500", 1),
    "parts that overlap": lambda text: text.replace("\t2\t192\n", "\t2\t128\n", 1),
    "a type that runs code": lambda text: text.replace("float32", "object", 1),
    "an unknown role": lambda text: text.replace("trainable\tw", "unknown\tw", 1),
    "a role in the wrong place": lambda text: text.replace("trainable\tw", "random_seed\tw", 1),
    "two of a name": lambda text: text.replace("odd\\tname\\\\", "w"),
    "no name": lambda text: text.replace("trainable\tw\t", "trainable\t\t", 1),
    "no counters": lambda text: text[: text.index("tensor\toptimizer_step")],
    "a counter of another type": lambda text: text.replace("train_step\tint64", "train_step\tfloat64", 1),
    "a tensor without parts": lambda text: text.replace("frozen\tscale\t\t64\n", "", 1),
    "a line too short": lambda text: text.replace("tensor\tscale\t", "tensor\t", 1),
    "an empty line": lambda text: text.replace("property", "\nproperty", 1),
    "a wrong escape": lambda text: text.replace("\\tname", "\\xname"),
    "an escape cut off": lambda text: text.replace("s:two\\n", "s:two\n\\", 1),
    "a value without a type": lambda text: text.replace("i:3", "3"),
    "an integer that is none": lambda text: text.replace("i:3", "i:three"),
    "no end of the line": lambda text: text[:-1],
    "no text": lambda text: "",
}


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
    "no values": ({"nominal": True, "trainable": {"w": NominalTensor(1)}, "frozen": {}}, "nominal"),
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
