"""Language models beside torch with peft: LoRA and DPO steps, generation, export; seconds, memory and disk.

    python benchmarks/language_model.py 135m --base bases                       # LoRA: float32, 4-bit, torch + peft
    python benchmarks/language_model.py 1b --base bases --engines float32 int4  # TinyLlama's shape
    python benchmarks/language_model.py 135m --base bases --measure dpo         # or: generate, export

Weights are random, texts are random words, a batch is 1 x 256 tokens (DPO: a pair of 2 x 256), adapters have rank 8
beside the four projections of attention. Each engine runs in a process of its own, one after the other, `--rounds`
times; the time to the first step counts from the start of the process, imports included; later runs find training
models that the first one kept. Processor time is what to compare on a machine that others use too. Memory is the
highest resident size that the kernel recorded (VmHWM, Linux): mapped pages of the base are in it. Where peft is not
installed, torch's adapters are written by hand. The ratio of two engines is the median over the rounds. DPO in torch
has TRL's formulas; its reference is computed in each step with the adapters off, as TRL does by default (`torch`), or
was computed before (`torch-kept`), as ours is.
Bases are made once and kept in the folder `--base`; the 4-bit one of 1.1 B is written layer by layer, without torch.
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
    "135m": {  # SmolLM's
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
    },
    "360m": {
        "vocab_size": 49152, "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
        "num_attention_heads": 15, "num_key_value_heads": 5, "max_position_embeddings": 2048,
    },
    "1b": {  # TinyLlama's
        "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
        "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    },
    "tiny": {  # to try this file
        "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    },
}  # fmt: skip
LENGTH, RANK, WRITTEN = 256, 8, 96
# what each kind of run tells, and the heads of its columns
COLUMNS = {
    "first": "first step, s", "first cpu": "of processors", "step": "step, s", "step cpu": "of processors",
    "tokens": "tokens a second", "export": "export, s", "artifacts": "artifacts, s", "written": "written, s",
    "peak": "peak memory, MB", "own": "without mapped files", "disk": "base on disk, MB",
}  # fmt: skip
ENGINES = {
    "lora": ["float32", "int4", "torch"], "dpo": ["float32", "torch", "torch-kept"],
    "generate": ["float32", "int4", "torch"], "export": ["torch"],
}  # fmt: skip


def main() -> None:
    """Make what is missing, then measure every engine in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--base", type=Path, required=True, help="folder of the bases")
    parser.add_argument("--measure", choices=ENGINES, default="lora")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--engines", nargs="*", help="some of: float32 int4 torch; of dpo also torch-kept")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, help="of each engine; as many as there are processors")
    parser.add_argument("--recompute", type=float, help="the share of activations that is kept")
    parser.add_argument("--json", type=Path, help="write every run there too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    folder = asked.base / asked.shape
    if asked.child:
        _limit_threads(asked.threads)
        print(json.dumps(_run(asked, folder)))
        return
    engines = asked.engines or ENGINES[asked.measure]
    make_bases(asked.shape, folder, engines)
    if not asked.rounds:  # the bases alone
        return
    rows: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
    for _ in range(asked.rounds):
        for engine, runs in rows.items():
            runs.append(_measured(asked, folder, engine, again=bool(runs)))
            print(engine, runs[-1], file=sys.stderr, flush=True)
            if asked.json:
                asked.json.write_text(
                    json.dumps({"shape": asked.shape, "measure": asked.measure, "runs": rows})
                )
    _show(rows, asked.measure)


def _show(rows: dict[str, list[dict[str, float]]], measure: str) -> None:
    """A table of medians, and ratios to torch, or to the last engine: round by round, so that drifts cancel."""
    engines = list(rows)
    names = [name for name in COLUMNS if name in rows[engines[0]][0]]
    print(f"| engine | {' | '.join(COLUMNS[name] for name in names)} |\n|---{'|---' * len(names)}|")
    for engine, runs in rows.items():
        values = [statistics.median(row[name] for row in runs[1:] or runs) for name in names]
        print(f"| {engine} | " + " | ".join(f"{value:.4g}" for value in values) + " |")
    others = [engine for engine in engines if engine.startswith("torch")] or engines[-1:]
    compared = [name for name in names if name in ("step", "step cpu", "tokens", "peak", "own")]
    for engine in engines:
        for other in [] if engine in others else others:
            parts = []
            for name in compared:
                ratios = [row[name] / beside[name] for row, beside in zip(rows[engine], rows[other])]
                low, high = min(ratios), max(ratios)
                parts.append(f"{COLUMNS[name]} {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")
            print(f"\n{engine} / {other}: {'; '.join(parts)}")
    if measure == "lora":
        for engine, runs in rows.items():
            print(
                f"\n{engine}: first step of the first run, which makes the graphs: {runs[0]['first']:.3g} s"
            )


def _run(asked: argparse.Namespace, folder: Path) -> dict[str, float]:
    """One engine's figures."""
    engine, of_torch = asked.child, asked.child.startswith("torch")  # the export begins with torch's folder
    lines = _texts(SHAPES[asked.shape]["vocab_size"], asked.steps)
    if asked.measure == "export":
        return _export(folder)
    if asked.measure == "generate":
        return (_generate_in_torch if of_torch else _generate)(folder / engine, lines[0])
    if of_torch:
        return _torch(folder / "torch", lines, {"torch": "each step", "torch-kept": "kept"}[engine] if
                      asked.measure == "dpo" else None)  # fmt: skip
    return _onward(folder / engine, lines, asked.recompute, preferences=asked.measure == "dpo")


def _measured(asked: argparse.Namespace, folder: Path, engine: str, *, again: bool) -> dict[str, float]:
    command = [sys.executable, __file__, asked.shape, "--base", str(asked.base), "--child", engine]
    command += ["--measure", asked.measure]
    for name in ("steps", "threads", "recompute"):
        if getattr(asked, name) is not None:
            command += [f"--{name}", str(getattr(asked, name))]
    cache = folder / f"cache-{asked.measure}-{engine}"
    if not again:
        shutil.rmtree(cache, ignore_errors=True)
    environment = {**os.environ, "ONWARD_STARTED": str(time.time()), "ONWARD_CACHE": str(cache)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    files = (folder / engine.removesuffix("-kept")).rglob("*")
    disk = sum(path.stat().st_size for path in files if path.is_file())
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
    steps = [np.subtract(later, before) for before, later in itertools.pairwise(times)]
    wall, busy = (sorted(float(step[index]) for step in steps)[len(steps) // 5] for index in (0, 1))
    first, busy_first = times[0]
    return {
        "first": first - started,
        "first cpu": busy_first,
        "step": wall,
        "step cpu": busy,
        "peak": _peak(),
        "own": _own_memory() / 1e3,
    }


def _peak() -> float:
    """Megabytes that were resident at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e3


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


def _onward(
    folder: Path, texts: list[str], recompute: float | None, *, preferences: bool = False
) -> dict[str, float]:
    import onward
    from onward.train.callbacks import Callback

    times: list[tuple[float, float]] = []

    class Clock(Callback):
        def on_step(self, trainer: Any, row: dict[str, Any]) -> None:
            times.append((time.time(), time.process_time()))

    lines: list[dict[str, str]] = [{"text": text} for text in texts]
    more: dict[str, Any] = {}
    if preferences:
        lines, more = _pairs(texts), {"loss": "dpo"}
    onward.finetune(
        folder, lines, hold_out=0.0, max_length=LENGTH, progress=False, callbacks=[Clock()], recompute=recompute,
        lora=onward.lora.LoRA(rank=RANK, alpha=16.0, targets="attention"), **more,
    )  # fmt: skip
    return _report(times, float(os.environ["ONWARD_STARTED"]))


def _pairs(texts: list[str]) -> list[dict[str, str]]:
    """Each text's first half with its second, and with that of the next text, which is the worse answer."""
    halves = [(words[: LENGTH // 2], words[LENGTH // 2 :]) for words in (text.split() for text in texts)]
    endings = [end for _, end in halves]
    return [
        {"prompt": " ".join(begin), "chosen": " " + " ".join(end), "rejected": " " + " ".join(other)}
        for (begin, end), other in zip(halves, [*endings[1:], endings[0]])
    ]


def _torch(folder: Path, texts: list[str], reference: str | None) -> dict[str, float]:
    """Steps of torch with peft: the next token's loss, or DPO where it is said when its reference is computed."""
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
    encode = Tokenizer.from_file(str(folder / "tokenizer.json")).encode
    times: list[tuple[float, float]] = []
    losses: list[Any] = []
    if reference is None:
        for text in texts:
            ids = torch.tensor([[*encode(text).ids, 0]])
            losses.append(lambda ids=ids: model(input_ids=ids, labels=ids, use_cache=False).loss)
    else:
        for pair in _pairs(texts):
            rows = [[*encode(pair["prompt"] + pair[name]).ids, 0] for name in ("chosen", "rejected")]
            losses.append(
                _dpo(model, torch.tensor(rows), len(encode(pair["prompt"]).ids), reference == "kept")
            )
    for loss in losses:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.time(), time.process_time()))
    return _report(times, float(os.environ["ONWARD_STARTED"]))


def _dpo(model: Any, ids: Any, prompt: int, kept: bool) -> Any:
    """The loss of a pair by TRL's formulas, as a function; `kept` computes the reference now and not in the step."""
    import contextlib

    import torch

    def scores() -> Any:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        labels = ids[:, 1:]
        # TRL's selective_log_softmax: row by row, so that the probabilities of all words never exist at once
        chosen = logits.gather(-1, labels[..., None]).squeeze(-1)
        normal = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
        return (chosen - normal)[:, prompt - 1 :].sum(-1)

    def of_reference() -> Any:
        off = model.disable_adapter() if hasattr(model, "disable_adapter") else contextlib.nullcontext()
        with torch.no_grad(), off:
            return scores()

    stored = of_reference() if kept else None

    def loss() -> Any:
        ratios = scores() - (of_reference() if stored is None else stored)
        return -torch.nn.functional.logsigmoid(0.1 * (ratios[0] - ratios[1]))

    return loss


def _generate(folder: Path, text: str) -> dict[str, float]:
    import onward

    model: Any = onward.load(folder)
    prompt = " ".join(text.split()[:32])
    rates = []
    for _ in range(3):
        started = time.perf_counter()
        model(prompt, max_new_tokens=WRITTEN, min_new_tokens=WRITTEN)
        rates.append(WRITTEN / (time.perf_counter() - started))
    return {"tokens": max(rates), "peak": _peak(), "own": _own_memory() / 1e3}


def _generate_in_torch(folder: Path, text: str) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(" ".join(text.split()[:32]), return_tensors="pt")["input_ids"]
    rates = []
    for _ in range(3):
        started = time.perf_counter()
        length = {"max_new_tokens": WRITTEN, "min_new_tokens": WRITTEN}
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **length)
        rates.append(WRITTEN / (time.perf_counter() - started))
    return {"tokens": max(rates), "peak": _peak(), "own": _own_memory() / 1e3}


def _export(folder: Path) -> dict[str, float]:
    """Seconds from transformers' folder to ours, and from ours to training models, in memory and in files."""
    import tempfile

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from onward.export import from_transformers
    from onward.language.finetune import write_language_artifacts
    from onward.language.training_models import Recipe, build_training
    from onward.lora import LoRA

    model = AutoModelForCausalLM.from_pretrained(folder / "torch").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "torch")
    times = [time.perf_counter()]
    with tempfile.TemporaryDirectory() as scratch:
        from_transformers((model, tokenizer), "text-generation", Path(scratch) / "base")
        times.append(time.perf_counter())
        build_training(Path(scratch) / "base", LoRA(rank=RANK, alpha=16.0, targets="attention"), Recipe())
        times.append(time.perf_counter())
        write_language_artifacts(Path(scratch) / "base", Path(scratch) / "artifacts")
        times.append(time.perf_counter())
    return {**dict(zip(("export", "artifacts", "written"), np.diff(times).tolist())), "peak": _peak()}


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


def make_bases(shape: str, folder: Path, engines: list[str]) -> None:
    """The bases of a shape that are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    needed = {"torch" if engine.startswith("torch") else engine for engine in engines}
    described = ("config.json", "onward.json")
    missing = {name for name in needed if not any((folder / name / file).is_file() for file in described)}
    sizes = SHAPES[shape]
    if shape == "1b" and "int4" in missing:
        write_base(folder / "int4", sizes, words(sizes["vocab_size"]))
        missing.remove("int4")
    if not missing:
        return
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from onward.export import from_transformers

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=shape != "1b")).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words(sizes["vocab_size"]), eos_token="</s>")
    if "torch" in missing:
        model.save_pretrained(folder / "torch")
        tokenizer.save_pretrained(folder / "torch")
    for name in sorted(missing - {"torch"}):
        quantize = "int4" if name == "int4" else False
        from_transformers((model, tokenizer), "text-generation", folder / name, quantize=quantize)


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
