"""Bytes of a checkpoint: what goes in comes out, equal data gives equal bytes, bad data is refused."""

from __future__ import annotations

import io
import math

import ml_dtypes
import numpy as np
import pytest

from checkpoint.samples import encoded, fingerprint, sample
from onward.checkpoint import CheckpointData, NominalTensor, OptimizerGroup, decode, encode
from onward.checkpoint.content import dtype_of, supported_codes

# numpy 1 has no arrays of more than 32 dimensions
TOO_MANY_DIMENSIONS = (
    [(CheckpointData({"w": np.zeros((1,) * 33)}), ValueError, "at most 32")]
    if np.__version__[0] != "1"
    else []
)
SHAPES = [(), (1,), (0,), (3, 0, 2), (17,), (2, 3, 4), (1,) * 32]


@pytest.mark.parametrize("threshold", [1 << 30, 0], ids=["inside", "outside"])
@pytest.mark.parametrize("code", supported_codes(), ids=lambda code: str(dtype_of(code)))
def test_every_type_and_shape_survives_bit_for_bit(code, threshold):
    rng = np.random.default_rng(code)
    dtype = dtype_of(code)
    arrays = {}
    for index, shape in enumerate(SHAPES):
        raw = rng.integers(0, 2 if code == 9 else 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        arrays[f"tensor{index}"] = raw.view(dtype).reshape(shape)
    data = CheckpointData(
        trainable=arrays, optimizer=[OptimizerGroup(slots={"tensor0": {"momentum0": arrays["tensor4"]}})]
    )
    assert fingerprint(decode(encoded(data, external_threshold=threshold))) == fingerprint(data)


@pytest.mark.parametrize("threshold", [1 << 30, 1200, 0], ids=["inside", "parameters outside", "all outside"])
def test_every_part_survives(threshold):
    data = sample(3)
    assert fingerprint(decode(encoded(data, external_threshold=threshold))) == fingerprint(data)


def test_an_empty_checkpoint_survives():
    assert fingerprint(decode(encoded(CheckpointData()))) == fingerprint(CheckpointData())


def test_nominal_parameters_keep_name_and_type_only():
    data = CheckpointData(
        {"w": NominalTensor(1), "h": NominalTensor(10)}, {"n": NominalTensor(7)}, nominal=True
    )
    assert decode(encoded(data)) == data


def test_equal_data_gives_equal_bytes():
    assert encoded(sample(1)) == encoded(sample(1))
    assert encoded(sample(1)) != encoded(sample(2))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.arange(24, dtype=np.int64)[::2],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(5, dtype=">f4"),
        np.broadcast_to(np.float32(2), (3, 3)),
        np.float32(2),
    ],
    ids=["transposed", "strided", "fortran", "big-endian", "broadcast", "numpy scalar"],
)
def test_values_not_memory_layout_are_stored(array):
    found = decode(encoded(CheckpointData({"a": array}))).trainable["a"]
    np.testing.assert_array_equal(found, array)
    assert found.dtype.isnative


@pytest.mark.parametrize("offset", range(9))
def test_arrays_are_aligned_whatever_the_buffer(offset):
    buffer = bytes(offset) + encoded(CheckpointData({"a": np.arange(9.0), "b": np.arange(40)}))
    for array in decode(memoryview(buffer)[offset:]).trainable.values():
        assert array.flags.aligned and not array.flags.writeable


def test_tensor_bytes_are_streamed_not_copied():
    array = np.zeros(1 << 20, np.float32)

    class Spy(io.RawIOBase):
        shared = 0

        def write(self, data):
            if np.shares_memory(np.frombuffer(data, np.uint8), array):
                self.shared += len(data)
            return len(data)

    spy = Spy()
    encode(CheckpointData({"a": array}), spy)
    assert spy.shared == array.nbytes


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (3, 3),
        (-(2**63), -(2**63)),
        (2**63 - 1, 2**63 - 1),
        (0, 0),
        (True, 1),
        (np.int32(5), 5),
        (0.1, float(np.float32(0.1))),
        (0.0, 0.0),
        (math.inf, math.inf),
        (np.float16(0.5), 0.5),
        ("", ""),
        ("naïve 🙂", "naïve 🙂"),
    ],
)
def test_properties_are_int64_float32_and_text(given, stored):
    found = decode(encoded(CheckpointData(properties={"p": given}))).properties["p"]
    assert found == stored and type(found) is type(stored)


@pytest.mark.parametrize("value", [0.1, 5e-324, math.inf, -0.0, 2**200, -3, "f:1", "", "a\nb"])
def test_extras_are_exact(value):
    found = decode(encoded(CheckpointData(extras={"x": value}))).extras["x"]
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    ("given", "stored"),
    [(np.float32(0.1), float(np.float32(0.1))), (np.uint64(2**64 - 1), 2**64 - 1), (np.True_, 1)],
)
def test_extras_take_numpy_scalars(given, stored):
    found = decode(encoded(CheckpointData(extras={"x": given}))).extras["x"]
    assert found == stored and type(found) is type(stored)


def test_extras_and_accumulation_stay_out_of_what_the_user_put_in():
    found = decode(encoded(sample()))
    assert set(found.properties) == {"epoch", "loss", "note"}
    assert [group.name for group in found.optimizer] == ["group0"]


W = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (CheckpointData(properties={"p": [1]}), TypeError, "int, float and str, not list"),
        (CheckpointData(properties={"p": None}), TypeError, "not NoneType"),
        (CheckpointData(properties={"p": 2**63}), ValueError, "64 bits"),
        (CheckpointData(properties={"p": 1e39}), ValueError, "32-bit float"),
        (CheckpointData(properties={"onward.x": 1}), ValueError, "reserved"),
        (CheckpointData(properties={"": 1}), ValueError, "empty"),
        (CheckpointData(extras={"x": b"1"}), TypeError, "not bytes"),
        (CheckpointData({"w": W}, {"w": W}), ValueError, "trainable and frozen"),
        (CheckpointData({"": W}), ValueError, "empty"),
        (CheckpointData({3: W}), TypeError, "must be a str"),
        (CheckpointData({"w": [1.0]}), TypeError, "numpy array"),
        (CheckpointData({"w": np.array(["a"])}), TypeError, "cannot hold arrays of type <U1"),
        (CheckpointData({"w": np.zeros(2, complex)}), TypeError, "complex128"),
        (CheckpointData({"w": np.zeros(2, ml_dtypes.int4)}), TypeError, "int4"),
        *TOO_MANY_DIMENSIONS,
        (CheckpointData({"w": NominalTensor(1)}), TypeError, "expected a numpy array"),
        (CheckpointData({"w": W}, nominal=True), TypeError, "expected a NominalTensor"),
        (CheckpointData({"w": NominalTensor(8)}, nominal=True), ValueError, "data type 8"),
        (CheckpointData(optimizer=[OptimizerGroup("a"), OptimizerGroup("a")]), ValueError, "different names"),
        (CheckpointData(optimizer=[OptimizerGroup("onward.a")]), ValueError, "reserved"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_data_that_no_checkpoint_can_hold_is_refused_before_the_first_byte(data, error, text):
    stream = io.BytesIO()
    with pytest.raises(error, match=text):
        encode(data, stream)
    assert stream.getvalue() == b""
