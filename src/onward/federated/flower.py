"""A client and a strategy for Flower (`pip install onward[federated]`): what travels is checked as everywhere else."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.errors import OnwardError
from onward.federated.client import Client
from onward.federated.update import Update, layout_digest

if TYPE_CHECKING:
    from onward.federated.server import Server

__all__ = ["flower_client", "flower_strategy"]

_LAYOUT = "onward.layout"
_log = logging.getLogger(__name__)

Batches = Callable[[int], Iterable[Sequence[Any]]]
Evaluate = Callable[[Client], tuple[float, int, dict[str, float]]]


def flower_client(
    client: Client, batches: Batches, *, steps: int | None = None, evaluate: Evaluate | None = None
) -> Any:
    """A `flwr.client.NumPyClient` that trains a round on `batches(round)` and sends the difference.

    `evaluate` returns loss, number of examples and metrics of the client, which has the server's parameters then.
    """
    flwr = _import()
    names = list(client.parameters())

    def load(arrays: list[np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
        given = dict(zip(names, arrays))
        own = layout_digest(client.parameters())
        if len(arrays) != len(names) or config.get(_LAYOUT, own) != own:
            raise OnwardError(
                "the server trains another model: names, types or shapes of its parameters differ"
            )
        client.load(given)
        return given

    class FlowerClient(flwr.client.NumPyClient):
        def get_parameters(self, config: dict[str, Any]) -> list[np.ndarray]:
            return list(client.parameters().values())

        def fit(
            self, parameters: list[np.ndarray], config: dict[str, Any]
        ) -> tuple[list[np.ndarray], int, dict]:
            given = load(parameters, config)
            update = client.train(given, batches(int(config.get("round", 1))), steps=steps)
            return [update.difference[name] for name in names], update.examples, {_LAYOUT: update.layout}

        def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[float, int, dict]:
            if evaluate is None:
                raise OnwardError("this client does not evaluate: give flower_client evaluate=…")
            load(parameters, config)
            return evaluate(client)

    return FlowerClient()


def flower_strategy(server: Server, **options: Any) -> Any:
    """A `flwr.server.strategy.FedAvg` that averages differences with the checks of `Server`.

    `options` are FedAvg's: `fraction_fit`, `min_available_clients`, `evaluate_fn` …
    """
    flwr = _import()
    common = flwr.common
    names = list(server.parameters)
    reserved = {"initial_parameters", "on_fit_config_fn", "on_evaluate_config_fn"} & options.keys()
    if reserved:
        raise ValueError(f"{sorted(reserved)[0]} is given by the server: leave it out")

    def config(number: int) -> dict[str, Any]:
        return {_LAYOUT: server.layout, "round": number}

    class Strategy(flwr.server.strategy.FedAvg):
        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> tuple[Any, dict[str, Any]]:
            if not results or (failures and not self.accept_failures):
                return None, {}
            updates = {proxy.cid: _read(common, result, names) for proxy, result in results}
            if len(updates) < len(results):
                raise OnwardError("two updates of one client came in one round")
            try:
                report = server.average(updates)
            except OnwardError as error:
                _log.warning("round %d changed nothing: %s", server_round, error)
                return None, {"refused": len(updates)}
            for reason in report.refused.values():
                _log.warning("round %d: %s", server_round, reason)
            metrics = {"refused": len(report.refused), "clipped": len(report.clipped), "norm": report.norm}
            return common.ndarrays_to_parameters(list(server.parameters.values())), metrics

    start = common.ndarrays_to_parameters(list(server.parameters.values()))
    settings = {"min_fit_clients": server.min_updates, "min_available_clients": server.min_updates, **options}
    return Strategy(
        initial_parameters=start, on_fit_config_fn=config, on_evaluate_config_fn=config, **settings
    )


def _read(common: Any, result: Any, names: list[str]) -> Update:
    """What a client sent, to be checked; what cannot be read is an update of no model."""
    try:
        arrays = [np.asarray(array) for array in common.parameters_to_ndarrays(result.parameters)]
    except (ValueError, OSError, EOFError) as error:
        _log.warning("an update cannot be read: %s", error)
        arrays = []
    layout = result.metrics.get(_LAYOUT)
    difference = dict(zip(names, arrays)) if len(arrays) == len(names) else {}
    return Update(difference, result.num_examples, layout if isinstance(layout, str) else "")


def _import() -> Any:
    try:
        for part in ("client", "common", "server.strategy"):
            importlib.import_module(f"flwr.{part}")
        return importlib.import_module("flwr")
    except ImportError as error:
        raise OnwardError(
            f"Flower is not installed ({error}): pip install onward[federated]; Client and Server need it not",
            hint="pip install onward[federated]",
        ) from error
