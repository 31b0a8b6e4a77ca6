"""Data parallel: the number of ranks changes the speed, not the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import ranks
from models import classifier, points

from onward.distributed import Parameters, ShardedArrays, TrainingRunner


def train(
    folder: str, export: str | None = None, samples: int = 22, batch_size: int = 8, **settings: Any
) -> dict[str, Any]:
    """Two epochs on this rank; what it has seen and what it has in the end."""
    runner = TrainingRunner(
        Parameters(artifacts=folder, epochs=2, learning_rate=0.05, timeout=20, **settings)
    )
    runner.initialize()
    loader = ShardedArrays(*points(samples), batch_size=batch_size, seed=3)
    test = ShardedArrays(*points(10, seed=1), batch_size=4, shuffle=False)
    history = runner.run(loader, test)
    final = runner.end_training(test)
    if export is not None:
        runner.export_model_for_inferencing(export, ["logits"])
    module = runner._engine.module
    result = {
        "losses": history.losses,
        "evaluations": list(history.evaluations.values()),
        "final": final,
        "parameters": module._parameters.vector[
            : sum(v.size for v in module._parameters.views.values())
        ].copy(),
        "by_name": {name: view.copy() for name, view in module._parameters.views.items()},
        "norm": runner.optimizer.gradient_norm,
        "sent": getattr(runner._comm, "sent", 0),
    }
    runner.close()
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("alone") / "model.onnx"
    return {**ranks.run(1, train, folder=str(folder), export=str(path))[0], "path": path}


def weights(path: Path) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_give_the_losses_and_the_model_of_one(world, folder, alone, tmp_path):
    path = tmp_path / "model.onnx"
    found = ranks.run(world, train, folder=str(folder), export=str(path))
    for result in found:
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=1e-6)
        np.testing.assert_allclose(result["evaluations"], alone["evaluations"], rtol=1e-6)
        np.testing.assert_allclose(result["final"], alone["final"], rtol=1e-6)
        assert result["parameters"].tobytes() == found[0]["parameters"].tobytes()
    expected = weights(alone["path"])
    assert weights(path).keys() == expected.keys()
    for name, array in weights(path).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6)


SAME_AS_ONE_RANK = {
    "sharded optimizer state": {"shard_optimizer": True},
    "a last batch with nothing for one rank": {"samples": 17},
}


@pytest.mark.parametrize("settings", SAME_AS_ONE_RANK.values(), ids=SAME_AS_ONE_RANK)
def test_a_variant_gives_the_parameters_of_one_rank(settings, folder):
    (expected,) = ranks.run(1, train, folder=str(folder), **settings)
    for result in ranks.run(2, train, folder=str(folder), **settings):
        for name, array in expected["by_name"].items():
            np.testing.assert_allclose(result["by_name"][name], array, rtol=1e-5, atol=1e-6)
