"""Training steps on a GPU: Onward on the stock onnxruntime-gpu beside PyTorch, each engine in a process of its own.

    python benchmarks/gpu_step.py --models mlp,resnet --json figures.json

A step is forward, backward and AdamW over one batch that changes every time, the loss read back. Figures are
medians of the last steps, device memory is what the process holds at the end, and the first losses are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent / "step"))
from models import Residual  # the same network as on the CPU

Batch = tuple[torch.Tensor, ...]
RATE, EPSILON = 1e-4, 1e-6
LOW = ("fp16", "bf16")  # the precisions that an engine's name may end in; TF32 is on with them


class Layer(nn.Module):
    """One layer of a BERT-style encoder, or of a decoder where it is causal."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(y.shape[0], y.shape[1], self.heads, -1).transpose(1, 2)

        a = F.scaled_dot_product_attention(
            split(self.query(x)), split(self.key(x)), split(self.value(x)), is_causal=self.causal
        )
        x = self.norm1(x + self.output(a.transpose(1, 2).reshape(x.shape)))
        return self.norm2(x + self.narrow(F.gelu(self.wide(x))))


class Encoder(nn.Module):
    """Token and position embeddings, layers, and two classes from the first token."""

    def __init__(
        self, layers: int, width: int, heads: int, *, vocabulary: int = 30522, length: int = 512
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.pool, self.scores = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))
        for layer in self.layers:
            x = layer(x)
        return self.scores(torch.tanh(self.pool(x[:, 0])))


class Adapted(nn.Module):
    """A linear layer that stays as it is, with a low-rank adapter that trains."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.a.t()) @ self.b.t()


class Decoder(nn.Module):
    """A GPT-style decoder whose attention trains by adapters."""

    def __init__(
        self, layers: int, width: int, heads: int, *, vocabulary: int = 32000, rank: int = 8
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, causal=True) for _ in range(layers))
        self.scores = nn.Linear(width, vocabulary, bias=False)
        self.requires_grad_(False)
        for layer in self.layers:
            layer.query, layer.value = Adapted(layer.query, rank), Adapted(layer.value, rank)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.scores(x).flatten(0, 1)


def with_peft(module: nn.Module) -> nn.Module:
    """The same network with peft's adapters in place of ours, and the same numbers in them."""
    from peft import LoraConfig, inject_adapter_in_model

    ours = {name: layer for name, layer in module.named_modules() if isinstance(layer, Adapted)}
    for name, layer in ours.items():
        module.set_submodule(name, layer.base)
    rank = next(iter(ours.values())).a.shape[0]
    kinds = sorted({name.rpartition(".")[2] for name in ours})
    config = LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=kinds)
    module = inject_adapter_in_model(config, module)
    for name, layer in ours.items():
        made: Any = module.get_submodule(name)
        made.lora_A["default"].weight.data.copy_(layer.a.data)
        made.lora_B["default"].weight.data.copy_(layer.b.data)
    return module


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def images(size: int) -> Callable[[torch.Generator], Batch]:
    return lambda g: (torch.randn(size, 3, 32, 32, generator=g), torch.randint(0, 10, (size,), generator=g))


def tokens(rows: int, length: int, *, every: bool = False, vocabulary: int = 30000) -> Callable[..., Batch]:
    def make(g: torch.Generator) -> Batch:
        ids = torch.randint(5, vocabulary, (rows, length), generator=g)
        labels = torch.roll(ids, -1, 1).flatten() if every else torch.randint(0, 2, (rows,), generator=g)
        return ids, labels

    return make


# name: what is trained, a batch, and the symbolic axes of the input
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Batch], dict[int, str]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        lambda g: (torch.randn(32, 64, generator=g), torch.randint(0, 10, (32,), generator=g)),
        {0: "n"},
    ),
    "resnet": (resnet, images(128), {0: "n"}),
    "encoder-6x384-8x128": (lambda: Encoder(6, 384, 12), tokens(8, 128), {0: "n", 1: "length"}),
    "encoder-12x768-32x128": (lambda: Encoder(12, 768, 12), tokens(32, 128), {0: "n", 1: "length"}),
    "lora-1b-4x512": (
        lambda: Decoder(18, 2048, 16, vocabulary=32000),
        tokens(4, 512, every=True, vocabulary=32000),
        {0: "n", 1: "length"},
    ),
}
ENGINES = [
    "torch", "torch-tf32", "torch-compile-tf32", "torch-bf16", "torch-compile-bf16", "torch-peft-tf32",
    "torch-fp16", "onward", "onward-tf32", "onward-tf32-no-graphs", "onward-fp16", "onward-bf16", "onward-cpu",
]  # fmt: skip


def batches(name: str) -> Iterator[Batch]:
    g = torch.Generator().manual_seed(1)
    while True:
        yield MODELS[name][1](g)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().train()


def prepare(name: str, folder: Path, precision: str = "fp32") -> None:
    """Export the model, if it is not there already, and generate its artifacts."""
    from onward import onnxblock
    from onward.artifacts import LossType, generate_artifacts
    from onward.export import from_torch

    module, (x, _) = build(name), next(batches(name))
    trained = [n for n, p in module.named_parameters() if p.requires_grad]
    frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
    forward = (
        folder.with_name(name) / "forward.onnx" if folder.name.startswith(name) else folder / "forward.onnx"
    )
    if not forward.is_file():
        forward.parent.mkdir(parents=True, exist_ok=True)
        from_torch(
            module, (x,), forward, training=True, input_names=["x"], output_names=["scores"],
            dynamic_axes={"x": MODELS[name][2]}, check=False,
        )  # fmt: skip
    generate_artifacts(
        forward, requires_grad=trained, frozen_params=frozen, loss=LossType.CrossEntropyLoss,
        optimizer=onnxblock.optim.AdamW(eps=EPSILON, weight_decay=0.0), artifact_directory=folder,
        precision=precision,
    )  # fmt: skip


