"""A module prepared with torch.ao's quantization-aware training: it trains with its scales, or with its observers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from onward import artifacts
from onward.api import CheckpointState, Module, Optimizer
from onward.errors import ExportError
from onward.export import from_torch


class Classifier(nn.Module):
    def __init__(self, stubs: Any) -> None:
        super().__init__()
        self.quantize, self.dequantize = stubs
        self.conv, self.relu, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.relu(self.conv(self.quantize(x))).mean((2, 3))
        return self.dequantize(self.fc(pooled))


def prepared() -> tuple[nn.Module, torch.Tensor]:
    """A module whose observers have seen some batches."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao says that it moves to torchao
        from torch.ao import quantization

        module: Any = Classifier((quantization.QuantStub(), quantization.DeQuantStub())).train()
        module.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        module = quantization.prepare_qat(module)
    x = torch.randn(8, 3, 8, 8)
    for _ in range(3):
        module(x)
    return module, x


def test_a_module_of_torch_ao_trains_on_with_its_own_gradients(tmp_path: Path) -> None:
    module, x = prepared()
    for part in module.modules():
        if hasattr(part, "observer_enabled"):
            part.disable_observer()  # type: ignore[operator]
    from_torch(module, (x,), tmp_path / "model.onnx", training=True)  # compares with torch's outputs
    model = onnx.load(tmp_path / "model.onnx")
    assert sum(node.op_type == "QuantizeLinear" for node in model.graph.node) == 5
    artifacts.generate_artifacts(model, loss="cross-entropy", artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    step = Module(tmp_path / "training_model.onnx", state)
    labels = torch.arange(8) % 4
    loss = step(x.numpy(), labels.numpy())
    expected = nn.functional.cross_entropy(module(x), labels)
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    gradients = {name: value.grad for name, value in module.named_parameters()}
    for name in ("conv.weight", "conv.bias", "fc.weight", "fc.bias"):
        ours, theirs = state.parameters[name].grad, gradients[name].numpy()  # type: ignore[union-attr]
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max(), err_msg=name)


def test_ranges_that_observers_follow_are_state_of_the_step(tmp_path: Path) -> None:
    module, x = prepared()
    from_torch(module, (x,), tmp_path / "model.onnx")
    artifacts.generate_artifacts(
        tmp_path / "model.onnx", loss="cross-entropy", optimizer="SGD", artifact_directory=tmp_path
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    step = Module(tmp_path / "training_model.onnx", state)
    ours, theirs = (
        Optimizer(tmp_path / "optimizer_model.onnx", step),
        torch.optim.SGD(module.parameters(), 0.05),
    )
    ours.set_learning_rate(0.05)
    labels = torch.arange(8) % 4
    for factor in (1.0, 3.0, 2.0, 0.5):  # the ranges move
        loss = nn.functional.cross_entropy(module(factor * x), labels)
        assert float(step(factor * x.numpy(), labels.numpy())) == pytest.approx(loss.item(), rel=1e-5)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        ours.step()
        step.lazy_reset_grad()
    ranges = {
        n: value.numpy()
        for n, value in module.state_dict().items()
        if n.endswith(("scale", "_point", "_val"))
    }
    assert len(ranges) == 20
    for name, expected in ranges.items():
        np.testing.assert_allclose(state.parameters[name].data, expected, rtol=1e-5, err_msg=name)


def test_an_observer_of_another_kind_is_named_with_what_to_do() -> None:
    from torch.ao.quantization import FakeQuantize, HistogramObserver

    module = nn.Sequential(nn.Linear(4, 2), FakeQuantize(HistogramObserver))
    with pytest.raises(
        ExportError, match=r"observers are on, and a HistogramObserver cannot.*disable_observer"
    ):
        from_torch(module, torch.randn(3, 4))
