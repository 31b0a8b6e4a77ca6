"""Small forward models as exporters write them, for the tests of blocks and artifacts."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

PARAMETERS = {"fc1.weight": (6, 4), "fc1.bias": (6,), "fc2.weight": (3, 6), "fc2.bias": (3,)}


def values(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in PARAMETERS.items()}


def model_of(text: str, *, opset: int = 14, **weights: np.ndarray) -> onnx.ModelProto:
    """A model from the text of its graph; dots in names are written as underscores in keywords."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> net {text}')
    model.graph.initializer.extend(numpy_helper.from_array(w, name) for name, w in weights.items())
    return model


def two_layers(*, opset: int = 14, seed: int = 0) -> onnx.ModelProto:
    """input [batch, 4] → Gemm, Relu, Gemm → output [batch, 3]"""
    helper, FLOAT = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Gemm", ["input-0", "fc1.weight", "fc1.bias"], ["/fc1"], "/fc1/Gemm", transB=1),
        helper.make_node("Relu", ["/fc1"], ["/relu"], "/relu/Relu"),
        helper.make_node("Gemm", ["/relu", "fc2.weight", "fc2.bias"], ["output-0"], "/fc2/Gemm", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "main_graph",
        [helper.make_tensor_value_info("input-0", FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("output-0", FLOAT, ["batch", 3])],
        [numpy_helper.from_array(array, name) for name, array in values(seed).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def forward(x: np.ndarray, seed: int = 0) -> np.ndarray:
    """What `two_layers` computes."""
    w = values(seed)
    hidden = np.maximum(x @ w["fc1.weight"].T + w["fc1.bias"], 0)
    return hidden @ w["fc2.weight"].T + w["fc2.bias"]
