"""Dropout in training: random from step to step, the same for the same seed, distributed as torch's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from onward.api import CheckpointState
from onward.artifacts import LossType, OptimType, generate_artifacts
from small_models import load, start, with_weights

RATE, SHAPE = 0.3, (64, 256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """y = dropout(x)·w and the dropped values themselves."""
    folder = tmp_path_factory.mktemp("dropout")
    text = f"""net (float[n, 256] x) => (float[n, 1] y) <float rate = {{{RATE}}}, bool training = {{1}}> {{
        kept, mask = Dropout (x, rate, training)  y = MatMul (kept, w) }}"""
    generate_artifacts(
        with_weights(text, w=(256, 1)), requires_grad=["w"], loss=LossType.MSELoss, optimizer=OptimType.SGD,
        artifact_directory=folder, additional_output_names=["kept"],
    )  # fmt: skip
    return folder


ONES, TARGET = np.ones(SHAPE, np.float32), np.zeros((64, 1), np.float32)


def masks(folder: Path, count: int, **options: int) -> list[np.ndarray]:
    _, module = load(folder, **options)
    return [module(ONES, TARGET)[1] for _ in range(count)]


def test_every_step_drops_other_values(folder: Path) -> None:
    found = masks(folder, 5)
    assert len({mask.tobytes() for mask in found}) == 5


def test_a_seed_gives_the_same_steps_and_another_seed_others(folder: Path) -> None:
    one, same, other = (masks(folder, 3, seed=seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(one, same)
    assert all(a.tobytes() != b.tobytes() for a, b in zip(one, other))
    # neighbouring seeds do not share steps
    assert not {mask.tobytes() for mask in one} & {mask.tobytes() for mask in other}


def test_without_a_seed_runs_are_reproducible_too(folder: Path) -> None:
    np.testing.assert_array_equal(masks(folder, 2), masks(folder, 2))


def test_a_resumed_run_continues_the_sequence(folder: Path, tmp_path: Path) -> None:
    whole = masks(folder, 6, seed=11)
    state, module, _ = start(folder, seed=11)
    first = [module(ONES, TARGET)[1] for _ in range(2)]
    CheckpointState.save_checkpoint(state, tmp_path / "later", include_optimizer_state=True)
    _, resumed, _ = start(folder, tmp_path / "later")
    np.testing.assert_array_equal([*first, *(resumed(ONES, TARGET)[1] for _ in range(4))], whole)


def test_a_refused_call_does_not_use_up_a_step(folder: Path) -> None:
    _, module = load(folder)
    with pytest.raises(ValueError, match="x"):
        module(ONES[:, :3], TARGET)
    np.testing.assert_array_equal(module(ONES, TARGET)[1], masks(folder, 1)[0])


def test_values_are_dropped_as_often_and_scaled_as_torch_does(folder: Path) -> None:
    ours = np.stack(masks(folder, 12))
    torch.manual_seed(0)
    theirs = np.stack([torch.dropout(torch.ones(*SHAPE), RATE, True).numpy() for _ in range(12)])
    assert {0.0, float(np.float32(1 / (1 - RATE)))} == set(np.unique(ours).tolist())
    np.testing.assert_allclose(np.unique(ours), np.unique(theirs), rtol=1e-6)
    # the share of zeros is binomial: five standard deviations, also along each axis and between neighbours
    zeros = ours == 0
    for found, count in (
        (zeros.mean(), zeros.size),
        *((value, zeros.size / 12) for value in zeros.mean((1, 2))),
        *((value, zeros.size / 256) for value in zeros.mean((0, 1))),
        *((value, zeros.size / 64) for value in zeros.mean((0, 2))),
    ):
        assert abs(found - RATE) < 5 * np.sqrt(RATE * (1 - RATE) / count)
    for axis in range(3):
        one, two = (
            np.take(zeros, range(zeros.shape[axis] - 1), axis),
            np.take(zeros, range(1, zeros.shape[axis]), axis),
        )
        correlation = np.corrcoef(one.ravel(), two.ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(one.size)


def test_what_is_dropped_gets_no_gradient(folder: Path) -> None:
    state, module = load(folder)
    loss, kept = module(ONES[:1], TARGET[:1] + 1)
    gradient = state.parameters["w"].grad
    assert gradient is not None and np.isfinite(loss)
    np.testing.assert_array_equal(gradient.ravel() == 0, kept[0] == 0)


def test_evaluation_drops_nothing(folder: Path) -> None:
    _, module = load(folder)
    np.testing.assert_array_equal(module.eval()(ONES, TARGET)[1], ONES)
