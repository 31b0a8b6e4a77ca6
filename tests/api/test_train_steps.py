"""Many steps in one call do what the loop over steps does, in one run where that is possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.api import LinearLRScheduler, Module, Optimizer
from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.errors import NonFiniteError, OnwardError
from onward.onnxblock import optim
from onward.optim import ParameterGroup
from small_models import batch, snapshot, start, with_weights, write_classifier, write_normalized

STEPS = 7
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (write_classifier, {}),
    "SGD with momentum": (write_classifier, {"optimizer": optim.SGD(momentum=0.9, nesterov=True)}),
    "Lion": (write_classifier, {"optimizer": OptimType.Lion}),
    "dropout": (write_classifier, {"dropout": 0.4}),
    "batch norm": (write_normalized, {"optimizer": OptimType.AdamW}),
    "a frozen layer": (write_classifier, {"requires_grad": ["w2", "b2"], "frozen_params": ["w1", "b1"]}),
    "groups": (
        write_classifier,
        {
            "parameter_groups": [
                ParameterGroup(("b1", "b2"), weight_decay=0.0),
                ParameterGroup(("w2",), learning_rate_scale=0.1),
            ]
        },
    ),
}


def stacks(count: int = STEPS, size: int = 6) -> tuple[np.ndarray, np.ndarray]:
    x, labels = zip(*[batch(seed, size) for seed in range(count)])
    return np.stack(x), np.stack(labels)


def losses_of(results: Any) -> np.ndarray:
    return np.asarray(results[0] if isinstance(results, tuple) else results)


def step_by_step(
    module: Module, optimizer: Optimizer, x: np.ndarray, labels: np.ndarray, rates: Any = None
) -> list:
    made = []
    for index in range(len(x)):
        if rates is not None:
            optimizer.set_learning_rate(rates[index])
        made.append(module(x[index], labels[index]))
        optimizer.step()
        module.lazy_reset_grad()
    return made


def everything(state: Any, optimizer: Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = snapshot(state)
    found |= {f"{name}.grad": p.grad.tobytes() for name, p in state.parameters if p.requires_grad}
    for name, slots in optimizer._updater.slots_by_parameter().items():
        found |= {f"{name}.{slot}": array.tobytes() for slot, array in slots.items()}
    run = optimizer._module.run_state
    return {**found, "updates": optimizer._updater.step, "steps": run.steps, "skipped": run.skipped_in_a_row}


def joined(optimizer: Optimizer) -> bool:
    """Whether a session for many steps was made and used."""
    many = optimizer._many_steps
    return many is not None and bool(many._sessions) and not many._unfit


@pytest.mark.parametrize(("write", "options"), CASES.values(), ids=CASES)
def test_equals_the_loop_to_the_bit(write: Any, options: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path, **options)
    rates = np.linspace(3e-2, 1e-3, 2 * STEPS)
    x, labels = stacks(2 * STEPS)
    state, module, optimizer = start(folder, seed=5)
    expected = step_by_step(module, optimizer, x, labels, rates)
    other, quick, updater = start(folder, seed=5)
    found = [
        quick.train_steps(x[part], labels[part], learning_rates=rates[part])
        for part in (slice(0, STEPS), slice(STEPS, None))
    ]
    assert joined(updater)
    if isinstance(expected[0], tuple):
        for index in range(len(expected[0])):
            np.testing.assert_array_equal(
                np.concatenate([part[index] for part in found]), [made[index] for made in expected]
            )
    else:
        np.testing.assert_array_equal(np.concatenate(found), expected)
    assert everything(other, updater) == everything(state, optimizer)
    assert updater.gradient_norm == pytest.approx(optimizer.gradient_norm, rel=1e-6)
    # and both train on alike
    more = batch(99)
    assert losses_of(module(*more)) == losses_of(quick(*more))


@pytest.mark.parametrize(
    ("clip_norm", "options"),
    [(0.05, {}), (None, {"opset": 13})],
    # opset 13 has no CastLike, so the runtime folds more sizes and fuses a scale into a product
    ids=["clipping", "sizes that fuse"],
)
def test_equals_the_loop_within_rounding_where_sums_differ(
    clip_norm: float | None, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_classifier(tmp_path, **options)
    made = []
    for many in (False, True):
        state, module, optimizer = start(folder)
        optimizer.clip_norm = clip_norm
        x, labels = stacks(20)
        if many:
            module.train_steps(x, labels)
            assert joined(optimizer)
        else:
            step_by_step(module, optimizer, x, labels)
        made.append(np.concatenate([p.data.reshape(-1) for _, p in state.parameters]))
    np.testing.assert_allclose(made[1], made[0], rtol=0, atol=1e-6)


def test_a_schedule_gives_the_rates(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path)
    x, labels = stacks()
    state, module, optimizer = start(folder)
    schedule = LinearLRScheduler(optimizer, 2, STEPS + 3, 1e-2)
    for index in range(STEPS):
        module(x[index], labels[index])
        optimizer.step()
        schedule.step()
        module.lazy_reset_grad()
    other, quick, updater = start(folder)
    schedule = LinearLRScheduler(updater, 2, STEPS + 3, 1e-2)
    quick.train_steps(x, labels, learning_rates=schedule.rates(STEPS))
    assert snapshot(other) == snapshot(state)
    assert updater.get_learning_rate() == optimizer.get_learning_rate()


@pytest.mark.parametrize("policy", ["skip", "ignore"])
def test_a_batch_that_is_not_finite_is_skipped_or_ignored_as_by_the_loop(policy: Any, tmp_path: Path) -> None:
    folder = write_classifier(tmp_path)
    x, labels = stacks()
    x[3, 1, 2] = np.nan
    found = []
    for many in (False, True):
        state, module, optimizer = start(folder, on_nonfinite=policy)
        if many:
            module.train_steps(x, labels)
        else:
            step_by_step(module, optimizer, x, labels)
        found.append(everything(state, optimizer))
    assert found[0] == found[1]


def test_a_batch_that_is_not_finite_raises_after_the_steps_before_it(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path)
    x, labels = stacks()
    x[3, 1, 2] = np.inf
    state, module, optimizer = start(folder)
    step_by_step(module, optimizer, x[:3], labels[:3])
    other, quick, _ = start(folder)
    with pytest.raises(NonFiniteError, match="at training step 4"):
        quick.train_steps(x, labels)
    assert snapshot(other) == snapshot(state)


def test_batches_of_other_shapes_get_sessions_of_their_own(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path)
    state, module, optimizer = start(folder)
    other, quick, updater = start(folder)
    for size in (3, 6, 1, 3):
        x, labels = stacks(3, size)
        step_by_step(module, optimizer, x, labels)
        quick.train_steps(x, labels)
    assert everything(other, updater) == everything(state, optimizer)
    assert joined(updater)


def test_optimizers_over_whole_parameters_and_large_models_take_steps_one_by_one(tmp_path: Path) -> None:
    x, labels = stacks(3)
    lamb = write_classifier(tmp_path / "lamb", optimizer=OptimType.Lamb)
    state, module, optimizer = start(lamb)
    step_by_step(module, optimizer, x, labels)
    other, quick, updater = start(lamb)
    quick.train_steps(x, labels)
    assert everything(other, updater) == everything(state, optimizer)
    assert updater._many_steps is None

    wide = with_weights(
        "net (float[n, 4] x) => (float[n, 3] y) { h = MatMul (x, w1)  y = MatMul (h, w2) }",
        w1=(4, 40_000), w2=(40_000, 3),
    )  # fmt: skip
    generate_artifacts(
        wide, requires_grad=["w1", "w2"], loss=LossType.CrossEntropyLoss, optimizer=OptimType.SGD,
        artifact_directory=tmp_path / "wide",
    )  # fmt: skip
    _, module, optimizer = start(tmp_path / "wide")
    assert module.train_steps(x, labels).shape == (3,)
    assert optimizer._many_steps is None


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "other counts": (lambda x, y: ((x, y[:-1]), {}), ValueError, "as many for 'labels' as for 'x'"),
    "no step": (lambda x, y: ((x[:0], y[:0]), {}), ValueError, "at least one"),
    "one batch": (lambda x, y: ((x[0], y[0]), {}), ValueError, "shape|stacks|inputs"),
    "a label out of range": (lambda x, y: ((x, y + 1), {}), ValueError, "3 classes"),
    "too few rates": (lambda x, y: ((x, y), {"learning_rates": [0.1]}), ValueError, "1 learning rates for 7"),
    "no number": (
        lambda x, y: ((x, y), {"learning_rates": [np.nan] * STEPS}),
        ValueError,
        "learning rate of step 0 is nan",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls_say_what_is_wrong_and_change_nothing(
    call: Any, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    state, module, optimizer = start(write_classifier(tmp_path))
    before = everything(state, optimizer)
    given, options = call(*stacks())
    with pytest.raises(kind, match=message):
        module.train_steps(*given, **options)
    assert everything(state, optimizer) == before


def test_it_needs_an_optimizer_and_training_mode(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path)
    _, module, _ = start(folder)
    with pytest.raises(OnwardError, match="evaluation mode"):
        module.eval().train_steps(*stacks())
    module.train()._optimizer = None
    with pytest.raises(OnwardError, match="needs an optimizer"):
        module.train_steps(*stacks())
