"""What a training model's metadata says is checked before it is used."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest

from onward import contract
from onward.api import CheckpointState, Module
from onward.artifacts import LossType, generate_artifacts
from onward.data.match_inputs import specs_of
from onward.errors import ModelError

MODEL = """<ir_version: 10, opset_import: ["": 21]>
    net (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 2}> { y = MatMul(x, w) }"""


def test_a_loss_scale_that_is_no_parameter_is_refused(tmp_path: Path) -> None:
    generate_artifacts(
        onnx.parser.parse_model(MODEL),
        requires_grad=["w"],
        loss=LossType.MSELoss,
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    model = onnx.load(tmp_path / "training_model.onnx")
    model.metadata_props.add(key=contract.SCALE, value="nowhere")
    onnx.save(model, tmp_path / "altered.onnx")
    with pytest.raises(
        ModelError, match="names the loss scale 'nowhere', which is not one of its parameters"
    ):
        Module(tmp_path / "altered.onnx", state)


def test_a_forward_model_cannot_name_a_loss_scale(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(MODEL)
    model.metadata_props.add(key=contract.SCALE, value="nowhere")
    generate_artifacts(model, requires_grad=["w"], loss=LossType.MSELoss, artifact_directory=tmp_path)
    made = onnx.load(tmp_path / "training_model.onnx")
    assert contract.SCALE not in {entry.key for entry in made.metadata_props}


def test_a_size_below_zero_is_an_open_one() -> None:
    model = onnx.parser.parse_model(MODEL)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -3
    assert specs_of(model.graph)[0].dims == (None, 2)
