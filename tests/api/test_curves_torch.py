"""200 steps of training beside torch: same weights, batches and optimizer, the same curve and parameters.

On the CPU, and on CUDA where there is one, beside torch on the same GPU with TF32 off.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from architectures import Residual
from torch import nn

from onward.artifacts import LossType, generate_artifacts
from onward.export import from_torch
from onward.onnxblock import optim
from onward.runtime.devices import why_not
from small_models import start

STEPS = 200


class Encoder(nn.Module):
    """Embedding, two attention blocks, mean over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation="gelu")
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.rnn = nn.LSTM(12, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(tokens))[0][:, -1])


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        Residual(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def smooth_cnn() -> nn.Module:
    """No ReLU, no max pooling: at a kink a GPU's rounding decides, and curves part for that alone (docs/gpu.md)."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(8, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.Tanh(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, base.in_features) * 0.3)
        self.b = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class WithAdapters(nn.Module):
    """Embedding, attention and a wide layer; adapters train, the rest is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16).requires_grad_(False)
        self.q, self.k, self.v, self.up, self.head = (
            Adapted(nn.Linear(16, size)) for size in (16, 16, 16, 16, 3)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        weights = (self.q(x) @ self.k(x).transpose(1, 2) / 4).softmax(-1)
        x = x + weights @ self.v(x)
        return self.head((x + torch.nn.functional.gelu(self.up(x))).mean(1))


class Network(NamedTuple):
    make: Callable[[], nn.Module]
    sample: Callable[[int], torch.Tensor]


def tokens(size: int) -> torch.Tensor:
    return torch.randint(20, (size, 7))


NETWORKS = {
    "mlp": Network(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)),
        lambda size: torch.randn(size, 8),
    ),
    "cnn with batch norm": Network(cnn, lambda size: torch.randn(size, 3, 16, 16)),
    "encoder": Network(Encoder, tokens),
    "lstm": Network(Recurrent, tokens),
    "smooth cnn with batch norm": Network(smooth_cnn, lambda size: torch.randn(size, 3, 16, 16)),
    "adapters (LoRA)": Network(WithAdapters, tokens),
}
CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(why_not("cuda") is not None, reason="needs onnxruntime-gpu and a GPU that it can use"),
]
CASES = [
    *((name, "cpu") for name in ("mlp", "cnn with batch norm", "encoder", "lstm")),
    *(
        pytest.param((name, "cuda"), marks=CUDA, id=f"{name} on cuda")
        for name in ("mlp", "smooth cnn with batch norm", "encoder", "lstm", "adapters (LoRA)")
    ),
]


class Rule(NamedTuple):
    block: Callable[[], optim.OptimizerBlock]
    torch: Callable[..., torch.optim.Optimizer]
    rate: float


# ε keeps AdamW from turning gradients that are nothing but rounding into whole steps
RULES = {
    "SGD": Rule(lambda: optim.SGD(), lambda p: torch.optim.SGD(p, lr=0.05), 0.05),
    "AdamW": Rule(
        lambda: optim.AdamW(eps=1e-4, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, lr=2e-3, eps=1e-4, weight_decay=0.01),
        2e-3,
    ),
}


@pytest.fixture(scope="module", params=CASES, ids=str)
def network(request: pytest.FixtureRequest) -> tuple[nn.Module, onnx.ModelProto, Network, str]:
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    # on a GPU torch's short cut for inference is 2e-4 from what the layers compute one by one
    torch.backends.mha.set_fastpath_enabled(False)
    torch.manual_seed(0)
    name, device = request.param
    chosen = NETWORKS[name]
    module = chosen.make().train()
    exported = from_torch(module, chosen.sample(4))
    return (
        module,
        onnx.load_from_string(exported) if isinstance(exported, bytes) else exported,
        chosen,
        device,
    )


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_training_is_torchs(
    network: tuple[nn.Module, onnx.ModelProto, Network, str], rule: Rule, tmp_path: Path
) -> None:
    module, model, chosen, device = network
    twin = copy.deepcopy(module).train().to(device)
    frozen = [name for name, parameter in twin.named_parameters() if not parameter.requires_grad]
    generate_artifacts(
        model, frozen_params=frozen or None, loss=LossType.CrossEntropyLoss, optimizer=rule.block(),
        artifact_directory=tmp_path,
    )  # fmt: skip
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    state, ours, optimizer = start(tmp_path, device=device, session_options=options)
    optimizer.set_learning_rate(rule.rate)
    reference = rule.torch([p for p in twin.parameters() if p.requires_grad])
    torch.manual_seed(1)
    batches = [(chosen.sample(8), torch.randint(3, (8,))) for _ in range(10)]
    curve, expected = [], []
    x, labels = batches[0]
    for step in range(STEPS):
        x, labels = batches[step % len(batches)]
        reference.zero_grad()
        loss = nn.functional.cross_entropy(twin(x.to(device)), labels.to(device))
        loss.backward()
        reference.step()
        expected.append(loss.item())
        curve.append(float(ours(x.numpy(), labels.numpy())))
        optimizer.step()
        ours.lazy_reset_grad()
    assert np.mean(expected[-10:]) < np.mean(expected[:10])
    np.testing.assert_allclose(curve, expected, rtol=0, atol=5e-6)
    trained = twin.state_dict()
    for name, parameter in state.parameters:  # batch-norm statistics among them
        wanted = trained[name].cpu().numpy()
        np.testing.assert_allclose(
            parameter.data, wanted, rtol=0, atol=2e-5 * float(np.abs(wanted).max()), err_msg=name
        )
    assert {name for name, value in trained.items() if value.dim()} == {name for name, _ in state.parameters}
    with torch.no_grad():
        scores = twin.eval()(x.to(device)).cpu().numpy()
        loss = nn.functional.cross_entropy(torch.tensor(scores), labels).item()
    np.testing.assert_allclose(ours.eval()(x.numpy(), labels.numpy()), loss, rtol=2e-5)
    output = model.graph.output[0].name
    ours.export_model_for_inferencing(tmp_path / "model.onnx", [output])
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(found, scores, rtol=0, atol=2e-5 * float(np.abs(scores).max()))
