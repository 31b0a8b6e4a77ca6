"""Federated learning with differential privacy, in Flower's own simulation: two clients hide each of their digits.

    pip install onward[federated,privacy] "flwr[simulation]"
    python examples/federated_private.py

Each client clips the gradient of every example, adds noise to their sum, and counts what that tells of an example at
most: epsilon. The optimizer's state and that count stay with the client, in Flower's context.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from federated_digits import accuracy, classifier

from onward import artifacts
from onward.api import CheckpointState, Module, Optimizer
from onward.federated import Privacy, PrivateClient, Server, flower_client, flower_strategy

ROUNDS, STEPS = 10, 10
# an example may change the outcome by no more than (2, 1/1000)-privacy allows, or the run ends with an error
PRIVACY = Privacy(noise_multiplier=2.5, sample_rate=0.15, max_grad_norm=1.0, delta=1e-3, max_epsilon=2)


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    data = np.load(Path(__file__).parent / "data" / "digits.npz")
    return data["x"].reshape(-1, 64).astype(np.float32) / 16, data["y"].astype(np.int64)


def make_client(folder: Path, content: bytes | None) -> PrivateClient:
    """A client, from what it was after the round before, or as all begin."""
    state = CheckpointState.load_checkpoint(content or folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(2e-2)
    return PrivateClient(state, module, optimizer, PRIVACY)


def write_artifacts(folder: Path) -> None:
    artifacts.generate_artifacts(
        classifier(),
        requires_grad=["fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )


def main(rounds: int = ROUNDS) -> dict[str, float]:
    """Train in rounds; return the accuracy on digits that no client has, and the largest epsilon of a client."""
    from flwr.client import ClientApp
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.simulation import run_simulation

    images, labels = read_digits()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_artifacts(folder)
        server = Server(make_client(folder, None).parameters())
        result: dict[str, float] = {}

        def client_fn(context: Any) -> Any:
            mine = slice(600 * int(context.node_config["partition-id"]), None)
            examples = images[mine][:600], labels[mine][:600]
            client = flower_client(
                lambda content: make_client(folder, content),
                lambda number: examples,
                steps=STEPS,
                context=context,
            )
            return client.to_client()

        def evaluate(number: int, parameters: Any, config: Any) -> tuple[float, dict[str, float]]:
            result["accuracy"] = accuracy(server, folder, (images[1200:], labels[1200:]))
            return 0.0, {"accuracy": result["accuracy"]}

        def server_fn(context: Any) -> Any:
            strategy = flower_strategy(server, evaluate_fn=evaluate)
            return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds))

        run_simulation(ServerApp(server_fn=server_fn), ClientApp(client_fn=client_fn), num_supernodes=2)
    result["epsilon"] = PRIVACY.epsilon(rounds * STEPS)
    result["rounds"] = server.rounds
    print(
        f"held-out accuracy: {result['accuracy']:.1%} after {server.rounds} rounds, epsilon {result['epsilon']:.2f}"
    )
    return result


if __name__ == "__main__":
    main()
