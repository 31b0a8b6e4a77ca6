"""Arithmetic on sizes becomes constants where shapes tell the result."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onward.graph.dialect.normalize import normalize
from onward.graph.load import load_model
from onward.graph.passes.sizes import rename_sizes, settle_sizes

HEADER = '<ir_version: 10, opset_import: ["": 21]> '
RESHAPE = """g (float[batch, length, 6] x) => (float[batch, 2, length, 3] y)
    <int64 zero = {0}, int64 one = {1}, int64[1] front = {0}, int64[2] heads = {2, 3}> {
    s = Shape (x)  b = Gather (s, zero)  l = Gather (s, one)
    b1 = Unsqueeze (b, front)  l1 = Unsqueeze (l, front)
    shape = Concat <axis = 0> (b1, l1, heads)
    r = Reshape (x, shape)  y = Transpose <perm = [0, 2, 1, 3]> (r)
}"""
EXPAND = """g (float[batch, 1, length] x) => (float[batch, 4, length] y)
    <int64 zero = {0}, int64 two = {2}, int64[1] front = {0}, int64[1] four = {4}> {
    s = Shape (x)  b = Gather (s, zero)  l = Gather (s, two)
    b1 = Unsqueeze (b, front)  l1 = Unsqueeze (l, front)
    shape = Concat <axis = 0> (b1, four, l1)  y = Expand (x, shape)
}"""
LAST = """g (float[batch, length] x, float[batch, total] z) => (float[batch, length] y)
    <int64 one = {1}, int64[1] front = {0}, int64[1] axis = {1}, int64[1] end = {9223372036854775807}> {
    s = Shape (x)  l = Gather (s, one)  n = Neg (l)  start = Unsqueeze (n, front)
    last = Slice (z, start, end, axis)  y = Add (x, last)
}"""
HALF = """g (float[batch, length, 6] x) => (float[batch, length, 3] y)
    <int64 two = {2}, int64[1] front = {0}, int64[1] axis = {2}> {
    s = Shape (x)  width = Gather (s, two)  half = Div (width, two)
    stop = Unsqueeze (half, front)  y = Slice (x, front, stop, axis)
}"""


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


@pytest.mark.parametrize(
    ("text", "shapes", "left"),
    [
        (RESHAPE, {"x": (2, 5, 6)}, ["Reshape", "Transpose"]),
        (EXPAND, {"x": (2, 1, 5)}, ["Expand"]),
        (HALF, {"x": (2, 5, 6)}, ["Slice"]),
        (LAST, {"x": (2, 5), "z": (2, 5)}, ["Add"]),
    ],
    ids=["reshape", "expand", "half", "last"],
)
def test_only_what_computes_is_left(text: str, shapes: dict[str, tuple[int, ...]], left: list[str]) -> None:
    source = onnx.parser.parse_model(HEADER + text)
    model = normalize(load_model(source))
    rename_sizes(model, {"total": "length"})
    settle_sizes(model)
    assert [node.op_type for node in model.graph] == left
    random = np.random.default_rng(0)
    for extra in (0, 3):
        feeds = {
            name: random.normal(size=[n if n in (1, 6) else n + extra for n in shape]).astype(np.float32)
            for name, shape in shapes.items()
        }
        np.testing.assert_array_equal(run(ir.to_proto(model), feeds), run(source, feeds))


def test_a_slice_of_an_unknown_length_stays() -> None:
    source = onnx.parser.parse_model(HEADER + LAST)
    model = settle_sizes(normalize(load_model(source)))
    assert "Slice" in [node.op_type for node in model.graph]
    feeds = {"x": np.ones((2, 3), np.float32), "z": np.arange(10, dtype=np.float32).reshape(2, 5)}
    np.testing.assert_array_equal(run(ir.to_proto(model), feeds), run(source, feeds))
