"""A client and a strategy for Flower (`pip install onward[federated]`): what travels is checked as everywhere else."""

from __future__ import annotations

import importlib
import io
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.checkpoint import encode
from onward.errors import OnwardError
from onward.federated.client import Client
from onward.federated.update import Update, layout_digest

if TYPE_CHECKING:
    from onward.federated.server import Server

_LAYOUT = "onward.layout"
_CONTEXT, _CHECKPOINT = "onward", "checkpoint"
_log = logging.getLogger(__name__)

MakeClient = Callable[[bytes | None], Client]
Batches = Callable[[int], Iterable[Sequence[Any]]]
Evaluate = Callable[[Client], tuple[float, int, dict[str, float]]]


def flower_client(
    client: Client | MakeClient,
    batches: Batches,
    *,
    steps: int | None = None,
    evaluate: Evaluate | None = None,
    context: Any = None,
) -> Any:
    """A `flwr.client.NumPyClient` that trains a round on `batches(round)` and sends the difference.

    A `PrivateClient` takes all of its examples there.

    Flower makes a client for each message. With its `context`, give a function that makes a `Client` of a
    checkpoint's bytes (`None` in the first round): the optimizer's state is kept in the context from round to round.
    `evaluate` returns loss, number of examples and metrics of the client, which has the server's parameters then;
    without it Flower learns that this client does not evaluate.
    """
    flwr = _import()
    if isinstance(client, Client):
        if context is not None:
            raise ValueError(
                "with context=, give a function that makes a Client of a checkpoint's bytes or None"
            )
        trainer = client
    else:
        record = None if context is None else context.state.get(_CONTEXT)
        trainer = client(None if record is None else record[_CHECKPOINT])
    names = list(trainer.parameters())

    def load(arrays: list[np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
        received = dict(zip(names, arrays))
        own = layout_digest(trainer.parameters())
        if len(arrays) != len(names) or config.get(_LAYOUT, own) != own:
            raise OnwardError(
                "the server trains another model: names, types or shapes of its parameters differ"
            )
        trainer.load(received)
        return received

    class FlowerClient(flwr.client.NumPyClient):
        def get_parameters(self, config: dict[str, Any]) -> list[np.ndarray]:
            return list(trainer.parameters().values())

        def fit(
            self, parameters: list[np.ndarray], config: dict[str, Any]
        ) -> tuple[list[np.ndarray], int, dict]:
            received = load(parameters, config)
            update = trainer.train(received, batches(int(config.get("round", 1))), steps=steps)
            if context is not None:
                stream = io.BytesIO()
                encode(trainer.state.to_data(include_optimizer_state=True), stream)
                context.state[_CONTEXT] = flwr.common.ConfigRecord({_CHECKPOINT: stream.getvalue()})
            metrics = {**trainer.metrics(), _LAYOUT: update.layout}
            return [update.difference[name] for name in names], update.examples, metrics

    if evaluate is None:
        return FlowerClient()

    class EvaluatingClient(FlowerClient):  # Flower asks whether there is such a method
        def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[float, int, dict]:
            load(parameters, config)
            return evaluate(trainer)

    return EvaluatingClient()


def flower_strategy(server: Server, **options: Any) -> Any:
    """A `flwr.server.strategy.FedAvg` that averages differences with the checks of `Server`.

    `options` are FedAvg's: `fraction_fit`, `min_available_clients`, `evaluate_fn` … Clients are asked to evaluate only
    with `fraction_evaluate`: those without `evaluate=` cannot.
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
            # by client: the report names who was refused
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
            epsilons = [result.metrics["epsilon"] for _, result in results if "epsilon" in result.metrics]
            if epsilons:  # of private clients, as they say themselves
                metrics["epsilon"] = max(epsilons)
            return common.ndarrays_to_parameters(list(server.parameters.values())), metrics

    start = common.ndarrays_to_parameters(list(server.parameters.values()))
    # Flower would begin a round with fewer clients than the server takes updates of.
    settings = {"min_fit_clients": server.min_updates, "min_available_clients": server.min_updates, **options}
    settings.setdefault("fraction_evaluate", 0.0)
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
