"""A client: its own data, its own optimizer state, and the server's parameters at the start of each round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.federated.update import Arrays, Update, layout_digest, parameters_of

if TYPE_CHECKING:
    from onward.api import CheckpointState, Module, Optimizer

__all__ = ["Client"]


class Client:
    """Trains a module for one round at a time. The optimizer's state stays with the client from round to round."""

    def __init__(self, state: CheckpointState, module: Module, optimizer: Optimizer) -> None:
        self.state, self.module, self.optimizer = state, module, optimizer
        self._statistics = list(module.signature.statistics)

    def parameters(self) -> dict[str, np.ndarray]:
        """Copies of the parameters that training changes, batch-norm statistics included."""
        return parameters_of(self.state, self._statistics)

    def load(self, parameters: Arrays) -> None:
        """Take over the server's parameters; an error, with nothing changed, where they are another model's."""
        own = self.parameters()
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
        self.load(parameters)
        self.module.train()
        self.module.lazy_reset_grad()
        examples = 0
        for index, batch in enumerate(batches):
            if index == steps:
                break
            self.module(*batch)
            self.optimizer.step()
            self.module.lazy_reset_grad()
            examples += len(batch[0])
        if not examples:
            raise ValueError("a round needs at least one batch with one example")
        return Update.between(parameters, self.parameters(), examples=examples)


def _difference(given: Arrays, own: Arrays) -> str:
    name = next(n for n in own if (given[n].shape, given[n].dtype) != (own[n].shape, own[n].dtype))
    return (
        f"'{name}' is {given[name].dtype}{list(given[name].shape)} there and "
        f"{own[name].dtype}{list(own[name].shape)} here"
    )