def torch_step(name: str, engine: str) -> Callable[[Batch], float]:
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(engine[-4:])
    tf32 = "tf32" in engine or low is not None
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    module = build(name)
    module = (with_peft(module) if "peft" in engine else module).cuda()
    run: Any = torch.compile(module) if "compile" in engine else module
    optimizer = torch.optim.AdamW(
        [p for p in module.parameters() if p.requires_grad], lr=RATE, eps=EPSILON, weight_decay=0.0
    )

    scaler = torch.amp.GradScaler("cuda", enabled=low == torch.float16)

    def step(batch: Batch) -> float:
        x, labels = (value.cuda() for value in batch)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", low or torch.bfloat16, enabled=low is not None):
            loss = F.cross_entropy(run(x), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return step


def onward_step(folder: Path, engine: str) -> tuple[Callable[[Batch], float], Any]:
    from onward.api import CheckpointState, Module, Optimizer
    from onward.runtime.devices import Device

    kind = "cpu" if engine.endswith("cpu") else "cuda"
    device = Device(kind, tf32="tf32" in engine or engine[-4:] in LOW, graphs="no-graphs" not in engine)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, device=device)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(RATE)

    def step(batch: Batch) -> float:
        loss = module(*(value.numpy() for value in batch))
        optimizer.step()
        module.lazy_reset_grad()
        return float(loss)

    return step, module


def used_bytes() -> int:
    """What the whole device holds: onnxruntime keeps what it took, so the end is the peak."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def measure(name: str, engine: str, folder: Path, steps: int, warm: int) -> dict[str, Any]:
    torch.cuda.init()
    before = used_bytes()
    begun = time.perf_counter()
    module: Any = None
    if engine.startswith("torch"):
        step = torch_step(name, engine)
    else:
        step, module = onward_step(folder, engine)
    stream = batches(name)
    losses, seconds, found = [], [], {}
    for index in range(warm + steps):
        batch = next(stream)
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(step(batch))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if index == 0:
            found["first_step_s"] = round(time.perf_counter() - begun, 3)
    found["ms"] = round(1e3 * statistics.median(seconds[warm:]), 4)
    found["best_ms"] = round(1e3 * min(seconds[warm:]), 4)
    found["held_gb"] = round((used_bytes() - before) / 1e9, 3)
    if engine.startswith("torch"):
        found["peak_allocated_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
    found["losses"] = losses[:20]
    if module is not None and engine != "onward-cpu":
        made = list(module.step._by_shape.values())
        found["recorded"] = [bool(getattr(one, "capture", False)) for one in made]
        found["optimizer_ms"] = round(
            1e3 * statistics.median(_time(module._optimizer.step) for _ in range(20)), 4
        )
    return found


def _time(function: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def versions() -> dict[str, str]:
    import onnxruntime

    smi = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "gpu": smi.stdout.strip(), "torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version()),
        "onnxruntime": onnxruntime.__version__, "python": sys.version.split()[0], "numpy": np.__version__,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--engines", default=",".join(e for e in ENGINES if e != "onward-cpu"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--cache", type=Path, default=None)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "ENGINE"), help="measure in this process")
    given = parser.parse_args()
    if unknown := [name for name in given.models.split(",") if name not in MODELS]:
        parser.error(f"no model '{unknown[0]}': choose of {', '.join(MODELS)}")
    cache = given.cache or Path(tempfile.mkdtemp(prefix="gpu-step-"))
    if given.one:
        name, engine = given.one
        low = engine[-4:] if engine[-4:] in LOW and not engine.startswith("torch") else None
        folder = cache / (f"{name}-{low}" if low else name)
        if engine.startswith("prepare"):
            folder.mkdir(parents=True, exist_ok=True)
            prepare(name, folder, low or "fp32")
            print(json.dumps({"seconds": round(time.process_time(), 2)}))
        else:
            print(json.dumps(measure(name, engine, folder, given.steps, given.warm)))
        return
    figures: dict[str, Any] = {"versions": versions()}
    print(json.dumps(figures["versions"]), flush=True)
    for name in given.models.split(","):
        figures[name] = {}
        engines = [e for e in given.engines.split(",") if "peft" not in e or "lora" in name]
        low = [f"prepare-{kind}" for kind in LOW if f"onward-{kind}" in engines]
        for engine in ["prepare", *low, *engines]:
            command = [sys.executable, __file__, "--one", name, engine, "--cache", str(cache)]
            command += ["--steps", str(given.steps), "--warm", str(given.warm)]
            run = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
            lines = run.stdout.strip().splitlines()
            if run.returncode == 0 and lines:
                figures[name][engine] = json.loads(lines[-1])
            else:
                figures[name][engine] = {"error": (run.stderr or run.stdout)[-1500:]}
            shown = {k: v for k, v in figures[name][engine].items() if k != "losses"}
            print(
                name,
                engine,
                json.dumps(shown),
                [round(x, 5) for x in figures[name][engine].get("losses", [])[:4]],
                flush=True,
            )
            if given.json:
                given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
