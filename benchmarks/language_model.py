"""LoRA on a language model: time to the first step, step time, peak memory and disk, beside torch with peft.

    python benchmarks/language_model.py smollm --base bases          # SmolLM-135M's shape, float32 and 4-bit
    python benchmarks/language_model.py tinyllama --base bases       # TinyLlama's (1.1 B), 4-bit

Weights are random, texts are random words, a batch is 1 x 256 tokens, adapters have rank 8 beside the four
projections of attention. Each engine runs in a process of its own, one after the other, `--rounds` times; the time to
the first step counts from the start of the process, imports included; later runs find training models that
the first one kept. Processor time is what to compare on a machine
that others use too. Memory is the highest resident size that the
kernel recorded (VmHWM, Linux): mapped pages of the base are in it. Where peft is not installed, torch's adapters are
written by hand. Bases are made once and kept in the folder `--base`; the one of 1.1 B is written layer by layer,
without torch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from ready_made import write_base

SHAPES: dict[str, dict[str, Any]] = {
    "smollm": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
    },
    "tinyllama": {
        "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
        "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    },
}  # fmt: skip
TIED = {"smollm": True, "tinyllama": False}
LENGTH, RANK = 256, 8


def main() -> None:
    """Make what is missing, then measure every engine in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--base", type=Path, required=True, help="folder of the bases")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--engines", nargs="*", help="some of: float32 int4 torch")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, help="of each engine; as many as there are processors")
    parser.add_argument("--recompute", type=float, help="the share of activations that is kept")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        lines = _texts(SHAPES[asked.shape]["vocab_size"], asked.steps)
        _limit_threads(asked.threads)
        folder = asked.base / asked.child
        made = _torch(folder, lines) if asked.child == "torch" else _onward(folder, lines, asked.recompute)
        print(json.dumps(made))
        return
    folder = asked.base / asked.shape
    make_bases(asked.shape, folder)
    default = ["float32", "int4", "torch"] if asked.shape == "smollm" else ["int4"]
    rows: dict[str, list[dict[str, float]]] = {engine: [] for engine in asked.engines or default}
    for _ in range(asked.rounds):
        for engine, found in rows.items():
            found.append(_measured(asked, folder, engine, again=bool(found)))
            print(engine, found[-1], file=sys.stderr, flush=True)
    columns = ("first", "first cpu", "step", "step cpu", "peak", "own", "disk")
    print(
        "| engine | first step, s | in later runs | of processors | step, s | of processors | peak memory, MB "
        "| without mapped files | base on disk, MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for engine, found in rows.items():
        values = [statistics.median(row[name] for row in found[1:] or found) for name in columns]
        values.insert(0, found[0]["first"])
        print(f"| {engine} | " + " | ".join(f"{value:.4g}" for value in values) + " |")


def _measured(asked: argparse.Namespace, folder: Path, engine: str, *, again: bool) -> dict[str, float]:
    command = [sys.executable, __file__, asked.shape, "--base", str(folder), "--child", engine]
    for name in ("steps", "threads", "recompute"):
        if getattr(asked, name) is not None:
            command += [f"--{name}", str(getattr(asked, name))]
    cache = folder / f"cache-{engine}"
    if not again:
        shutil.rmtree(cache, ignore_errors=True)
    environment = {**os.environ, "ONWARD_STARTED": str(time.time()), "ONWARD_CACHE": str(cache)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    disk = sum(path.stat().st_size for path in (folder / engine).rglob("*") if path.is_file())
    return {**json.loads(done.stdout.splitlines()[-1]), "disk": disk / 1e6}


def _limit_threads(count: int | None) -> None:
    """Give every session that is made from here on as many threads."""
    if not count:
        return
    import onnxruntime as ort

    class Options(ort.SessionOptions):
        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = count  # pyright: ignore[reportAttributeAccessIssue]

    ort.SessionOptions = Options  # pyright: ignore[reportPrivateImportUsage]
    os.environ["OMP_NUM_THREADS"] = str(count)


def _report(times: list[tuple[float, float]], started: float) -> dict[str, float]:
    """Seconds of the first step from the start of the process and of later steps, by the clock and of processors."""
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    steps = [np.subtract(later, before) for before, later in itertools.pairwise(times)]
    wall, busy = (sorted(float(step[index]) for step in steps)[len(steps) // 5] for index in (0, 1))
    first, busy_first = times[0]
    return {
        "first": first - started,
        "first cpu": busy_first,
        "step": wall,
        "step cpu": busy,
        "peak": peak / 1e3,
        "own": _own_memory() / 1e3,
    }


def _own_memory() -> int:
    """Kilobytes that no file backs, at the end of the run."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def _texts(vocabulary: int, count: int) -> list[str]:
    random = np.random.default_rng(0)
    return [
        " ".join(f"w{number}" for number in random.integers(0, vocabulary - 10, LENGTH - 1))
        for _ in range(count)
    ]


def _onward(folder: Path, texts: list[str], recompute: float | None) -> dict[str, float]:
    import onward
    from onward.train.callbacks import Callback

    times: list[tuple[float, float]] = []

    class Clock(Callback):
        def on_step(self, trainer: Any, row: dict[str, Any]) -> None:
            times.append((time.time(), time.process_time()))

    lines = [{"text": text} for text in texts]
    onward.finetune(
        folder, lines, hold_out=0.0, max_length=LENGTH, progress=False, callbacks=[Clock()], recompute=recompute,
        lora=onward.lora.LoRA(rank=RANK, alpha=16.0, targets="attention"),
    )  # fmt: skip
    return _report(times, float(os.environ["ONWARD_STARTED"]))


def _torch(folder: Path, texts: list[str]) -> dict[str, float]:
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    try:
        from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
    except ImportError:
        _adapt(model, targets)
    else:
        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=16, target_modules=targets))
    model.train()
    weights = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=2e-4, fused=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    times: list[tuple[float, float]] = []
    for text in texts:
        ids = torch.tensor([[*tokenizer.encode(text).ids, 0]])
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.time(), time.process_time()))
    return _report(times, float(os.environ["ONWARD_STARTED"]))


def _adapt(model: Any, targets: list[str]) -> None:
    """LoRA by hand: y + (x·Aᵀ)·Bᵀ·scale beside each of the linear layers."""
    import torch

    class Adapted(torch.nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer
            self.a = torch.nn.Parameter(torch.randn(RANK, layer.in_features) / layer.in_features**0.5)
            self.b = torch.nn.Parameter(torch.zeros(layer.out_features, RANK))

        def forward(self, x: Any) -> Any:
            return self.layer(x) + (x @ self.a.T) @ self.b.T * (16 / RANK)

    for value in model.parameters():
        value.requires_grad_(False)
    for module in list(model.modules()):
        for name in targets:
            if hasattr(module, name):
                setattr(module, name, Adapted(getattr(module, name)))


def make_bases(shape: str, folder: Path) -> None:
    """The bases of a shape, where they are missing."""
    if (folder / "shape.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if shape == "tinyllama":
        write_base(folder / "int4", SHAPES[shape], words(SHAPES[shape]["vocab_size"]))
        (folder / "shape.json").write_text(json.dumps(SHAPES[shape]))
        return
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from onward.export import from_transformers

    torch.manual_seed(0)
    sizes = SHAPES[shape]
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=TIED[shape])).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words(sizes["vocab_size"]), eos_token="</s>")
    model.save_pretrained(folder / "torch")
    tokenizer.save_pretrained(folder / "torch")
    for name, quantize in (("float32", False), ("int4", "int4")):
        from_transformers((model, tokenizer), "text-generation", folder / name, quantize=quantize)
    (folder / "shape.json").write_text(json.dumps(sizes))


def words(vocabulary: int) -> Any:
    """A tokenizer of numbered words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    names = ["</s>", *(f"w{number}" for number in range(vocabulary - 1))]
    tokenizer = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="</s>"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


if __name__ == "__main__":
    main()
