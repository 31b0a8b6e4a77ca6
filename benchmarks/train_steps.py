"""Many steps in one run (`Module.train_steps`) against one by one and torch, for small networks; one thread, in turns.

    python benchmarks/train_steps.py [--steps 200] [--rounds 15]

Wall and processor time of a step, the least and the median of the rounds, and the median of the rounds' ratios. On a
machine with other work, processor time says more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import LossType, OptimType, generate_artifacts

INPUTS, HIDDEN, CLASSES, BATCH = 64, 128, 10, 32


def write_artifacts(folder: Path) -> None:
    """A perceptron of 64, 128 and 10 units with cross entropy and AdamW."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]>
        net (float[n, {INPUTS}] x) => (float[n, {CLASSES}] scores) {{
            a = Gemm <transB = 1> (x, w1, b1)  h = Relu (a)  scores = Gemm <transB = 1> (h, w2, b2) }}"""
    )
    rng = np.random.default_rng(0)
    shapes = {"w1": (HIDDEN, INPUTS), "b1": (HIDDEN,), "w2": (CLASSES, HIDDEN), "b2": (CLASSES,)}
    for name, shape in shapes.items():
        array = rng.normal(0, 0.1, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    generate_artifacts(
        model,
        requires_grad=list(shapes),
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        artifact_directory=folder,
    )


def start(folder: Path) -> tuple[Module, Optimizer]:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level, options.enable_mem_pattern = 1, 3, False
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, session_options=options)
    return module, Optimizer(folder / "optimizer_model.onnx", module)


def loops(folder: Path, x: np.ndarray, labels: np.ndarray) -> dict[str, Callable[[], object]]:
    """What takes all steps once, by name; torch where it is installed."""
    many, _ = start(folder)
    single, optimizer = start(folder)

    def one_by_one() -> None:
        for batch, classes in zip(x, labels):
            single(batch, classes)
            optimizer.step()
            single.lazy_reset_grad()

    found: dict[str, Callable[[], object]] = {
        "train_steps": lambda: many.train_steps(x, labels),
        "one by one": one_by_one,
    }
    try:
        import torch
    except ImportError:
        return found
    torch.set_num_threads(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(INPUTS, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES)
    )
    fused = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    batches, targets = torch.from_numpy(x), torch.from_numpy(labels)

    def in_torch() -> None:
        for batch, classes in zip(batches, targets):
            fused.zero_grad()
            torch.nn.functional.cross_entropy(net(batch), classes).backward()
            fused.step()

    return {**found, "torch, fused AdamW": in_torch}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    settings = parser.parse_args()
    rng = np.random.default_rng(1)
    x = rng.standard_normal((settings.steps, BATCH, INPUTS), np.float32)
    labels = rng.integers(0, CLASSES, (settings.steps, BATCH))
    with tempfile.TemporaryDirectory() as folder:
        write_artifacts(Path(folder))
        compared = loops(Path(folder), x, labels)
        wall: dict[str, list[float]] = {name: [] for name in compared}
        own: dict[str, list[float]] = {name: [] for name in compared}
        for index in range(settings.rounds + 1):
            for name, run in compared.items():
                begun, used = time.perf_counter(), time.process_time()
                run()
                if index:  # the first round makes sessions
                    wall[name].append(1e6 * (time.perf_counter() - begun) / settings.steps)
                    own[name].append(1e6 * (time.process_time() - used) / settings.steps)
    if hasattr(os, "getloadavg"):
        print(f"load {os.getloadavg()[0]:.1f}; microseconds a step: least, median")
    for name in compared:
        ratios = [a / b for a, b in zip(own["train_steps"], own[name])]
        print(
            f"{name:20} wall {min(wall[name]):7.1f} {statistics.median(wall[name]):7.1f}   "
            f"processor {min(own[name]):7.1f} {statistics.median(own[name]):7.1f}   "
            f"train_steps takes {statistics.median(ratios):.2f} of it"
        )


if __name__ == "__main__":
    main()
