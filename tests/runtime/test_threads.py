"""What may depend on the number of threads, and what may not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from onward.api import CheckpointState, Module
from small_models import write_classifier


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("artifacts"), dropout=0.5)


def step(folder: Path, threads: int) -> tuple[float, dict[str, np.ndarray]]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, session_options=options)
    x = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
    loss, _ = module(x, np.arange(256) % 3)
    return float(loss), {p.name: np.array(p.grad) for _, p in state.parameters}


@pytest.mark.parametrize("threads", [2, 16, 64])
def test_a_step_has_the_same_dropout_and_gradients(artifacts: Path, threads: int) -> None:
    """Another mask would change the loss in its first digits; another order of sums, in its last."""
    loss, gradients = step(artifacts, 1)
    found, others = step(artifacts, threads)
    assert found == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(others[name], gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=name)
