"""Large tables get the gradients of the rows that were read in place, and no other row keeps an old one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from onward.api import CheckpointState, Module
from onward.artifacts import LossType, generate_artifacts
from onward.errors import NonFiniteError

ROWS, WIDTH = 4000, 20  # large enough to be treated so


def write(folder: Path, *, ids: str = "int64", tied: bool = False) -> Path:
    score = "w_t = Transpose<perm=[1, 0]> (table) y = MatMul (m, w_t)" if tied else "y = MatMul (m, head)"
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]>
        net ({ids}[n, s] ids, float[n, s, 1] scale) => (float[n, c] y) <int64[1] one = {{1}}>
        {{ e = Gather (table, ids) f = Mul (e, scale) m = ReduceMean<keepdims=0> (f, one) {score} }}"""
    )
    rng = np.random.default_rng(0)
    names = ["table"] if tied else ["table", "head"]
    for name, shape in (("table", (ROWS, WIDTH)), ("head", (WIDTH, 5))):
        if name in names:
            array = rng.normal(0, 0.1, shape).astype(np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    generate_artifacts(model, requires_grad=names, loss=LossType.CrossEntropyLoss, artifact_directory=folder)
    return folder


def start(folder: Path, **options: str) -> tuple[CheckpointState, Module]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    return state, Module(folder / "training_model.onnx", state, **options)  # pyright: ignore[reportArgumentType]


def batch(seed: int, kind: str = "int64") -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(-ROWS, ROWS, (3, 6)).astype(kind)
    ids[0, :3] = ids[1, 0]  # some rows several times
    return [ids, rng.normal(size=(3, 6, 1)).astype(np.float32), rng.integers(0, 5, 3)]


def gradient(state: CheckpointState) -> np.ndarray:
    return state.parameters["table"].grad


@pytest.mark.parametrize("kind", ["int64", "int32"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_step_equals_that_of_a_new_module(kind: str, tied: bool, tmp_path: Path) -> None:
    folder = write(tmp_path, ids=kind, tied=tied)
    state, module = start(folder)
    assert bool(module.step._bound[True].rows) != tied
    for seed in range(4):
        module(*batch(seed, kind))
        module.lazy_reset_grad()
        fresh, other = start(folder)
        other(*batch(seed, kind))
        np.testing.assert_array_equal(gradient(state), gradient(fresh))
        read = np.unique(batch(seed, kind)[0] % ROWS)
        if not tied:
            assert set(np.flatnonzero(gradient(state).any(axis=1))) == set(read)


def test_gradients_add_up_over_steps(tmp_path: Path) -> None:
    folder = write(tmp_path)
    state, module = start(folder)
    alone = []
    for seed in range(3):
        module(*batch(seed))
        module.lazy_reset_grad()
        alone.append(gradient(state))
    for again in range(2):  # the second time, from what the first one left
        for seed in range(3):
            module(*batch(seed))
        np.testing.assert_allclose(gradient(state), sum(alone), rtol=1e-5, atol=1e-9, err_msg=f"{again}")
        module.lazy_reset_grad()


def test_a_resumed_accumulation_leaves_no_rows_behind(tmp_path: Path) -> None:
    folder = write(tmp_path)
    state, module = start(folder)
    module(*batch(0))
    CheckpointState.save_checkpoint(state, tmp_path / "saved", include_optimizer_state=True)
    resumed = CheckpointState.load_checkpoint(tmp_path / "saved")
    other = Module(folder / "training_model.onnx", resumed)
    np.testing.assert_array_equal(gradient(resumed), gradient(state))
    other.lazy_reset_grad()
    other(*batch(1))
    module.lazy_reset_grad()
    module(*batch(1))
    np.testing.assert_array_equal(gradient(resumed), gradient(state))


def test_a_step_that_fails_leaves_no_rows_behind(tmp_path: Path) -> None:
    folder = write(tmp_path)
    state, module = start(folder)
    bad = batch(0)
    bad[1][0, 0] = np.nan
    with pytest.raises(NonFiniteError):
        module(*bad)
    wrong = [np.full((3, 6), ROWS), *batch(0)[1:]]
    with pytest.raises(ValueError, match="the step failed"):
        module(*wrong)
    module(*batch(1))
    fresh, other = start(folder)
    other(*batch(1))
    np.testing.assert_array_equal(gradient(state), gradient(fresh))
