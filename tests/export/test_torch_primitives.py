"""Modules that compute derivatives or complex numbers, change buffers, branch, or hold 16 bits: they train as in torch.

Every row of the tables is exported, made into artifacts, and trained for 20 steps next to torch on the same batches,
every other one of them larger than the example.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
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
from onward.export.torch.from_torch import MissingOperator


class Physics(nn.Module):
    """The residual of a heat equation, u_t = u_xx, from first and second derivatives of a network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, points):
        points = points.detach().requires_grad_()
        first = torch.autograd.grad(self.net(points).sum(), points, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)[0]
        return ((first[:, 1:] - second[:, :1]) ** 2).mean()


class Penalty(nn.Module):
    """A critic's loss with a gradient penalty, through convolutions where the data are pictures."""

    def __init__(self, critic: nn.Module) -> None:
        super().__init__()
        self.critic = critic

    def forward(self, real, made):
        between = ((real + made) / 2).requires_grad_()
        score = self.critic(between)
        (slope,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True)
        length = slope.flatten(1).norm(2, dim=1)
        return self.critic(made).mean() - self.critic(real).mean() + 10 * ((length - 1) ** 2).mean()


class Jacobian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        rows = torch.func.vmap(torch.func.jacrev(lambda row: self.layer(row).tanh()))(x)
        return (rows**2).mean()


class Curvature(nn.Module):
    """Hessians of a field, row by row; forward mode over reverse mode."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x):
        hessian = torch.func.vmap(torch.func.hessian(lambda row: self.field(row).squeeze(-1)))(x)
        along = torch.func.jvp(self.field, (x,), (x.detach().cos(),))[1]
        return hessian.diagonal(dim1=-2, dim2=-1).sum(-1).square().mean() + along.mean()


class InnerStep(nn.Module):
    """One step of gradient descent in forward, and the loss after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x, y):
        weights = dict(self.layer.named_parameters())
        loss = nn.functional.mse_loss(torch.func.functional_call(self.layer, weights, (x,)), y)
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        moved = {name: weight - 0.1 * slope for (name, weight), slope in zip(weights.items(), slopes)}
        return nn.functional.mse_loss(torch.func.functional_call(self.layer, moved, (x.flip(1),)), y)


