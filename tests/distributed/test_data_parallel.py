"""Data parallel: the number of ranks changes the speed, not the result."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import ranks
from rank_models import EMULATED, NEEDS_CUDA, build, classifier, points

from onward.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from onward.distributed import RunnerSettings, ShardedArrays, ShardedSampler, TrainingRunner, connect
from onward.distributed.comm import TorchCommunicator
from onward.distributed.runner import two_level


def train(
    folder: str,
    export: str | None = None,
    samples: int = 22,
    batch_size: int = 8,
    **settings: Any,
) -> dict[str, Any]:
    """Two epochs on this rank; what it has seen and what it has in the end."""
    runner = TrainingRunner(
        RunnerSettings(artifacts=folder, epochs=2, learning_rate=0.05, timeout=20, **settings)
    )
    runner.initialize()
    loader = ShardedArrays(*points(samples), batch_size=batch_size, seed=3)
    test = ShardedArrays(*points(10, seed=1), batch_size=4, shuffle=False)
    history = runner.run(loader, test)
    final = runner.end_training(test)
    if export is not None:
        runner.export_model_for_inferencing(export, ["logits"])
    module = runner.engine.module
    result = {
        "losses": history.losses,
        "evaluations": [row["eval_loss"] for row in history.epochs],
        "final": final,
        "parameters": module.memory.parameters.whole.read().copy(),
        "by_name": {name: array.copy() for name, array in module.memory.parameters.arrays().items()},
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


def warm(optimizer: Optimizer) -> LinearLRScheduler:
    return LinearLRScheduler(optimizer, 2, 8, 0.05)


def weights(path: Path) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


@pytest.mark.parametrize("world, group", [(2, 1), (4, 1), (4, 2)])
def test_ranks_give_the_losses_and_the_model_of_one(world, group, folder, alone, tmp_path):
    path = tmp_path / "model.onnx"
    found = ranks.run(world, train, folder=str(folder), export=str(path), reduce_group_size=group)
    for result in found:
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=1e-6)
        np.testing.assert_allclose(result["evaluations"], alone["evaluations"], rtol=1e-6)
        np.testing.assert_allclose(result["final"], alone["final"], rtol=1e-6)
        assert result["parameters"].tobytes() == found[0]["parameters"].tobytes()
    expected = weights(alone["path"])
    assert weights(path).keys() == expected.keys()
    for name, array in weights(path).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6)


VARIANTS = {
    "sharded optimizer state": {"shard_optimizer": True},
    "a last batch with nothing for one rank": {"samples": 17},
    "accumulation over batches of different sizes": {"gradient_accumulation_steps": 2},
    "a schedule of the rate": {"scheduler": warm},
    "accumulation and a number of steps": {"gradient_accumulation_steps": 3, "num_train_steps": 3},
    "memory of a device": {"device": EMULATED},
    "memory of a device, sharded state": {"device": EMULATED, "shard_optimizer": True, "clip_norm": 0.5},
}


# Two ranks share the GPU, which NCCL does not allow: gloo carries their gradients through the host.
ON_CUDA = {
    "two ranks on one GPU": {"device": "cuda"},
    "two ranks on one GPU, sharded state": {"device": "cuda", "shard_optimizer": True},
    "two ranks on one GPU, accumulation": {"device": "cuda", "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize(
    "settings",
    [
        *(pytest.param(given, id=name) for name, given in VARIANTS.items()),
        *(pytest.param(given, id=name, marks=NEEDS_CUDA) for name, given in ON_CUDA.items()),
    ],
)
def test_a_variant_gives_the_parameters_of_one_rank(settings, folder):
    (expected,) = ranks.run(1, train, folder=str(folder), **settings)
    for result in ranks.run(2, train, folder=str(folder), **settings):
        for name, array in expected["by_name"].items():
            np.testing.assert_allclose(result["by_name"][name], array, rtol=1e-5, atol=1e-6)


def over_nccl(folder: str, *, compress: bool) -> dict[str, Any]:
    """What NCCL gets of a module on the GPU, in a world of one rank: two ranks would need two GPUs."""
    import torch.distributed as dist

    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    comm = TorchCommunicator(nccl=True, timeout=20)
    seen: list[tuple[int, int]] = []
    real = comm._dist.all_reduce

    def all_reduce(tensor: Any, **options: Any) -> Any:
        if tensor.is_cuda:
            seen.append((tensor.data_ptr(), tensor.numel()))
        return real(tensor, **options)

    state = CheckpointState.load_checkpoint(Path(folder) / "checkpoint")
    module = Module(Path(folder) / "training_model.onnx", state, device="cuda")
    module(*points(16))
    gradients = module.memory.gradients.whole
    before, address = gradients.read(), gradients.__cuda_array_interface__["data"][0]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(comm._dist, "all_reduce", all_reduce)
        comm.all_reduce(gradients, compress=compress)
    dist.destroy_process_group()
    return {"seen": seen, "before": before, "after": gradients.read(), "address": address}


@pytest.mark.cuda
@NEEDS_CUDA[1]
@pytest.mark.parametrize("compress", [False, True])
def test_nccl_reduces_the_memory_of_the_gpu_in_place(compress, folder):
    (result,) = ranks.run(1, over_nccl, folder=str(folder), compress=compress)
    assert len(result["seen"]) == 1
    if compress:
        np.testing.assert_allclose(result["after"], result["before"], atol=1e-2)
        return
    assert result["seen"] == [(result["address"], result["before"].size)]
    np.testing.assert_array_equal(result["after"], result["before"])


def two_levels(sizes: list[int]) -> list[np.ndarray]:
    """Sums of random vectors, in groups of two ranks."""
    comm = two_level(connect(timeout=20), 2, timeout=20)
    vectors = [np.random.default_rng([comm.rank, size]).normal(size=size) for size in sizes]
    for vector in vectors:
        comm.all_reduce(vector)
    comm.close()
    return vectors


def test_a_reduction_in_two_levels_is_the_sum_and_the_same_on_all_ranks():
    sizes = [1, 5, 5001]  # the last is large enough to go in parts, and does not divide
    found = ranks.run(4, two_levels, sizes=sizes)
    for index, size in enumerate(sizes):
        expected = sum(np.random.default_rng([rank, size]).normal(size=size) for rank in range(4))
        np.testing.assert_allclose(found[0][index], expected, rtol=1e-12, atol=1e-14)
        assert {result[index].tobytes() for result in found} == {found[0][index].tobytes()}


def test_gradients_sent_as_bfloat16_train_almost_the_same_on_equal_ranks(folder, alone):
    found = ranks.run(2, train, folder=str(folder), compress=True)
    assert found[0]["parameters"].tobytes() == found[1]["parameters"].tobytes()
    assert 0 < np.abs(np.array(found[0]["losses"]) - alone["losses"]).max() < 2e-2


def test_an_update_sends_one_vector_of_gradients_and_nine_numbers(folder, alone):
    """Runs of six and of four updates differ by two: what else they send does not depend on the number."""
    size = sum(-(-view.size // 16) * 16 * 4 for view in alone["by_name"].values())
    sent = [ranks.run(2, train, folder=str(folder), samples=n, batch_size=8)[0]["sent"] for n in (24, 16)]
    assert sent[0] - sent[1] == 2 * (size + 9 * 8)


class Dealt:
    """Batches by name, of which the ranks have different numbers; they know their epoch."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        x, labels = points(12)
        share = slice(0, 8) if os.environ["RANK"] == "0" else slice(8, 12)
        for start in range(0, len(labels[share]), 4):
            part = slice(share.start + start, share.start + start + 4)
            yield {"labels": labels[part], "x": x[part]}


