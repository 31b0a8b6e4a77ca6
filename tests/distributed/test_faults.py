"""Ranks that die or hang: the others end with an error, and a restarted run ends as if nothing had been."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
from rank_models import classifier, points

from onward import checkpoint
from onward.distributed import RunnerSettings, ShardedArrays, TrainingRunner
from onward.distributed.comm import TorchCommunicator
from onward.distributed.data_parallel import DataParallel
from onward.runtime import inference_model as inference
from onward.train.run_files import RunFiles

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="the system has no SIGKILL")


def train(
    folder: str, directory: str, fault: tuple[str, int, int] | None = None, timeout: float = 20
) -> None:
    """Six updates with a checkpoint after every second, then the export; a fault in the first attempt."""
    if fault is not None and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        where, rank, number = fault
        if os.environ["RANK"] == str(rank):
            _inject(where, rank, number)
    kept = Path(directory) / "checkpoints"
    parameters = RunnerSettings(
        artifacts=folder, epochs=2, checkpoint_directory=kept, checkpoint_every=2, timeout=timeout
    )
    with TrainingRunner(parameters) as runner:
        runner.run(ShardedArrays(*points(22), batch_size=8))
        runner.end_training()
        runner.export_model_for_inferencing(Path(directory) / "model.onnx", ["logits"])


def _inject(where: str, rank: int, number: int) -> None:
    def at(owner: Any, name: str, count: int, counts: Callable[..., bool] = lambda *_: True) -> None:
        original, seen = getattr(owner, name), [0]

        def patched(*args: Any, **kwargs: Any) -> Any:
            seen[0] += bool(counts(*args))
            if seen[0] == count:
                time.sleep(0.05)  # the others are waiting by now
                os.kill(os.getpid(), number)
            return original(*args, **kwargs)

        setattr(owner, name, patched)

    if where == "a step":
        at(DataParallel, "backward", 4)
    elif where == "an all-reduce":
        at(TorchCommunicator, "all_reduce", 4, lambda _, array, *rest: math.prod(array.shape) > 16)
    elif where == "a checkpoint":
        if rank == 0:
            at(os, "fsync", 4)
        else:
            at(RunFiles, "save", 2)
    elif rank == 0:
        at(inference, "_load", 1)
    else:
        at(TrainingRunner, "export_model_for_inferencing", 1)


def result(directory: Path) -> tuple[bytes, bytes]:
    """The bytes of the last checkpoint and of the exported model."""
    latest = checkpoint.load_latest(directory / "checkpoints").path
    return latest.read_bytes(), (directory / "model.onnx").read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory) -> tuple[bytes, bytes]:
    directory = tmp_path_factory.mktemp("undisturbed")
    ranks.run(2, train, folder=str(folder), directory=str(directory))
    return result(directory)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["a step", "an all-reduce", "a checkpoint", "the export"])
def test_a_rank_killed_in(where, rank, folder, undisturbed, tmp_path):
    job = {"folder": str(folder), "directory": str(tmp_path), "fault": (where, rank, signal.SIGKILL)}
    with pytest.raises(ranks.Lost) as lost:
        ranks.start(2, train, **job).wait()
    assert lost.value.errors[rank] == f"exit -{int(signal.SIGKILL)}"
    assert "RankLost: rank" in lost.value.errors[1 - rank]
    ranks.start(2, train, attempt=1, **job).wait()
    assert result(tmp_path) == undisturbed
    assert {path.name for path in tmp_path.iterdir() if path.name[0] != "."} == {"checkpoints", "model.onnx"}


@pytest.mark.skipif("ONWARD_FUZZ" not in os.environ, reason="more ranks of the same: by make fuzz")
@pytest.mark.parametrize("world", [3, 4])
def test_a_rank_of_several_killed_in(world, folder, tmp_path):
    """Any one of them: all others say so, and the job ends as if nothing had been."""
    job = {"folder": str(folder), "directory": str(tmp_path / "whole")}
    ranks.run(world, train, **job)
    whole = result(tmp_path / "whole")
    places = ["a step", "an all-reduce", "a checkpoint", "the export"]
    for rank in range(world):
        job = {"folder": str(folder), "directory": str(tmp_path / str(rank))}
        job["fault"] = (places[rank % 4], rank, signal.SIGKILL)
        with pytest.raises(ranks.Lost) as lost:
            ranks.start(world, train, **job).wait()
        errors = lost.value.errors
        assert errors.pop(rank) == f"exit -{int(signal.SIGKILL)}"
        assert len(errors) == world - 1
        assert all("RankLost: rank" in error for error in errors.values())
        ranks.start(world, train, attempt=1, **job).wait()
        assert result(tmp_path / str(rank)) == whole


def test_a_rank_that_hangs_ends_the_job_within_the_timeout(folder, undisturbed, tmp_path):
    job = {"folder": str(folder), "directory": str(tmp_path), "timeout": 3}
    with pytest.raises(ranks.Lost) as lost:
        ranks.start(2, train, **job, fault=("an all-reduce", 1, signal.SIGSTOP)).wait(grace=0.2)
    assert "did not respond within 3 s" in lost.value.errors[0]
    ranks.start(2, train, attempt=1, **job).wait()
    assert result(tmp_path) == undisturbed
