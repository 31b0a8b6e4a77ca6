"""Large model files are read without the data of their tensors."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onward.errors import ModelError
from onward.graph import tensor_references
from onward.graph.load import load_model
from small_models import with_weights

TEXT = "net (float[n, 64] x) => (float[n, 3] y) { a = MatMul (x, big)  y = Add (a, small) }"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tensor_references, "_LARGE_FILE", 512)
    monkeypatch.setattr(tensor_references, "_LARGE_TENSOR", 256)
    model = with_weights(TEXT, big=(64, 3), small=(3,))
    model.metadata_props.add(
        key="about", value="x" * 300
    )  # lengths of several bytes outside of the graph too
    onnx.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_a_model_is_the_same_read_with_references(path: Path) -> None:
    whole, parted = load_model(path), load_model(path, by_reference=True)
    for name, value in whole.graph.initializers.items():
        found = parted.graph.initializers[name].const_value
        assert value.const_value is not None and found is not None
        assert isinstance(found, ir.ExternalTensor) == (name == "big")
        np.testing.assert_array_equal(found.numpy(), value.const_value.numpy())
    assert ir.to_proto(parted).graph.node == ir.to_proto(whole).graph.node
    assert parted.metadata_props == whole.metadata_props
    small = tensor_references.parse_with_references(path)
    assert small is not None and small.ByteSize() < path.stat().st_size


@pytest.mark.parametrize("kind", ["symlink", "hard link"])
def test_links_are_read_as_a_whole(path: Path, kind: str) -> None:
    link = path.with_name("link.onnx")
    (os.symlink if kind == "symlink" else os.link)(path, link)
    assert tensor_references.parse_with_references(link) is None
    tensor = load_model(link, by_reference=True).graph.initializers["big"].const_value
    assert tensor is not None and not isinstance(tensor, ir.ExternalTensor)


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.999])
def test_a_file_that_is_cut_short_gets_the_usual_error(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(
        ModelError, match=r"is not an ONNX model, or is cut short|not a valid|not an ONNX model"
    ):
        load_model(path, by_reference=True)


def test_noise_is_no_model(path: Path) -> None:
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 4096, np.uint8).tobytes())
    with pytest.raises(ModelError):
        load_model(path, by_reference=True)
