"""The browser trains what Python trains, from the same files, to the same losses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from onward.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from web.models import MODELS, OPTIMIZERS, make_data

if TYPE_CHECKING:
    from web.browser import Browser

RATE = 3e-3


def python_curve(
    folder: Path,
    name: str,
    *,
    count: int = 100,
    accumulate: int = 1,
    seed: int = 7,
    total: int | None = None,
    optimizer: str = "optimizer_model.onnx",
) -> tuple[list[float], float]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx", seed=seed)
    update = Optimizer(folder / optimizer, module)
    update.set_learning_rate(RATE)
    scheduler = None if total is None else LinearLRScheduler(update, 5, total, RATE)
    data = make_data(name)
    losses = []
    for i in range(count):
        part = slice(16 * i, 16 * (i + 1))
        losses.append(float(module(data.x[part], data.labels[part])))
        if (i + 1) % accumulate == 0:
            update.step()
            module.lazy_reset_grad()
            if scheduler is not None:
                scheduler.step()
    module.eval()
    return losses, float(module(data.x[:64], data.labels[:64]))


CASES: list[dict[str, Any]] = [
    *({"name": name} for name in MODELS),
    {"name": "mlp", "accumulate": 3},
    {"name": "cnn", "accumulate": 2, "total": 40},
    *({"name": "mlp", "optimizer": f"{prefix}optimizer_model.onnx"} for prefix in OPTIMIZERS),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_loss_curve_is_pythons(harness: Browser, models: dict[str, Path], case: dict[str, Any]) -> None:
    losses, evaluation = python_curve(models[case["name"]], **case)
    schedule = {"schedule": "LinearLRScheduler"} if "total" in case else {}
    found = harness.evaluate("harness.curve", {"count": 100, "rate": RATE, "seed": 7, **schedule, **case})
    np.testing.assert_allclose(found["losses"], losses, rtol=0, atol=1e-4)
    np.testing.assert_allclose(found["evaluation"], evaluation, rtol=0, atol=1e-4)
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:10])
