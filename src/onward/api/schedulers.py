"""Learning-rate schedules: a factor for each step, times the initial rate.

A new schedule is a subclass with `factor`. Their progress is part of the checkpoint (with
`include_optimizer_state=True`), and a schedule created for a resumed optimizer continues where it was.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from onward.errors import LimitError, OnwardError
from onward.reading import parse_json

if TYPE_CHECKING:
    from onward.api.optimizer import Optimizer

__all__ = [
    "ConstantLRScheduler",
    "CosineLRScheduler",
    "LRScheduler",
    "LinearLRScheduler",
    "OneCycleLRScheduler",
    "PolynomialLRScheduler",
    "StepLRScheduler",
]


class LRScheduler:
    """Sets the optimizer's rate to initial_lr·factor(step); the constructor sets that of step 0.

    Warmup rises linearly from 0 over `warmup_step_count` steps; `factor` describes what comes after.
    """

    def __init__(self, optimizer: Optimizer, initial_lr: float, *, warmup_step_count: int = 0) -> None:
        if warmup_step_count < 0:
            raise ValueError(f"warmup_step_count is {warmup_step_count}: it must not be negative")
        if not (math.isfinite(initial_lr) and initial_lr >= 0):
            raise ValueError(f"initial_lr is {initial_lr}: it must be a finite number, 0 or more")
        self._optimizer = optimizer
        self._initial_lr = float(initial_lr)
        self._warmup = warmup_step_count
        self._step = 0
        # Asked of the optimizer, which has the checkpoint: a schedule is made anew in a resumed run.
        resumed = optimizer.follow(self, self._initial_lr)
        if isinstance(resumed, str):
            self._step = self._resumed_step(resumed)
        self._apply()

    def _resumed_step(self, text: str) -> int:
        """The step that a checkpoint recorded for a schedule of this kind; 0 where it has none."""
        try:
            saved = parse_json(text)
        except (ValueError, LimitError) as error:
            raise OnwardError(f"the checkpoint's schedule is damaged: {error}") from None
        step = saved.get("step")
        # another schedule begins at its own start: its step would mean another rate
        if saved.get("kind") != type(self).__name__:
            return 0
        if type(step) is not int or step < 0:
            raise OnwardError(f"the checkpoint's schedule is damaged: its step is {str(step)[:40]!r}")
        return step

    def factor(self, step: int) -> float:
        """The fraction of the initial rate at a step, counted from the start (warmup included)."""
        raise NotImplementedError

    def step(self) -> None:
        """Advance by one step; call it after `optimizer.step()`."""
        self._step += 1
        self._apply()

    def rate(self, step: int) -> float:
        """The learning rate at a step."""
        if step < self._warmup:
            return self._initial_lr * step / max(1, self._warmup)
        return self._initial_lr * self.factor(step)

    def rates(self, count: int) -> list[float]:
        """The learning rates of the next `count` steps, for `Module.train_steps`; the schedule moves past them."""
        first = self._step
        self._step += count
        self._apply()
        # The rate that is set is the last one's: what runs next uses the schedule's own.
        return [self.rate(step) for step in range(first, self._step)]

    def to_json(self) -> str:
        """The schedule's state for a checkpoint."""
        return json.dumps({"kind": type(self).__name__, "step": self._step})

    def _apply(self) -> None:
        self._optimizer.set_learning_rate(self.rate(self._step))


class LinearLRScheduler(LRScheduler):
    """Rises to the initial rate over the warmup, then falls linearly to 0 at the last step."""

    def __init__(
        self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float
    ) -> None:
        self._total = _positive("total_step_count", total_step_count)
        super().__init__(optimizer, initial_lr, warmup_step_count=warmup_step_count)

    def factor(self, step: int) -> float:
        """(total − s) / (total − warmup), at least 0"""
        return max(0.0, (self._total - step) / max(1, self._total - self._warmup))


class ConstantLRScheduler(LRScheduler):
    """The initial rate, after warmup."""

    def factor(self, step: int) -> float:
        """1"""
        return 1.0


class StepLRScheduler(LRScheduler):
    """Multiplies the rate by `gamma` every `step_size` steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        initial_lr: float,
        *,
        step_size: int,
        gamma: float = 0.1,
        warmup_step_count: int = 0,
    ) -> None:
        self._size, self._gamma = _positive("step_size", step_size), gamma
        super().__init__(optimizer, initial_lr, warmup_step_count=warmup_step_count)

    def factor(self, step: int) -> float:
        """γ^⌊(s − warmup)/size⌋"""
        return self._gamma ** ((step - self._warmup) // self._size)


class CosineLRScheduler(LRScheduler):
    """Cosine decay to `final_factor` of the initial rate."""

    def __init__(
        self,
        optimizer: Optimizer,
        initial_lr: float,
        *,
        total_step_count: int,
        warmup_step_count: int = 0,
        final_factor: float = 0.0,
    ) -> None:
        self._total, self._final = _positive("total_step_count", total_step_count), final_factor
        super().__init__(optimizer, initial_lr, warmup_step_count=warmup_step_count)

    def factor(self, step: int) -> float:
        """final + (1 − final)·½(1 + cos πt), t the share of the way"""
        return self._final + (1 - self._final) * 0.5 * (
            1 + math.cos(math.pi * _share(self, step, self._total))
        )


class PolynomialLRScheduler(LRScheduler):
    """Polynomial decay."""

    def __init__(
        self,
        optimizer: Optimizer,
        initial_lr: float,
        *,
        total_step_count: int,
        power: float = 1.0,
        warmup_step_count: int = 0,
        final_factor: float = 0.0,
    ) -> None:
        self._total, self._power = _positive("total_step_count", total_step_count), power
        self._final = final_factor
        super().__init__(optimizer, initial_lr, warmup_step_count=warmup_step_count)

    def factor(self, step: int) -> float:
        """final + (1 − final)·(1 − t)^power"""
        return self._final + (1 - self._final) * (1 - _share(self, step, self._total)) ** self._power


class OneCycleLRScheduler(LRScheduler):
    """One-cycle schedule: rises along a cosine to the maximum at `pct_start` of all steps, then falls to near zero."""

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float,
        *,
        total_step_count: int,
        pct_start: float = 0.3,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
    ) -> None:
        self._total = _positive("total_step_count", total_step_count)
        if not 0.0 <= pct_start <= 1.0:
            raise ValueError(f"pct_start is {pct_start}: it must lie between 0 and 1")
        self._start, self._div, self._final_div = pct_start, div_factor, final_div_factor
        super().__init__(optimizer, max_lr)

    def factor(self, step: int) -> float:
        """Cosine from 1/div to 1, then from 1 to 1/(div·final_div)"""
        # torch counts phases from step 0 to total − 1
        top = self._start * self._total - 1
        low, end = 1 / self._div, 1 / (self._div * self._final_div)
        if step <= top:
            return _cosine(low, 1.0, step / max(top, 1e-12))
        return _cosine(1.0, end, min(1.0, (step - top) / max(self._total - 1 - top, 1e-12)))


def _cosine(start: float, stop: float, share: float) -> float:
    return stop + (start - stop) / 2 * (1 + math.cos(math.pi * share))


def _share(scheduler: LRScheduler, step: int, total: int) -> float:
    return min(1.0, (step - scheduler._warmup) / max(1, total - scheduler._warmup))


def _positive(name: str, value: int) -> int:
    if value <= 0:
        raise ValueError(f"{name} is {value}: it must be positive")
    return value
