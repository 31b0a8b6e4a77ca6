"""Small models with their artifacts and data, for the tests of training on several ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser

from onward import artifacts, onnxblock

__all__ = ["classifier", "points"]

_CLASSIFIER = """
<ir_version: 10, opset_import: ["": 21]>
net (float[N, 4] x) => (float[N, 3] logits) {
    h = Gemm(x, w1, b1)
    a = Tanh(h)
    logits = Gemm(a, w2, b2)
}
"""


def classifier(folder: Path, *, optimizer: object = None) -> Path:
    """Artifacts of a perceptron with 4 inputs and 3 classes."""
    generator = np.random.default_rng(0)
    model = onnx.parser.parse_model(_CLASSIFIER)
    for name, shape in {"w1": (4, 8), "b1": (8,), "w2": (8, 3), "b2": (3,)}.items():
        array = generator.normal(size=shape).astype(np.float32) * 0.5
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    artifacts.generate_artifacts(
        model,
        requires_grad=["w1", "b1", "w2", "b2"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=optimizer or onnxblock.optim.AdamW(clip_grad=onnxblock.optim.ClipGradNorm(0.5)),
        artifact_directory=folder,
        additional_output_names=["logits"],
    )
    return folder


def points(count: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points in four dimensions and their classes."""
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return x, np.argmax(x[:, :3] + 0.3 * x[:, 1:], axis=1).astype(np.int64)
