"""Functions that torch's exporters lack: outputs and gradients as torch's, checked by the export itself."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onward.artifacts import build_artifacts
from onward.errors import ExportError
from onward.export import from_torch
from same_gradients import assert_gradients_equal_torch


class After(nn.Module):
    """A function of what a linear layer gives."""

    def __init__(self, function, width: int = 8) -> None:
        super().__init__()
        self.first, self.function = nn.Linear(width, width), function

    def forward(self, x):
        return self.function(self.first(x))


def square(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, 2, 2, 2)


FUNCTIONS = {
    "cumprod": lambda x: x.cumprod(-1),
    "axes counted from the end": lambda x: (
        square(x).permute(0, -2, -1, 1),
        torch.permute(square(x), (-1, 0, -2, -3)),
    ),
    "triangular systems": lambda x: (
        torch.linalg.solve_triangular(x @ x.mT + 2 * torch.eye(5), x, upper=False),
        torch.linalg.solve_triangular(x @ x.mT + 2 * torch.eye(5), x.mT, upper=True, left=False),
        torch.linalg.solve_triangular(square(x[:4]).tril(-1), square(x[:4]), upper=False, unitriangular=True),
    ),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 1) + x.logcumsumexp(-1),
    # a trace of torch's own knows no truth values where numbers are expected, and the runtime no Where of them
    "truth values for numbers": lambda x: (
        x.masked_fill(
            torch.zeros(x.shape, dtype=torch.bool).scatter(1, x.argmax(-1, keepdim=True), True), 0.0
        ),
        x.masked_fill(torch.full(x.shape, False).masked_fill(x > 0, True), 1.0),
        x.where((x > 0) == torch.full_like(x, True, dtype=torch.bool), x * x),
        x.masked_fill(torch.where(x > 0, True, x < -1) & True, 2.0),
        x * x.new_full(x.shape, True, dtype=torch.bool).index_fill(1, torch.tensor([1]), False),
        x.masked_fill(((x > 1) != True).where(x < 0, False) | False, 3.0),  # noqa: E712
        (2 * x).masked_fill_(torch.bitwise_xor(x > 0, True), 0.5),
    ),
    "cumprod of rows": lambda x: torch.cumprod(x, dim=0),
    "cummax": lambda x: x.cummax(-1).values,
    "cummin": lambda x: torch.cummin(x, 1)[0],
    "median": lambda x: x.median(-1).values,
    "median of all": lambda x: x.median() * x,
    "kthvalue": lambda x: x.kthvalue(3, -1, keepdim=True).values,
    "inv": lambda x: torch.linalg.inv(square(x) - 0.5 * torch.ones(2, 2)),
    "inverse": lambda x: torch.inverse(
        x.reshape(-1, 1, 8).expand(-1, 8, 8).tril() + 2 * torch.eye(8).flip(0)
    ),
    "solve": lambda x: torch.linalg.solve(square(x) + 3 * torch.eye(2), square(x)),
    "solve of vectors": lambda x: torch.linalg.solve(square(x)[:, 0] + 3 * torch.eye(2), x[:, :2]),
    "cholesky solve": lambda x: torch.cholesky_solve(
        square(x), torch.linalg.cholesky(square(x) @ square(x).mT + torch.eye(2))
    ),
    "cholesky": lambda x: torch.linalg.cholesky(square(x) @ square(x).mT + torch.eye(2)),
    # several in one export: outputs are compared one by one
    "elementwise": lambda x: (
        torch.hypot(x, x + 1),
        torch.copysign(x, x.flip(0)),
        torch.fmin(x, torch.where(x > 1, torch.nan, x * x)),
        x.fmax(x.flip(1)),
        x.lgamma() + torch.special.gammaln(3 * x.abs() + 0.5),
        torch.digamma(2.1 * x) + torch.special.digamma(x.abs() + 1),
        torch.erfinv(x.tanh() * 0.999),
    ),
    "order": lambda x: (
        torch.where(x > 0.5, torch.nan, x).nanmedian(-1).values + x.nanmedian(),
        (x.round() + x - x.detach()).mode(-1).values,
        torch.sort(x, stable=True, dim=0, descending=True)[0],
        x.gather(-1, torch.argsort((x > 0), dim=-1, descending=True, stable=True)),
        x.gather(0, x.argsort(0)),
        x * torch.searchsorted(torch.linspace(-2, 2, 5), x, right=True),
        x * torch.bucketize(x, torch.linspace(-2, 2, 5)),
        x * torch.isin(x.round().long(), torch.tensor([0, 1])),
    ),
    "moved": lambda x: (
        square(x).movedim(-1, 1),
        square(x).moveaxis((0, -1), (-1, 0)),
        torch.rot90(x, 1, (-2, -1)) * 2,
        x.rot90(2) + x.rot90(-4),
        torch.cat(torch.cat(x.split(2, -1), 0).split(x.size(0), 0), -1),  # a size that the trace follows
        x.view(len(x), -1, 2).sum(2),
        torch.zeros(3, 8).index_add(0, torch.tensor([0, 2, 2, 1]), x[:4], alpha=0.5),
        torch.zeros_like(x).index_add_(1, torch.tensor([0, 0, 1]), x[:, :3]),
        torch.where(torch.eye(len(x), dtype=torch.bool), 0.0, x @ x.T),
        torch.zeros_like(x).copy_(x[:1]),
        F.grid_sample(
            square(x)[:, :1], F.affine_grid(x[:, :6].view(-1, 2, 3), [len(x), 1, 3, 3], False).tanh()
        ),
    ),
    "hyperbolic": lambda x: (
        torch.acosh(1.5 + x.abs()) + x.asinh() + torch.atanh(x.sigmoid() * 0.9),
        x.sinh() + x.cosh(),
        torch.xlogy(x.relu(), x.abs() + 1) + torch.special.xlogy(0.5, x.exp()),
    ),
    "rows": lambda x: (
        torch.cdist(x, x * 2, p=1),
        torch.cdist(x, x.flip(0)),
        torch.cdist(x, x + 1, p=torch.inf),
        F.pdist(x, 3.0),
        torch.cov(x),
        torch.corrcoef(x),
        torch.full((2, 8), -9.0).index_reduce(0, torch.tensor([0, 1, 1, 0, 1]), x, "amax"),
        torch.linalg.slogdet(x[:2, :2])[1],
        torch.vander(x[0], 3).detach() * x[0, 0],  # torch has no gradient of it
    ),
    "diagonals": lambda x: (
        torch.diag(x, 1),
        torch.diag(x[0], -2),
        torch.diag_embed(x, 1),
        x.diag_embed(dim1=0, dim2=2),
    ),
    "integers": lambda x: (
        x * ((x * 9).long() ^ 5),
        x * torch.bitwise_xor((x * 9).int(), (x * 3).int()),
        x * ((x > 0) ^ (x < 0.5)),
        x * torch.bincount((3 * x.abs()).long().flatten(), minlength=30)[0],
        x * torch.bincount((x[0] > 0).long(), weights=x[1].detach())[1],
    ),
    "pooling": lambda x: (
        F.adaptive_avg_pool2d(x[None, None], (3, 5)),
        F.adaptive_max_pool2d(x[None, None], (None, 3)),
        F.adaptive_max_pool1d(x[None], 3),
        F.adaptive_avg_pool3d(x[None, None, None], (1, 2, 3)),
        F.avg_pool2d(x[None, None], 3, 2, 1, divisor_override=4),
        F.batch_norm(x, None, None, training=True),
    ),
    "losses": lambda x: (
        F.smooth_l1_loss(x, x.flip(0).detach(), beta=0.5),
        F.huber_loss(x, 2 * x.detach(), delta=0.3, reduction="none"),
        F.poisson_nll_loss(x, 3 * x.detach().abs(), full=True),
        F.gaussian_nll_loss(x, x.detach() + 1, x.abs(), full=True, eps=0.3),
        F.cross_entropy(
            x, torch.tensor([1, 2, -100, 4, 0]), label_smoothing=0.1, weight=torch.arange(1.0, 9.0)
        ),
        F.cross_entropy(x, x.flip(0).softmax(-1).detach(), label_smoothing=0.2),
        F.multilabel_margin_loss(x, torch.tensor([[3, 0, -1, 1, 2, 4, 5, 6]] * 5), reduction="sum"),
        F.multilabel_margin_loss(x[0], torch.tensor([7, 1, 2, -1, -1, -1, -1, -1])),
        F.cross_entropy(
            x[None], torch.tensor([[0, 1, 2, 3, 4, 0, 0, 1]]), label_smoothing=0.1, reduction="sum"
        ),
    ),
    "random": lambda x: (
        x[torch.randperm(5)] * x,
        torch.empty_like(x).normal_(1.0, 0.5) * x,
        torch.normal(x, x.detach().abs()),
        torch.normal(0.0, 1.0, (5, 8)) + x,
        # DropPath and StochasticDepth at a half, as timm and torchvision draw
        x * torch.empty(5, 1).bernoulli_(0.5) / 0.5,
        x * (0.5 + torch.rand(5, 1)).floor(),
        x * torch.bernoulli(torch.full((5, 1), 0.5)),
        x * torch.empty(5, 1).bernoulli_(0.499),
    ),
}


# They run step by step over the rows, so that the export holds as many as the example has.
OF_WHOLE_BATCHES = ("cumprod of rows", "median of all", "pooling")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_exports_with_torchs_values_and_gradient(name: str) -> None:
    torch.manual_seed(0)
    expected = pytest.warns(UserWarning, match="the export fixes batch at")
    with expected if name in OF_WHOLE_BATCHES else nullcontext():
        proto = from_torch(After(FUNCTIONS[name]), torch.randn(5, 8))
    origin = next(entry.value for entry in proto.metadata_props if entry.key == "onward.export")
    assert "torchscript" in origin


BAGS = {
    "rows": (torch.tensor([[1, 2, 0, 6], [0, 0, 0, 0], [3, 3, 1, 0]]),),
    "offsets, one bag empty": (torch.tensor([1, 2, 0, 6, 5, 4, 3, 3, 0]), torch.tensor([0, 2, 2, 5])),
}


@pytest.mark.parametrize("arguments", BAGS.values(), ids=BAGS)
@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings_export_with_torchs_values_and_gradient(mode, padding, arguments) -> None:
    bag = nn.EmbeddingBag(7, 4, mode=mode, padding_idx=padding)
    proto = from_torch(bag, arguments)
    assert not {"Loop", "If", "SequenceAt"} & {node.op_type for node in proto.graph.node}


class AdaptiveSoftmax(nn.Module):
    """An adaptive softmax after a linear layer, and which of its results are given."""

    def __init__(self, results) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(8, 20, cutoffs=[5, 10], div_value=2.0, head_bias=True)
        self.results = results

    def forward(self, x, *labels):
        return self.results(self.softmax, self.linear(x), *labels)


@pytest.mark.parametrize(
    "results",
    [
        lambda softmax, x, labels: softmax(x, labels),
        lambda softmax, x, labels: softmax(x[0], labels[0]).output,
        lambda softmax, x, labels: softmax.log_prob(x),
    ],
    ids=["loss", "one row", "probabilities"],
)
def test_an_adaptive_softmax_exports_for_any_batch_and_any_cluster(results) -> None:
    torch.manual_seed(0)
    labels = torch.tensor([0, 4, 1, 19, 3, 10])  # none of the middle cluster
    proto = from_torch(AdaptiveSoftmax(results), (torch.randn(6, 6), labels))
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    build_artifacts(proto, loss=lambda op, output: op.ReduceMean(output, keepdims=0))


def test_bags_take_weights_and_a_last_offset_and_refuse_max_norm() -> None:
    ids, offsets = torch.tensor([1, 2, 0, 6, 5]), torch.tensor([0, 2, 2, 5])
    from_torch(nn.EmbeddingBag(7, 4, mode="sum", include_last_offset=True), (ids, offsets, torch.randn(5)))
    with pytest.raises(ExportError, match="max_norm"):
        from_torch(nn.EmbeddingBag(7, 4, max_norm=1.0), (ids, offsets))


@pytest.mark.parametrize("training", [True, False])
def test_a_row_of_attention_that_sees_nothing_gives_zeros_as_torchs_does(training: bool) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

        def forward(self, x, padding):
            return self.layer(x, src_key_padding_mask=padding)

    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0], padding[1, 3:] = True, True
    module, x = Encoder().train(training), torch.randn(3, 5, 8)
    proto = from_torch(module, (x, padding), training=training)
    if not training:  # in training dropout draws other masks: the export's own check leaves it out
        feeds = {"x": x.numpy(), "padding": padding.numpy()}
        (got,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)
        with torch.no_grad():
            expected = module.eval()(x, padding).numpy()
        np.testing.assert_allclose(got[1:], expected[1:], rtol=1e-4, atol=1e-5)
        assert np.isfinite(got).all()


def test_a_module_made_by_torch_jit_is_refused() -> None:
    with pytest.raises(
        ExportError, match=r"'1' was made by torch.jit .*: export the module that it was made from"
    ):
        from_torch(nn.Sequential(nn.ReLU(), torch.jit.script(nn.Linear(8, 8))), torch.randn(5, 8))


class Conditional(nn.Module):
    """A kernel for each sample, mixed of three: the batch is the number of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.route, self.kernels = nn.Linear(3, 3), nn.Parameter(torch.randn(3, 4, 3, 3, 3))

    def forward(self, x):
        kernels = torch.einsum("bk,koihw->boihw", self.route(x.mean((2, 3))).softmax(-1), self.kernels)
        flat = x.reshape(1, -1, *x.shape[2:])
        y = F.conv2d(flat, kernels.flatten(0, 1), padding=1, groups=x.shape[0])
        return y.view(x.shape[0], 4, *x.shape[2:])


