"""Weights written past protobuf give the message that protobuf would have written."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onward.export.huggingface.from_transformers import add_weights, serialized

WEIGHTS = {
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "scalar": np.asarray(3, np.int64),
    "empty": np.zeros((0, 4), np.float32),
    "flags": np.asarray([True, False]),
    "half": np.asarray([1.5, -2], np.float16),
    "longer than two digits of its length": np.ones(40_000, np.float32),
}


@pytest.mark.parametrize("names", [[], ["scalar"], list(WEIGHTS)], ids=["none", "one", "all"])
def test_joined_bytes_are_the_message_with_its_weights(names: list[str]) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [x])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    helper.set_model_props(model, {"key": "value"})
    weights = {name: WEIGHTS[name] for name in names}
    written = onnx.load_from_string(serialized(model, weights))
    assert not model.graph.initializer
    add_weights(model, weights)
    assert written == model
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in written.graph.initializer}
    for name, value in weights.items():
        np.testing.assert_array_equal(stored[name], value)
