"""Trains small networks on a device and on the CPU, by the onnxruntime that PYTHONPATH names; prints JSON.

python device_steps.py DEVICE NETWORK…
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import generate_artifacts
from onward.conformance import NETWORKS, Network
from onward.errors import OnwardError
from onward.graph.passes.lora import LoRA
from onward.runtime.resident import ResidentTensor

_STEPS = 20


class Copies:
    """Bytes that cross between the host and the device, by what the runtime's bindings are given."""

    def __init__(self) -> None:
        self.bytes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        own = ort.IOBinding.bind_cpu_input, ort.IOBinding.bind_ortvalue_input, ort.IOBinding.bind_output
        read = ResidentTensor.read

        def bind_cpu_input(binding: ort.IOBinding, name: str, array: np.ndarray) -> None:
            self.bytes += array.nbytes
            own[0](binding, name, array)

        def bind_ortvalue_input(binding: ort.IOBinding, name: str, value: ort.OrtValue) -> None:
            self.bytes += value.tensor_size_in_bytes() if value.device_name() == "cpu" else 0
            own[1](binding, name, value)

        def bind_output(binding: ort.IOBinding, name: str, device: str = "cpu", *more: object) -> None:
            # where the size is not said, it is a loss: nothing else is read back
            shape = more[2] if len(more) > 2 else [1]
            self.bytes += 4 * math.prod(shape) if device == "cpu" else 0  # type: ignore[arg-type]
            own[2](binding, name, device, *more)

        def read_counting(tensor: ResidentTensor) -> np.ndarray:
            array = read(tensor)
            self.bytes += array.nbytes
            return array

        replaced = (bind_cpu_input, bind_ortvalue_input, bind_output)
        names = ("bind_cpu_input", "bind_ortvalue_input", "bind_output")
        try:
            for name, function in zip(names, replaced):
                setattr(ort.IOBinding, name, function)
            ResidentTensor.read = read_counting  # type: ignore[method-assign]
            yield
        finally:
            for name, function in zip(names, own):
                setattr(ort.IOBinding, name, function)
            ResidentTensor.read = read  # type: ignore[method-assign]


def write(network: Network, folder: Path) -> None:
    model = network.model()
    floats = [
        t.name for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT and t.name[0] == "w"
    ]
    lora = LoRA(rank=2) if network.lora else None
    generate_artifacts(
        model, requires_grad=[] if lora else floats, loss="cross-entropy", optimizer="adamw", lora=lora,
        artifact_directory=folder,
    )  # fmt: skip


def batches(network: Network) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    shape = [dim.dim_value or 4 for dim in network.model().graph.input[0].type.tensor_type.shape.dim]
    labels = 20 if network.name == "generator" else 4
    for _ in range(_STEPS):
        x = (
            rng.integers(0, network.words, shape)
            if network.words
            else rng.normal(size=shape).astype(np.float32)
        )
        yield x, rng.integers(0, 3, labels)


def curve(folder: Path, network: Network, device: str) -> tuple[np.ndarray, dict[str, np.ndarray], int, int]:
    """Losses of training, then of an evaluation; the parameters; bytes copied and bytes of a batch, for a step."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx", device=device)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(1e-3)
    losses, copies, batch_bytes = [], Copies(), 0
    last: tuple[np.ndarray, ...] = ()
    for index, (x, labels) in enumerate(batches(network)):
        if index == 1:  # the first step makes sessions, which copies constants
            copies.bytes = 0
        with copies.counted():
            losses.append(float(module(x, labels)))
            optimizer.step()
        module.lazy_reset_grad()
        batch_bytes = x.nbytes + labels.nbytes
        last = x, labels
    per_step = copies.bytes // (_STEPS - 1)
    losses.append(float(module.eval()(*last)))
    return np.array(losses), {name: p.data.copy() for name, p in state.parameters}, per_step, batch_bytes


def main() -> None:
    device, *names = sys.argv[1:]
    results = {}
    for network in NETWORKS:
        if network.name in names:
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place)
                write(network, folder)
                expected, weights, _, _ = curve(folder, network, "cpu")
                try:
                    actual, trained, copied, batch = curve(folder, network, device)
                except OnwardError as error:
                    results[network.name] = {"refused": str(error)}
                    continue
                results[network.name] = {
                    "loss": float(np.abs(actual - expected).max()),
                    "weights": float(max(np.abs(trained[name] - weights[name]).max() for name in weights)),
                    "moved": float(expected[0] - expected[-2]),
                    "copied": copied,
                    "batch": batch,
                    "parameters": int(sum(array.nbytes for array in weights.values())),
                }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
