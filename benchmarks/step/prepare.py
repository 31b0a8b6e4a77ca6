"""Writes, for each model, one forward ONNX file, one batch of inputs and Onward's artifacts.

Files are kept for the next run, and made again where the code that makes them has changed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import onnx
from models import MODELS, workload

import onward
from onward import artifacts
from onward.api import CheckpointState, Module
from onward.export import from_torch

__all__ = ["prepare"]

SOURCE = Path(onward.__file__).parent


def prepare(name: str, cache: Path) -> Path:
    """The folder of a model's files, made where it is missing or old."""
    folder = cache / name
    exporting = _digest([Path(__file__).with_name("models.py"), *sorted((SOURCE / "export").rglob("*.py"))])
    if not _is_current(folder / "forward.digest", exporting):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _export(name, folder)
        (folder / "forward.digest").write_text(exporting)
    generating = _digest(sorted(SOURCE.rglob("*.py")))
    if not _is_current(folder / "onward.digest", generating):
        shutil.rmtree(folder / "onward", ignore_errors=True)
        _generate(folder)
        (folder / "onward.digest").write_text(generating)
    return folder


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _is_current(mark: Path, digest: str) -> bool:
    return mark.exists() and mark.read_text() == digest


def _export(name: str, folder: Path) -> None:
    chosen = workload(name)
    module, inputs, labels = chosen.build()
    names = list(chosen.dynamic)
    # the predecessor cannot differentiate LayerNormalization as exporters write it: opset 16 spells it out
    spellings = (("forward.onnx", 17), ("forward-16.onnx", 16)) if name in MODELS else (("forward.onnx", 17),)
    for file, opset in spellings:
        from_torch(
            module,
            inputs,
            folder / file,
            opset=opset,
            training=True,
            input_names=names,
            output_names=["scores"],
            dynamic_axes=chosen.dynamic,
            check=False,
        )
    np.savez(folder / "inputs.npz", **{k: v.numpy() for k, v in zip([*names, "labels"], [*inputs, labels])})
    kept = {tensor.name for tensor in onnx.load(folder / "forward.onnx").graph.initializer}
    trainable = [key for key, value in module.named_parameters() if key in kept]
    (folder / "trainable.json").write_text(json.dumps(trainable))


def _generate(folder: Path) -> None:
    artifacts.generate_artifacts(
        onnx.load(folder / "forward.onnx"),
        requires_grad=json.loads((folder / "trainable.json").read_text()),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder / "onward",
    )
    home = folder / "onward"
    state = CheckpointState.load_checkpoint(home / "checkpoint")
    module = Module(home / "training_model.onnx", state, home / "eval_model.onnx")
    module.export_model_for_inferencing(home / "inference.onnx", ["scores"])