class SpectralLayer(nn.Module):
    """A Fourier neural operator's layer, whose weights are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv1d(1, 2, 1)
        self.weight = nn.Parameter(torch.randn(2, 2, 3, dtype=torch.cfloat) / 2)

    def forward(self, x):
        spectrum = torch.fft.rfft(self.lift(x))
        kept = torch.zeros_like(spectrum)
        kept[:, :, :3] = torch.einsum("bix,iox->box", spectrum[:, :, :3], self.weight)
        return torch.fft.irfft(kept, n=x.shape[-1])


class StateSpace(nn.Module):
    """S4D: a convolution in Fourier space with a kernel of complex exponentials."""

    def __init__(self) -> None:
        super().__init__()
        self.output, self.step = nn.Parameter(torch.randn(2, 2, 2)), nn.Parameter(torch.randn(2) / 4 - 1)
        self.decay, self.turn = nn.Parameter(torch.randn(2, 2) / 4), nn.Parameter(torch.randn(2, 2))

    def forward(self, x):
        length = x.shape[-1]
        rates = torch.complex(-self.decay.exp(), self.turn)
        steps = rates * self.step.exp().unsqueeze(-1)
        output = torch.view_as_complex(self.output) * (torch.exp(steps) - 1.0) / rates
        powers = torch.exp(steps.unsqueeze(-1) * torch.arange(length))
        kernel = 2 * torch.einsum("hn,hnl->hl", output, powers).real
        spectrum = torch.fft.rfft(kernel, n=2 * length) * torch.fft.rfft(x, n=2 * length)
        return torch.fft.irfft(spectrum, n=2 * length)[..., :length]


class Of(nn.Module):
    """A function of what a layer gives."""

    def __init__(self, function: Callable[..., torch.Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.function = nn.ModuleList(layers), function

    def forward(self, x):
        return self.function(self.layers, x)


def spectrogram(x: torch.Tensor) -> torch.Tensor:
    return torch.stft(x, 8, 4, window=torch.hann_window(8), return_complex=True)


def rotated(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """A rotary embedding over complex numbers"""
    pairs = torch.view_as_complex(layers[0](x).reshape(-1, 4, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones(4), torch.arange(4.0))).flatten(1)


def autocast(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = layers[0](x)
    return layers[1](hidden.float())


def recurrence(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.scan import scan

    def step(hidden, row):
        hidden = layers[0](torch.cat([hidden, row], -1)).tanh()
        return hidden, hidden.clone()

    return scan(step, x.new_zeros(x.shape[0], 3), x, dim=1)[1]


def chosen(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, layers[0], layers[1], (x,))


def loop(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """The same as `recurrence`."""
    states = [x.new_zeros(x.shape[0], 3)]
    for row in x.unbind(1):
        states.append(layers[0](torch.cat([states[-1], row], -1)).tanh())
    return torch.stack(states[1:], 1)


class Average(nn.Module):
    """What the layer gives, less its moving average."""

    def __init__(self, *, written: bool) -> None:
        super().__init__()
        self.layer, self.written = nn.Linear(3, 4), written
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        y = self.layer(x)
        with torch.no_grad():
            if self.written:
                self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
            else:
                self.average = 0.9 * self.average + 0.1 * y.mean(0)
        return y - self.average


@dataclass(frozen=True)
class Row:
    name: str
    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    scalar: bool = False
    fixed: bool = False
    # the same without `torch.cond` and `scan`, which torch compiles for half a minute
    written_out: Callable[[], nn.Module] | None = None


def _critic() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))


def _picture_critic() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.SiLU(), nn.Flatten(), nn.Linear(36, 1))


ROWS = [
    Row("physics-informed", Physics, ((6, 2),), scalar=True),
    Row("gradient penalty", lambda: Penalty(_critic()), ((6, 4), (6, 4)), scalar=True),
    Row("gradient penalty of pictures", lambda: Penalty(_picture_critic()), ((3, 2, 6, 6), (3, 2, 6, 6)), scalar=True),
    Row("jacobian", Jacobian, ((5, 3),), scalar=True),
    Row("curvature", Curvature, ((5, 3),), scalar=True),
    Row("inner step", InnerStep, ((5, 3), (5, 1)), scalar=True),
    Row("Fourier neural operator", SpectralLayer, ((2, 1, 8),)),
    Row("state space", StateSpace, ((3, 2, 6),)),
    Row("filter", lambda: Of(lambda m, x: torch.fft.fft2(m[0](x)).abs(), nn.Linear(3, 6)), ((2, 5, 3),)),
    Row("short-time Fourier", lambda: Of(lambda m, x: spectrogram(m[0](x)).abs(), nn.Linear(3, 32)), ((4, 3),)),
    Row("and back", lambda: Of(lambda m, x: torch.istft(spectrogram(m[0](x)) * (1 + 0.5j), 8, 4,
        window=torch.hann_window(8)), nn.Linear(3, 32)), ((4, 3),)),
    Row("rotation", lambda: Of(rotated, nn.Linear(3, 8)), ((4, 3),)),
    Row("autocast", lambda: Of(autocast, nn.Linear(3, 4), nn.Linear(4, 2)), ((5, 3),)),
    Row("scan", lambda: Of(recurrence, nn.Linear(6, 3)), ((2, 4, 3),), written_out=lambda: Of(loop, nn.Linear(6, 3))),
    Row("cond", lambda: Of(chosen, nn.Linear(3, 4), nn.Linear(3, 4)), ((5, 3),),
        written_out=lambda: Of(lambda m, x: m[0 if x.sum() > 0 else 1](x), nn.Linear(3, 4), nn.Linear(3, 4))),
]  # fmt: skip
# layers whose backward pass torch computes in kernels
BACKWARD = {
    "average pooling": nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    "adaptive pooling": nn.AdaptiveAvgPool2d((2, 3)),
    "maximum pooling": nn.MaxPool2d(3, 2, 1),
    "transposed convolution": nn.ConvTranspose2d(2, 4, 3, 2, 1, groups=2),
    "replicated edges": nn.ReplicationPad2d((2, 1, 0, 3)),
    "instance norm": nn.InstanceNorm2d(2, affine=True),
}


class Slope(nn.Module):
    """The derivative of a layer's result with respect to the input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Conv2d(1, 2, 2), layer

    def forward(self, x):
        x.requires_grad_()
        return torch.autograd.grad(self.layer(self.first(x)).sin().sum(), x, create_graph=True)[0]


