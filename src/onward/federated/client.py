"""A client: its own data, its own optimizer state, and the server's parameters at the start of each round."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.federated.update import Arrays, Update, layout_digest, parameters_of

if TYPE_CHECKING:
    from onward.api import CheckpointState, Module, Optimizer


class Client:
    """Trains a module for one round at a time. The optimizer's state stays with the client from round to round."""

    def __init__(self, state: CheckpointState, module: Module, optimizer: Optimizer) -> None:
        self.state, self.module, self.optimizer = state, module, optimizer
        # Running statistics are not trained, but each client's data move them: unless they travel too, the mean
        # of the weights meets the statistics of one client.
        self._statistics = list(module.signature.statistics)

    def parameters(self) -> dict[str, np.ndarray]:
        """Copies of the parameters that training changes, batch-norm statistics included."""
        return parameters_of(self.state, self._statistics)

    def metrics(self) -> dict[str, float]:
        """What the client tells the server of itself besides its update."""
        return {}

    def load(self, parameters: Arrays) -> None:
        """Take over the server's parameters; an error, with nothing changed, where they are another model's."""
        own = self.parameters()
        # The whole is checked before any of it is set: a round that failed half way would train on a mixture of
        # two models.
        if layout_digest(parameters) != layout_digest(own):
            names = sorted(parameters.keys() ^ own.keys())
            what = f"'{names[0]}' is on one side only" if names else _difference(parameters, own)
            raise ValueError(f"the server's parameters are not this model's: {what}")
        bad = [name for name, array in parameters.items() if not np.isfinite(array).all()]
        if bad:
            raise ValueError(f"the server's parameter '{bad[0]}' is not finite")
        for name, array in parameters.items():
            self.state.parameters[name].data = array

    def train(
        self, parameters: Arrays, batches: Iterable[Sequence[Any]], *, steps: int | None = None
    ) -> Update:
        """One round: load the parameters, train on batches (at most `steps` of them), return the difference.

        A loss that is not finite raises `NonFiniteError`, so that nothing is sent.
        """
        if steps is not None and steps < 1:
            raise ValueError(f"steps is {steps}: a round has at least one")
        examples = self._train(parameters, itertools.islice(batches, steps))
        if not examples:
            raise ValueError("a round needs at least one batch with one example")
        return Update.between(parameters, self.parameters(), examples=examples)

    def _train(self, parameters: Arrays, batches: Iterable[Sequence[Any]]) -> int:
        """Load the parameters and make a step on each batch; returns how many examples they had."""
        self.load(parameters)
        self.module.train()
        examples = 0
        for batch in batches:
            self.module.lazy_reset_grad()
            self._compute_gradients(batch)
            self.optimizer.step()
            # Counted, not asked for: the weight of a client in the mean is what it really trained on.
            examples += len(batch[0])
        self.module.lazy_reset_grad()
        return examples

    def _compute_gradients(self, batch: Sequence[Any]) -> None:
        self.module(*batch)


def _difference(theirs: Arrays, own: Arrays) -> str:
    name = next(n for n in own if (theirs[n].shape, theirs[n].dtype) != (own[n].shape, own[n].dtype))
    return (
        f"'{name}' is {theirs[name].dtype}{list(theirs[name].shape)} there and "
        f"{own[name].dtype}{list(own[name].shape)} here"
    )
