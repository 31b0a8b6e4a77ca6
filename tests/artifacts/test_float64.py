"""Models in float64 train in float64: loss, gradients, state and update."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import generate_artifacts
from onward.errors import ModelError, OnwardError

TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (double[N,3] x) => (double[N,2] y) { h = Gemm(x, w1, b1)  r = Tanh(h)  y = Gemm(r, w2, b2) }"""
SHAPES = {"w1": (3, 4), "b1": (4,), "w2": (4, 2), "b2": (2,)}


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


def network() -> onnx.ModelProto:
    model = onnx.parser.parse_model(TEXT)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in weights().items())
    return model


def open_run(folder: Path) -> tuple[CheckpointState, Module, Optimizer]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.normal(size=(5, 3)), rng.normal(size=(5, 2))


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_thirty_steps_are_those_of_torch_in_float64(tmp_path: Path, optimizer: str) -> None:
    generate_artifacts(network(), loss="mse", optimizer=optimizer, artifact_directory=tmp_path)
    state, module, updates = open_run(tmp_path)
    updates.set_learning_rate(0.01)
    x, y = data()
    twin = {name: torch.tensor(array, requires_grad=True) for name, array in weights().items()}
    if optimizer == "AdamW":  # with the rates of onnxruntime's, which the artifacts have
        options = {"eps": 1e-6, "weight_decay": 0.0}
        reference: torch.optim.Optimizer = torch.optim.AdamW(twin.values(), lr=0.01, **options)
    else:
        reference = torch.optim.SGD(twin.values(), lr=0.01)
    for _ in range(30):
        loss = module(x, y)
        hidden = torch.tanh(torch.tensor(x) @ twin["w1"] + twin["b1"])
        expected = torch.nn.functional.mse_loss(hidden @ twin["w2"] + twin["b2"], torch.tensor(y))
        reference.zero_grad()
        expected.backward()
        assert np.asarray(loss).dtype == np.float64
        np.testing.assert_allclose(loss, expected.item(), rtol=1e-11)
        updates.step()
        module.lazy_reset_grad()
        reference.step()
    for name, value in twin.items():
        assert state.parameters[name].data.dtype == np.float64
        np.testing.assert_allclose(
            state.parameters[name].data, value.detach().numpy(), rtol=1e-10, atol=1e-13
        )


def test_a_saved_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    generate_artifacts(network(), loss="mse", optimizer="AdamW", artifact_directory=tmp_path)
    x, y = data()
    state, module, updates = open_run(tmp_path)
    losses = []
    for step in range(6):
        losses.append(float(module(x, y)))
        updates.step()
        module.lazy_reset_grad()
        if step == 2:
            CheckpointState.save_checkpoint(state, tmp_path / "checkpoint", include_optimizer_state=True)
    assert module.get_contiguous_parameters().numpy().dtype == np.float64
    _, module, updates = open_run(tmp_path)
    for expected in losses[3:]:
        assert float(module(x, y)) == expected
        updates.step()
        module.lazy_reset_grad()


def test_parameters_of_two_types_are_refused_together(tmp_path: Path) -> None:
    model = network()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "scale"))
    wide, scaled = ("wide", "scaled")
    model.graph.node.insert(0, onnx.helper.make_node("Cast", ["scale"], [wide], to=onnx.TensorProto.DOUBLE))
    model.graph.node.insert(1, onnx.helper.make_node("Mul", ["x", wide], [scaled]))
    model.graph.node[2].input[0] = scaled
    with pytest.raises(
        ModelError, match="'w1' is DOUBLE: trainable parameters must be float32, or all of them"
    ):
        generate_artifacts(model, requires_grad=["w1", "scale"], loss="mse", artifact_directory=tmp_path)


def test_a_rule_over_whole_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="LAMB updates float32 parameters only"):
        generate_artifacts(network(), loss="mse", optimizer="lamb", artifact_directory=tmp_path)


def test_a_missing_kernel_is_named_with_what_to_do(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (double[N,1,4,4] x) => (double[N,2] y) { h = Conv(x, w)  y = GlobalAveragePool(h)  }"""
    model = onnx.parser.parse_model(text.replace("double[N,2] y", "double[N,2,1,1] y"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((2, 1, 3, 3)), "w"))
    generate_artifacts(model, loss="mse", optimizer="AdamW", artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(OnwardError, match=r"float64.*model\.float\(\)"):
        Module(tmp_path / "training_model.onnx", state)
