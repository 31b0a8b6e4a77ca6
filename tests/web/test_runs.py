"""Schedules and whole runs of the page's Trainer, against Python's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from onward import Trainer
from onward.api import schedulers
from web.models import make_data

if TYPE_CHECKING:
    from web.browser import Browser

# (class, Python's arguments after the optimizer, JavaScript's)
SCHEDULES: list[tuple[str, list, dict, list]] = [
    ("LinearLRScheduler", [5, 25, 0.1], {}, [5, 25, 0.1]),
    ("ConstantLRScheduler", [0.1], {"warmup_step_count": 4}, [0.1, {"warmupStepCount": 4}]),
    ("StepLRScheduler", [0.1], {"step_size": 7, "gamma": 0.5}, [0.1, {"stepSize": 7, "gamma": 0.5}]),
    (
        "CosineLRScheduler",
        [0.1],
        {"total_step_count": 25, "warmup_step_count": 3, "final_factor": 0.1},
        [0.1, {"totalStepCount": 25, "warmupStepCount": 3, "finalFactor": 0.1}],
    ),
    (
        "PolynomialLRScheduler",
        [0.1],
        {"total_step_count": 25, "power": 2.0},
        [0.1, {"totalStepCount": 25, "power": 2}],
    ),
    ("OneCycleLRScheduler", [0.1], {"total_step_count": 25}, [0.1, {"totalStepCount": 25}]),
]


@pytest.mark.parametrize(
    ("kind", "given", "named", "there"), SCHEDULES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_rates_are_pythons(harness: Browser, kind: str, given: list, named: dict, there: list) -> None:
    optimizer = SimpleNamespace(follow=lambda scheduler, rate: None, set_learning_rate=lambda rate: None)
    schedule = getattr(schedulers, kind)(optimizer, *given, **named)
    found = harness.evaluate("harness.rates", {"kind": kind, "given": there, "count": 30})
    np.testing.assert_allclose(found, [schedule.rate(step) for step in range(30)], rtol=1e-12, atol=1e-15)


RUNS: list[dict[str, Any]] = [
    {"name": "mlp", "schedule": "cosine", "warmup": 0.2, "gradient_accumulation_steps": 5},
    {"name": "cnn", "schedule": "one-cycle", "clip_norm": 0.3},
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_a_run_is_pythons(harness: Browser, models: dict[str, Path], run: dict[str, Any]) -> None:
    """400 samples in batches of 32: the last batch is smaller, and so is the last accumulation."""
    options = {"learning_rate": 3e-3, "seed": 5, **run}
    name = options.pop("name")
    trainer = Trainer(models[name], metrics=["accuracy"], progress=False, **options)
    data = make_data(name)
    train = (data.x[:400], data.labels[:400])
    history = trainer.fit(train, train, epochs=2, batch_size=32, shuffle=False)
    there = {_camel(key): value for key, value in options.items()}
    found = harness.evaluate(
        "harness.fit", {"name": name, "options": there, "samples": 400, "epochs": 2, "batchSize": 32}
    )
    for key in ("loss", "learning_rate", "gradient_norm"):
        np.testing.assert_allclose(
            [row[_camel(key)] for row in found["steps"]],
            [row[key] for row in history.steps],
            rtol=1e-3,
            atol=1e-4,
        )
    for key in ("loss", "eval_loss", "accuracy"):
        np.testing.assert_allclose(
            [row[_camel(key)] for row in found["epochs"]],
            [row[key] for row in history.epochs],
            rtol=0,
            atol=1e-4,
        )


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.title() for word in rest)
