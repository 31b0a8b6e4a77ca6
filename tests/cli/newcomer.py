"""What a newcomer has: a small classifier and data for it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser


def make_model() -> onnx.ModelProto:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        net (float[batch, 4] x) => (float[batch, 3] scores) {
            h = Gemm <transB = 1> (x, w1, b1)  a = Relu (h)  scores = Gemm <transB = 1> (a, w2, b2) }""")
    rng = np.random.default_rng(0)
    for name, shape in {"w1": (16, 4), "b1": (16,), "w2": (3, 16), "b2": (3,)}.items():
        array = rng.normal(0, 0.3, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def make_data(samples: int = 96, seed: int = 1) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(samples, 4)).astype(np.float32)
    return {"x": x, "labels": np.argmax(x[:, :3], axis=1)}
