"""Sizes that the model declares open and its operators fix."""

from __future__ import annotations

import logging

import onnx.parser
import pytest

from onward.graph.dialect.normalize import normalize

TEXT = """<ir_version: 8, opset_import: ["": 12]>
g (float[length, batch, 3] x, float[{state}] h) => (float[batch] y) {{
  steps, last = GRU<hidden_size=4>(x, w, r, , , h)
  y = Squeeze(last)
}}"""


def model(state: str) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(TEXT.format(state=state))
    for name, shape in (("w", (1, 12, 3)), ("r", (1, 12, 4))):
        size = shape[1] * shape[2]
        proto.graph.initializer.append(onnx.helper.make_tensor(name, 1, shape, [0.1] * size))
    return proto


def test_a_fixed_initial_state_fixes_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "onward"):
        graph = normalize(model("1, 1, 4")).graph
    assert list(graph.inputs[0].shape or ()) == ["length", 1, 3]
    assert list(graph.outputs[0].shape or ()) == [4]  # what is declared for it is of another batch
    assert "requires 'batch' to be 1" in caplog.text


def test_an_open_initial_state_leaves_the_batch_open() -> None:
    graph = normalize(model("1, batch, 4")).graph
    assert [str(dim) for dim in graph.inputs[0].shape or ()] == ["length", "batch", "3"]
