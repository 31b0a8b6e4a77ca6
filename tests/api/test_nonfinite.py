"""What is NaN or infinite never reaches the parameters: raise, skip or (asked for) ignore."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import OptimType, generate_artifacts
from onward.errors import NonFiniteError
from small_models import batch, snapshot, start, with_weights, write_classifier, write_normalized


class Run(NamedTuple):
    state: CheckpointState
    module: Module
    optimizer: Optimizer

    def everything(self) -> dict[str, bytes]:
        """Parameters, statistics and optimizer state, bit by bit; the step count too."""
        found = snapshot(self.state)
        for name, slots in self.optimizer._updater.slots_by_parameter().items():
            found |= {f"{name}.{slot}": array.tobytes() for slot, array in slots.items()}
        return {**found, "step": str(self.optimizer._updater.step).encode()}

    def good(self, seed: int = 0) -> None:
        self.module(*batch(seed))
        assert self.optimizer.step()
        self.module.lazy_reset_grad()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def gradient_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A loss that stays finite where its gradient does not: √x at 0."""
    folder = tmp_path_factory.mktemp("gradient")
    text = """net (float[n, 4] x) => (float loss) {
        a = MatMul (x, w)  s = Mul (a, a)  r = Sqrt (s)  loss = ReduceMean <keepdims = 0> (r) }"""
    generate_artifacts(
        with_weights(text, w=(4, 8)),
        requires_grad=["w"],
        optimizer=OptimType.AdamW,
        artifact_directory=folder,
    )
    return folder


def with_value(value: float) -> tuple[np.ndarray, np.ndarray]:
    x, labels = batch(9)
    x[2, 1] = value
    return x, labels


def poison_weight(run: Run, value: float) -> None:
    data = run.state.parameters["w2"].data
    data[1, 1] = value
    run.state.parameters["w2"] = data


INPUTS = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
WEIGHTS = {"nan weight": np.nan, "inf weight": np.inf}


@pytest.mark.parametrize("value", INPUTS.values(), ids=INPUTS)
def test_raise_names_the_step_and_leaves_everything(folder: Path, value: float) -> None:
    run = Run(*start(folder))
    run.good()
    before = run.everything()
    if np.isnan(value):
        with pytest.raises(
            NonFiniteError, match=r"the loss is nan at training step 2; parameters are unchanged"
        ):
            run.module(*with_value(value))
    else:  # tanh makes an infinite input finite, but not its gradient
        run.module(*with_value(value))
        with pytest.raises(NonFiniteError, match=r"the gradient of 'w1'.* is not finite at training step 2"):
            run.optimizer.step()
    assert run.everything() == before
    run.good(1)
    assert run.everything() != before


@pytest.mark.parametrize("value", INPUTS.values(), ids=INPUTS)
def test_skip_leaves_everything_and_recovers(folder: Path, value: float) -> None:
    run = Run(*start(folder, on_nonfinite="skip"))
    run.good()
    before = run.everything()
    run.module(*with_value(value))
    assert run.optimizer.step() is False
    assert run.everything() == before
    # the gradients of the bad step are gone even where nobody resets
    run.module(*batch(1))
    assert run.optimizer.step() is True
    reference = Run(*start(folder))
    reference.good()
    reference.good(1)
    assert run.everything() == reference.everything()


@pytest.mark.parametrize("value", INPUTS.values(), ids=INPUTS)
def test_ignore_updates_all_the_same(folder: Path, value: float) -> None:
    run = Run(*start(folder, on_nonfinite="ignore"))
    run.module(*with_value(value))
    assert run.optimizer.step() is True
    assert not np.isfinite(run.state.parameters["w1"].data).all()


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("value", WEIGHTS.values(), ids=WEIGHTS)
def test_a_bad_weight_spreads_to_no_other(folder: Path, value: float, policy: Any) -> None:
    run = Run(*start(folder, on_nonfinite=policy))
    run.good()
    poison_weight(run, value)
    before = run.everything()
    if policy == "raise":
        with pytest.raises(NonFiniteError, match="the loss is"):
            run.module(*batch(1))
    else:
        run.module(*batch(1))
        assert not run.optimizer.step()
    assert run.everything() == before
    poison_weight(run, 0.1)
    run.good(1)