class Follower(nn.Module):
    """A network that follows the other one as forward says; both start as one."""

    def __init__(self, follow: Callable[[nn.Module, nn.Module], object]) -> None:
        super().__init__()
        self.online, self.target, self.follow = nn.Linear(3, 4), nn.Linear(3, 4), follow
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)

    def forward(self, x):
        self.follow(self.target, self.online)
        return self.online(x) - self.target(x.flip(1))


def follow_by_assignment(target: nn.Module, online: nn.Module) -> None:
    for theirs, ours in zip(target.parameters(), online.parameters()):
        theirs.data = theirs.data * 0.9 + ours.data * 0.1


def follow_in_place(target: nn.Module, online: nn.Module) -> None:
    for theirs, ours in zip(target.parameters(), online.parameters()):
        theirs.data.mul_(0.9).add_(ours.data, alpha=0.1)


@torch.no_grad()
def follow_at_once(target: nn.Module, online: nn.Module) -> None:
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), 0.1)


FROZEN = [
    Row(follow.__name__, lambda follow=follow: Follower(follow), ((5, 3),))
    for follow in (follow_by_assignment, follow_in_place, follow_at_once)
]


class Masked(nn.Linear):
    """Writes its mask into the weights, as published networks of masked convolutions do."""

    def forward(self, x):
        self.weight.data *= torch.ones(3, 3).tril()
        return super().forward(x)


STATE = [
    Row("average written in place", lambda: Average(written=True), ((5, 3),)),
    Row("average assigned", lambda: Average(written=False), ((5, 3),)),
    Row("cumulative batch norm", lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None)), ((5, 3),)),
    Row("spectral norm", lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Tanh()), ((5, 3),)),
    Row("spectral norm as a parametrization",
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh()), ((5, 3),)),
]  # fmt: skip


def train(
    row: Row, folder: Path, *, dtype: torch.dtype = torch.float32, rtol: float
) -> tuple[nn.Module, Any]:
    """Twenty steps of both; the torch module and the state of the other."""
    torch.manual_seed(0)
    module = row.build()
    # autocast and 16 bits are compared with float32, in which the artifacts compute
    module = module if dtype == torch.float32 else module.to(dtype)
    reference = copy.deepcopy(module) if dtype == torch.float32 else copy.deepcopy(module).float()
    if row.written_out is not None:
        reference = row.written_out()
        reference.load_state_dict(module.state_dict())
    example = tuple(torch.randn(shape).to(dtype) for shape in row.shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        proto = from_torch(module, example)
    assert isinstance(proto, onnx.ModelProto)
    loss = None if row.scalar else artifacts.LossType.MSELoss
    artifacts.generate_artifacts(
        proto, loss=loss, optimizer=artifacts.OptimType.SGD, artifact_directory=folder
    )
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    step = Module(folder / "training_model.onnx", state)
    update = Optimizer(folder / "optimizer_model.onnx", step)
    update.set_learning_rate(0.03)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.03)
    for turn in range(20):
        more = 0 if row.fixed else turn % 2
        inputs = [torch.randn(shape[0] + more, *shape[1:]) for shape in row.shapes]
        with torch.autocast("cpu", enabled=False):
            y = reference(*inputs)
        targets = [] if row.scalar else [torch.randn(y.shape)]
        expected = y if row.scalar else ((y - targets[0]) ** 2).mean()
        sgd.zero_grad()
        expected.backward()
        sgd.step()
        got = step(*(x.detach().numpy() for x in [*inputs, *targets]))
        update.step()
        step.lazy_reset_grad()
        np.testing.assert_allclose(np.reshape(got, ()), expected.item(), rtol=rtol, err_msg=f"step {turn}")
    return reference, state


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_twenty_steps_are_torchs(row: Row, tmp_path: Path) -> None:
    # torch's own autocast rounds to 8 bits
    train(row, tmp_path, rtol=1e-2 if row.name == "autocast" else 1e-4)


