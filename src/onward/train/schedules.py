"""Schedules by name, fitted to the length of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from onward.api import schedulers
from onward.errors import did_you_mean

if TYPE_CHECKING:
    from onward.api.optimizer import Optimizer

Schedule: TypeAlias = "str | Callable[[Optimizer, int | None], schedulers.LRScheduler]"
SCHEDULES = ("constant", "linear", "cosine", "step", "one-cycle", "polynomial")


def make_schedule(
    schedule: Schedule, optimizer: Optimizer, rate: float, *, total: int | None, warmup: float = 0
) -> schedulers.LRScheduler:
    """The scheduler of a run of `total` updates; warmup counts them, or is a share of them when below 1."""
    if not isinstance(schedule, str):
        return schedule(optimizer, total)
    require_schedule(schedule)
    if warmup < 0:
        raise ValueError(f"warmup is {warmup}: it must not be negative")
    if total is None and schedule == "constant" and 0 < warmup < 1:
        raise ValueError(
            f"warmup is {warmup}, a fraction of all updates, and this data does not tell how many there are: "
            "give a number of updates"
        )
    if total is None and schedule != "constant":
        raise ValueError(
            f"schedule='{schedule}' needs the number of batches of an epoch, which this data does not tell: "
            "pass a list or arrays, or schedule='constant'"
        )
    # 1 is one update, not all of them: a share is below it
    steps = round(warmup * total) if 0 < warmup < 1 and total is not None else int(warmup)
    if schedule == "constant" or total is None:
        return schedulers.ConstantLRScheduler(optimizer, rate, warmup_step_count=steps)
    if schedule == "linear":
        return schedulers.LinearLRScheduler(optimizer, steps, total, rate)
    if schedule == "cosine":
        return schedulers.CosineLRScheduler(optimizer, rate, total_step_count=total, warmup_step_count=steps)
    if schedule == "step":
        return schedulers.StepLRScheduler(
            # three plateaus, whatever the length of the run
            optimizer,
            rate,
            step_size=max(1, total // 3),
            warmup_step_count=steps,
        )
    if schedule == "polynomial":
        return schedulers.PolynomialLRScheduler(
            optimizer, rate, total_step_count=total, power=2.0, warmup_step_count=steps
        )
    return schedulers.OneCycleLRScheduler(optimizer, rate, total_step_count=total)


def require_schedule(schedule: Schedule) -> None:
    """Reject an unknown schedule name; the error lists the known ones."""
    if isinstance(schedule, str) and schedule not in SCHEDULES:
        hint = did_you_mean(schedule, SCHEDULES)
        raise ValueError(f"no schedule '{schedule}': there are {', '.join(SCHEDULES)}{hint}")


def schedule_name(schedule: Schedule) -> str:
    """The name of a schedule for reports."""
    return schedule if isinstance(schedule, str) else getattr(schedule, "__name__", "a function")
