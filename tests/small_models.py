"""Small forward models, written out, and the folders of artifacts that tests train from. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.onnxblock import optim

HEADER = '<ir_version: 10, opset_import: ["": 18]>'


def with_weights(text: str, seed: int = 0, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    """Parse a model and give it random weights of these shapes."""
    model = onnx.parser.parse_model(HEADER + text)
    rng = np.random.default_rng(seed)
    for name, shape in shapes.items():
        array = rng.normal(0, 0.5, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def classifier(dropout: float = 0.0) -> onnx.ModelProto:
    """4 numbers to 3 scores: w1 (4, 8), b1, w2 (8, 3), b2; 67 numbers in all."""
    middle = "d, mask = Dropout (h, rate, training)" if dropout else "d = Identity (h)"
    return with_weights(
        f"""net (float[n, 4] x) => (float[n, 3] scores)
        <float rate = {{{dropout}}}, bool training = {{1}}> {{
            a = Gemm (x, w1, b1)  h = Tanh (a)  {middle}  scores = Gemm (d, w2, b2) }}""",
        w1=(4, 8), b1=(8,), w2=(8, 3), b2=(3,),
    )  # fmt: skip


def regression() -> onnx.ModelProto:
    """y = x·w with w (2, 1)."""
    return with_weights("net (float[n, 2] x) => (float[n, 1] y) { y = MatMul (x, w) }", w=(2, 1))


def normalized() -> onnx.ModelProto:
    """Linear, batch norm in training mode, linear; its statistics are 'mean' and 'var'."""
    model = with_weights(
        """net (float[n, 4] x) => (float[n, 3] scores) {
            a = MatMul (x, w1)
            b, m, v = BatchNormalization <training_mode = 1> (a, scale, bias, mean, var)
            c = Relu (b)
            scores = MatMul (c, w2) }""",
        w1=(4, 8), w2=(8, 3),
    )  # fmt: skip
    for name, value in (("scale", 1.0), ("bias", 0.0), ("mean", 0.0), ("var", 1.0)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(8, value, np.float32), name))
    return model


CLASSIFIER = ["w1", "b1", "w2", "b2"]
NORMALIZED = ["w1", "w2", "scale", "bias"]


def write_classifier(folder: Path, *, dropout: float = 0.0, **options: Any) -> Path:
    """Artifacts of the classifier with cross entropy, AdamW as torch has it by default, and the scores."""
    chosen: dict[str, Any] = {
        "requires_grad": CLASSIFIER,
        "loss": LossType.CrossEntropyLoss,
        "optimizer": optim.AdamW(eps=1e-8, weight_decay=0.01),
        "additional_output_names": ["scores"],
    }
    generate_artifacts(classifier(dropout), artifact_directory=folder, **{**chosen, **options})
    return folder


def write_normalized(folder: Path, **options: Any) -> Path:
    chosen: dict[str, Any] = {
        "requires_grad": NORMALIZED,
        "frozen_params": ["mean", "var"],
        "loss": LossType.CrossEntropyLoss,
        "optimizer": OptimType.SGD,
    }
    generate_artifacts(normalized(), artifact_directory=folder, **{**chosen, **options})
    return folder


def one_thread() -> ort.SessionOptions:
    """Threads that wait for work in a loop cost more than they give, for models of this size."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return options


def load(
    folder: Path, checkpoint: str | Path = "checkpoint", **options: Any
) -> tuple[CheckpointState, Module]:
    """The state and a module with its eval model."""
    state = CheckpointState.load_checkpoint(folder / checkpoint)
    options.setdefault("session_options", one_thread())
    return state, Module(folder / "training_model.onnx", state, folder / "eval_model.onnx", **options)


def start(
    folder: Path, checkpoint: str | Path = "checkpoint", **options: Any
) -> tuple[CheckpointState, Module, Optimizer]:
    """The three that a training loop needs."""
    state, module = load(folder, checkpoint, **options)
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


def batch(seed: int = 0, size: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of the classifier."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(size, 4)).astype(np.float32), rng.integers(0, 3, size)


def snapshot(state: CheckpointState) -> dict[str, bytes]:
    """Every parameter's bytes."""
    return {name: parameter.data.tobytes() for name, parameter in state.parameters}
