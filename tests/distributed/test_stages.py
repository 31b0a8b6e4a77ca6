"""Stages of exported networks, one after the other in one process: the gradients of the whole, dropout and all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export.architectures import ARCHITECTURES
from onward import artifacts
from onward.api import CheckpointState, Module
from onward.contract import SEED
from onward.distributed import RunnerSettings
from onward.distributed.stages.models import Blueprint, StageModel, StageStep, draw_blueprint
from onward.export import from_torch
from onward.runtime.devices import Device
from onward.runtime.memory import HostTensor, ModelMemory

Arrays = dict[str, np.ndarray]


def export(name: str, folder: Path) -> list[np.ndarray]:
    """Artifacts that fit an architecture's first output to noise; returns what a call takes."""
    architecture = ARCHITECTURES[name]
    args, kwargs = architecture.args()
    model = from_torch(architecture.module(), args, kwargs=kwargs, check=False)
    with torch.no_grad():
        made: Any = architecture.module().eval()(*args, **kwargs)
    first = made if isinstance(made, torch.Tensor) else next(iter(made.values()))
    artifacts.generate_artifacts(
        model,
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
        loss_input_names=[model.graph.output[0].name],
    )
    target = np.random.default_rng(0).normal(size=first.shape).astype(np.float32)
    return [*(tensor.numpy() for tensor in [*args, *kwargs.values()]), target]


def make_stages(blueprint: Blueprint, folder: Path) -> tuple[list[StageStep], list[Arrays]]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    steps, gradients = [], []
    for index in range(len(blueprint.training)):
        step = StageStep(blueprint, index, device=Device("cpu"), options=None)
        memory = ModelMemory(step.signature, Device("cpu"))
        for name in step.signature.parameters:
            if name in step.signature.trainable:
                memory[name].write(state.parameters[name].data)
            else:
                memory.add_frozen(name, state.parameters[name].data)
        gradients.append(memory.gradients.views)
        step.attach(memory)
        steps.append(step)
    return steps, gradients


def received_by(stages: list[StageModel], run: Any, given: Arrays) -> tuple[list[Arrays], Arrays]:
    """What each stage receives, and what the last one makes."""
    received, passing = [], {}
    for index, stage in enumerate(stages):
        received.append({name: passing[name] for name in stage.received})
        passing = {**received[-1], **run(index, {**received[-1], **given})}
    return received, passing


@pytest.mark.parametrize("name", ["gpt2", "gru", "unet"])
def test_four_stages_make_the_loss_and_the_gradients_of_the_whole(name, tmp_path):
    feeds = export(name, tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx", seed=3)
    loss = module(*feeds)
    blueprint = draw_blueprint(RunnerSettings(artifacts=tmp_path, pipeline_parallel_size=4))
    steps, gradients = make_stages(blueprint, tmp_path)
    given = {**dict(zip(module.input_names(), feeds)), SEED: module.step._seed.read().copy()}

    received, made = received_by(blueprint.training, lambda i, values: steps[i].forward(values), given)
    np.testing.assert_allclose(made[steps[-1].loss], loss, rtol=1e-6)
    arriving = {steps[-1].loss: np.ones_like(made[steps[-1].loss])}
    for step, values in zip(reversed(steps), reversed(received)):
        passed = {name: HostTensor(np.zeros_like(value, order="C")) for name, value in values.items()}
        step.backward({**values, **given}, arriving, into=passed)
        arriving = {name: tensor.array for name, tensor in passed.items()}
        step.commit_statistics()

    largest = np.abs(module.memory.gradients.vector).max()
    for parameter, expected in module.memory.gradients.views.items():
        total = sum(own[parameter] for own in gradients if parameter in own)
        np.testing.assert_allclose(total, expected, rtol=0, atol=1e-6 * largest, err_msg=parameter)

    assert blueprint.evaluation is not None
    _, made = received_by(blueprint.evaluation, lambda i, values: steps[i].evaluate(values), given)
    module.eval()
    np.testing.assert_allclose(made[steps[-1].loss], module(*feeds), rtol=1e-6)
