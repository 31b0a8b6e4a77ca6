"""Small files that describe large data: all are refused, with little memory."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.forge import Forge
from checkpoint.samples import encoded, sample
from onward.checkpoint import load
from onward.checkpoint.integrity import TRAILER_SIZE
from onward.errors import CheckpointError

MANY = 4000


def tensors_over_one_vector() -> bytes:
    f = Forge()
    raw, dims = f.raw(bytes(600_000)), f.dims(150_000)
    tensors = [f.tensor(f"t{i}", dims=dims, raw=raw) for i in range(MANY)]
    return f.finish(f.module(f.offsets(tensors), f.offsets([])))


def two_tensors_over_one_vector() -> bytes:
    f = Forge()
    raw = f.raw(bytes(40))
    tensors = [f.tensor(f"t{i}", dims=f.dims(10), raw=raw) for i in range(2)]
    return f.finish(f.module(f.offsets(tensors), f.offsets([])))


def one_table_a_million_times() -> bytes:
    f = Forge()
    tensor = f.tensor("t", dims=f.dims(1), raw=f.raw(bytes(4)))
    return f.finish(f.module(f.offsets([tensor] * 1_000_000), f.offsets([])))


def moments_over_parameters() -> bytes:
    f = Forge()
    raw = f.raw(bytes(400_000))
    tensor = f.tensor("t", dims=f.dims(100_000), raw=raw)
    states = [
        f.table(
            2,
            s0=("Ref", f.text(f"t{i}")),
            s1=("Ref", f.offsets([f.tensor("momentum0", dims=f.dims(100_000), raw=raw)])),
        )
        for i in range(MANY)
    ]
    group = f.table(
        4, s0=("Ref", f.text("group0")), s1=("Int64", 1), s2=("Float32", 0), s3=("Ref", f.offsets(states))
    )
    return f.finish(f.module(f.offsets([tensor]), f.offsets([])), groups=f.offsets([group]))


def groups_over_one_vector_of_states() -> bytes:
    f = Forge()
    momentum = f.tensor("momentum0", dims=f.dims(100_000), raw=f.raw(bytes(400_000)))
    states = f.offsets([f.table(2, s0=("Ref", f.text("t")), s1=("Ref", f.offsets([momentum])))])
    groups = [
        f.table(4, s0=("Ref", f.text(f"g{i}")), s1=("Int64", 1), s2=("Float32", 0), s3=("Ref", states))
        for i in range(MANY)
    ]
    return f.finish(f.module(f.offsets([]), f.offsets([])), groups=f.offsets(groups))


def properties_over_one_text() -> bytes:
    f = Forge()
    text = f.text("x" * 1_000_000)
    strings = [f.table(2, s0=("Ref", f.text(f"p{i}")), s1=("Ref", text)) for i in range(MANY)]
    return f.finish(f.module(f.offsets([]), f.offsets([])), bag=f.table(3, s2=("Ref", f.offsets(strings))))


def with_dims(*dims: int) -> Callable[[], bytes]:
    def build() -> bytes:
        f = Forge()
        tensor = f.tensor("t", dims=f.dims(*dims), raw=f.raw(b""))
        return f.finish(f.module(f.offsets([tensor]), f.offsets([])))

    return build


def vector_longer_than_the_file() -> bytes:
    f = Forge()
    tensor = f.tensor("t", dims=f.dims(4), raw=f.raw(b"ABCDEFGHIJKLMNOP"))
    content = bytearray(f.finish(f.module(f.offsets([tensor]), f.offsets([]))))
    at = content.index(b"ABCDEFGHIJKLMNOP") - 4
    content[at : at + 4] = struct.pack("<I", 2**32 - 1)
    return bytes(content)


def module_that_is_the_root() -> bytes:
    f = Forge()
    content = bytearray(f.finish(f.module(f.offsets([]), f.offsets([]))))
    (root,) = struct.unpack_from("<I", content)
    vtable = root - struct.unpack_from("<i", content, root)[0]
    field = root + struct.unpack_from("<H", content, vtable + 6)[0]
    struct.pack_into("<I", content, field, (root - field) % 2**32)
    return bytes(content)


def vtable_outside() -> bytes:
    content = bytearray(tensors_over_one_vector())
    (root,) = struct.unpack_from("<I", content)
    struct.pack_into("<i", content, root, -(2**31))
    return bytes(content)


BOMBS = {
    "4000 tensors over one vector": (tensors_over_one_vector, "share bytes"),
    "two tensors over one vector": (two_tensors_over_one_vector, "share bytes"),
    "one table a million times": (one_table_a_million_times, "share bytes"),
    "moments over parameters": (moments_over_parameters, "share bytes"),
    "groups over one vector of states": (groups_over_one_vector_of_states, "share bytes"),
    "properties over one text": (properties_over_one_text, "share bytes"),
    "product of dims overflows to 0": (with_dims(2**32, 2**32), "too large"),
    "zero hides a huge dimension": (with_dims(0, 2**62), "too large"),
    "negative dimensions": (with_dims(-1, -1), "negative dimension"),
    "a million dimensions": (with_dims(*[1] * 1_000_000), "at most 32"),
    "shape without data": (with_dims(2**30), "needs 4294967296 bytes"),
    "vector longer than the file": (vector_longer_than_the_file, "outside"),
    "a table that contains itself": (module_that_is_the_root, "."),
    "vtable outside": (vtable_outside, "outside"),
}


def assert_refused_within_bounds(path: Path, size: int, text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=text):
            load(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * size + 100_000_000


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_with_little_memory(name, tmp_path):
    build, text = BOMBS[name]
    content = build()
    path = tmp_path / "bomb"
    path.write_bytes(content)
    assert_refused_within_bounds(path, len(content), text)


def honest() -> bytes:
    f = Forge()
    tensor = f.tensor("t", dims=f.dims(4), raw=f.raw(bytes(16)))
    return f.finish(f.module(f.offsets([tensor]), f.offsets([])))


@pytest.mark.filterwarnings("ignore::onward.checkpoint.UncheckedCheckpointWarning")
def test_the_forge_can_make_an_honest_file(tmp_path):
    (tmp_path / "c").write_bytes(honest())
    assert load(tmp_path / "c").trainable["t"].tolist() == [0.0] * 4


sparse = pytest.mark.skipif(os.name == "nt", reason="NTFS allocates what other systems keep as a hole")


@sparse
@pytest.mark.parametrize("kind", ["without seal", "with seal"])
def test_a_sparse_giant_is_refused_before_memory_is_taken(kind, tmp_path):
    content = honest() if kind == "without seal" else encoded(sample())[:-TRAILER_SIZE]
    path = tmp_path / "giant"
    path.write_bytes(content)
    os.truncate(path, 1 << 34)
    assert_refused_within_bounds(path, len(content), "more than|trailer")


def external_file(offsets: list[int], *, elements: int = 16, flag: bool = True) -> bytes:
    f = Forge()
    tensors = [f.tensor(f"t{i}", dims=f.dims(elements), external=offset) for i, offset in enumerate(offsets)]
    return f.finish(f.module(f.offsets(tensors), f.offsets([]), external=flag))


@sparse
def test_a_sparse_giant_of_external_data_is_refused_before_memory_is_taken(tmp_path):
    (tmp_path / "c").write_bytes(external_file([1 << 33]))
    (tmp_path / "c.data").write_bytes(b"")
    os.truncate(tmp_path / "c.data", 1 << 34)
    assert_refused_within_bounds(tmp_path / "c", 1000, "gaps")


@pytest.mark.parametrize(
    ("offsets", "flag", "text"),
    [
        ([0, 32], True, "share bytes"),
        ([0, 0], True, "share bytes"),
        ([1000], True, "outside"),
        ([2**63 - 1], True, "outside"),
        ([-2], True, "negative offset"),
        ([0], False, "says it has none"),
    ],
)
def test_external_places_that_cannot_be_are_refused(offsets, flag, text, tmp_path):
    (tmp_path / "c").write_bytes(external_file(offsets, flag=flag))
    (tmp_path / "c.data").write_bytes(bytes(256))
    with pytest.raises(CheckpointError, match=text):
        load(tmp_path / "c")


@pytest.mark.skipif(os.name == "nt", reason="links and pipes as POSIX has them")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p, other: p.symlink_to(other), "symbolic link"),
        (lambda p, other: p.hardlink_to(other), "hard links"),
        (lambda p, other: os.mkfifo(p), "not a regular file"),
        (lambda p, other: p.mkdir(), "directory|regular"),
        (lambda p, other: None, "No such file"),
    ],
    ids=["symbolic link", "hard link", "pipe", "directory", "missing"],
)
def test_external_data_comes_only_from_a_regular_file_of_its_own(make, text, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(64)))
    (tmp_path / "c").write_bytes(external_file([0]))
    make(tmp_path / "c.data", secret)
    with pytest.raises(CheckpointError, match=text):
        load(tmp_path / "c")


@pytest.mark.skipif(os.name == "nt", reason="pipes as POSIX has them")
def test_a_pipe_in_place_of_a_checkpoint_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "c")
    with pytest.raises(CheckpointError, match="regular file"):
        load(tmp_path / "c")


@pytest.mark.filterwarnings("ignore::onward.checkpoint.UncheckedCheckpointWarning")
def test_honest_external_data_loads(tmp_path):
    (tmp_path / "c").write_bytes(external_file([0, 64]))
    (tmp_path / "c.data").write_bytes(bytes(128))
    assert load(tmp_path / "c").trainable["t1"].shape == (16,)
