"""Modules that torch's tracer cannot take, old opsets, data-dependent branches, and torch's own keywords."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onward import artifacts
from onward.api import CheckpointState, Module
from onward.errors import ExportError, ParityError
from onward.export import from_torch
from onward.export.torch import probe


class Net(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x):
        return self.function(self.layer(x))


def exporter_of(model: onnx.ModelProto) -> str:
    return next(json.loads(e.value)["exporter"] for e in model.metadata_props if e.key == "onward.export")


# ---- layers that the tracer does not know, written in those that it does -----------------------------

REWRITTEN: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "RMSNorm": (nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)), (3, 8)),
    "ChannelShuffle": (nn.Sequential(nn.Linear(8, 8), nn.ChannelShuffle(2)), (2, 4, 3, 8)),
    "AlphaDropout": (nn.Sequential(nn.Linear(8, 8), nn.AlphaDropout(0.3)), (3, 8)),
    "FeatureAlphaDropout": (nn.Sequential(nn.Linear(8, 8), nn.FeatureAlphaDropout(0.3)), (2, 4, 3, 8)),
    "RReLU": (nn.Sequential(nn.Linear(8, 8), nn.RReLU()), (3, 8)),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_layers_without_a_translation_are_traced(name: str) -> None:
    module, shape = REWRITTEN[name]
    proto = from_torch(module, torch.randn(*shape), exporter="torchscript")
    assert exporter_of(proto) == "torchscript"


def test_bilinear_is_traced() -> None:
    assert from_torch(nn.Bilinear(4, 3, 5), (torch.randn(2, 4), torch.randn(2, 3)), exporter="torchscript")


@pytest.mark.parametrize("features", [False, True])
def test_alpha_dropout_keeps_mean_and_spread(features: bool) -> None:
    layer = nn.FeatureAlphaDropout(0.3) if features else nn.AlphaDropout(0.3)
    proto = from_torch(nn.Sequential(nn.Identity(), layer), torch.randn(100, 200), check="outputs")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options)
    x = np.random.default_rng(0).normal(size=(500, 200)).astype(np.float32)
    (y,) = session.run(None, {"input": x})
    assert abs(y.mean()) < 0.05 and abs(y.std() - 1) < 0.05
    assert not np.allclose(y, session.run(None, {"input": x})[0])


@pytest.mark.parametrize("layer", [nn.RReLU(), nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.2)], ids=str)
def test_random_layers_train_at_random_and_evaluate_as_in_eval_mode(layer: nn.Module, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), layer), torch.randn(64, 8)
    proto = from_torch(model, x)
    name = proto.graph.output[0].name
    artifacts.generate_artifacts(
        proto, loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path, additional_output_names=[name]
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    target = np.zeros((64, 8), np.float32)
    (_, once), (_, again) = module(x.numpy(), target), module(x.numpy(), target)
    assert not np.allclose(once, again)
    before = model[0](x).detach().numpy()
    if isinstance(layer, nn.RReLU):
        slopes = (once / before)[before < 0]
        assert slopes.min() >= 1 / 8 - 1e-5 and slopes.max() <= 1 / 3 + 1e-5
        assert abs(slopes.mean() - 11 / 48) < 0.02
    module.eval()
    expected = model.eval()(x).detach().numpy()
    np.testing.assert_allclose(module(x.numpy(), target)[1], expected, rtol=1e-5, atol=1e-6)


def test_an_eval_model_that_still_draws_is_named(tmp_path: Path) -> None:
    proto = from_torch(Net(lambda y: y + 0.1 * torch.randn_like(y)), torch.randn(3, 8))
    with pytest.warns(UserWarning, match="the eval model draws random numbers too"):
        artifacts.build_artifacts(proto, loss=artifacts.LossType.MSELoss)


# ---- the other exporters ---------------------------------------------------------------------------


def test_what_the_tracer_cannot_take_goes_through_primitive_operators() -> None:
    module = Net(lambda y: torch.fft.rfft(y).abs())
    with pytest.warns(
        UserWarning, match="exported through torch's primitive operators, because the tracer cannot"
    ):
        proto = from_torch(module, torch.randn(3, 8))
    assert exporter_of(proto) == "primitives"
    assert [tensor.name for tensor in proto.graph.initializer][:2] == ["layer.weight", "layer.bias"]


def test_a_chosen_exporter_is_not_replaced() -> None:
    with pytest.raises(ExportError, match="cannot be exported at opset 18"):
        from_torch(Net(lambda y: torch.fft.rfft(y).abs()), torch.randn(3, 8), exporter="torchscript")


class Baked(nn.Module):
    """A parameter that the export would hold as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        scale = self.scale if not torch.jit.is_tracing() else torch.tensor([1.0] * 8)
        return self.layer(x) * scale


