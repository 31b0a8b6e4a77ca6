"""What Onward adds to the runtime: a Module step over the bare bound run, an update, and the import.

    python benchmarks/overhead.py

Prints microseconds of the median step over several rounds, taken in turns, so that a busy machine hits both.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
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
from onward.runtime.tensors import run_bound

ROUNDS, STEPS = 15, 400


def model(width: int) -> onnx.ModelProto:
    made = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]> net (float[n, {width}] x) => (float[n, 10] y) {{
            a = Gemm (x, w1, b1)  h = Relu (a)  y = Gemm (h, w2, b2) }}"""
    )
    rng = np.random.default_rng(0)
    for name, shape in (("w1", (width, width)), ("b1", (width,)), ("w2", (width, 10)), ("b2", (10,))):
        array = rng.normal(0, 0.1, shape).astype(np.float32)
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return made


def measure(uses: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The fastest of each round's medians, in microseconds."""
    found: dict[str, list[float]] = {name: [] for name in uses}
    for _ in range(ROUNDS):
        for name, use in uses.items():
            times = []
            for _ in range(STEPS):
                begun = time.perf_counter_ns()
                use()
                times.append(time.perf_counter_ns() - begun)
            found[name].append(statistics.median(times) / 1000)
    return {name: min(medians) for name, medians in found.items()}


def steps(width: int, batch: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate_artifacts(
            model(width), requires_grad=["w1", "b1", "w2", "b2"], loss=LossType.CrossEntropyLoss,
            optimizer=OptimType.AdamW, artifact_directory=folder,
        )  # fmt: skip
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(
            folder / "training_model.onnx", state, folder / "eval_model.onnx", session_options=options
        )
        optimizer = Optimizer(folder / "optimizer_model.onnx", module)
        rng = np.random.default_rng(0)
        x, labels = rng.normal(size=(batch, width)).astype(np.float32), rng.integers(0, 10, batch)

        def whole() -> None:
            module.lazy_reset_grad()
            module(x, labels)

        whole()
        bound = module.step._bound[True]

        def bare() -> None:
            run_bound(bound.session, bound.binding)

        return measure({"bare run": bare, "module step": whole, "optimizer step": optimizer.step})


def import_seconds(code: str) -> float:
    """The fastest of five new processes, less an empty one."""

    def seconds(program: str) -> float:
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], check=True)
        return time.perf_counter() - begun

    return min(seconds(code) for _ in range(5)) - min(seconds("pass") for _ in range(5))


def main() -> None:
    for width, batch in ((8, 4), (256, 32)):
        found = steps(width, batch)
        added = found["module step"] - found["bare run"]
        shown = ", ".join(f"{name} {value:.1f} µs" for name, value in found.items())
        print(f"width {width:4}, batch {batch:3}: {shown}; a module step adds {added:.1f} µs")
    for code in ("import onward", "import onward.api", "import onnxruntime, onnx"):
        print(f"{code}: {import_seconds(code):.3f} s")


if __name__ == "__main__":
    main()