def dealt(folder: str) -> tuple[list[float], list[int]]:
    loader = Dealt()
    with TrainingRunner(RunnerSettings(artifacts=folder, epochs=2, timeout=20)) as runner:
        return runner.run(loader).losses, loader.epochs


def test_ranks_may_have_different_numbers_of_batches(folder):
    first, second = ranks.run(2, dealt, folder=str(folder))
    assert first == second
    losses, epochs = first
    assert len(losses) == 4 and epochs == [0, 1]
    assert losses[2] < losses[0] and losses[3] < losses[1]  # the same samples, one epoch later


def average_statistics(folder: str, arrays: tuple, how: str) -> dict[str, np.ndarray]:
    """The statistics before and after ranks agree on them."""
    with TrainingRunner(RunnerSettings(artifacts=folder, statistics=how, timeout=20)) as runner:
        runner.run(ShardedArrays(*arrays, batch_size=8))
        frozen = runner.engine.module.memory.frozen
        before = {name: tensor.read().copy() for name, tensor in frozen.items()}
        runner.end_training()
        return {"before": before, "after": {name: tensor.read().copy() for name, tensor in frozen.items()}}


@pytest.mark.parametrize("how", ["average", "rank0"])
def test_ranks_agree_on_batch_norm_statistics(how, tmp_path):
    arrays = build("residual network", tmp_path)
    found = ranks.run(2, average_statistics, folder=str(tmp_path), arrays=arrays, how=how)
    for name in found[0]["before"]:
        first, second = (result["before"][name] for result in found)
        assert not np.array_equal(first, second)
        expected = first if how == "rank0" else (first + second) / np.float32(2)
        for result in found:
            np.testing.assert_array_equal(result["after"][name], expected)


