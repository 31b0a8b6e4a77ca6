"""Rounds in Flower's own simulation, which makes a client for each message in a process of its own."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.federated import Client, Server, flower_client, flower_strategy
from small_models import NORMALIZED, batch, normalized

pytest.importorskip("flwr", reason="Flower is an extra: pip install onward[federated]")
pytest.importorskip("ray", reason="its simulation is an extra of Flower's: pip install flwr[simulation]")
EXAMPLES = Path(__file__).parents[2] / "examples"
ROUNDS, CLIENTS, STEPS = 3, 2, 4


def make_client(folder: Path, content: bytes | None) -> Client:
    state = CheckpointState.load_checkpoint(content or folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(5e-3)
    return Client(state, module, optimizer)


def batches_of(client: int, number: int) -> list[Any]:
    return [batch(100 * client + 10 * number + index, 6) for index in range(STEPS)]


def simulate(strategy: Any, client_fn: Callable[[Any], Any]) -> None:
    client, server = importlib.import_module("flwr.client"), importlib.import_module("flwr.server")

    def server_fn(context: Any) -> Any:
        return server.ServerAppComponents(strategy=strategy, config=server.ServerConfig(num_rounds=ROUNDS))

    importlib.import_module("flwr.simulation").run_simulation(
        server.ServerApp(server_fn=server_fn), client.ClientApp(client_fn=client_fn), num_supernodes=CLIENTS
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generate_artifacts(
        normalized(), requires_grad=NORMALIZED, loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW,
        artifact_directory=tmp_path,
    )  # fmt: skip
    return tmp_path


@pytest.mark.parametrize("asked", [0.0, 1.0], ids=["nobody evaluates", "all are asked, none can"])
def test_it_trains_as_clients_that_stay_do(
    asked: float, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(make_client(folder, None).parameters())

    def client_fn(context: Any) -> Any:
        index = int(context.node_config["partition-id"])
        return flower_client(
            lambda content: make_client(folder, content),
            lambda number: batches_of(index, number),
            context=context,
        ).to_client()

    with caplog.at_level(logging.INFO):
        simulate(flower_strategy(server, fraction_evaluate=asked), client_fn)
    assert server.rounds == ROUNDS
    assert caplog.text.count(f"aggregate_fit: received {CLIENTS} results and 0 failures") == ROUNDS
    assert "Traceback" not in caplog.text and "Error" not in caplog.text

    plain = Server(make_client(folder, None).parameters())
    clients = [make_client(folder, None) for _ in range(CLIENTS)]
    for number in range(1, ROUNDS + 1):
        plain.average(
            {
                str(index): client.train(plain.parameters, batches_of(index, number))
                for index, client in enumerate(clients)
            }
        )
    for name, array in plain.parameters.items():
        np.testing.assert_allclose(server.parameters[name], array, rtol=1e-6, atol=1e-7, err_msg=name)
    # an optimizer that begins anew each round goes elsewhere
    fresh = Server(make_client(folder, None).parameters())
    for number in range(1, ROUNDS + 1):
        fresh.average(
            {
                str(index): make_client(folder, None).train(fresh.parameters, batches_of(index, number))
                for index in range(CLIENTS)
            }
        )
    assert any(
        not np.allclose(fresh.parameters[name], array, atol=1e-4) for name, array in plain.parameters.items()
    )


def test_the_example_with_privacy_learns_digits_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dp_accounting", reason="an extra: pip install onward[privacy]")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sys.modules.pop("federated_private", None)
    example = importlib.import_module("federated_private")

    result = example.main()
    assert result["rounds"] == example.ROUNDS
    assert result["accuracy"] > 0.7
    assert 1 < result["epsilon"] < 2
