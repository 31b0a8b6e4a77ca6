"""What a module says about its gradients is kept by an export, or refused."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.errors import ParityError
from onward.export import from_torch
from same_gradients import assert_gradients_equal_torch


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.sign(x)

    @staticmethod
    def backward(ctx, dy):
        return dy


class Clipped(torch.autograd.Function):
    """Rounds; lets gradients through near zero only."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.round(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy * (x.abs() < 1)


class Reversed(torch.autograd.Function):
    """In the newer style, with a number that backward reads."""

    @staticmethod
    def forward(x, factor):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, dy):
        return -ctx.factor * dy, None


class Square(torch.autograd.Function):
    """A backward pass that is the derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * ctx.saved_tensors[0] * dy


class Summed(torch.autograd.Function):
    """A backward pass that mixes elements."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy.flip(0)


@torch.no_grad()
def frozen(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(layer(x)) * 3


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        if kind == "padding_idx":
            self.table = nn.Embedding(7, 5, padding_idx=2)
        if kind == "codebook":
            self.codes = nn.Parameter(torch.randn(6, 5))

    def forward(self, x, ids):
        h = self.first(x)
        match self.kind:
            case "detach":
                h = h + 2 * self.first(x).detach()
            case "data":
                h = h * torch.sigmoid(h.data)
            case "no_grad":
                with torch.no_grad():
                    scale = torch.tanh(self.first(x)) * 3
                    with torch.enable_grad():
                        h = h + torch.sigmoid(h)
                h = h * scale
            case "no_grad function":
                h = h * frozen(self.first, x)
            case "straight through":
                h = StraightThrough.apply(h)
            case "clipped":
                h = Clipped.apply(2 * h)
            case "reversed":
                h = Reversed.apply(h, 0.5)
            case "plain function":
                h = Square.apply(h)
            case "padding_idx":
                h = h + self.table(ids)
            case "codebook":  # as a vector-quantized autoencoder does
                near = torch.cdist(h.detach(), self.codes.detach()).argmin(1)
                code = F.embedding(near, self.codes)
                h = h + (code - h).detach() + (code - h.detach()) * 0.25
            case "checkpoint":
                h = torch.utils.checkpoint.checkpoint(torch.tanh, h, use_reentrant=False)
        return self.last(torch.tanh(h)) if ids is None else self.last(torch.tanh(h)) + 0 * ids[:, None]


KINDS = [
    "detach", "data", "no_grad", "no_grad function", "straight through", "clipped", "reversed", "plain function",
    "padding_idx", "codebook", "checkpoint",
]  # fmt: skip
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([1, 2, 3, 2, 0, 6])


def network(kind: str) -> Net:
    torch.manual_seed(0)
    return Net(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_export_are_torchs(kind: str) -> None:
    module = network(kind)
    proto = from_torch(module, (X, IDS))
    assert_gradients_equal_torch(module, proto, X, IDS)


def test_artifacts_hold_no_marks_and_no_needless_nodes(tmp_path: Path) -> None:
    module = network("padding_idx")
    proto = from_torch(module, (X, IDS))
    assert isinstance(proto, onnx.ModelProto)
    assert any(node.metadata_props for node in proto.graph.node)
    onnx.checker.check_model(proto)
    generate_artifacts(proto, loss=LossType.MSELoss, optimizer=OptimType.AdamW, artifact_directory=tmp_path)
    for name in ("training_model.onnx", "eval_model.onnx"):
        nodes = onnx.load(tmp_path / name).graph.node
        assert not any(node.metadata_props or node.op_type == "Identity" for node in nodes)
    assert not any(node.op_type == "Where" for node in onnx.load(tmp_path / "eval_model.onnx").graph.node)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return Summed.apply(self.layer(x))


def test_a_backward_pass_that_mixes_elements_is_kept() -> None:
    module = Mixing()
    assert_gradients_equal_torch(module, from_torch(module, X), X)


class Hooked(Mixing):
    def forward(self, x):
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda dy: dy * 0.1)
        return y


def test_a_gradient_that_differs_is_refused_unless_only_outputs_are_checked() -> None:
    with pytest.raises(ParityError, match=r"gradients differ.*\n  layer.weight: off by"):
        from_torch(Hooked(), X)
    assert from_torch(Hooked(), X, check="outputs")


def test_the_newer_exporter_refuses_what_it_does_not_keep() -> None:
    with pytest.raises(ParityError, match="gradients differ"):
        from_torch(network("detach"), (X, IDS), exporter="dynamo")


@pytest.mark.parametrize("check", ["gradients", 3])
def test_an_unknown_check_is_refused(check) -> None:
    with pytest.raises(ValueError, match="check must be"):
        from_torch(Mixing(), X, check=check)


def test_gradient_checks_are_for_training() -> None:
    with pytest.raises(ValueError, match="is for training"):
        from_torch(Mixing(), X, training=False, check="gradient")