def _axes(proto: onnx.ModelProto) -> list[str | int]:
    return [d.dim_param or d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim]


def test_as_many_groups_as_examples_leave_the_batch_free() -> None:
    proto = from_torch(Conditional(), torch.randn(2, 3, 6, 6))  # compared with torch at other batches
    assert _axes(proto) == ["batch", 3, "height", "width"]


def test_a_batch_that_cannot_be_free_leaves_other_axes_free() -> None:
    class Running(nn.Conv2d):
        def forward(self, x):
            return super().forward(x).cumprod(0)

    with pytest.warns(UserWarning, match="the export fixes batch at"):
        proto = from_torch(Running(3, 2, 3), torch.randn(2, 3, 6, 6))
    assert _axes(proto) == [2, 3, "height", "width"]


def test_a_running_maximum_knows_nan() -> None:
    from onward.export.torch.missing_functions import MISSING

    ours = {(owner, name): function for owner, name, function in MISSING}
    x = torch.tensor([[1.0, torch.nan, 3.0, 2.0], [2.0, 2.0, 1.0, 5.0]])
    for name in ("cummax", "cummin"):
        expected, got = getattr(torch, name)(x, 1), ours[torch, name](x, 1)
        torch.testing.assert_close(got.values, expected.values, equal_nan=True)
        torch.testing.assert_close(got.indices, expected.indices)
    torch.testing.assert_close(ours[torch, "median"](x, 1).values, torch.median(x, 1).values, equal_nan=True)


