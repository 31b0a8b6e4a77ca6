"""A whole training step beside onnxsim's, which writes step graphs in ONNX too: losses, and time in turns.

    pip install --no-deps onnxsim==0.8.1
    taskset -c 0 python benchmarks/onnxsim_steps.py

Both train the same two networks with Adam; shapes are fixed and the loss is a mean square, as onnxsim wants them. Give
both one core: onnxsim's sessions take all that they see.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import onnx.parser
import onnxsim.compile_training  # pyright: ignore[reportMissingImports]

from onward import artifacts, optim
from onward.api import CheckpointState, Module, Optimizer

BATCH, RATE = 32, 1e-3
LOSS = "d = Sub (y, target)  s = Mul (d, d)  loss = ReduceMean <keepdims = 0> (s)"
NETWORKS = {
    "mlp": (
        f"""<ir_version: 8, opset_import: ["": 17]>
        net (float[{BATCH}, 784] x, float[{BATCH}, 10] target) => (float loss) {{
            h = Gemm <transB = 1> (x, w1, b1)  a = Relu (h)  y = Gemm <transB = 1> (a, w2, b2)  {LOSS} }}""",
        {"w1": (500, 784), "b1": (500,), "w2": (10, 500), "b2": (10,)},
        (784,),
    ),
    "cnn": (
        f"""<ir_version: 8, opset_import: ["": 17]>
        net (float[{BATCH}, 3, 32, 32] x, float[{BATCH}, 10] target) => (float loss)
            <int64[2] flat = {{{BATCH}, 64}}> {{
            c1 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, k1, b1)  r1 = Relu (c1)
            c2 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (r1, k2, b2)  r2 = Relu (c2)
            c3 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (r2, k3, b3)  r3 = Relu (c3)
            g = GlobalAveragePool (r3)  f = Reshape (g, flat)  y = Gemm <transB = 1> (f, w, b)  {LOSS} }}""",
        {
            "k1": (16, 3, 3, 3), "b1": (16,), "k2": (32, 16, 3, 3), "b2": (32,), "k3": (64, 32, 3, 3), "b3": (64,),
            "w": (10, 64), "b": (10,),
        },
        (3, 32, 32),
    ),
}  # fmt: skip
Step = Callable[[], float]


def steps(name: str) -> tuple[Step, Step]:
    """One step of Onward and one of onnxsim, on the same network and batch."""
    text, shapes, sample = NETWORKS[name]
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(text)
    for parameter, shape in shapes.items():
        array = rng.normal(0, 0.05, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, parameter))
    feeds = {
        "x": rng.normal(size=(BATCH, *sample)).astype(np.float32),
        "target": rng.normal(size=(BATCH, 10)).astype(np.float32),
    }

    folder = tempfile.mkdtemp()
    artifacts.generate_artifacts(
        model, requires_grad=list(shapes), loss=None, optimizer=optim.adam(), artifact_directory=folder
    )
    module = Module(f"{folder}/training_model.onnx", CheckpointState.load_checkpoint(f"{folder}/checkpoint"))
    optimizer = Optimizer(f"{folder}/optimizer_model.onnx", module)
    optimizer.set_learning_rate(RATE)
    loop = onnxsim.compile_training.compile_training_loop(model, "loss", list(shapes))

    def step() -> float:
        loss = module(*feeds.values())
        optimizer.step()
        module.lazy_reset_grad()
        return float(loss)

    return step, lambda: float(loop(feeds, lr=RATE))


def main(rounds: int = 30, turn: int = 5) -> None:
    """Print the losses of the first steps and the ratio of times, ours divided by theirs."""
    for name in NETWORKS:
        ours, theirs = steps(name)
        for _ in range(3):
            print(f"{name}: loss {ours():.6f} {theirs():.6f}")
        ratios = []
        for _ in range(rounds):
            times = []
            for step in (ours, theirs):
                start = time.perf_counter()
                for _ in range(turn):
                    step()
                times.append(time.perf_counter() - start)
            ratios.append(times[0] / times[1])
        low, _, high = statistics.quantiles(ratios)
        print(f"{name}: {statistics.median(ratios):.2f} ({low:.2f}–{high:.2f}) of onnxsim's time")


if __name__ == "__main__":
    main()
