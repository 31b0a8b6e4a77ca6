"""Names of sizes: what convolutions and pools make of them, and the numbers that they stand for."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest

from onward.graph.shapes.dims import number_of, windows
from onward.graph.shapes.model import infer_shapes, sharpen

SIZES = {"h": 13, "n": 2}


@pytest.mark.parametrize(("margin", "stride"), [(-1, 1), (-1, 2), (-2, 2), (1, 1), (-3, 1), (-7, 4)], ids=str)
def test_a_name_stands_for_the_number_of_windows(margin: int, stride: int) -> None:
    name = windows("h", margin, stride)
    assert isinstance(name, str)
    assert number_of(name, SIZES) == windows(13, margin, stride) == (13 + margin) // stride + 1
    again = windows(name, -1, 2)
    assert isinstance(again, str) and number_of(again, SIZES) == ((13 + margin) // stride + 1 - 1) // 2 + 1


def test_names_that_say_nothing_stay_unknown() -> None:
    assert windows(None, -1, 2) is None and windows("2*h", -1, 2) is None
    assert windows("h", -1, 1) == "h"
    for name in ("w", "(w-1)/2+1", "(h-1)/0+1", "2*w", "h+1", ""):
        assert number_of(name, SIZES) is None
    assert number_of("3*h*n", SIZES) == 78


def test_layers_with_equally_many_windows_have_one_name() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        net (float[n, 3, h, w] x, float[4, 3, 3, 3] k, float[4, 3, 1, 1] s, float[4, 4, 3, 3] m)
        => (float[n, 4, p, q] y) {
            a = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, k)
            b = Conv <strides = [2, 2]> (x, s)
            c = Conv <pads = [1, 1, 1, 1]> (a, m)
            d = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (b)
            e = MaxPool <kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1> (d)
            y = Add (c, d) }""")
    made = ir.from_proto(model)
    infer_shapes(made)
    sharpen(made)
    shapes = {node.outputs[0].name: node.outputs[0].shape for node in made.graph}
    assert shapes["a"] == shapes["b"] == shapes["c"] == shapes["d"]
    assert [str(dim) for dim in shapes["a"][2:]] == ["(h-1)/2+1", "(w-1)/2+1"]
    assert shapes["e"][2] != shapes["d"][2]
