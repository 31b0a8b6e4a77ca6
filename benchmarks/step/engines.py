"""What each engine does in a phase: functions without arguments, on the files of one model.

`train` phases are step (forward, backward, AdamW), gradients (forward and backward), optimizer and eval;
`infer` is the forward pass of a model that is done training. Imports only what an engine needs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["ENGINES", "Phases"]

Phases = dict[str, Callable[[], object]]


def torch_engine(folder: Path, threads: int, *, use: str, fused: bool, compiled: bool = False) -> Phases:
    import torch
    from models import workload

    torch.set_num_threads(threads)
    module, inputs, labels = workload(folder.name).build()
    forward = torch.compile(module) if compiled else module
    loss_of = torch.nn.functional.cross_entropy

    def infer() -> None:
        with torch.inference_mode():
            forward(*inputs)

    if use == "infer":
        module.eval()
        return {"infer": infer}
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=1e-4, eps=1e-6, weight_decay=0.0, fused=fused or None
    )

    def training(wanted: bool) -> None:
        if module.training != wanted:  # to walk through the modules every time would be no engine's cost
            module.train(wanted)

    def gradients() -> None:
        training(True)
        optimizer.zero_grad(set_to_none=True)
        loss_of(forward(*inputs), labels).backward()

    def step() -> None:
        gradients()
        optimizer.step()

    def evaluate() -> None:
        training(False)
        with torch.no_grad():
            loss_of(forward(*inputs), labels)

    if compiled:  # its optimizer is the fused one, and `infer` has its forward pass
        return {"step": step, "gradients": gradients}
    return {"step": step, "gradients": gradients, "optimizer": optimizer.step, "eval": evaluate}


def onward_engine(folder: Path, threads: int, *, use: str) -> Phases:
    import numpy as np
    import onnxruntime as ort

    options = None
    if threads != os.cpu_count():  # else the defaults, as most people use them
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.enable_mem_pattern = False  # as Onward has it where it is given no options
    inputs = _arrays(np.load(folder / "inputs.npz"))
    if use == "infer":
        session = ort.InferenceSession(folder / "onward" / "inference.onnx", options)
        feeds = {value.name: inputs[value.name] for value in session.get_inputs()}
        return {"infer": lambda: session.run(None, feeds)}

    from onward.api import CheckpointState, Module, Optimizer

    state = CheckpointState.load_checkpoint(folder / "onward" / "checkpoint")
    module = Module(
        folder / "onward" / "training_model.onnx",
        state,
        folder / "onward" / "eval_model.onnx",
        session_options=options,
    )
    optimizer = Optimizer(folder / "onward" / "optimizer_model.onnx", module)
    return _phases(module, optimizer, list(inputs.values()))


def ort_training_engine(folder: Path, threads: int, *, use: str) -> Phases:
    import numpy as np
    import onnxruntime as ort

    home = folder / "ort-training"
    if use == "generate":
        _generate_ort_training(folder, home)
        return {}
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    state = CheckpointState.load_checkpoint(str(home / "checkpoint"))
    module = Module(
        str(home / "training_model.onnx"), state, str(home / "eval_model.onnx"), session_options=options
    )
    optimizer = Optimizer(str(home / "optimizer_model.onnx"), module)
    return _phases(module, optimizer, list(_arrays(np.load(folder / "inputs.npz")).values()))


def _phases(module: Any, optimizer: Any, inputs: list[Any]) -> Phases:
    """Onward and the predecessor have the same interface."""
    optimizer.set_learning_rate(1e-4)

    def gradients() -> None:
        module.train()
        module(*inputs)
        module.lazy_reset_grad()

    def step() -> None:
        module.train()
        module(*inputs)
        optimizer.step()
        module.lazy_reset_grad()

    def evaluate() -> None:
        module.eval()
        module(*inputs)

    return {"step": step, "gradients": gradients, "optimizer": optimizer.step, "eval": evaluate}


def _arrays(file: Any) -> dict[str, Any]:
    return {name: file[name] for name in file.files}


def _generate_ort_training(folder: Path, home: Path) -> None:
    import onnx
    from onnxruntime.training import artifacts

    model = onnx.load(folder / "forward-16.onnx")
    trainable = json.loads((folder / "trainable.json").read_text())
    home.mkdir(exist_ok=True)
    artifacts.generate_artifacts(
        model,
        requires_grad=trainable,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=str(home),
    )
    # it leaves the outputs of training mode in its eval model, which does not load then
    evaluation = onnx.load(home / "eval_model.onnx")
    for node in evaluation.graph.node:
        if node.op_type == "BatchNormalization":
            del node.output[1:]
    onnx.save(evaluation, home / "eval_model.onnx")


def products_engine(folder: Path, threads: int, *, use: str) -> Phases:
    from products import run_products

    return {"step": run_products(folder, threads)}


ENGINES: dict[str, Callable[..., Phases]] = {
    "onward": onward_engine,
    "torch": lambda folder, threads, use: torch_engine(folder, threads, use=use, fused=False),
    "torch-fused": lambda folder, threads, use: torch_engine(folder, threads, use=use, fused=True),
    "torch-compile": lambda folder, threads, use: torch_engine(
        folder, threads, use=use, fused=True, compiled=True
    ),
    "ort-training": ort_training_engine,
    "products": products_engine,
}
