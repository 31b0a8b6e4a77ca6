"""Batch-norm statistics: state of the run, whichever list they were in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from onward.api import CheckpointState
from small_models import NORMALIZED, batch, start, write_normalized

LISTS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "in neither list": {"frozen_params": None},
}


@pytest.mark.parametrize("lists", LISTS.values(), ids=LISTS)
def test_statistics_follow_the_batches(lists: dict[str, Any], tmp_path: Path) -> None:
    folder = write_normalized(tmp_path / "artifacts", **lists)
    state, module, optimizer = start(folder)
    assert {name for name, _ in state.parameters} == {*NORMALIZED, "mean", "var"}
    mean, variance = state.parameters["mean"].data, state.parameters["var"].data
    for seed in range(200):
        x, labels = batch(seed, size=8)
        before = x @ state.parameters["w1"].data
        mean = 0.9 * mean + 0.1 * before.mean(0)
        variance = 0.9 * variance + 0.1 * before.var(0, ddof=1)  # as torch: unbiased
        module(x, labels)
        optimizer.step()
        module.lazy_reset_grad()
    assert np.abs(mean).max() > 0.01
    np.testing.assert_allclose(state.parameters["mean"].data, mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.parameters["var"].data, variance, rtol=1e-5, atol=1e-6)
    assert not state.parameters["mean"].requires_grad and state.parameters["mean"].grad is None


def test_statistics_are_saved_and_used_by_evaluation_and_export(tmp_path: Path) -> None:
    folder = write_normalized(tmp_path / "artifacts", additional_output_names=["scores"])
    state, module, optimizer = start(folder)
    for seed in range(20):
        module(*batch(seed))
        optimizer.step()
        module.lazy_reset_grad()
    p = {name: parameter.data for name, parameter in state.parameters}
    x, labels = batch(99)
    hidden = (x @ p["w1"] - p["mean"]) / np.sqrt(p["var"] + 1e-5) * p["scale"] + p["bias"]
    expected = np.maximum(hidden, 0) @ p["w2"]
    np.testing.assert_allclose(module.eval()(x, labels)[1], expected, rtol=1e-4, atol=1e-5)

    module.export_model_for_inferencing(tmp_path / "model.onnx", ["scores"])
    (found,) = ort.InferenceSession(tmp_path / "model.onnx").run(None, {"x": x})
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

    CheckpointState.save_checkpoint(state, tmp_path / "later")
    loaded = CheckpointState.load_checkpoint(tmp_path / "later")
    for name in ("mean", "var"):
        np.testing.assert_array_equal(loaded.parameters[name].data, p[name])


def test_evaluation_does_not_move_statistics(tmp_path: Path) -> None:
    state, module, _ = start(write_normalized(tmp_path))
    before = state.parameters["mean"].data
    module.eval()(*batch())
    np.testing.assert_array_equal(state.parameters["mean"].data, before)


def test_each_batch_of_an_accumulation_moves_statistics(tmp_path: Path) -> None:
    state, module, _ = start(write_normalized(tmp_path))
    seen = [state.parameters["mean"].data.tobytes()]
    for seed in range(3):
        module(*batch(seed))
        seen.append(state.parameters["mean"].data.tobytes())
    assert len(set(seen)) == 4