@pytest.mark.parametrize("policy", ["raise", "skip", "ignore"])
def test_a_gradient_that_is_not_finite_under_a_finite_loss(gradient_only: Path, policy: Any) -> None:
    run = Run(*start(gradient_only, on_nonfinite=policy))
    before = run.everything()
    loss = run.module(np.zeros((2, 4), np.float32))
    assert np.isfinite(loss)
    if policy == "raise":
        with pytest.raises(NonFiniteError, match=r"the gradient of 'w' is not finite at training step 1"):
            run.optimizer.step()
        assert run.everything() == before
    else:
        assert run.optimizer.step() is (policy == "ignore")
        assert (run.everything() == before) is (policy == "skip")


def test_an_error_that_is_passed_over_is_raised_again_by_the_optimizer(folder: Path) -> None:
    run = Run(*start(folder))
    run.good()
    before = run.everything()
    with pytest.raises(NonFiniteError):
        run.module(*with_value(np.nan))
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="training step 2"):
            run.optimizer.step()
    assert run.everything() == before
    run.good(1)


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_bad_batch_spoils_its_accumulation_window_only(folder: Path, bad: int, policy: Any) -> None:
    run = Run(*start(folder, on_nonfinite=policy))
    before = run.everything()
    refused = 0
    for index in range(3):
        try:
            run.module(*(with_value(np.nan) if index == bad else batch(index)))
        except NonFiniteError:
            refused += 1
            break
    if policy == "skip":
        assert not run.optimizer.step()
    assert refused == (policy == "raise")
    assert run.everything() == before
    run.module.lazy_reset_grad()
    run.good(5)
    reference = Run(*start(folder))
    reference.good(5)
    assert run.everything() == reference.everything()


def test_ten_skips_in_a_row_are_an_error(folder: Path) -> None:
    run = Run(*start(folder, on_nonfinite="skip"))
    before = run.everything()
    for _ in range(9):
        run.module(*with_value(np.nan))
        assert not run.optimizer.step()
    run.good()  # the count starts again
    before = run.everything()
    for _ in range(9):
        run.module(*with_value(np.nan))
        assert not run.optimizer.step()
    run.module(*with_value(np.nan))
    with pytest.raises(
        NonFiniteError, match=r"10 updates in a row were skipped.*the loss is nan at training step 20"
    ):
        run.optimizer.step()
    assert run.everything() == before
    run.module.lazy_reset_grad()
    run.good(1)


def test_the_count_of_skips_and_a_bad_window_survive_a_resume(folder: Path, tmp_path: Path) -> None:
    run = Run(*start(folder, on_nonfinite="skip"))
    for _ in range(9):
        run.module(*with_value(np.nan))
        assert not run.optimizer.step()
    run.module(*with_value(np.nan))
    CheckpointState.save_checkpoint(run.state, tmp_path / "later", include_optimizer_state=True)
    resumed = Run(*start(folder, tmp_path / "later", on_nonfinite="skip"))
    with pytest.raises(NonFiniteError, match="10 updates in a row"):
        resumed.optimizer.step()


# ---- batch norm ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def norm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_normalized(tmp_path_factory.mktemp("norm"), optimizer=OptimType.AdamW)


BAD_FOR_NORM: dict[str, Callable[[np.ndarray], object]] = {
    "nan": lambda x: x.__setitem__((0, 0), np.nan),
    # the variance overflows, the normalized values are 0, and loss and gradients are finite
    "overflow of the variance": lambda x: x.__imul__(np.float32(1e25)),
}


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("spoil", BAD_FOR_NORM.values(), ids=BAD_FOR_NORM)
def test_statistics_stay_as_they_were(norm_folder: Path, spoil: Callable, policy: Any) -> None:
    run = Run(*start(norm_folder, on_nonfinite=policy))
    run.good()
    before = run.everything()
    x, labels = batch(3)
    spoil(x)
    run.module.lazy_reset_grad()
    run.module(*batch(4))  # a good one in the same window: its statistics go, too
    if policy == "raise":
        with pytest.raises(NonFiniteError, match="at training step 3"):
            run.module(x, labels)
    else:
        run.module(x, labels)
        assert not run.optimizer.step()
    assert run.everything() == before
    run.module.lazy_reset_grad()
    run.good(5)
    assert all(np.isfinite(p.data).all() for _, p in run.state.parameters)