@pytest.mark.parametrize("row", STATE, ids=lambda row: row.name)
def test_buffers_that_forward_changes_move_with_the_step(row: Row, tmp_path: Path) -> None:
    reference, state = train(row, tmp_path, rtol=1e-5)
    buffers = dict(reference.named_buffers())
    assert buffers
    for name, expected in buffers.items():
        got = state.parameters[name].data
        np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("row", FROZEN, ids=lambda row: row.name)
def test_frozen_parameters_that_forward_changes_move_with_the_step(row: Row, tmp_path: Path) -> None:
    reference, state = train(row, tmp_path, rtol=1e-5)
    for name, expected in reference.named_parameters():
        np.testing.assert_allclose(
            state.parameters[name].data, expected.detach().numpy(), rtol=1e-5, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("name", BACKWARD)
def test_a_layer_is_differentiated_in_forward(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert from_torch(
            Slope(BACKWARD[name]), torch.randn(2, 1, 8, 8)
        )  # compared with torch, gradients too


def test_a_mask_that_forward_writes_into_weights_holds_at_every_step(tmp_path: Path) -> None:
    train(Row("masked", lambda: nn.Sequential(Masked(3, 3), nn.Tanh()), ((5, 3),)), tmp_path, rtol=1e-5)


def test_the_module_is_as_it_was_whatever_forward_writes() -> None:
    for module in (Follower(follow_in_place), Follower(follow_by_assignment), Masked(3, 3)):
        module.train()
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        from_torch(module, torch.randn(5, 3))
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, before[name]), name


def test_a_change_that_the_next_step_counts_on_is_refused() -> None:
    class Clipped(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    for module, x in (
        (Clipped(3, 3), torch.randn(5, 3)),
        (nn.Embedding(5, 3, max_norm=0.1), torch.tensor([1, 2])),
    ):
        with pytest.raises(
            ExportError, match="changes the parameter 'weight', which the optimizer trains too"
        ):
            from_torch(module, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_modules_of_16_bits_train_with_float32_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    row = Row("halves", lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.GELU(), nn.Flatten(),
              nn.Linear(24, 2)), ((5, 2, 8),))  # fmt: skip
    train(row, tmp_path, dtype=dtype, rtol=1e-5)


def test_complex_parameters_are_pairs_in_the_file() -> None:
    module = SpectralLayer()
    with pytest.warns(UserWarning, match="exported through torch's primitive operators"):
        proto = from_torch(module, torch.randn(2, 1, 8))
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    np.testing.assert_array_equal(stored["weight"], torch.view_as_real(module.weight.detach()).numpy())
    assert module.weight.is_complex()


def test_what_forward_detaches_stays_without_a_gradient() -> None:
    """autograd itself detaches what it keeps: only the module's own stops count."""

    class Detached(Physics):
        def forward(self, points):
            return super().forward(points) * self.net(points).detach().mean() + self.net[4].bias.data.sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert from_torch(Detached(), torch.randn(4, 2))  # its check compares gradients with torch's


def test_an_operator_without_a_form_is_named_with_every_reason() -> None:
    with pytest.raises(
        MissingOperator,
        match=r"(?s)no form of torch's linalg_qr.*called at \S*test_torch_primitives.py:\d+ .*[Pp]rimitive operators",
    ) as failed:
        from_torch(Of(lambda m, x: torch.linalg.qr(m[0](x))[0], nn.Linear(3, 3)), torch.randn(3, 3))
    assert isinstance(failed.value, ExportError)


def test_a_missing_kernel_is_said_in_our_words() -> None:
    with pytest.raises(ExportError, match=r"no kernel on the CPU for ConvTranspose .*model\.float\(\)"):
        from_torch(nn.ConvTranspose2d(2, 3, 3).double(), torch.randn(1, 2, 5, 5).double())
