"""A long run: 10,000 steps and 200 saves, watching memory and file descriptors.

    python benchmarks/soak.py

Ends with an error if memory grows by more than 5 MB, or a descriptor is left open, after the first tenth.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import onnx.parser

from onward import checkpoint
from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import LossType, OptimType, generate_artifacts

STEPS, SAVES = 10_000, 200
LARGEST_GROWTH = 5.0


def model() -> onnx.ModelProto:
    """Dropout and batch norm, so that seeds and statistics are exercised."""
    made = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]> net (float[n, 32] x) => (float[n, 10] y)
        <float rate = {0.1}, bool training = {1}> {
            a = Gemm (x, w1, b1)
            b, m, v = BatchNormalization <training_mode = 1> (a, scale, bias, mean, var)
            c = Relu (b)
            d, mask = Dropout (c, rate, training)
            y = Gemm (d, w2, b2) }""")
    rng = np.random.default_rng(0)
    for name, shape in (("w1", (32, 64)), ("b1", (64,)), ("w2", (64, 10)), ("b2", (10,))):
        made.graph.initializer.append(
            onnx.numpy_helper.from_array(rng.normal(0, 0.1, shape).astype(np.float32), name)
        )
    for name, value in (("scale", 1), ("bias", 0), ("mean", 0), ("var", 1)):
        made.graph.initializer.append(onnx.numpy_helper.from_array(np.full(64, value, np.float32), name))
    return made


def memory() -> float:
    """Resident megabytes, or 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return 0.0


def descriptors() -> int:
    """Open file descriptors, or 0 where the system does not say."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def main() -> int:
    begun = time.perf_counter()
    seen: list[tuple[int, float, int]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate_artifacts(
            model(), requires_grad=["w1", "b1", "w2", "b2", "scale", "bias"], frozen_params=["mean", "var"],
            loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW, artifact_directory=folder,
            additional_output_names=["y"],
        )  # fmt: skip
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
        optimizer = Optimizer(folder / "optimizer_model.onnx", module)
        rng = np.random.default_rng(1)
        for step in range(1, STEPS + 1):
            size = int(rng.integers(2, 64))  # other sizes, other memory
            x, labels = rng.normal(size=(size, 32)).astype(np.float32), rng.integers(0, 10, size)
            module.train()(x, labels)
            if step % 3 == 0:
                optimizer.step()
                module.lazy_reset_grad()
            if step % (STEPS // SAVES) == 0:
                module.eval()(x, labels)
                data = state.to_data(include_optimizer_state=True)
                checkpoint.save_step(data, folder / "run", step=step)
            if step % (STEPS // 20) == 0:
                seen.append((step, memory(), descriptors()))
                print(f"step {step:6}: {seen[-1][1]:7.1f} MB, {seen[-1][2]} descriptors", flush=True)
        files = len(os.listdir(folder / "run"))
    settled = seen[1:]
    growth = settled[-1][1] - settled[0][1]
    opened = settled[-1][2] - settled[0][2]
    print(
        f"{STEPS} steps and {SAVES} saves in {time.perf_counter() - begun:.1f} s: {growth:+.1f} MB, "
        f"{opened:+d} descriptors after the first tenth; {files} checkpoints kept"
    )
    return 1 if growth > LARGEST_GROWTH or opened > 0 or files != 2 else 0


if __name__ == "__main__":
    sys.exit(main())
