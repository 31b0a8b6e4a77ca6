"""Mixed precision: products in 16 bits, float32 weights, and a scale of the loss that adapts."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onward.api import CheckpointState, Module
from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.errors import ModelError, NonFiniteError
from onward.export import from_torch
from onward.onnxblock import optim
from onward.runtime.devices import Device
from small_models import batch, normalized, start, with_weights, write_classifier

KINDS = {"fp16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16}


class Block(nn.Module):
    """Attention and a feed-forward net over embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv, self.norm = nn.Embedding(40, 16), nn.Linear(16, 48), nn.LayerNorm(16)
        self.wide, self.narrow, self.scores = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = self.norm(x + torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v)
        return self.scores((x + self.narrow(F.gelu(self.wide(x)))).mean(1))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


MODELS = {
    "encoder": (Block, lambda rng: rng.integers(0, 40, (6, 5))),
    "cnn": (cnn, lambda rng: rng.normal(size=(8, 2, 8, 8)).astype(np.float32)),
}


def low_operators(path: Path, precision: str) -> set[str]:
    """The operators of a model that give numbers of 16 bits."""
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    kinds = {v.name: v.type.tensor_type.elem_type for v in [*model.graph.value_info, *model.graph.output]}
    return {node.op_type for node in model.graph.node if kinds.get(node.output[0]) == KINDS[precision]}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", [Device("cpu"), Device("cpu", memory="device")], ids=["host", "device"])
def test_a_curve_in_float16_is_as_near_to_float32_as_that_of_torch_autocast(tmp_path, name, device):
    make, sample = MODELS[name]
    torch.manual_seed(0)
    module = make().train()
    rng = np.random.default_rng(1)
    batches = [(sample(rng), rng.integers(0, 3, 6 if name == "encoder" else 8)) for _ in range(30)]
    from_torch(module, (torch.from_numpy(batches[0][0]),), tmp_path / "forward.onnx", training=True)
    generate_artifacts(
        tmp_path / "forward.onnx", loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path,
        optimizer=optim.AdamW(eps=1e-6, weight_decay=0.0), precision="fp16",
    )  # fmt: skip
    _, ours, optimizer = start(tmp_path, device=device)
    optimizer.set_learning_rate(5e-3)
    found = []
    for inputs in batches:
        found.append(float(ours(*inputs)))
        assert optimizer.step()
        ours.lazy_reset_grad()
    curves = {}
    weights = {key: value.clone() for key, value in module.state_dict().items()}
    for low in (False, True):
        module.load_state_dict(weights)
        update = torch.optim.AdamW(module.parameters(), lr=5e-3, eps=1e-6, weight_decay=0.0)
        curve = []
        for x, labels in batches:
            update.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=low):
                scores = module(torch.from_numpy(x))
            loss = F.cross_entropy(scores.float(), torch.from_numpy(labels))
            loss.backward()
            update.step()
            curve.append(loss.item())
        curves[low] = np.array(curve)
    gap, reference = np.abs(found - curves[False]).max(), np.abs(curves[True] - curves[False]).max()
    assert 0 < gap < max(2 * reference, 2e-3)
    assert np.abs(found - curves[True]).max() < 3 * reference + 2e-3


@pytest.mark.parametrize("precision", KINDS)
def test_weights_and_outputs_stay_float32(tmp_path, precision):
    write_classifier(tmp_path, precision=precision)
    assert low_operators(tmp_path / "training_model.onnx", precision) >= {"Gemm", "Cast"}
    model = onnx.load(tmp_path / "training_model.onnx")
    for value in [*model.graph.input, *model.graph.output]:
        assert value.type.tensor_type.elem_type not in KINDS.values(), value.name
    assert low_operators(tmp_path / "eval_model.onnx", precision) == set()


def test_normalisations_and_losses_stay_float32(tmp_path):
    generate_artifacts(
        normalized(), requires_grad=["w1", "w2"], loss=LossType.CrossEntropyLoss, optimizer=OptimType.SGD,
        artifact_directory=tmp_path, precision="bf16",
    )  # fmt: skip
    low = low_operators(tmp_path / "training_model.onnx", "bf16")
    made = {node.op_type for node in onnx.load(tmp_path / "training_model.onnx").graph.node}
    float32 = {
        "BatchNormalization",
        "Exp",
        "LogSoftmax",
        "ReduceMean",
        "ReduceSum",
        "Sqrt",
        "Reciprocal",
        "Pow",
    }
    assert made & float32 >= {"BatchNormalization", "LogSoftmax"}
    assert "MatMul" in low and not low & float32


def test_numbers_that_float16_lacks_stay_float32(tmp_path):
    """Scores are masked with the lowest float32, which would be -inf, and a row of those NaN."""
    model = with_weights(
        """net (float[n, 4] x, bool[n, 3] keep) => (float[n, 3] y) <float low = {-3.4e38}> {
            s = MatMul (x, w)  m = Where (keep, s, low)  y = Softmax (m) }""",
        w=(4, 3),
    )  # fmt: skip
    generate_artifacts(
        model, requires_grad=["w"], loss=LossType.MSELoss, optimizer=OptimType.SGD, artifact_directory=tmp_path,
        precision="fp16",
    )  # fmt: skip
    _, module, _ = start(tmp_path)
    x, _ = batch(size=2)
    keep = np.array([[True, False, True], [False, False, False]])
    assert np.isfinite(module(x, keep, np.zeros((2, 3), np.float32)))


