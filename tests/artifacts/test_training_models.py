"""The training and evaluation models of networks that behave differently in the two."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from architectures import convnext
from torch import nn

from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.export import from_torch

torch.set_num_threads(1)


def module_of(folder: Path, **options: Any) -> Module:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    return Module(folder / "training_model.onnx", state, folder / "eval_model.onnx", **options)


def artifacts_of(network: nn.Module, x: torch.Tensor, folder: Path, **options: Any) -> onnx.ModelProto:
    """Export for training, generate; returns the evaluation model."""
    model = from_torch(network.train(), x)
    chosen = {"loss": LossType.MSELoss, "optimizer": OptimType.SGD, "additional_output_names": None}
    first = onnx.load_from_string(model) if isinstance(model, bytes) else model
    chosen["additional_output_names"] = [first.graph.output[0].name]
    generate_artifacts(first, artifact_directory=folder, **{**chosen, **options})
    return onnx.load(folder / "eval_model.onnx")


def test_dropout_is_off_in_evaluation_and_visible(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 3))
    x = torch.randn(8, 6)
    evaluation = artifacts_of(network, x, tmp_path)
    dropouts = [node for node in evaluation.graph.node if node.op_type == "Dropout"]
    assert [list(node.input)[2:] for node in dropouts] == [[""]]
    module = module_of(tmp_path)
    target = np.zeros((8, 3), np.float32)
    first, second = (module(x.numpy(), target)[1] for _ in range(2))
    assert not np.allclose(first, second)
    module.eval()
    with torch.no_grad():
        expected = network.eval()(x).numpy()
    np.testing.assert_allclose(module(x.numpy(), target)[1], expected, rtol=1e-5, atol=1e-6)


def test_dropout_goes_on_where_a_checkpoint_left_it(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 3))
    x, target = torch.randn(8, 6), np.zeros((8, 3), np.float32)
    artifacts_of(network, x, tmp_path)
    module = module_of(tmp_path, seed=11)
    module(x.numpy(), target)
    CheckpointState.save_checkpoint(module._state, tmp_path / "later", include_optimizer_state=True)
    expected = module(x.numpy(), target)[1]
    resumed = Module(tmp_path / "training_model.onnx", CheckpointState.load_checkpoint(tmp_path / "later"))
    np.testing.assert_array_equal(resumed(x.numpy(), target)[1], expected)


def test_stochastic_depth_is_the_identity_in_evaluation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = convnext()
    x = torch.randn(4, 3, 32, 32)
    evaluation = artifacts_of(network, x, tmp_path)
    kinds = {node.op_type for node in evaluation.graph.node}
    assert not kinds & {"RandomUniform", "RandomUniformLike", "Floor"}
    module = module_of(tmp_path)
    target = np.zeros((4, 10), np.float32)
    steps = [module(x.numpy(), target)[1] for _ in range(4)]
    assert len({step.tobytes() for step in steps}) > 1
    module.eval()
    with torch.no_grad():
        expected = network.eval()(x).numpy()
    np.testing.assert_allclose(module(x.numpy(), target)[1], expected, rtol=1e-4, atol=1e-5)


NORMS = [
    pytest.param(lambda: nn.BatchNorm2d(4), (6, 4, 5, 5), id="BatchNorm2d"),
    pytest.param(lambda: nn.BatchNorm2d(4, momentum=0.3, eps=1e-3), (3, 4, 2, 2), id="BatchNorm2d(momentum=0.3)"),
    pytest.param(lambda: nn.BatchNorm1d(4), (6, 4), id="BatchNorm1d"),
    pytest.param(lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 3),
                                       nn.BatchNorm2d(2)), (4, 4, 8, 8), id="two layers"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "shape"), NORMS)
def test_batch_norm_trains_as_torch_does(make: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(1)
    network = make()
    x = torch.randn(*shape)
    twin = copy.deepcopy(network).train()
    evaluation = artifacts_of(network, x, tmp_path)
    norms = [node for node in evaluation.graph.node if node.op_type == "BatchNormalization"]
    modes = [
        attribute.i for node in norms for attribute in node.attribute if attribute.name == "training_mode"
    ]
    assert norms and modes == [0] * len(norms)

    module = module_of(tmp_path)
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.1)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(20):
        batch = torch.randn(*shape) * (1 + step % 3) + step % 5
        target = torch.randn(output_shape(twin, batch))
        reference.zero_grad()
        loss = nn.functional.mse_loss(twin(batch), target)
        loss.backward()
        reference.step()
        found = module(batch.numpy(), target.numpy())[0]
        optimizer.step()
        module.lazy_reset_grad()
        np.testing.assert_allclose(found, loss.item(), rtol=1e-4)
    state = {name: tensor.numpy() for name, tensor in twin.state_dict().items()}
    for name, parameter in module._state.parameters:
        np.testing.assert_allclose(parameter.data, state[name], rtol=2e-4, atol=1e-5, err_msg=name)
    module.eval()
    with torch.no_grad():
        expected = twin.eval()(x).numpy()
    found = module(x.numpy(), np.zeros_like(expected))[1]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def output_shape(network: nn.Module, batch: torch.Tensor) -> torch.Size:
    """The shape of the output, found without touching the running statistics."""
    with torch.no_grad():
        return copy.deepcopy(network)(batch).shape


def test_gradients_of_batch_norms_accumulate_as_one_vector(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 4, 1),
        *(part for _ in range(5) for part in (nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))),
    ]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 3))
    artifacts_of(network, torch.randn(6, 3, 3, 3), tmp_path)
    training = onnx.load(tmp_path / "training_model.onnx")
    trainable = sum(1 for _ in network.parameters())
    assert sum(node.op_type == "Where" for node in training.graph.node) == trainable - 10 + 1
    module = module_of(tmp_path)
    batches = [np.random.default_rng(i).normal(size=(6, 3, 3, 3)).astype(np.float32) for i in range(2)]
    target = np.ones((6, 3), np.float32)

    def gradients() -> dict[str, np.ndarray]:
        return {name: p.grad.copy() for name, p in module._state.parameters if p.requires_grad}

    for x in batches:
        module(x, target)
    together, apart = gradients(), []
    for x in batches:
        module.lazy_reset_grad()
        module(x, target)
        apart.append(gradients())
    for name, total in together.items():
        np.testing.assert_allclose(total, apart[0][name] + apart[1][name], rtol=1e-5, atol=1e-6)
    assert np.abs(together["1.weight"]).max() > 1e-4
