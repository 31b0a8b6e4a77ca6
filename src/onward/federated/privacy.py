"""Differential privacy of a client: what leaves it tells little of any single example of its data.

Gradients of single examples are scaled down to a norm, noise is added to their sum, and an accountant
(`dp-accounting`, a library of Google) says what that is worth: DP-SGD (Abadi et al., 2016).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.errors import OnwardError
from onward.federated.client import Client
from onward.federated.update import Arrays, Update
from onward.reading import parse_json

if TYPE_CHECKING:
    from onward.api import CheckpointState, Module, Optimizer

# The property of a client's checkpoint that says which steps its data have been in.
_LEDGER = "privacy_steps"


class PrivacyBudgetError(OnwardError):
    """A round that would tell more of a client's examples than it may."""

    hint = "stop here, or begin with more noise, a lower sample rate or fewer steps"


@dataclasses.dataclass(frozen=True)
class Privacy:
    """How a client hides its examples.

    In each step an example takes part with a chance of `sample_rate`; its gradient is scaled down to `max_grad_norm`,
    and noise with a standard deviation of `noise_multiplier` times that is added to the sum. All steps together are
    (epsilon, `delta`)-private; a round that would go beyond `max_epsilon` is an error.
    """

    noise_multiplier: float
    sample_rate: float
    max_grad_norm: float = 1.0
    delta: float = 1e-5
    max_epsilon: float | None = None

    def __post_init__(self) -> None:
        positive = ("noise_multiplier", "sample_rate", "max_grad_norm", "delta")
        for name in (*positive, *(["max_epsilon"] if self.max_epsilon is not None else [])):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}: it must be a positive number")
        if self.sample_rate > 1 or self.delta >= 1:
            raise ValueError(
                f"sample_rate is {self.sample_rate} and delta {self.delta}: the one is at most 1, the other less"
            )

    def epsilon(self, steps: int) -> float:
        """What so many steps tell of an example at most: to choose the settings before a run."""
        return self._epsilon({self._mechanism: steps})

    @property
    def _mechanism(self) -> tuple[float, float]:
        return self.sample_rate, self.noise_multiplier

    def _epsilon(self, ledger: dict[tuple[float, float], int]) -> float:
        dp = _import_accounting()
        # the distribution of privacy losses: tighter bounds than those of Rényi divergences, in about a second
        accountant = dp.pld.PLDAccountant()
        for (sample_rate, noise), steps in ledger.items():
            event = dp.PoissonSampledDpEvent(sample_rate, dp.GaussianDpEvent(noise))
            accountant.compose(event, steps)
        return float(accountant.get_epsilon(self.delta))


class PrivateClient(Client):
    """A `Client` whose updates are differentially private for each of its examples.

    `train` takes all examples in place of batches. How often they were used is a property of the state, and so
    stays with it. Each example is a run of the model of its own.
    """

    def __init__(
        self,
        state: CheckpointState,
        module: Module,
        optimizer: Optimizer,
        privacy: Privacy,
        *,
        generator: np.random.Generator | None = None,
    ) -> None:
        super().__init__(state, module, optimizer)
        if self._statistics:
            raise ValueError(
                f"batch norm ('{self._statistics[0]}') remembers examples without noise: freeze it, or use another norm"
            )
        if module.signature.loss_scale:
            raise ValueError(
                "gradients of float16 models come scaled: a private client takes precision='fp32'"
            )
        self.privacy = privacy
        self.epsilon = 0.0  # of all rounds so far
        self._generator = generator or np.random.default_rng()
        self._expected = 0.0  # how many examples a draw has in the mean

    def train(self, parameters: Arrays, batches: Any, *, steps: int | None = None) -> Update:
        """One round: load the parameters, make steps on samples of the examples, return the difference.

        `batches` are the examples: an array for each input of the model and for the labels, with an axis of examples.
        """
        examples = list(batches)
        counts = {len(array) if isinstance(array, np.ndarray) and array.ndim else 0 for array in examples}
        if len(counts) != 1 or counts == {0}:
            shapes = [getattr(array, "shape", type(array).__name__) for array in examples]
            raise ValueError(f"a private round takes arrays of as many examples each, not {shapes}")
        (count,) = counts
        if steps is None or steps < 1:
            raise ValueError(f"steps is {steps}: a private round has a number of steps")
        ledger = self._read_ledger()
        mechanism = self.privacy._mechanism
        ledger[mechanism] = ledger.get(mechanism, 0) + steps
        epsilon = self.privacy._epsilon(ledger)
        if self.privacy.max_epsilon is not None and epsilon > self.privacy.max_epsilon:
            raise PrivacyBudgetError(
                f"after this round epsilon is {epsilon:.3g}: more than max_epsilon={self.privacy.max_epsilon}"
            )
        # before the steps: of a round that fails half way, something may have been seen
        self._write_ledger(ledger)
        self.epsilon = epsilon
        # An example that is not finite must not be seen from outside by an error: it counts as none.
        policy, self.module.on_nonfinite = self.module.on_nonfinite, "ignore"
        self._expected = self.privacy.sample_rate * count
        try:
            self._train(parameters, (self._draw(examples, count) for _ in range(steps)))
        finally:
            self.module.on_nonfinite = policy
        # not how many were drawn, which would tell of the draw
        return Update.between(parameters, self.parameters(), examples=max(round(self._expected), 1) * steps)

    def metrics(self) -> dict[str, float]:
        """What a server may know: epsilon of all rounds so far."""
        return {"epsilon": self.epsilon}

    def _draw(self, examples: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
        """Each example with the same chance: the accountant knows no other way."""
        drawn = self._generator.random(count) < self.privacy.sample_rate
        return [array[drawn] for array in examples]

    def _compute_gradients(self, batch: Sequence[np.ndarray]) -> None:
        module, gradients, privacy = self.module, self.module.memory.gradients, self.privacy
        sums = {name: np.zeros(shape, np.float64) for name, shape in gradients.shapes.items()}
        for index in range(len(batch[0])):
            module.lazy_reset_grad()
            # one example alone: a batch has the sum of its gradients only
            module(*(array[index : index + 1] for array in batch))
            arrays = gradients.arrays()
            norm = math.sqrt(sum(float(np.sum(np.square(a, dtype=np.float64))) for a in arrays.values()))
            if math.isfinite(norm):
                scale = min(1.0, privacy.max_grad_norm / norm) if norm else 0.0
                for name, array in arrays.items():
                    sums[name] += scale * array
        deviation = privacy.noise_multiplier * privacy.max_grad_norm
        # by the expected number of examples: the number that was drawn would need noise of its own
        gradients.write(
            {
                name: (total + self._generator.normal(0.0, deviation, total.shape)) / self._expected
                for name, total in sums.items()
            }
        )

    def _read_ledger(self) -> dict[tuple[float, float], int]:
        """How many steps there were of each sample rate and noise."""
        if _LEDGER not in self.state.properties:
            return {}
        rows = parse_json(str(self.state.properties[_LEDGER]), list)
        return {(float(rate), float(noise)): int(steps) for rate, noise, steps in rows}

    def _write_ledger(self, ledger: dict[tuple[float, float], int]) -> None:
        rows = [[rate, noise, steps] for (rate, noise), steps in ledger.items()]
        self.state.properties[_LEDGER] = json.dumps(rows)


def _import_accounting() -> Any:
    try:
        importlib.import_module("dp_accounting.pld")
        return importlib.import_module("dp_accounting")
    except ImportError as error:
        raise OnwardError(
            f"dp-accounting, which counts what privacy is left, is not installed ({error})",
            hint="pip install onward[privacy]",
        ) from error
