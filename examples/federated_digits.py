"""Federated learning: two clients with different digits train one model; their data stays with them.

    python examples/federated_digits.py

Each round a client loads the server's parameters, makes ten steps and sends the difference; the server checks
the updates and adds their weighted mean.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

from onward import artifacts, checkpoint
from onward.api import CheckpointState, Module, Optimizer
from onward.export import for_inference
from onward.federated import Client, Server

ROUNDS, STEPS, BATCH = 60, 10, 20
Samples = tuple[np.ndarray, np.ndarray]


def classifier() -> onnx.ModelProto:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        digits (float[batch, 64] image) => (float[batch, 10] scores) {
            a = Gemm <transB = 1> (image, fc1_weight, fc1_bias)  b = Relu (a)
            scores = Gemm <transB = 1> (b, fc2_weight, fc2_bias)
        }""")
    rng = np.random.default_rng(0)
    shapes = {"fc1_weight": (48, 64), "fc1_bias": (48,), "fc2_weight": (10, 48), "fc2_bias": (10,)}
    for name, shape in shapes.items():
        array = rng.normal(0, 0.1, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def make_client(folder: Path) -> Client:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(5e-3)
    return Client(state, module, optimizer)


def batches(samples: Samples, seed: int) -> Iterator[Samples]:
    order = np.random.default_rng(seed).permutation(len(samples[1]))
    for first in range(0, len(order), BATCH):
        chosen = order[first : first + BATCH]
        yield samples[0][chosen], samples[1][chosen]


def accuracy(server: Server, folder: Path, samples: Samples) -> float:
    """Held-out accuracy of the server's model, exported as it would be deployed."""
    trained = server.into(checkpoint.load(folder / "checkpoint"))
    checkpoint.save(trained, folder / "trained")
    for_inference(folder / "eval_model.onnx", folder / "trained", ["scores"], folder / "model.onnx")
    (scores,) = ort.InferenceSession(str(folder / "model.onnx")).run(None, {"image": samples[0]})
    return float(np.mean(np.argmax(np.asarray(scores), axis=1) == samples[1]))


def main(rounds: int = ROUNDS) -> dict[str, float]:
    """Train in rounds; return the accuracy of the mean, and of one process that had all data."""
    data = np.load(Path(__file__).parent / "data" / "digits.npz")
    images, labels = data["x"].reshape(-1, 64).astype(np.float32) / 16, data["y"].astype(np.int64)
    train, test = (images[:1200], labels[:1200]), (images[1200:], labels[1200:])
    # one client has mostly low digits, the other mostly high ones
    low = (train[1] < 5) ^ (np.random.default_rng(0).random(1200) < 0.3)
    shares = [(train[0][chosen], train[1][chosen]) for chosen in (low, ~low)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifacts.generate_artifacts(
            classifier(),
            requires_grad=["fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"],
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=artifacts.OptimType.AdamW,
            artifact_directory=folder,
        )
        clients = [make_client(folder) for _ in shares]
        server = Server(clients[0].parameters())
        for number in range(rounds):
            updates = {
                f"client {index}": client.train(server.parameters, batches(share, number), steps=STEPS)
                for index, (client, share) in enumerate(zip(clients, shares))
            }
            report = server.average(updates)
            if number % 20 == 19:
                print(
                    f"round {number + 1}: mean of {len(report.weights)} updates, its norm {report.norm:.3f}"
                )
        alone = make_client(folder)
        whole = Server(alone.parameters(), min_updates=1)
        for number in range(rounds):
            whole.average({"alone": alone.train(whole.parameters, batches(train, number), steps=STEPS)})
        found = {"together": accuracy(server, folder, test), "whole": accuracy(whole, folder, test)}
    print(
        f"held-out accuracy: {found['together']:.1%} of two clients, {found['whole']:.1%} with all data in one place"
    )
    return found


if __name__ == "__main__":
    main()
