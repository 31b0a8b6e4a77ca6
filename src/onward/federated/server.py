"""The server: parameters that all clients start from, and the checked, weighted mean of what they send back.

An update is untrusted: names, shapes, types and the model's digest must be the server's, numbers finite, and
the share of each client bounded. What is wrong with one update rejects that update, not the round.
"""

from __future__ import annotations

import dataclasses
import math
import statistics as numbers
from collections.abc import Mapping

import numpy as np

from onward.checkpoint import CheckpointData, NominalTensor
from onward.errors import OnwardError
from onward.federated.update import Arrays, Update, UpdateError, layout_digest

# What the bytes of an update take besides its numbers: names and shapes.
_OVERHEAD = 1 << 16


@dataclasses.dataclass(frozen=True)
class RoundReport:
    """What became of a round: the share of each client in the mean, and why others were left out."""

    weights: dict[str, float]
    refused: dict[str, str]
    clipped: list[str]
    norm: float


class Server:
    """Holds the parameters and changes them by the weighted mean of clients' updates.

    `min_updates` is how many good updates a round needs: the mean of a single one would show what that client
    learned. An update whose norm is more than `clip_factor` times the round's median is scaled down to that, or to
    `max_norm` where that is less. `max_examples` bounds what a client may claim to stand for. `learning_rate`
    multiplies the mean.

    >>> server = Server({"w": np.zeros(2, np.float32)})
    >>> after = [{"w": np.array(values, np.float32)} for values in ([1, 0], [0, 1])]
    >>> sent = [Update.between(server.parameters, after[i], examples=1 + 2 * i) for i in range(2)]
    >>> report = server.average({"client0": sent[0], "client1": sent[1]})
    >>> server.parameters["w"], report.weights
    (array([0.25, 0.75], dtype=float32), {'client0': 0.25, 'client1': 0.75})
    """

    def __init__(
        self,
        parameters: Arrays,
        *,
        min_updates: int = 2,
        clip_factor: float | None = 3.0,
        max_norm: float | None = None,
        max_examples: int = 1_000_000,
        learning_rate: float = 1.0,
    ) -> None:
        if not parameters:
            raise ValueError("there are no parameters to train")
        for name, limit in (
            ("clip_factor", clip_factor),
            ("max_norm", max_norm),
            ("learning_rate", learning_rate),
        ):
            if limit is not None and not (math.isfinite(limit) and limit > 0):
                raise ValueError(f"{name} is {limit}: it must be a positive number")
        for name, count in (("min_updates", min_updates), ("max_examples", max_examples)):
            if count < 1:
                raise ValueError(f"{name} is {count}: it must be 1 or more")
        self.parameters = {name: np.array(array) for name, array in parameters.items()}
        for name, array in self.parameters.items():
            if not np.issubdtype(array.dtype, np.floating) or not np.isfinite(array).all():
                raise ValueError(
                    f"parameter '{name}' is {array.dtype}, or not finite: the mean needs finite floats"
                )
        # once: parameters change every round, their layout never
        self.layout = layout_digest(self.parameters)
        self.min_updates, self.max_examples = min_updates, max_examples
        self.rounds = 0
        self._clip_factor, self._max_norm, self._rate = clip_factor, max_norm, learning_rate

    def receive(self, content: bytes, *, sender: str = "<bytes>") -> Update:
        """Read a client's update; more bytes than an update of this model has are refused unread."""
        names = sum(len(name.encode()) for name in self.parameters)
        # 1 KiB for the name, shape and type of each tensor, whatever encoding they have; a bound, not a
        # prediction.
        most = sum(array.nbytes + 1024 for array in self.parameters.values()) + names + _OVERHEAD
        if len(content) > most:
            raise UpdateError(
                f"'{sender}' sent {len(content)} bytes; an update of this model has at most {most}"
            )
        update = Update.from_bytes(content, sender=sender)
        self.check(update, sender=sender)
        return update

    def check(self, update: Update, *, sender: str = "<update>") -> None:
        """Reject an update that is another model's, not finite, or that claims more examples than it may."""
        examples = update.examples
        if (
            # True is an int for Python, and would count as one example.
            not isinstance(examples, int)
            or isinstance(examples, bool)
            or not 1 <= examples <= self.max_examples
        ):
            raise UpdateError(
                f"'{sender}' says that it trained on {examples} examples: 1 to {self.max_examples} are taken "
                "(max_examples)"
            )
        # Both are compared: what a client claims of its model, and what it has sent.
        if update.layout != self.layout or layout_digest(update.difference) != self.layout:
            raise UpdateError(f"'{sender}' sent an update of another model: names, types or shapes differ")
        for name, array in update.difference.items():
            if not np.isfinite(array).all():
                raise UpdateError(f"'{sender}' sent numbers that are not finite, in '{name}'")

    def average(self, updates: Mapping[str, Update]) -> RoundReport:
        """Change the parameters by the weighted mean of the updates, which are given by client.

        Updates that `check` rejects are left out; with fewer than `min_updates` left, an error, and nothing changes.
        """
        good: dict[str, Update] = {}
        refused: dict[str, str] = {}
        for client, update in updates.items():
            try:
                self.check(update, sender=client)
                good[client] = update
            except UpdateError as error:
                refused[client] = str(error)
        if len(good) < self.min_updates:
            why = f"; refused: {'; '.join(refused.values())}" if refused else ""
            raise OnwardError(
                f"the round has {len(good)} good updates and needs {self.min_updates} (min_updates){why}"
            )
        norms = {client: _norm(update) for client, update in good.items()}
        limit = (
            math.inf if self._clip_factor is None else self._clip_factor * numbers.median_low(norms.values())
        )
        # median_low is the norm of a client that is there, the lower of the two in the middle: with an even number of
        # clients, one that sends large numbers moves the limit less
        limit = min(limit, math.inf if self._max_norm is None else self._max_norm)
        total = sum(update.examples for update in good.values())
        weights = {client: update.examples / total for client, update in good.items()}
        scales = {client: weight * min(1.0, limit / norms[client] if norms[client] else 1.0)
                  for client, weight in weights.items()}  # fmt: skip
        # In float64: the sum over hundreds of clients of nearly equal numbers loses digits in float32.
        means = {
            name: sum(
                scale * good[client].difference[name].astype(np.float64) for client, scale in scales.items()
            )
            for name in self.parameters
        }
        with np.errstate(over="ignore"):
            # the new parameters beside the old, until all of them are known to be finite
            following = {
                name: (array + self._rate * means[name]).astype(array.dtype)
                for name, array in self.parameters.items()
            }
        # Finite differences may still sum to more than the type holds; nothing has been changed yet.
        for name, array in following.items():
            if not np.isfinite(array).all():
                raise OnwardError(f"the mean of the updates overflows in '{name}'; nothing was changed")
        self.parameters = following
        self.rounds += 1
        clipped = [client for client, norm in norms.items() if norm > limit]
        norm = math.sqrt(sum(float(np.sum(np.square(mean))) for mean in means.values()))
        return RoundReport(weights, refused, clipped, norm)

    def into(self, checkpoint: CheckpointData) -> CheckpointData:
        """A checkpoint of the same model with the server's parameters: to save, to export, or as a portable state.

        The optimizer's state is left out: it belonged to other parameters.
        """
        names = checkpoint.parameters()
        missing = [name for name in self.parameters if name not in names]
        if missing:
            raise ValueError(f"the checkpoint has no parameter '{missing[0]}': is it another model's?")

        def replaced(
            tensors: Mapping[str, np.ndarray | NominalTensor],
        ) -> dict[str, np.ndarray | NominalTensor]:
            return {name: self.parameters.get(name, array) for name, array in tensors.items()}

        return CheckpointData(
            trainable=replaced(checkpoint.trainable),
            frozen=replaced(checkpoint.frozen),
            properties=dict(checkpoint.properties),
        )


def _norm(update: Update) -> float:
    return math.sqrt(sum(float(np.sum(np.square(a, dtype=np.float64))) for a in update.difference.values()))