def test_a_parameter_that_becomes_a_constant_is_refused() -> None:
    with pytest.raises(ParityError, match="torch trains scale, which the exported model holds as constants"):
        from_torch(Baked(), torch.randn(3, 8), exporter="torchscript")


# ---- opsets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("opset", [7, 9, 11, 12, 13])
def test_old_opsets_train_and_infer(opset: int, training: bool) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))
    proto = from_torch(net, torch.randn(2, 3, 5, 5), opset=opset, training=training)
    assert proto.opset_import[0].version == opset


# ---- decisions -------------------------------------------------------------------------------------


def test_a_branch_that_depends_on_data_is_named_with_its_line() -> None:
    module = Net(lambda y: y if y.abs().sum() > 0 else y * 2)
    with pytest.warns(UserWarning, match=r"decides by the data at .*test_torch_fallback.py:\d+ \(.*> 0"):
        from_torch(module, torch.randn(3, 8))


@pytest.mark.parametrize(("rate", "count"), [(0.0, 0), (1e-9, 1), (1.0, 0)])
def test_a_draw_decides_only_where_its_rate_leaves_a_choice(rate: float, count: int) -> None:
    module = Net(lambda y: y if torch.rand([]) < rate else y * 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from_torch(module, torch.randn(3, 8))
    assert sum("decides by the data" in str(w.message) for w in caught) == count


def test_a_branch_that_the_check_sees_differ_is_an_error_with_its_line() -> None:
    module = Net(lambda y: y if y.sum() > 0 else y * 2)
    nn.init.eye_(module.layer.weight)
    nn.init.zeros_(module.layer.bias)
    for seed in range(16):  # some example goes one way and the check the other
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from_torch(module, x, exporter="torchscript")
        except ParityError as error:
            assert "decides by the data at" in str(error)
            return
    raise AssertionError("the check never saw the other branch")


# ---- torch's own call ------------------------------------------------------------------------------


def test_the_keywords_of_torchs_training_call() -> None:
    proto = from_torch(
        nn.Linear(4, 2), torch.randn(3, 4), training=torch.onnx.TrainingMode.TRAINING, opset_version=15,
        do_constant_folding=False, export_params=True, keep_initializers_as_inputs=False, verbose=True, dynamo=False,
        input_names=["x"], output_names=["y"], dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
    )  # fmt: skip
    assert proto.opset_import[0].version == 15
    assert [tensor.name for tensor in proto.graph.initializer] == ["weight", "bias"]


@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({"do_constant_folding": True}, ValueError),
        ({"export_params": False}, ValueError),
        ({"training": torch.onnx.TrainingMode.PRESERVE}, ValueError),
        ({"colour": "red"}, TypeError),
        ({"dynamo": True}, ValueError),
        ({"dynamic_shapes": ({0: "batch"},)}, ValueError),
    ],
    ids=str,
)
def test_keywords_that_mean_something_else_are_refused(keywords: dict, error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(keywords))):
        from_torch(nn.Linear(4, 2), torch.randn(3, 4), **keywords)