def test_products_of_positions_keep_every_bit(tmp_path):
    """Frequencies times positions, as rotary embeddings have them: 2049 is not a number in either type."""
    model = with_weights(
        """net (int64[n, 1] place, float[n, 2] x) => (float[n, 2] y) <float[1, 2] zero = {0.0, 0.0}> {
            p = Cast <to = 1> (place)  f = Unsqueeze (rates, axis)  angles = MatMul (p, f)
            c = Cos (angles)  a = MatMul (x, w)  y = Mul (a, c) }""",
        w=(2, 2), rates=(2,),
    )  # fmt: skip
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "axis"))
    generate_artifacts(
        model, requires_grad=["w"], loss=LossType.MSELoss, optimizer=OptimType.SGD, artifact_directory=tmp_path,
        precision="bf16", additional_output_names=["angles"],
    )  # fmt: skip
    training = onnx.load(tmp_path / "training_model.onnx")
    kinds = {v.name: v.type.tensor_type.elem_type for v in training.graph.value_info}
    product = next(node for node in training.graph.node if "angles" in node.output)
    assert all(kinds.get(name, onnx.TensorProto.FLOAT) == onnx.TensorProto.FLOAT for name in product.input)


def test_the_scale_of_the_loss_falls_where_gradients_overflow_and_that_update_is_skipped(tmp_path):
    write_classifier(tmp_path, precision="fp16")
    state, module, optimizer = start(tmp_path)
    before = state.parameters["w1"].data.copy()
    for expected in (32768.0, 16384.0):
        module(*batch())
        # the CPU provider computes in float32 between casts, so no gradient of a small model overflows there
        module.memory.gradients.tensors["w1"].write(np.array(np.inf))
        assert not optimizer.step()
        module.lazy_reset_grad()
        assert state.parameters["loss_scale"].data.item() == expected
        np.testing.assert_array_equal(state.parameters["w1"].data, before)
    module(*batch())
    assert optimizer.step()
    assert not np.array_equal(state.parameters["w1"].data, before)


def test_the_scale_of_the_loss_rises_after_many_updates_and_goes_on_from_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("onward.api.optimizer._PATIENCE", 4)
    write_classifier(tmp_path, precision="fp16")
    runs = []
    for stop in (3, None):
        state, module, optimizer = start(tmp_path)
        for step in range(6):
            module(*batch(step))
            assert optimizer.step()
            module.lazy_reset_grad()
            if step + 1 == stop:
                CheckpointState.save_checkpoint(state, tmp_path / "kept", include_optimizer_state=True)
                state, module, optimizer = start(tmp_path, "kept")
        runs.append({name: parameter.data.tobytes() for name, parameter in state.parameters})
        assert state.parameters["loss_scale"].data.item() == 2 * 65536.0
    assert runs[0] == runs[1]


def test_gradients_are_those_of_the_loss_and_not_of_its_scale(tmp_path):
    norms = []
    for precision in ("fp32", "fp16"):
        write_classifier(tmp_path / precision, precision=precision)
        _, module, optimizer = start(tmp_path / precision)
        module(*batch())
        optimizer.step()
        norms.append(optimizer.gradient_norm)
    assert norms[1] == pytest.approx(norms[0], rel=2e-3)


def test_gradients_that_no_scale_makes_finite_are_an_error(tmp_path):
    write_classifier(tmp_path, precision="fp16")
    state, module, optimizer = start(tmp_path)
    state.parameters["loss_scale"].data = np.ones(1, np.float32)
    module(*batch())
    module.memory.gradients.whole.write(np.array(np.nan))
    with pytest.raises(NonFiniteError, match="gradient"):
        optimizer.step()


def test_a_checkpoint_of_float32_goes_on_in_float16(tmp_path):
    write_classifier(tmp_path / "a")
    write_classifier(tmp_path / "b", precision="fp16")
    _, module, optimizer = start(tmp_path / "b", tmp_path / "a" / "checkpoint")
    module(*batch())
    assert optimizer.step()


def test_a_provider_without_the_kernels_is_a_clear_error(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        write_classifier(tmp_path, precision="bf16")
    assert not caplog.records, "who asks for bfloat16 knows that it is not for the CPU"
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(ModelError, match=r"(?s)bf16.*CPUExecutionProvider lacks.*precision='fp16'"):
        Module(tmp_path / "training_model.onnx", state)


def test_bad_precisions_are_refused(tmp_path):
    with pytest.raises(ValueError, match="precision is 'half': it is one of fp32, fp16, bf16"):
        write_classifier(tmp_path, precision="half")
    with pytest.raises(ModelError, match="portable=True takes precision='fp32'"):
        write_classifier(tmp_path, precision="fp16", portable=True)
    assert not list(tmp_path.iterdir())
