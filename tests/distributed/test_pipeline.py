"""Pipeline parallel: cutting a model into stages changes where it is computed, not what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import ranks
import torch
from rank_models import EMULATED, MODELS, NEEDS_CUDA, build, classifier, points

from onward.api.state import CheckpointState
from onward.contract import SEED
from onward.distributed import RunnerSettings, ShardedArrays, TrainingRunner
from onward.distributed.stages.models import StageStep, draw_blueprint, layout_of
from onward.distributed.stages.pipeline_parallel import Flow, Micro
from onward.runtime.devices import Device
from onward.runtime.memory import DeviceTensor, ModelMemory


def train(
    folder: str,
    arrays: tuple[np.ndarray, ...],
    batch_size: int,
    export: tuple[str, str] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Two epochs in order; losses, this rank's gradients, and what evaluation says."""
    parameters = RunnerSettings(artifacts=folder, epochs=2, learning_rate=0.1, timeout=20, **settings)
    with TrainingRunner(parameters) as runner:
        loader = ShardedArrays(*arrays, batch_size=batch_size, shuffle=False)
        history = runner.run(loader)
        final = runner.end_training(loader)
        if export is not None:
            runner.export_model_for_inferencing(export[0], [export[1]])
        module = runner.engine.module
        return {
            "losses": history.losses,
            "final": final,
            "norm": runner.optimizer.gradient_norm,
            # those that the update saw: engines add them up in units of their own
            "gradients": {
                name: array * np.float32(runner.optimizer.gradient_scale)
                for name, array in module.memory.gradients.arrays().items()
            },
        }


class Reference:
    """A model, its data, and what one process makes of it with the same micro-batches."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.arrays = build(name, folder)
        self.output = "logits" if name == "residual network" else "scores"
        self.path = folder / "one.onnx"
        (self.result,) = ranks.run(
            1,
            train,
            folder=str(folder),
            arrays=self.arrays,
            batch_size=2,
            gradient_accumulation_steps=4,
            export=(str(self.path), self.output),
        )


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> dict[str, Reference]:
    return {name: Reference(name, tmp_path_factory.mktemp("pipeline")) for name in MODELS}


def weights(path: Path) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


SPLITS = {
    "two stages, balanced": ("residual network", 2, {}),
    "two stages, cut in the residual block": ("residual network", 2, {"cuts": ["n1"]}),
    "two stages by names": ("residual network", 2, {"stages": {"c1": 1}}),
    "four stages, one forward one backward": ("residual network", 4, {}),
    "two stages that share a weight, integers across": ("encoder with tied embeddings", 2, {"cuts": ["h1"]}),
    "two stages in the memory of a device": ("residual network", 2, {"device": EMULATED}),
    "two that share a weight, in the memory of a device": (
        "encoder with tied embeddings", 2, {"cuts": ["h1"], "device": EMULATED},
    ),
    "four stages, all forward first": ("encoder with tied embeddings", 4, {"pipeline_schedule": "gpipe"}),
}  # fmt: skip


@pytest.mark.parametrize("name, stages, settings", SPLITS.values(), ids=SPLITS)
def test_stages_give_the_gradients_and_the_model_of_one_process(name, stages, settings, references, tmp_path):
    reference = references[name]
    path = tmp_path / "model.onnx"
    found = ranks.run(
        stages,
        train,
        folder=str(reference.folder),
        arrays=reference.arrays,
        batch_size=8,
        micro_batches=4,
        pipeline_parallel_size=stages,
        export=(str(path), reference.output),
        **settings,
    )
    expected = reference.result
    seen = set()
    for result in found:
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-6)
        np.testing.assert_allclose(result["final"], expected["final"], rtol=1e-6)
        np.testing.assert_allclose(result["norm"], expected["norm"], rtol=1e-5)
        for parameter, gradient in result["gradients"].items():
            scale = np.abs(expected["gradients"][parameter]).max()
            np.testing.assert_allclose(gradient, expected["gradients"][parameter], atol=2e-6 * scale, rtol=0)
            seen.add(parameter)
    assert seen == set(expected["gradients"])
    for parameter, array in weights(path).items():
        np.testing.assert_allclose(array, weights(reference.path)[parameter], rtol=1e-5, atol=1e-6)


@pytest.mark.cuda
@NEEDS_CUDA[1]
@pytest.mark.parametrize("name", MODELS)
def test_stages_on_one_gpu_train_as_one_process_on_the_cpu(name, references):
    reference = references[name]
    job = {"folder": str(reference.folder), "arrays": reference.arrays, "batch_size": 8, "micro_batches": 4}
    for result in ranks.run(2, train, pipeline_parallel_size=2, device="cuda", **job):
        np.testing.assert_allclose(result["losses"], reference.result["losses"], rtol=2e-5)
        np.testing.assert_allclose(result["final"], reference.result["final"], rtol=2e-5)
        np.testing.assert_allclose(result["norm"], reference.result["norm"], rtol=1e-4)


def small_only(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a tensor, for those of a few numbers only."""

    def call(tensor: DeviceTensor, *values: Any) -> Any:
        assert tensor.nbytes <= 64, f"{tensor.nbytes} bytes go through the host"
        return method(tensor, *values)

    return call


