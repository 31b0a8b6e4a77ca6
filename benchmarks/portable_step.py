"""The portable step and C++ against `Module` and `Optimizer`: processor time of a step on one thread, in turns.

    python benchmarks/portable_step.py [--driver PROGRAM] [MODEL...]

Processor time, as wall time on a machine with other work says little; the fastest and the median of many steps.
PROGRAM is tests/cpp/driver.cpp, built with -O2; without it C++ is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.checkpoint.portable import read_layout

sys.path.insert(0, str(Path(__file__).parent / "step"))
from prepare import prepare

CACHE = Path(__file__).parent / ".cache" / "step"


def one_thread() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level, options.enable_mem_pattern = 1, 3, False
    return options


def portable(folder: Path, inputs: dict[str, np.ndarray], *, in_place: bool) -> Callable[[], object]:
    """The step in place, or with two sets of state tensors that take turns."""
    layout, file = read_layout(folder / "state.bin"), np.fromfile(folder / "state.bin", np.uint8)
    session = ort.InferenceSession(folder / "train_step.onnx", one_thread())
    given = {**inputs, "learning_rate": np.full(1, 1e-4, np.float32)}
    sets: list[dict[str, np.ndarray]] = [{} for _ in range(1 if in_place else 2)]
    for tensor, offset in zip(layout.tensors, layout.offsets):
        for arrays in sets:
            part = file[offset : offset + tensor.nbytes].copy()
            arrays[tensor.name] = part.view(tensor.dtype).reshape(tensor.shape)
    bindings = []
    for now, following in zip(sets, sets[::-1]):
        binding = session.io_binding()
        for value in session.get_inputs():
            array = now[value.name] if value.name in now else given[value.name]
            binding.bind_ortvalue_input(value.name, ort.OrtValue.ortvalue_from_numpy(array))
        for value in session.get_outputs():
            array = following.get(value.name.removesuffix(".next"), np.zeros(1, np.float32))
            given[f"{value.name} {len(bindings)}"] = array  # bindings hold addresses only
            binding.bind_output(value.name, "cpu", 0, array.dtype.type, list(array.shape), array.ctypes.data)
        bindings.append(binding)

    def step() -> None:
        session.run_with_iobinding(bindings[0])
        bindings.reverse()

    step.keeps = (sets, given)  # type: ignore[attr-defined]
    return step


def module(folder: Path, inputs: dict[str, np.ndarray]) -> Callable[[], object]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    made = Module(folder / "training_model.onnx", state, session_options=one_thread())
    optimizer = Optimizer(folder / "optimizer_model.onnx", made)
    optimizer.set_learning_rate(1e-4)

    def step() -> None:
        made(*inputs.values())
        optimizer.step()
        made.lazy_reset_grad()

    return step


def write_batch(path: Path, inputs: dict[str, np.ndarray]) -> None:
    """A batch as the driver reads it: of each tensor type, rank, sizes, bytes."""
    with open(path, "wb") as file:
        for array in inputs.values():
            kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            file.write(np.array([kind, array.ndim, *array.shape], np.int64).tobytes() + array.tobytes())


def run_driver(driver: str, home: Path, steps: int) -> list[float]:
    folder = home / "portable"
    command = [driver, "time", folder, folder / "state.bin", home / "batch", steps, 7, 1]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    return [float(line) for line in done.stdout.split()][2:]


def main(names: list[str], driver: str | None) -> None:
    for name in names:
        home = prepare(name, CACHE)
        generate_artifacts(
            onnx.load(home / "forward.onnx"),
            requires_grad=json.loads((home / "trainable.json").read_text()),
            loss=LossType.CrossEntropyLoss,
            optimizer=OptimType.AdamW,
            artifact_directory=home / "portable",
            portable=True,
        )
        inputs = dict(np.load(home / "inputs.npz"))
        folder = home / "portable"
        uses = {
            "module": module(folder, inputs),
            "in place": portable(folder, inputs, in_place=True),
            "in turns": portable(folder, inputs, in_place=False),
        }
        times: dict[str, list[float]] = {use: [] for use in uses}
        small = name == "mlp"
        steps = 20 if small else 1  # a clock's tick is long beside a short step
        write_batch(home / "batch", inputs)
        for turn in range(50 if small else 4):
            for use, step in uses.items():
                for _ in range(5):
                    begun = time.process_time_ns()
                    for _ in range(steps):
                        step()
                    if turn >= 1:
                        times[use].append((time.process_time_ns() - begun) / 1e6 / steps)
            if driver is not None:
                times.setdefault("C++", []).extend(run_driver(driver, home, steps))
        fastest, median = ({u: f(t) for u, t in times.items()} for f in (min, statistics.median))
        for what, found in (("fastest", fastest), ("median", median)):
            all_ = [f"{use} {value:9.4f} ms ({value / found['module']:.3f})" for use, value in found.items()]
            print(f"{name:14} {what:8} {'  '.join(all_)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver")
    parser.add_argument("models", nargs="*")
    given = parser.parse_args()
    main(given.models or ["mlp", "encoder-2x32", "encoder-8x128"], given.driver)
