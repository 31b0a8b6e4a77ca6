"""What the C++ program needs: artifacts of a small network, and the handwritten digits as plain numbers.

python examples/cpp/prepare.py build/digits
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser

from onward.artifacts import LossType, OptimType, generate_artifacts


def forward_model(seed: int = 0) -> onnx.ModelProto:
    """64 pixels to 10 scores, with dropout."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        digits (float[batch, 64] image) => (float[batch, 10] scores) <float rate = {0.1}, bool training = {1}> {
            a = Gemm (image, w1, b1)
            b = Relu (a)
            c = Dropout (b, rate, training)
            scores = Gemm (c, w2, b2)
        }""")
    rng = np.random.default_rng(seed)
    for name, shape in {"w1": (64, 128), "b1": (128,), "w2": (128, 10), "b2": (10,)}.items():
        array = rng.normal(0, np.sqrt(2 / shape[0]) if len(shape) > 1 else 0, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def main(folder: Path) -> None:
    """Write the artifacts, images.bin (float32, 64 each) and labels.bin (int64)."""
    generate_artifacts(
        forward_model(),
        requires_grad=["w1", "b1", "w2", "b2"],
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        artifact_directory=folder,
        portable=True,
    )
    digits = np.load(Path(__file__).parents[1] / "data" / "digits.npz")
    (digits["x"].astype("<f4") / 16).tofile(folder / "images.bin")
    digits["y"].astype("<i8").tofile(folder / "labels.bin")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/digits"))