def one_micro_batch(reference: Reference, device: Device, *, nccl: bool) -> dict[str, Any]:
    """Two stages in one process, by turns: what they hand each other, as torch has it, and their gradients."""
    settings = RunnerSettings(artifacts=reference.folder, pipeline_parallel_size=2, device=device)
    blueprint = draw_blueprint(settings)
    data = CheckpointState.load_checkpoint(reference.folder / "checkpoint").to_data()
    ids, labels = reference.arrays
    first, last = blueprint.signature.inputs
    given = {first: ids, last: labels, SEED: np.array([7], np.int64)}
    flows, memories = [], []
    for stage in range(2):
        step = StageStep(blueprint, stage, device=device, options=None)
        memory = ModelMemory(step.signature, device)
        for name, array in data.parameters().items():
            if name in memory.parameters.tensors:
                memory.parameters.tensors[name].write(array)
            elif name in step.signature.parameters:
                memory.add_frozen(name, array)
        step.attach(memory)
        pipe: Any = SimpleNamespace(nccl=nccl, rank=stage, world=2)
        flow = Flow(step, pipe, schedule="gpipe")
        flow._micros = [Micro(given, 1.0)]
        flows.append(flow)
        memories.append(memory)
    made = flows[0]._step.forward(given, move=False)
    layout = layout_of(list(made), [a.dtype for a in made.values()], [a.shape for a in made.values()])
    flows[0]._outgoing = flows[1]._incoming = layout
    with pytest.MonkeyPatch.context() as patched:
        if flows[
            0
        ]._in_place:  # nothing goes through the host, but sizes and statistics that sessions read there
            for name in ("read", "write"):
                patched.setattr(DeviceTensor, name, small_only(getattr(DeviceTensor, name)))
        start = flows[0]._vector(1)
        sent = flows[0].run_forward(start, 0)
        as_sent = sent.clone()  # the CPU's batch norm writes its statistics over those that it reads
        loss = flows[1].run_forward(sent, 0)
        passed = flows[1].run_backward(sent, 0, torch.ones_like(loss))
        flows[0].run_backward(start, 0, passed)
    assert [flow.failure for flow in flows] == [None, None]
    return {
        "vectors": [as_sent, loss, passed],
        "gradients": {n: a for m in memories for n, a in m.gradients.arrays().items()},
    }


@pytest.mark.parametrize(
    "device", [EMULATED, pytest.param(Device("cuda"), marks=NEEDS_CUDA)], ids=lambda device: device.kind
)
@pytest.mark.parametrize("name", MODELS)
def test_stages_hand_over_what_lies_in_the_memory_of_their_devices(name, device, references):
    """As with NCCL, which carries it: sessions read and write torch's vectors where they are."""
    found = one_micro_batch(references[name], device, nccl=True)
    expected = one_micro_batch(references[name], Device("cpu"), nccl=False)
    assert {vector.device.type for vector in found["vectors"]} == {device.kind}
    for vector, other in zip(found["vectors"], expected["vectors"]):
        np.testing.assert_allclose(vector.cpu(), other, rtol=2e-5, atol=2e-6)
    assert any(np.abs(array).max() > 0 for array in expected["gradients"].values())
    for parameter, array in expected["gradients"].items():
        np.testing.assert_allclose(found["gradients"][parameter], array, rtol=2e-4, atol=2e-6)


def test_copies_of_a_pipeline_share_the_data(references):
    """Without batch norm, two copies with half of each batch train as one with all of it."""
    reference = references["encoder with tied embeddings"]
    found = ranks.run(
        4,
        train,
        folder=str(reference.folder),
        arrays=reference.arrays,
        batch_size=8,
        pipeline_parallel_size=2,
    )
    for result in found:
        np.testing.assert_allclose(result["losses"], reference.result["losses"], rtol=1e-6)
        np.testing.assert_allclose(result["final"], reference.result["final"], rtol=1e-6)


def test_a_batch_that_does_not_divide_is_cut_into_fewer_micro_batches(references):
    reference = references["encoder with tied embeddings"]
    arrays = tuple(array[:7] for array in reference.arrays)
    job = {"folder": str(reference.folder), "arrays": arrays}
    (expected,) = ranks.run(1, train, batch_size=4, **job)
    for result in ranks.run(2, train, batch_size=4, pipeline_parallel_size=2, **job):
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-6)


@pytest.mark.parametrize("stages", [1, 2])
def test_labels_that_are_ignored_count_nothing_wherever_they_are(stages, tmp_path):
    """One rank, or one micro-batch, has hardly any labels; the next has none at all."""
    folder = str(classifier(tmp_path, ignore_index=-1))
    x, labels = points(16)
    labels[1:4] = labels[8:12] = -1
    (expected,) = ranks.run(1, train, folder=folder, arrays=(x, labels), batch_size=8)
    found = ranks.run(
        2, train, folder=folder, arrays=(x, labels), batch_size=8, pipeline_parallel_size=stages
    )
    for result in found:
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-6)
        np.testing.assert_allclose(result["norm"], expected["norm"], rtol=1e-5)


def train_without_pickle(**arguments: Any) -> dict[str, Any]:
    """Training where every function of torch's that would send a pickled object fails."""
    import torch.distributed as dist

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an object was pickled")

    for name in dir(dist):
        if "object" in name and callable(getattr(dist, name)):
            setattr(dist, name, refuse)
    return train(**arguments)


def test_nothing_that_stages_send_is_pickled(references):
    reference = references["encoder with tied embeddings"]
    job = {"folder": str(reference.folder), "arrays": reference.arrays, "batch_size": 8}
    for result in ranks.run(2, train_without_pickle, pipeline_parallel_size=2, **job):
        np.testing.assert_allclose(result["losses"], reference.result["losses"], rtol=1e-6)