def test_the_file_may_be_called_f(tmp_path: Path) -> None:
    assert (
        from_torch(nn.Linear(4, 2), torch.randn(3, 4), f=tmp_path / "model.onnx") == tmp_path / "model.onnx"
    )
    with pytest.raises(TypeError, match="both a path and f"):
        from_torch(nn.Linear(4, 2), torch.randn(3, 4), tmp_path / "a.onnx", f=tmp_path / "b.onnx")


def test_export_options_given_to_artifacts_are_sent_to_the_export() -> None:
    with pytest.raises(TypeError, match=r"generate_artifacts\(\) got .*'training'.*from_torch takes it"):
        artifacts.generate_artifacts(b"", training=True)  # type: ignore[call-arg]


def test_interpolation_with_antialiasing() -> None:
    module = Net(lambda y: F.interpolate(y, size=(4, 4), mode="bilinear", antialias=True))
    with pytest.warns(UserWarning, match="torch.export"):
        assert from_torch(module, torch.randn(2, 3, 8, 8))


# ---- scatter_reduce, and inputs that rows must agree on -----------------------------------------------


class Scattered(nn.Module):
    def __init__(self, reduce: str, include_self: bool) -> None:
        super().__init__()
        self.layer, self.reduce, self.include_self = nn.Linear(8, 8), reduce, include_self

    def forward(self, x, index, base):
        return base.scatter_reduce(1, index, self.layer(x), self.reduce, include_self=self.include_self)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_scatter_reduce_in_two_dimensions(reduce: str, include_self: bool) -> None:
    index = torch.tensor([[0, 1, 1, 0, 2, 3, 3, 1], [3, 2, 1, 0, 0, 0, 2, 2], [1, 1, 1, 1, 2, 0, 3, 3]])
    args = (torch.randn(3, 8), index, torch.randn(3, 5))
    with pytest.warns(UserWarning, match="the export fixes sequence"):  # that of the base alone
        assert from_torch(Scattered(reduce, include_self), args, exporter="torchscript")


class Counting(nn.Module):
    """Needs as many end tokens in each row, as sequence classifiers do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids):
        ends = ids.eq(2)
        if not torch.jit.is_tracing() and len(torch.unique(ends.sum(1))) > 1:
            raise ValueError("All examples must have the same number of <eos> tokens.")
        return (self.table(ids) * ends.unsqueeze(-1)).sum(1)


def test_inputs_tried_keep_what_rows_must_agree_on() -> None:
    proto = from_torch(Counting(), torch.tensor([[5, 6, 7, 8, 2], [3, 4, 9, 1, 2]]))
    dims = proto.graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_param for dim in dims] == ["batch", "sequence"]


class _Looks(nn.Module):
    """Takes any size, but looks at its numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if float(x.abs().sum()) >= 0 else x


class _Keeps(nn.Module):
    """Keeps something that it made from the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.seen = nn.BatchNorm2d(3), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.mean() if self.seen is None else self.seen
        return self.norm(x) + self.seen


@pytest.mark.parametrize(
    "network",
    [nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 31 * 31, 2)),
     nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1)), nn.MaxPool2d(2),
     _Looks(), _Keeps()],
    ids=["fixed size", "any size", "pool", "looks", "keeps"],
)  # fmt: skip
def test_sizes_that_may_change_are_the_same_without_running(
    network: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = (torch.randn(2, 3, 64, 64),)  # so large that shapes alone are worked out first
    quick = probe.make_plan(network, x, {}, None, None, "auto")
    assert all(not tensor.is_meta for tensor in [*network.parameters(), *network.buffers()])
    monkeypatch.setattr(probe, "_MANY", 1 << 40)
    slow = probe.make_plan(network, x, {}, None, None, "auto")
    assert quick.groups == slow.groups and quick.groups
    assert quick.output_axes == slow.output_axes
