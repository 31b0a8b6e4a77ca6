"""Peak memory and step time of an encoder against depth and batch, with recomputation and without, beside torch.

    python benchmarks/recompute_memory.py --layers 6 12 --batch 8 --length 128

MiniLM's shape (width 384, 12 heads) with dropout, a step of forward, backward and AdamW. Each engine runs in a
process of its own, rounds interleaved; prints medians of milliseconds (with one thread, processor time is what
to compare on a machine that others use too) and the peak resident memory in MB, as a table in Markdown.
`torch checkpoint` is torch.utils.checkpoint around each layer.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENGINES: dict[str, Any] = {
    "onward": None,
    "onward recompute=0.5": 0.5,
    "onward recompute=layers": "encoder.layer.*",
    "onward recompute=True": True,
    "torch": False,
    "torch checkpoint": True,
}


def encoder(layers: int, *, dropout: float) -> Any:
    """A module from token numbers to two scores."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=8192,
            hidden_size=384,
            num_hidden_layers=layers,
            num_attention_heads=12,
            intermediate_size=1536,
            num_labels=2,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            attn_implementation="eager",
        )
    ).train()


def prepare(folder: Path, layers: int, *, dropout: float) -> None:
    """Write artifacts for each of Onward's engines."""
    import torch

    from onward import artifacts
    from onward.export import from_torch

    network = encoder(layers, dropout=dropout)

    class Scores(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = network

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.bert(input_ids=ids).logits

    ids = torch.randint(5, 8000, (2, 16))
    axes = {"ids": {0: "batch", 1: "length"}, "scores": {0: "batch"}}
    from_torch(
        Scores(), (ids,), folder / "forward.onnx", training=True, check=False,
        input_names=["ids"], output_names=["scores"], dynamic_axes=axes,
    )  # fmt: skip
    for name, wanted in ENGINES.items():
        if name.startswith("onward"):
            artifacts.generate_artifacts(
                str(folder / "forward.onnx"),
                loss=artifacts.LossType.CrossEntropyLoss,
                optimizer=artifacts.OptimType.AdamW,
                artifact_directory=folder / name,
                recompute=wanted,
            )


def onward_step(folder: Path, ids: Any, labels: Any, threads: int) -> Callable[[], object]:
    import onnxruntime as ort

    from onward.api import CheckpointState, Module, Optimizer

    options = None
    if threads != os.cpu_count():
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.enable_mem_pattern = False
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, session_options=options)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)

    def step() -> None:
        module(ids, labels)
        optimizer.step()
        module.lazy_reset_grad()

    return step


def torch_step(
    layers: int, ids: Any, labels: Any, threads: int, *, checkpoint: bool, dropout: float
) -> Callable[[], object]:
    import torch

    torch.set_num_threads(threads)
    network = encoder(layers, dropout=dropout)
    if checkpoint:
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    x, y = torch.from_numpy(ids), torch.from_numpy(labels)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(network(input_ids=x).logits, y).backward()
        optimizer.step()

    return step


def resident(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def work(arguments: argparse.Namespace) -> None:
    """One engine: a step for each line of standard input."""
    import numpy as np

    rng = np.random.default_rng(0)
    ids = rng.integers(5, 8000, (arguments.batch[0], arguments.length))
    labels = rng.integers(0, 2, arguments.batch[0])
    name, layers = arguments.engine, arguments.layers[0]
    if name.startswith("onward"):
        step = onward_step(arguments.folder / name, ids, labels, arguments.threads)
    else:
        step = torch_step(
            layers, ids, labels, arguments.threads, checkpoint=ENGINES[name], dropout=arguments.dropout
        )
    before = resident("VmRSS")
    step()
    print(json.dumps({"before": before}), flush=True)
    for _ in sys.stdin:
        start, busy = time.perf_counter(), time.process_time()
        step()
        took = {"ms": time.perf_counter() - start, "busy": time.process_time() - busy}
        print(json.dumps({**{k: v * 1e3 for k, v in took.items()}, "peak": resident("VmHWM")}), flush=True)


def measure(arguments: argparse.Namespace, layers: int, batch: int, folder: Path) -> None:
    """One table: all engines on one model and batch."""
    workers = {}
    answers: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
    told: dict[str, dict[str, float]] = {}
    for name in ENGINES:
        command = [
            *(sys.executable, __file__, "--engine", name, "--folder", str(folder), "--layers", str(layers)),
            *("--batch", str(batch), "--length", str(arguments.length), "--threads", str(arguments.threads)),
            *("--dropout", str(arguments.dropout)),
        ]
        workers[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        told[name] = json.loads(_line(workers[name]))
    for _ in range(arguments.rounds):
        for name, worker in workers.items():
            assert worker.stdin is not None
            worker.stdin.write("step\n")
            worker.stdin.flush()
            answers[name].append(json.loads(_line(worker)))
    for worker in workers.values():
        worker.communicate()
    print(f"\n{layers} layers, batch {batch}×{arguments.length}, dropout {arguments.dropout}\n")
    print("| engine | peak MB | of which by the steps | step ms | processor ms |\n|---|---|---|---|---|")
    for name, found in answers.items():
        peak = found[-1]["peak"]
        took, busy = (statistics.median(answer[key] for answer in found) for key in ("ms", "busy"))
        own = peak - told[name]["before"]
        print(f"| {name} | {peak:.0f} | {own:.0f} | {took:.0f} | {busy:.0f} |", flush=True)


def _line(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise SystemExit(f"an engine ended: {worker.wait()}")
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12])
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        work(arguments)
        return
    for layers in arguments.layers:
        with tempfile.TemporaryDirectory() as folder:
            # in a process of its own: what exporting takes is no engine's memory
            subprocess.run(
                [sys.executable, "-c", _PREPARE, str(layers), folder, str(arguments.dropout)],
                check=True,
                cwd=Path(__file__).parent,
            )
            for batch in arguments.batch:
                measure(arguments, layers, batch, Path(folder))


_PREPARE = """
import sys
from pathlib import Path
from recompute_memory import prepare
prepare(Path(sys.argv[2]), int(sys.argv[1]), dropout=float(sys.argv[3]))
"""

if __name__ == "__main__":
    main()
