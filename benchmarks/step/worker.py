"""One engine with one model, in a process of its own, which times steps when told to.

Reads `phase rounds` lines from standard input and answers each with a JSON line of milliseconds. Run by
`bench.py`; imports only what its engine needs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

Phases = dict[str, Callable[[], object]]


def torch_engine(folder: Path, threads: int, *, fused: bool, compiled: bool) -> Phases:
    import torch
    from models import MODELS

    torch.set_num_threads(threads)
    module, inputs, labels = MODELS[folder.name].build()
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=1e-4, eps=1e-6, weight_decay=0.0, fused=fused or None
    )
    forward = torch.compile(module) if compiled else module
    loss_of = torch.nn.functional.cross_entropy

    def gradients() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(forward(*inputs), labels).backward()

    def step() -> float:
        gradients()
        optimizer.step()
        return 0.0

    def evaluate() -> None:
        with torch.no_grad():
            loss_of(forward(*inputs), labels)

    return {"step": step, "gradients": gradients, "optimizer": optimizer.step, "eval": evaluate}


def onward_engine(folder: Path, threads: int) -> Phases:
    import numpy as np
    import onnxruntime as ort

    from onward.api import CheckpointState, Module, Optimizer

    options = None
    if threads != os.cpu_count():  # else the defaults, as most people use them
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
    data = np.load(folder / "inputs.npz")
    inputs = [data[name] for name in data.files]
    state = CheckpointState.load_checkpoint(folder / "onward" / "checkpoint")
    module = Module(
        folder / "onward" / "training_model.onnx",
        state,
        folder / "onward" / "eval_model.onnx",
        session_options=options,
    )
    optimizer = Optimizer(folder / "onward" / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(1e-4)

    def gradients() -> None:
        module.train()
        module(*inputs)
        module.lazy_reset_grad()

    def step() -> None:
        module.train()
        module(*inputs)
        optimizer.step()
        module.lazy_reset_grad()

    def evaluate() -> None:
        module.eval()
        module(*inputs)

    return {"step": step, "gradients": gradients, "optimizer": optimizer.step, "eval": evaluate}


def ort_training_engine(folder: Path, threads: int) -> Phases:
    import numpy as np
    import onnxruntime as ort
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    data = np.load(folder / "inputs.npz")
    inputs = [data[name] for name in data.files]
    home = folder / "ort-training"
    if not (home / "training_model.onnx").exists():
        generate_ort_training(folder, home)
    state = CheckpointState.load_checkpoint(str(home / "checkpoint"))
    module = Module(
        str(home / "training_model.onnx"), state, str(home / "eval_model.onnx"), session_options=options
    )
    optimizer = Optimizer(str(home / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(1e-4)

    def gradients() -> None:
        module.train()
        module(*inputs)
        module.lazy_reset_grad()

    def step() -> None:
        gradients()
        optimizer.step()

    def evaluate() -> None:
        module.eval()
        module(*inputs)

    return {"step": step, "gradients": gradients, "optimizer": optimizer.step, "eval": evaluate}


def generate_ort_training(folder: Path, home: Path) -> None:
    import onnx
    from onnxruntime.training import artifacts

    model = onnx.load(folder / "forward-16.onnx")
    trainable = json.loads((folder / "trainable.json").read_text())
    home.mkdir(exist_ok=True)
    artifacts.generate_artifacts(
        model,
        requires_grad=trainable,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=str(home),
    )


ENGINES: dict[str, Callable[[Path, int], Phases]] = {
    "onward": onward_engine,
    "torch": lambda folder, threads: torch_engine(folder, threads, fused=False, compiled=False),
    "torch-fused": lambda folder, threads: torch_engine(folder, threads, fused=True, compiled=False),
    "torch-compile": lambda folder, threads: torch_engine(folder, threads, fused=True, compiled=True),
    "ort-training": ort_training_engine,
}


def peak_memory() -> float:
    """The largest resident size of this process so far, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    began = time.perf_counter()
    phases = ENGINES[arguments.engine](arguments.folder, arguments.threads)
    phases["step"]()
    first = time.perf_counter() - began
    answer({"ready": True, "first_step_seconds": first})
    for line in sys.stdin:
        phase, rounds = line.split()
        run, times = phases[phase], []
        for _ in range(int(rounds)):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        answer({"times": times, "peak_mb": peak_memory()})


def answer(value: dict) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
