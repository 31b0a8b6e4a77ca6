"""What is wrong on one rank is said on all of them, in the same words, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
from rank_models import build, classifier, points

from onward import artifacts, checkpoint
from onward.distributed import Communicator, RunnerSettings, ShardedArrays, TrainingRunner, connect
from onward.distributed.settings import make_grid
from onward.distributed.stages.models import split_graph
from onward.graph.dialect.normalize import normalize
from onward.graph.prune import prune

SETTINGS = {
    "steps and accumulation": (
        {"num_train_steps": 5, "gradient_accumulation_steps": 2},
        "Number of training steps must be a multiple of number of gradient accumulation step",
    ),
    "cuts and stages": (
        {"cuts": ["a"], "pipeline_parallel_size": 3},
        "Number of cuts does not match number of pipeline stages",
    ),
    "cuts and names": ({"cuts": ["a"], "stages": {"b": 1}, "pipeline_parallel_size": 2}, "give one of them"),
    "names and no stages": ({"stages": {"b": 1}}, "pipeline_parallel_size is 1"),
    "no epochs": ({"epochs": 0}, "epochs is 0: it must be at least 1"),
    "a schedule that is not there": (
        {"pipeline_schedule": "zigzag"},
        "pipeline_schedule is 'zigzag': choose 1f1b or gpipe",
    ),
}


@pytest.mark.parametrize("settings, text", SETTINGS.values(), ids=SETTINGS)
def test_settings_that_do_not_fit_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        RunnerSettings(**settings)


GRIDS = {
    "horizontal": (
        {"horizontal_parallel_size": 5},
        "world_size(64) is not divisible by horizontal_parallel_size(5)",
    ),
    "product": (
        {"data_parallel_size": 8, "horizontal_parallel_size": 4},
        "data(8) * horizontal(4) * pipeline(1) != world_size(64)",
    ),
    "pipeline": (
        {"pipeline_parallel_size": 3},
        "world_size(64) is not divisible by pipeline_parallel_size(3)",
    ),
    "not supported": (
        {"horizontal_parallel_size": 2},
        "splitting single operators over ranks is not supported",
    ),
}


@pytest.mark.parametrize("settings, text", GRIDS.values(), ids=GRIDS)
def test_a_grid_that_does_not_fit_the_world_is_refused(settings, text):
    with pytest.raises(ValueError) as error:
        make_grid(RunnerSettings(**settings), rank=0, world=64)
    assert text in str(error.value)


SPLITS = {
    "a cut that is not there": (
        {"cuts": ["nowhere"]},
        "Invalid cut point. 'nowhere': no value has that name",
    ),
    "a cut at the end": ({"cuts": ["{loss}"]}, "Stage 1 was not assigned to any node."),
    "a name that is not there": ({"by_name": {"nowhere": 1}}, "'nowhere': no node or value has that name"),
    "a stage that is not there": ({"by_name": {"c1": 2}}, "stages are 0 to 1"),
    "backwards": ({"by_name": {"c0": 1, "c1": 0}}, "is assigned to stage 0 but reads a value of stage 1"),
    "a stage with nothing": ({"by_name": {"c0": 0}}, "Stage 1 was not assigned to any node."),
}


@pytest.fixture(scope="module")
def residual(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("residual")
    build("residual network", folder)
    return folder


@pytest.mark.parametrize("how, text", SPLITS.values(), ids=SPLITS)
def test_a_split_that_cannot_be_is_refused(how, text, residual):
    model = normalize(str(residual / "eval_model.onnx"))
    loss = model.metadata_props["onward.loss"]
    if "cuts" in how:
        how = {"cuts": [how["cuts"][0].format(loss=loss)]}
    with pytest.raises(RuntimeError) as error:
        split_graph(prune(model, [loss]).graph, loss, stages=2, inputs=["x", "labels"], **how)
    assert text in str(error.value)


# ---- on two ranks ------------------------------------------------------------------------------------


class OneRankFails:
    """Batches, of which one rank's third cannot be read."""

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        import os

        yield from [list(points(4)), list(points(4))]
        if os.environ["RANK"] == "1":
            raise ValueError("the file of batch 2 is damaged")
        yield list(points(4))


def _only_on(rank: int, change: Callable[[list[np.ndarray]], None]) -> list[list[np.ndarray]]:
    import os

    batch = [array.copy() for array in points(4)]
    if os.environ["RANK"] == str(rank):
        change(batch)
    return [batch]


def _bad_label(batch: list[np.ndarray]) -> None:
    batch[1][0] = 99


def _not_finite(batch: list[np.ndarray]) -> None:
    batch[0][0] = np.nan


def _run(loader: Any, **settings: Any) -> Callable[[Communicator, str], Any]:
    def condition(comm: Communicator, folder: str) -> Any:
        runner = _start(comm, artifacts=folder, **settings)
        return runner.run(loader() if callable(loader) else loader).skipped

    return condition


def _export(path: str = "model.onnx", outputs: Any = ("logits",), **settings: Any) -> Callable:
    def condition(comm: Communicator, folder: str) -> None:
        runner = _start(comm, artifacts=folder, **settings)
        runner.export_model_for_inferencing(Path(folder) / path, outputs)

    return condition