def test_a_large_inverse_is_refused_with_the_limit() -> None:
    model = After(lambda x: torch.linalg.inv(torch.diag_embed(x.exp())), width=40)
    with pytest.raises(ExportError, match="40 x 40 matrices cannot be exported: 32 rows"):
        from_torch(model, torch.randn(2, 40), exporter="torchscript", check=False)


@pytest.mark.parametrize(
    "options", [{}, {"bidirectional": True, "num_layers": 2, "batch_first": True}], ids=str
)
def test_an_lstm_with_projection(options: dict) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 5, proj_size=3, **options)

        def forward(self, x):
            out, (h, c) = self.lstm(x)
            return out, h, c

    with pytest.warns(UserWarning, match="fixes"):
        proto = from_torch(Net(), torch.randn(4, 3, 4))
    names = {tensor.name for tensor in proto.graph.initializer}
    assert {"lstm.weight_hr_l0", "lstm.weight_hh_l0"} <= names


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ctc_loss_with_lengths_and_repeats(reduction: str) -> None:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 5)

        def forward(self, x, targets, frames, lengths):
            scores = self.last(x).log_softmax(-1)
            return F.ctc_loss(scores, targets, frames, lengths, reduction=reduction, zero_infinity=True)

    torch.manual_seed(0)
    targets = torch.tensor([[1, 1, 2], [3, 4, 0], [2, 0, 0]])
    args = (torch.randn(8, 3, 4), targets, torch.tensor([8, 6, 4]), torch.tensor([3, 2, 1]))
    proto = from_torch(Speech(), args, dynamic_axes=None)
    assert proto.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


