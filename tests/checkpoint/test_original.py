"""Interchange with onnxruntime-training: its files are read, and its readers read ours."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs.Checkpoint import Checkpoint

from checkpoint.samples import encoded, fingerprint, sample
from onward.checkpoint import CheckpointData, NominalTensor, UncheckedCheckpointWarning, load, save
from onward.checkpoint.content import code_of, dtype_of
from onward.errors import CheckpointError

FIXTURES = Path(__file__).parent / "fixtures"
SHAPES = {"fc1.weight": (6, 5), "fc1.bias": (6,), "fc2.weight": (3, 6), "fc2.bias": (3,)}

pytestmark = pytest.mark.filterwarnings("ignore::onward.checkpoint.UncheckedCheckpointWarning")


def stock_tensor(tensor, data: bytes = b"") -> tuple:
    """Name, type, shape and bytes of a tensor as the generated reader in the stock wheel sees it."""
    shape = tuple(tensor.Dims(i) for i in range(tensor.DimsLength()))
    dtype = dtype_of(tensor.DataType())
    offset = tensor.ExternalDataOffset()
    if offset >= 0:
        raw = data[offset : offset + dtype.itemsize * int(np.prod(shape))]
    else:
        raw = tensor.RawDataAsNumpy().tobytes() if tensor.RawDataLength() else b""
    return tensor.Name().decode(), str(dtype), shape, raw


def stock_content(payload: bytes, data: bytes = b"") -> dict:
    root = Checkpoint.GetRootAs(payload, 0)
    assert Checkpoint.CheckpointBufferHasIdentifier(payload, 0)
    module, bag = root.ModuleState(), root.PropertyBag()
    groups = []
    for g in (root.OptimizerGroups(i) for i in range(root.OptimizerGroupsLength())):
        states = [g.OptimizerStates(i) for i in range(g.OptimizerStatesLength())]
        slots = [
            (s.ParamName().decode(), [stock_tensor(s.Momentums(i), data) for i in range(s.MomentumsLength())])
            for s in states
        ]
        groups.append((g.GroupName().decode(), g.Step(), g.InitialLearningRate(), slots))
    properties = {}
    if bag is not None:
        for kind in ("Ints", "Floats", "Strings"):
            for i in range(getattr(bag, kind + "Length")()):
                entry = getattr(bag, kind)(i)
                value = entry.Value()
                properties[entry.Name().decode()] = value.decode() if isinstance(value, bytes) else value
    return {
        "version": root.Version(),
        "nominal": bool(module.IsNominalState()),
        "external": bool(module.HasExternalData()),
        "trainable": [
            stock_tensor(module.RequiresGradParams(i), data) for i in range(module.RequiresGradParamsLength())
        ],
        "frozen": [stock_tensor(module.FrozenParams(i), data) for i in range(module.FrozenParamsLength())],
        "groups": groups,
        "properties": properties,
    }


def ours(tensors) -> list[tuple]:
    return [(name, str(array.dtype), array.shape, array.tobytes()) for name, array in tensors.items()]


@pytest.mark.parametrize("threshold", [1 << 30, 1200, 0], ids=["inside", "parameters outside", "all outside"])
def test_the_stock_wheels_readers_see_what_was_written(threshold):
    data = sample(5)
    payload = encoded(data, external_threshold=threshold)
    found = stock_content(payload, payload)
    assert found["version"] == 2 and not found["nominal"]
    assert found["external"] == (threshold < 1 << 30)
    assert found["trainable"] == ours(data.trainable)
    assert found["frozen"] == ours(data.frozen)
    group, accumulation = found["groups"]
    assert group[:3] == ("group0", 12, 0.25)
    assert group[3] == [(name, ours(slots)) for name, slots in data.optimizer[0].slots.items()]
    assert accumulation[0] == "onward.accumulation"
    assert accumulation[3] == [(name, ours({"gradient": array})) for name, array in data.accumulation.items()]
    assert {name: value for name, value in found["properties"].items() if "." not in name} == data.properties
    assert found["properties"]["onward.extra.learning_rate"] == "f:0.1"


def test_the_stock_wheels_readers_see_a_nominal_state():
    data = CheckpointData(
        {"w": NominalTensor(1)}, {"n": NominalTensor(code_of(np.dtype("int64")))}, nominal=True
    )
    found = stock_content(encoded(data))
    assert found["nominal"]
    assert [(name, dtype) for name, dtype, _, _ in found["trainable"] + found["frozen"]] == [
        ("w", "float32"),
        ("n", "int64"),
    ]


@pytest.mark.parametrize("name", ["original.ckpt", "original_external.ckpt"])
def test_the_originals_files_are_read(name):
    data = load(FIXTURES / name)
    assert set(data.trainable) == {"fc1.weight", "fc1.bias"} and set(data.frozen) == {
        "fc2.weight",
        "fc2.bias",
    }
    for parameter, array in data.parameters().items():
        shape = SHAPES[parameter]
        np.testing.assert_array_equal(
            array, (np.arange(np.prod(shape), dtype=np.float32).reshape(shape) - 4) / 8
        )
    assert data.properties == {"epoch": 3, "loss": 0.25, "note": "größer"}
    path = FIXTURES / name
    beside = Path(f"{path}.data")
    expected = stock_content(path.read_bytes(), beside.read_bytes() if beside.exists() else b"")
    (group,) = data.optimizer
    assert [(group.name, group.step, group.initial_learning_rate)] == [
        entry[:3] for entry in expected["groups"]
    ]
    assert [(parameter, ours(slots)) for parameter, slots in group.slots.items()] == expected["groups"][0][3]
    assert all(np.any(array) for slots in group.slots.values() for array in slots.values())


def test_the_originals_nominal_file_is_read():
    data = load(FIXTURES / "original_nominal.ckpt")
    assert data.nominal
    assert data.trainable == {"fc1.weight": NominalTensor(1), "fc1.bias": NominalTensor(1)}
    assert data.frozen == {"fc2.weight": NominalTensor(1), "fc2.bias": NominalTensor(1)}


def test_a_file_without_checksum_warns_until_it_is_saved_again(tmp_path, recwarn):
    with pytest.warns(UncheckedCheckpointWarning, match="no checksum"):
        data = load(FIXTURES / "original.ckpt")
    save(data, tmp_path / "again")
    recwarn.clear()
    again = load(tmp_path / "again")
    assert not recwarn.list
    assert fingerprint(again) == fingerprint(data)


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need a privilege on Windows")
def test_large_values_are_found_where_the_original_looks_for_them(tmp_path):
    path = tmp_path / "checkpoint"
    save(sample(1), path, external_threshold=0)
    beside = tmp_path / "checkpoint.data"
    assert beside.read_bytes() == path.read_bytes()
    assert fingerprint(load(path)) == fingerprint(sample(1))
    save(sample(2), path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint"]


def test_a_checkpoint_with_a_second_file_needs_it(tmp_path):
    shutil.copy(FIXTURES / "original_external.ckpt", tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"c\.data.*No such file"):
        load(tmp_path / "c")