def _start(comm: Communicator, **settings: Any) -> TrainingRunner:
    runner = TrainingRunner(RunnerSettings(**settings), communicator=comm)
    runner.initialize()
    return runner


def _data(**settings: Any) -> Callable[[], ShardedArrays]:
    return lambda: ShardedArrays(*points(8), batch_size=8)


class CannotBegin:
    """A loader that one rank cannot even begin to read."""

    def __iter__(self) -> Iterator[Any]:
        import os

        if os.environ["RANK"] == "0":
            raise FileNotFoundError("no such data")
        return iter([list(points(4))])


CONDITIONS: dict[str, tuple[Callable[[Communicator, str], Any], str, str]] = {
    "a loader fails on one rank": (_run(OneRankFails()), "ValueError", "the file of batch 2 is damaged"),
    "a loader cannot begin on one rank": (_run(CannotBegin()), "FileNotFoundError", "no such data"),
    "a batch that lacks an input": (_run([{"x": points(4)[0]}]), "KeyError", "the data has no 'labels'"),
    "a label is out of range on one rank": (
        _run(lambda: _only_on(1, _bad_label)),
        "ValueError",
        "has label 99 at (0,): the model has 3 classes",
    ),
    "a loss is not finite on one rank": (
        _run(lambda: _only_on(1, _not_finite)),
        "NonFiniteError",
        "the loss is nan",
    ),
    "the state is nominal, training": (
        _run(_data(), checkpoint="nominal_checkpoint"),
        "OnwardError",
        "Please load the model parameters first",
    ),
    "the state is nominal, export": (
        _export(checkpoint="nominal_checkpoint"),
        "OnwardError",
        "Please load the model parameters first",
    ),
    "no eval model": (
        _export(eval_model=None),
        "ModelError",
        "Eval model was not provided. Cannot export a model for inferencing.",
    ),
    "no outputs": (_export(outputs=[]), "ModelError", "Expected a non empty vector of graph output names"),
    "an output that is not there": (_export(outputs=["nope"]), "ModelError", "could not be found"),
    "a folder that is not there": (_export("no/such/model.onnx"), "ExportError", "there is no folder"),
    "no checkpoint": (_run(_data(), checkpoint="nowhere"), "CheckpointError", "No such file"),
    "no training model": (_run(_data(), training_model="nowhere.onnx"), "ModelError", "no training model at"),
    "a loader that is none": (_run(3), "TypeError", "a loader must be a ShardedArrays or an iterable"),
    "groups that do not divide the world": (
        _run(_data(), reduce_group_size=3),
        "ValueError",
        "world_size(2) is not divisible by reduce_group_size(3)",
    ),
    "a pipeline and shares of state": (
        _run(_data(), pipeline_parallel_size=2, shard_optimizer=True),
        "DistributedError",
        "cannot be combined",
    ),
    "a pipeline that is cut nowhere": (
        _run(_data(), pipeline_parallel_size=2, cuts=["nowhere"]),
        "DistributedError",
        "Invalid cut point. 'nowhere'",
    ),
    "a label is out of range on one stage": (
        _run(lambda: _only_on(1, _bad_label), pipeline_parallel_size=2),
        "ValueError",
        "has label 99",
    ),
}


def meet_conditions(folder: str) -> dict[str, tuple[str, str]]:
    """The error of every condition, as this rank sees it."""
    comm = connect(timeout=10)
    seen = {}
    for name, (condition, _, _) in CONDITIONS.items():
        try:
            condition(comm, folder)
            seen[name] = ("nothing", "")
        except Exception as error:
            seen[name] = (type(error).__name__, str(error))
    comm.close()
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict[str, tuple[str, str]]]:
    folder = classifier(tmp_path_factory.mktemp("classifier"))
    made = checkpoint.load(folder / "checkpoint")
    parts = artifacts.Artifacts(None, None, None, made)  # type: ignore[arg-type]
    checkpoint.save(parts.nominal_checkpoint(), folder / "nominal_checkpoint")
    return ranks.run(2, meet_conditions, folder=str(folder))


@pytest.mark.parametrize("name", CONDITIONS)
def test_every_rank_raises(name, seen):
    _, kind, text = CONDITIONS[name]
    for rank in seen:
        assert rank[name][0] == kind, rank[name]
        assert text in rank[name][1]


def skip_one(folder: str) -> tuple[int, bytes]:
    """An update that only one rank has to skip."""
    comm = connect(timeout=10)
    runner = _start(comm, artifacts=folder, on_nonfinite="skip")
    before = runner.engine.module.memory.parameters.vector.tobytes()
    skipped = runner.run(_only_on(0, _not_finite)).skipped
    comm.close()
    return skipped, before == runner.engine.module.memory.parameters.vector.tobytes()


def test_all_ranks_skip_an_update_that_one_has_to_skip(tmp_path):
    assert ranks.run(2, skip_one, folder=str(classifier(tmp_path))) == [(1, True), (1, True)]


def test_sharded_arrays_in_a_tuple_are_refused() -> None:
    x = np.zeros((4, 2), np.float32)
    with pytest.raises(TypeError, match="takes the arrays themselves"):
        ShardedArrays((x, x), batch_size=2)  # type: ignore[arg-type]
