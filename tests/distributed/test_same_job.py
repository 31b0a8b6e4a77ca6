"""Ranks that were started with different jobs: an error on all of them, before the first step."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import ranks
from rank_models import classifier, points

from onward import artifacts
from onward.api import LinearLRScheduler
from onward.distributed import Communicator, RunnerSettings, ShardedArrays, TrainingRunner, connect


def _first(optimizer: Any) -> LinearLRScheduler:
    return LinearLRScheduler(optimizer, 1, 10)


def _second(optimizer: Any) -> LinearLRScheduler:
    return LinearLRScheduler(optimizer, 2, 10)


def _settings(on_rank_1: dict[str, Any], **both: Any) -> Callable[[Communicator, Path], Any]:
    """A run whose settings differ on rank 1."""

    def job(comm: Communicator, folder: Path) -> Any:
        chosen = {"artifacts": "good", **both, **(on_rank_1 if comm.rank == 1 else {})}
        chosen["artifacts"] = folder / chosen["artifacts"]
        runner = TrainingRunner(RunnerSettings(**chosen), communicator=comm)
        runner.initialize()
        return len(runner.run(ShardedArrays(*points(8), batch_size=8)).losses)

    return job


def _data(make: Callable[[int], Any], test: Callable[[int], Any] = lambda rank: None) -> Callable:
    """A run whose data differs by rank."""

    def job(comm: Communicator, folder: Path) -> Any:
        runner = TrainingRunner(RunnerSettings(artifacts=folder / "good"), communicator=comm)
        runner.initialize()
        return len(runner.run(make(comm.rank), test(comm.rank)).losses)

    return job


def _wide(rank: int) -> ShardedArrays:
    x, labels = points(8)
    return ShardedArrays(x.astype(np.float64) if rank else x, labels, batch_size=8)


JOBS: dict[str, tuple[Callable[[Communicator, Path], Any], str]] = {
    "another activation": (_settings({"artifacts": "relu"}), "training_model is "),
    "another optimizer": (_settings({"artifacts": "sgd"}), "optimizer_model is "),
    "a model that is not there": (
        _settings({"training_model": "nowhere.onnx"}),
        "training_model is not readable",
    ),
    "no evaluation model": (_settings({"eval_model": None}), "eval_model is none"),
    "accumulation": (
        _settings({"gradient_accumulation_steps": 2}),
        "gradient_accumulation_steps is 2, rank 0 has 1",
    ),
    "learning rate": (_settings({"learning_rate": 0.1}), "learning_rate is 0.1, rank 0 has 0.001"),
    "epochs": (_settings({"epochs": 2}), "epochs is 2, rank 0 has 1"),
    "groups": (_settings({"reduce_group_size": 2}), "reduce_group_size is 2, rank 0 has 1"),
    "a pipeline": (_settings({"pipeline_parallel_size": 2}), "pipeline_parallel_size is 2, rank 0 has 1"),
    "shares of state": (_settings({"shard_optimizer": True}), "shard_optimizer is True, rank 0 has False"),
    "a schedule": (_settings({"scheduler": _second}, scheduler=_first), "_second, rank 0 has"),
    "seed": (_settings({"seed": 1}), "seed is 1, rank 0 has 0"),
    "number of samples": (
        _data(lambda rank: ShardedArrays(*points(8 + rank), batch_size=8)),
        "training data: samples is 9, rank 0 has 8",
    ),
    "batch size": (
        _data(lambda rank: ShardedArrays(*points(8), batch_size=8 >> rank)),
        "training data: batch size is 4, rank 0 has 8",
    ),
    "seed of the order": (
        _data(lambda rank: ShardedArrays(*points(8), batch_size=8, seed=rank)),
        "training data: seed is 1, rank 0 has 0",
    ),
    "types of the data": (_data(_wide), "training data: arrays is "),
    "evaluation on one rank only": (
        _data(
            lambda rank: ShardedArrays(*points(8), batch_size=8),
            lambda rank: ShardedArrays(*points(8), batch_size=8) if rank else None,
        ),
        "evaluation data is given, rank 0 has none",
    ),
}
SAME: dict[str, Callable[[Communicator, Path], Any]] = {
    "the same files in another place": _settings({"artifacts": "copy", "threads": 2}),
    "own batches, more on one rank": _data(lambda rank: [list(points(4))] * (1 + rank)),
}


def start_jobs(folder: str) -> dict[str, tuple[str, str]]:
    """What becomes of every job, as this rank sees it."""
    comm = connect(timeout=20)
    seen = {}
    jobs = {name: job for name, (job, _) in JOBS.items()} | SAME
    for name, job in jobs.items():
        try:
            seen[name] = ("", str(job(comm, Path(folder))))
        except Exception as error:
            seen[name] = (type(error).__name__, str(error))
    comm.close()
    return seen


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    classifier(folder / "good")
    shutil.copytree(folder / "good", folder / "copy")
    for name, optimizer in (("relu", artifacts.OptimType.AdamW), ("sgd", artifacts.OptimType.SGD)):
        shutil.copytree(folder / "good", folder / name)
        if name == "sgd":
            other = folder / "other"
            model = onnx.parser.parse_model(
                '<ir_version: 10, opset_import: ["": 21]> n (float[N, 2] x) => (float[N, 1] y)'
                "<float[2, 1] w = {1, 2}> { y = MatMul(x, w) }"
            )
            artifacts.generate_artifacts(
                model, requires_grad=["w"], loss=artifacts.LossType.MSELoss, optimizer=optimizer,
                artifact_directory=other,
            )  # fmt: skip
            shutil.copy(other / "optimizer_model.onnx", folder / name / "optimizer_model.onnx")
    model = onnx.load(folder / "relu" / "training_model.onnx")
    for node in model.graph.node:
        if node.op_type == "Tanh":
            node.op_type = "Relu"
    onnx.save(model, folder / "relu" / "training_model.onnx")
    return folder


@pytest.fixture(scope="module")
def seen(jobs) -> list[dict[str, tuple[str, str]]]:
    return ranks.run(2, start_jobs, folder=str(jobs))


@pytest.mark.parametrize("name", JOBS)
def test_different_jobs_are_refused_on_every_rank(name: str, seen: list[dict[str, tuple[str, str]]]) -> None:
    for rank in seen:
        assert rank[name][0] == "DistributedError", rank[name]
        assert "rank 1 has another job than rank 0" in rank[name][1]
        assert JOBS[name][1] in rank[name][1]


@pytest.mark.parametrize("name", SAME)
def test_what_may_differ(name: str, seen: list[dict[str, tuple[str, str]]]) -> None:
    assert [rank[name][0] for rank in seen] == ["", ""], [rank[name] for rank in seen]


@pytest.mark.skipif("ONWARD_FUZZ" not in os.environ, reason="more ranks of the same: by make fuzz")
@pytest.mark.parametrize("world", [3, 4])
def test_one_of_several_is_named_on_all(world: int, jobs: Path) -> None:
    for rank in ranks.run(world, start_jobs, folder=str(jobs)):
        for name, (_, text) in JOBS.items():
            assert rank[name][0] == "DistributedError", rank[name]
            found = re.match(r"rank (\d) has another job than rank 0: ", rank[name][1])
            assert found, rank[name]
            assert (
                found[1] != "1" or text in rank[name][1]
            )  # where data differs on each, another may be named


def test_one_rank_alone_compares_with_nobody(tmp_path: Path) -> None:
    assert "RANK" not in os.environ
    classifier(tmp_path)
    with TrainingRunner(RunnerSettings(artifacts=tmp_path)) as runner:
        assert len(runner.run(ShardedArrays(*points(8), batch_size=8)).losses) == 1