def resumable(folder: str, directory: str, steps: int | None, **settings: Any) -> dict[str, np.ndarray]:
    """A run that stops after some updates, or goes on to the end."""
    parameters = RunnerSettings(
        artifacts=folder,
        epochs=2,
        num_train_steps=steps,
        checkpoint_directory=directory,
        timeout=20,
        **settings,
    )
    with TrainingRunner(parameters) as runner:
        runner.run(ShardedArrays(*points(22), batch_size=8))
        runner.end_training()
        data = runner.engine.gather(include_optimizer_state=True)
        if data is None:
            return {}
        state = {f"{n}.{slot}": a for n, s in data.optimizer[0].slots.items() for slot, a in s.items()}
        return {name: np.array(array) for name, array in {**data.trainable, **state}.items()}


RESUMES = {
    "two ranks, then one": [(2, {}), (1, {})],
    "one rank, then four that share the state": [(1, {}), (4, {"shard_optimizer": True})],
    "two that share the state, then two stages": [
        (2, {"shard_optimizer": True}),
        (2, {"pipeline_parallel_size": 2}),
    ],
    "two stages, then two copies of two stages": [
        (2, {"pipeline_parallel_size": 2}),
        (4, {"pipeline_parallel_size": 2}),
    ],
}


@pytest.fixture(scope="module")
def uninterrupted(folder, tmp_path_factory) -> dict[str, np.ndarray]:
    directory = tmp_path_factory.mktemp("uninterrupted")
    return ranks.run(1, resumable, folder=str(folder), directory=str(directory), steps=None)[0]


@pytest.mark.parametrize("first, second", RESUMES.values(), ids=RESUMES)
def test_a_run_goes_on_with_another_number_of_ranks(first, second, folder, uninterrupted, tmp_path):
    for (world, settings), steps in ((first, 4), (second, None)):
        found = ranks.run(
            world, resumable, folder=str(folder), directory=str(tmp_path), steps=steps, **settings
        )
    assert found[0].keys() == uninterrupted.keys()
    for name, array in uninterrupted.items():
        np.testing.assert_allclose(found[0][name], array, rtol=1e-4, atol=1e-6)
    assert all(result == {} for result in found[1:])


def test_samples_are_shared_without_overlap_and_shuffled_anew():
    sampler = ShardedSampler(23, batch_size=6, seed=5)
    epochs = []
    for epoch in range(2):
        shares = [list(sampler.epoch(epoch, rank=rank, world=4)) for rank in range(4)]
        assert [len(share) for share in shares] == [4, 4, 4, 4]
        order = np.concatenate([share[batch] for batch in range(4) for share in shares])
        assert sorted(order.tolist()) == list(range(23))
        epochs.append(order.tolist())
        (one,) = [np.concatenate(list(sampler.epoch(epoch, rank=0, world=1)))]
        assert one.tolist() == order.tolist()
    assert epochs[0] != epochs[1]


def test_one_process_needs_no_torch(folder, tmp_path):
    script = f"""
import sys
sys.modules["torch"] = None
sys.path.insert(0, {str(Path(__file__).parent)!r})
from rank_models import points
from onward.distributed import RunnerSettings, ShardedArrays, TrainingRunner
with TrainingRunner(RunnerSettings(artifacts={str(folder)!r})) as runner:
    runner.run(ShardedArrays(*points(16), batch_size=8))
    runner.export_model_for_inferencing({str(tmp_path / "model.onnx")!r}, ["logits"])
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    assert weights(tmp_path / "model.onnx").keys() >= {"w1", "b1"}
