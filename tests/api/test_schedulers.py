"""Learning-rate schedules against their formulas, against torch's, and after a resume."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onward.api import (
    CheckpointState,
    ConstantLRScheduler,
    CosineLRScheduler,
    LinearLRScheduler,
    LRScheduler,
    OneCycleLRScheduler,
    Optimizer,
    PolynomialLRScheduler,
    StepLRScheduler,
)
from small_models import start, write_classifier

RATE, TOTAL, WARMUP = 0.3, 20, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="module")
def optimizer(folder: Path) -> Optimizer:
    return start(folder)[2]


def rates(scheduler: LRScheduler, optimizer: Optimizer, count: int) -> list[float]:
    found = [optimizer.get_learning_rate()]
    for _ in range(count - 1):
        scheduler.step()
        found.append(optimizer.get_learning_rate())
    return found


def original_linear(step: int, warmup: int) -> float:
    return step / max(1, warmup) if step < warmup else max(0.0, (TOTAL - step) / max(1, TOTAL - warmup))


def after_warmup(formula: Callable[[float], float]) -> Callable[[int, int], float]:
    def factor(step: int, warmup: int) -> float:
        if step < warmup:
            return step / warmup
        return formula(min(1.0, (step - warmup) / (TOTAL - warmup)))

    return factor


Make = Callable[[Optimizer, int], LRScheduler]
FORMULAS: dict[str, tuple[Make, Callable[[int, int], float]]] = {
    "linear": (lambda o, w: LinearLRScheduler(o, w, TOTAL, RATE), original_linear),
    "constant": (
        lambda o, w: ConstantLRScheduler(o, RATE, warmup_step_count=w),
        lambda s, w: s / w if s < w else 1.0,
    ),
    "step": (
        lambda o, w: StepLRScheduler(o, RATE, step_size=3, gamma=0.5, warmup_step_count=w),
        lambda s, w: s / w if s < w else 0.5 ** ((s - w) // 3),
    ),
    "cosine": (
        lambda o, w: CosineLRScheduler(
            o, RATE, total_step_count=TOTAL, warmup_step_count=w, final_factor=0.1
        ),
        after_warmup(lambda t: 0.1 + 0.9 * (1 + math.cos(math.pi * t)) / 2),
    ),
    "polynomial": (
        lambda o, w: PolynomialLRScheduler(
            o, RATE, total_step_count=TOTAL, power=3.0, warmup_step_count=w, final_factor=0.2
        ),
        after_warmup(lambda t: 0.2 + 0.8 * (1 - t) ** 3),
    ),
}


@pytest.mark.parametrize("warmup", [0, 1, WARMUP])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_schedule_follows_its_formula(optimizer: Optimizer, name: str, warmup: int) -> None:
    make, factor = FORMULAS[name]
    found = rates(make(optimizer, warmup), optimizer, TOTAL + 3)  # and stays put after the end
    assert found == pytest.approx([RATE * factor(step, warmup) for step in range(TOTAL + 3)], rel=1e-12)


def torch_rates(make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]) -> list[float]:
    reference = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = make(reference)
        found = [reference.param_groups[0]["lr"]]
        for _ in range(TOTAL - 1):
            reference.step()
            scheduler.step()
            found.append(reference.param_groups[0]["lr"])
    return found


schedules = torch.optim.lr_scheduler
TORCH: dict[str, tuple[Callable[[Optimizer], LRScheduler], Callable]] = {
    "ConstantLR": (lambda o: ConstantLRScheduler(o, RATE), lambda t: schedules.ConstantLR(t, factor=1.0)),
    "LinearLR": (
        lambda o: LinearLRScheduler(o, 0, TOTAL, RATE),
        lambda t: schedules.LinearLR(t, 1.0, 0.0, total_iters=TOTAL),
    ),
    "StepLR": (
        lambda o: StepLRScheduler(o, RATE, step_size=4, gamma=0.3),
        lambda t: schedules.StepLR(t, step_size=4, gamma=0.3),
    ),
    "CosineAnnealingLR": (
        lambda o: CosineLRScheduler(o, RATE, total_step_count=TOTAL, final_factor=0.1),
        lambda t: schedules.CosineAnnealingLR(t, T_max=TOTAL, eta_min=0.1 * RATE),
    ),
    "PolynomialLR": (
        lambda o: PolynomialLRScheduler(o, RATE, total_step_count=TOTAL, power=2.0),
        lambda t: schedules.PolynomialLR(t, total_iters=TOTAL, power=2.0),
    ),
    "OneCycleLR": (
        lambda o: OneCycleLRScheduler(o, RATE, total_step_count=TOTAL),
        lambda t: schedules.OneCycleLR(t, max_lr=RATE, total_steps=TOTAL),
    ),
    "OneCycleLR(late)": (
        lambda o: OneCycleLRScheduler(o, RATE, total_step_count=TOTAL, pct_start=0.7, div_factor=10),
        lambda t: schedules.OneCycleLR(t, max_lr=RATE, total_steps=TOTAL, pct_start=0.7, div_factor=10),
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_a_schedule_is_torchs(optimizer: Optimizer, name: str) -> None:
    ours, theirs = TORCH[name]
    found = rates(ours(optimizer), optimizer, TOTAL)
    assert found == pytest.approx(torch_rates(theirs), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_resumed_schedule_goes_on(folder: Path, tmp_path: Path, name: str) -> None:
    make, _ = FORMULAS[name]
    state, _, optimizer = start(folder)
    scheduler = make(optimizer, WARMUP)
    expected = rates(scheduler, optimizer, 7)
    CheckpointState.save_checkpoint(state, tmp_path / "later", include_optimizer_state=True)
    expected = rates(scheduler, optimizer, TOTAL)
    _, _, resumed = start(folder, tmp_path / "later")
    assert resumed.get_learning_rate() == expected[0]  # also without a scheduler
    assert rates(make(resumed, WARMUP), resumed, TOTAL) == expected
    again = make(resumed, WARMUP)  # a second schedule in the same run is a new one
    assert resumed.get_learning_rate() == again.rate(0)


def test_the_original_starts_at_zero_with_warmup(optimizer: Optimizer) -> None:
    LinearLRScheduler(optimizer, 2, 10, 0.5)
    assert optimizer.get_learning_rate() == 0.0
    LinearLRScheduler(optimizer, 0, 10, 0.5)
    assert optimizer.get_learning_rate() == 0.5


def test_a_schedule_of_ones_own_is_a_factor(optimizer: Optimizer) -> None:
    class Halving(LRScheduler):
        def factor(self, step: int) -> float:
            return 0.5**step

    assert rates(Halving(optimizer, 0.8), optimizer, 3) == pytest.approx([0.8, 0.4, 0.2])


WRONG: dict[str, tuple[Callable[[Optimizer], object], str]] = {
    "negative warmup": (
        lambda o: ConstantLRScheduler(o, 0.1, warmup_step_count=-1),
        "warmup_step_count is -1",
    ),
    "nan": (lambda o: ConstantLRScheduler(o, math.nan), "initial_lr is nan"),
    "negative rate": (lambda o: ConstantLRScheduler(o, -0.1), "initial_lr is -0.1"),
    "no steps": (lambda o: LinearLRScheduler(o, 0, 0, 0.1), "total_step_count is 0"),
    "step size": (lambda o: StepLRScheduler(o, 0.1, step_size=0), "step_size is 0"),
    "start": (lambda o: OneCycleLRScheduler(o, 0.1, total_step_count=5, pct_start=2), "pct_start is 2"),
    "rate": (lambda o: o.set_learning_rate(math.inf), "learning rate is inf"),
}


@pytest.mark.parametrize(("use", "message"), WRONG.values(), ids=WRONG)
def test_impossible_schedules_are_refused(
    optimizer: Optimizer, use: Callable[[Optimizer], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        use(optimizer)
