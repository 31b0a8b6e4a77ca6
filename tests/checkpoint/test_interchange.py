"""safetensors: what that package writes is read, what is written it reads, hostile files are refused."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import safetensors.numpy

from checkpoint.samples import fingerprint, sample
from onward.checkpoint import CheckpointData, NominalTensor, from_safetensors, save, to_safetensors
from onward.checkpoint.content import dtype_of
from onward.errors import CheckpointError

TYPES = [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13]


def every_type() -> dict[str, np.ndarray]:
    shapes = [(3,), (), (2, 5), (0, 4)]
    return {
        f"{dtype_of(code)}{i}": np.ones(shape, dtype_of(code))
        for code in TYPES
        for i, shape in enumerate(shapes)
    }


def test_the_package_reads_what_is_written(tmp_path):
    arrays = every_type()
    to_safetensors(CheckpointData(trainable=arrays), tmp_path / "f")
    found = safetensors.numpy.load_file(tmp_path / "f")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)


def test_what_the_package_writes_is_read(tmp_path):
    arrays = every_type()
    safetensors.numpy.save_file(arrays, tmp_path / "f", metadata={"format": "pt"})
    found = from_safetensors(tmp_path / "f")
    assert not found.frozen and found.trainable.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found.trainable[name], array, strict=True)


@pytest.mark.parametrize("code", [16, 17, 19], ids=lambda code: str(dtype_of(code)))
def test_torch_reads_the_types_that_numpy_lacks(code, tmp_path):
    import safetensors.torch

    array = np.arange(6).astype(dtype_of(code)).reshape(2, 3)
    to_safetensors(CheckpointData({"w": array}), tmp_path / "f")
    found = safetensors.torch.load_file(tmp_path / "f")["w"]
    np.testing.assert_array_equal(found.float().numpy(), array.astype(np.float32))
    np.testing.assert_array_equal(from_safetensors(tmp_path / "f").trainable["w"], array)


def test_trainable_frozen_and_their_order_survive(tmp_path):
    data = CheckpointData(trainable=sample().trainable, frozen=sample().frozen)
    to_safetensors(data, tmp_path / "f")
    assert fingerprint(from_safetensors(tmp_path / "f")) == fingerprint(data)
    chosen = from_safetensors(tmp_path / "f", frozen=["scale"])
    assert list(chosen.frozen) == ["scale"]


def test_a_checkpoint_file_is_a_source_too(tmp_path):
    save(sample(1), tmp_path / "c")
    to_safetensors(tmp_path / "c", tmp_path / "f")
    np.testing.assert_array_equal(
        from_safetensors(tmp_path / "f").trainable["encoder.weight"], sample(1).trainable["encoder.weight"]
    )


def test_values_merge_into_a_checkpoint_and_the_rest_of_it_stays(tmp_path):
    new = {"scale": np.float32(9).reshape(())}
    to_safetensors(CheckpointData(new), tmp_path / "f")
    expected = sample(1)
    expected.trainable["scale"] = new["scale"]
    assert fingerprint(from_safetensors(tmp_path / "f", into=sample(1))) == fingerprint(expected)


def test_a_nominal_checkpoint_gets_its_values(tmp_path):
    to_safetensors(CheckpointData({"w": np.ones(3, np.float32)}), tmp_path / "f")
    nominal = CheckpointData({"w": NominalTensor(1)}, nominal=True)
    merged = from_safetensors(tmp_path / "f", into=nominal)
    assert not merged.nominal
    np.testing.assert_array_equal(merged.trainable["w"], np.ones(3, np.float32))
    with pytest.raises(CheckpointError, match="needs all"):
        from_safetensors(
            tmp_path / "f", into=CheckpointData({"w": NominalTensor(1), "v": NominalTensor(1)}, nominal=True)
        )


@pytest.mark.parametrize(
    ("array", "text"),
    [
        ({"scale": np.zeros(2, np.float32)}, r"expected float32 \[\], found float32 \[2\]"),
        ({"scale": np.zeros((), np.float64)}, "expected float32"),
        ({"scales": np.zeros(2, np.float32)}, "does not have: .'scales'"),
    ],
)
def test_values_that_do_not_fit_are_refused(array, text, tmp_path):
    to_safetensors(CheckpointData(array), tmp_path / "f")
    with pytest.raises(CheckpointError, match=text):
        from_safetensors(tmp_path / "f", into=sample(1))


def test_what_the_format_cannot_hold_is_refused_and_the_old_file_kept(tmp_path):
    path = tmp_path / "f"
    to_safetensors(CheckpointData({"w": np.ones(1)}), path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="nominal"):
        to_safetensors(CheckpointData({"w": NominalTensor(1)}, nominal=True), path)
    with pytest.raises(TypeError, match="float8_e5m2fnuz"):
        to_safetensors(CheckpointData({"w": np.zeros(1, dtype_of(20))}), path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["f"]


def file_with(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        file_with({}, length=2**63),
        file_with(b"not json"),
        file_with(b"[]"),
        file_with(b"[" * 100_000),
        file_with(b'{"w":{},"w":{}}'),
        file_with({"w": 3}),
        file_with({"w": entry()}, b""),
        file_with({"w": entry()}, bytes(8)),
        file_with({"w": entry(offsets=(4, 8))}, bytes(8)),
        file_with({"w": entry(), "v": entry()}, bytes(4)),
        file_with({"w": entry(offsets=(0, 4.0))}, bytes(4)),
        file_with({"w": entry(offsets=(4, 0))}, bytes(4)),
        file_with({"w": entry(dtype="X")}, bytes(4)),
        file_with({"w": entry(shape=(-1,))}, bytes(4)),
        file_with({"w": entry(shape=(True,))}, bytes(4)),
        file_with({"w": entry(shape=(2**33, 2**33), offsets=(0, 0))}),
        file_with({"w": entry(shape=(0, 2**61), offsets=(0, 0))}),
        file_with({"w": entry(shape=(1,) * 40)}, bytes(4)),
        file_with({"__metadata__": {"onward.frozen": "{"}, "w": entry()}, bytes(4)),
    ],
)
def test_files_that_cannot_be_are_refused(content, tmp_path):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CheckpointError):
        from_safetensors(tmp_path / "f")
