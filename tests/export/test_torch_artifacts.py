"""onward.export.artifacts_from_torch: one call from a torch module to artifacts that train as it does."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from onward import artifacts
from onward.export import artifacts_from_torch


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def step(folder, **feeds) -> dict[str, np.ndarray]:
    """One run of the training model; whatever is not fed is a parameter, an empty buffer or the reset flag."""
    session = onnxruntime.InferenceSession(folder / "training_model.onnx")
    for value in session.get_inputs():
        if value.name == "lazy_reset_grad":
            feeds[value.name] = np.array([True])
        elif value.name not in feeds:
            feeds[value.name] = np.zeros(value.shape, np.float32)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds)))


def test_gradients_loss_and_statistics_are_torchs(tmp_path):
    module = make_module()
    module[0].bias.requires_grad_(False)
    folder = artifacts_from_torch(
        module,
        torch.randn(4, 6),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        directory=tmp_path / "artifacts",
    )
    x, labels = torch.randn(5, 6), torch.randint(3, (5,))
    state = {name: value.numpy().copy() for name, value in module.state_dict().items() if value.dim()}
    loss = nn.functional.cross_entropy(module.train()(x), labels)
    loss.backward()

    got = step(folder, input=x.numpy(), labels=labels.numpy(), **state)

    trained = {name: p.grad.numpy() for name, p in module.named_parameters() if p.requires_grad}
    ends = "_grad.accumulation.out"
    assert {name.removesuffix(ends) for name in got if name.endswith(ends)} == set(trained)
    for name, gradient in trained.items():
        # the bias before batch norm has no gradient but rounding
        np.testing.assert_allclose(got[name + ends].reshape(gradient.shape), gradient, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(next(iter(got.values())), loss.item(), rtol=1e-6)
    for name in ("1.running_mean", "1.running_var"):
        np.testing.assert_allclose(got[name + ".next"], module.state_dict()[name].numpy(), rtol=1e-5)


def test_named_parameters_override_the_modules_flags(tmp_path):
    folder = artifacts_from_torch(
        make_module(),
        torch.randn(4, 6),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        directory=tmp_path,
        requires_grad=["3.weight"],
        frozen_params=["0.weight", "0.bias", "1.weight", "1.bias", "3.bias"],
    )
    session = onnxruntime.InferenceSession(folder / "training_model.onnx")
    outputs = [value.name for value in session.get_outputs()]
    assert [name for name in outputs if name.endswith("_grad.accumulation.out")] == [
        "3.weight_grad.accumulation.out"
    ]


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_module()

    def forward(self, x, target):
        return ((self.net(x) - target) ** 2).mean()


def test_a_model_kept_outside_one_file_gives_the_same_artifacts(tmp_path):
    options = {"loss": None, "optimizer": artifacts.OptimType.AdamW}
    args = torch.randn(4, 6), torch.randn(4, 3)
    inside = artifacts_from_torch(WithLoss(), args, directory=tmp_path / "a", **options)
    outside = artifacts_from_torch(WithLoss(), args, directory=tmp_path / "b", external_data=True, **options)
    for name in ("training_model.onnx", "checkpoint"):
        assert (inside / name).read_bytes() == (outside / name).read_bytes(), name


def test_artifacts_of_an_inference_export_are_refused(tmp_path):
    with pytest.raises(ValueError, match="training=False"):
        artifacts_from_torch(
            make_module(),
            torch.randn(4, 6),
            loss=None,
            optimizer=None,
            directory=tmp_path / "a",
            training=False,
        )
    assert not (tmp_path / "a").exists()