class Estimate(torch.autograd.Function):
    """Attention with a backward pass that is no derivative, but linear."""

    @staticmethod
    def forward(ctx, q, k, v):
        weights = (q @ k.transpose(-1, -2)).tanh()
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        q, k, v, weights = ctx.saved_tensors
        mixed = (dy @ v.transpose(-1, -2)) * weights
        return mixed @ k, 0.5 * mixed.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ dy


class Sorted(torch.autograd.Function):
    """Two results, one of them of integers."""

    @staticmethod
    def forward(ctx, x):
        values, places = x.sort(-1)
        ctx.save_for_backward(places)
        ctx.mark_non_differentiable(places)
        return values, places

    @staticmethod
    def backward(ctx, dy, _):
        return 2 * dy.cumsum(-1)


class Clipped(torch.autograd.Function):
    """A backward pass that is not linear."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy / (1 + dy.abs().sum())


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Linear(4, 12)

    def forward(self, x):
        for _ in range(2):
            x = Estimate.apply(*self.parts(x).chunk(3, -1))
        return x


def test_a_backward_pass_that_is_linear_is_kept() -> None:
    module, x = Attend(), torch.randn(2, 3, 4)
    assert_gradients_equal_torch(module, from_torch(module, x, exporter="torchscript"), x)


def test_a_backward_pass_of_two_results_is_kept() -> None:
    module, x = After(lambda x: Sorted.apply(x)[0].exp()), torch.randn(2, 8)
    assert_gradients_equal_torch(module, from_torch(module, x, exporter="torchscript"), x)


def test_a_backward_pass_that_is_not_linear_is_refused_with_the_line() -> None:
    said = r"Clipped \(.*test_torch_missing.py:\d+\).*called at .*py:\d+.*not linear in what arrives"
    with pytest.raises(ExportError, match=said):
        from_torch(After(Clipped.apply), torch.randn(2, 8), exporter="torchscript")


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        scale = torch.empty(1, 8).uniform_(0.5, 1.5)
        return F.gumbel_softmax(x * scale, tau=0.7)


def test_numbers_drawn_in_place_are_drawn_in_the_file_too() -> None:
    proto = from_torch(Draws(), torch.randn(3, 8))
    kinds = [node.op_type for node in proto.graph.node]
    assert kinds.count("RandomUniformLike") == 2


@pytest.mark.parametrize("opset", [7, 9, 11, 12, 13])
def test_every_old_opset_exports_for_training_with_dropout(opset: int) -> None:
    from onward.artifacts import LossType, build_artifacts

    model = nn.Sequential(nn.Linear(8, 8), nn.Hardswish(), nn.Dropout(0.3), nn.Linear(8, 2))
    proto = from_torch(model, torch.randn(4, 8), opset=opset)
    assert [entry.version for entry in proto.opset_import] == [opset]
    made = build_artifacts(proto, loss=LossType.MSELoss)
    assert "random_seed" in {value.name for value in made.training.graph.inputs}
    assert "random_seed" not in {value.name for value in made.evaluation.graph.inputs}


def test_what_an_old_opset_cannot_say_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Upsample(scale_factor=2, mode="bilinear"))
    with pytest.raises(ExportError, match=r"(?s)cannot be exported at opset 8.*Resize .*half_pixel"):
        from_torch(model, torch.randn(1, 1, 4, 4), opset=8)


def test_an_old_opset_is_reached_through_a_newer_one() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0]

    with pytest.warns(UserWarning, match="exported at opset 18 and converted"):
        proto = from_torch(Net(), torch.randn(2, 3, 4), opset=8)
    assert [entry.version for entry in proto.opset_import] == [8]


# ---- float64, for which onnxruntime lacks kernels -------------------------------------------------------

IN_FLOAT64 = {
    "gelu": (nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), (3, 3)),
    "erf": (After(lambda x: torch.erf(x)), (5, 8)),
    "convolutions": (
        nn.Sequential(nn.Conv2d(2, 4, (3, 2), (2, 1), "valid", groups=2), nn.Conv2d(4, 3, 2, padding=1, dilation=2)),
        (2, 2, 9, 8),
    ),
    "convolutions of one axis": (
        nn.Sequential(nn.Conv1d(2, 4, 3, padding="same", bias=False), nn.GELU(), nn.Conv1d(4, 2, 3, 2)), (2, 2, 9)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_float64_is_exact_where_the_runtime_has_no_kernel(name: str) -> None:
    module, shape = IN_FLOAT64[name]
    module.double()
    x = torch.randn(shape, dtype=torch.float64)
    proto = from_torch(module, x, rtol=1e-13, atol=1e-14)
    assert proto.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.DOUBLE


def test_cells_follow_a_batch_whose_shape_the_tracer_lost() -> None:
    class Walk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.lstm = nn.GRUCell(4, 4), nn.LSTMCell(4, 4, bias=False)

        def forward(self, memory):
            place = memory.sum(-1).argmax(-1)
            x = memory.gather(1, place[:, None, None].expand(-1, 1, memory.size(-1))).squeeze(1)
            return self.lstm(x, (self.gru(x, x), x))[0]

    assert _axes(from_torch(Walk(), torch.randn(3, 5, 4), exporter="torchscript"))[:2] == [
        "batch",
        "sequence",
    ]
