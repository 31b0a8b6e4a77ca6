"""Writes, for each model, one forward ONNX file, one batch of inputs and Onward's artifacts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from models import MODELS

from onward import artifacts
from onward.export import from_torch

__all__ = ["prepare"]


def prepare(name: str, cache: Path) -> Path:
    """The folder of a model's files, made where it is missing."""
    folder = cache / name
    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    workload = MODELS[name]
    module, inputs, labels = workload.build()
    names = list(workload.dynamic)
    # the predecessor cannot differentiate LayerNormalization as exporters write it: opset 16 spells it out
    for file, opset in (("forward.onnx", 17), ("forward-16.onnx", 16)):
        from_torch(
            module,
            inputs,
            folder / file,
            opset=opset,
            training=True,
            input_names=names,
            output_names=["scores"],
            dynamic_axes=workload.dynamic,
            check=False,
        )
    np.savez(folder / "inputs.npz", **{k: v.numpy() for k, v in zip([*names, "labels"], [*inputs, labels])})
    model = onnx.load(folder / "forward.onnx")
    kept = {tensor.name for tensor in model.graph.initializer}
    trainable = [key for key, value in module.named_parameters() if key in kept]
    (folder / "trainable.json").write_text(json.dumps(trainable))
    artifacts.generate_artifacts(
        model,
        requires_grad=trainable,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder / "onward",
    )
    (folder / "done").touch()
    return folder
