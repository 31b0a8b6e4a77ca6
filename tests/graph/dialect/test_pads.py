"""Pads with a list of axes come out naming all axes: onnxruntime gets the others wrong beside a Transpose."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onward import gradient
from onward.graph.passes.finish import finish

CASES = {
    "known pads": ("", "p = Constant<value_ints=[1, 2, 0, 1]> ()"),
    "pads known at run time": (", int64[4] given", "p = Identity (given)"),
}


@pytest.mark.parametrize("case", CASES)
def test_pads_name_all_axes(case: str) -> None:
    more, pads = CASES[case]
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[a, b, c] x{more}) => (float[d, e, f] y)
        <int64[2] axes = {{-1, 1}}> {{ {pads} y = Pad (x, p, , axes) }}"""
    )
    made = ir.to_proto(finish(ir.from_proto(model)))
    (pad,) = (node for node in made.graph.node if node.op_type == "Pad")
    assert [name for name in pad.input if name] == [pad.input[0], pad.input[1]]
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    feeds = {"x": x, "given": np.array([1, 2, 0, 1])} if more else {"x": x}
    wanted = np.pad(x, [(0, 0), (2, 1), (1, 0)])
    np.testing.assert_array_equal(ort.InferenceSession(made.SerializeToString()).run(None, feeds)[0], wanted)


def test_the_gradient_of_a_slice_beside_transposes_runs() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[a, 3, 4, 5] x) => (float y)
        <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}> {
            t = Transpose<perm=[0, 2, 3, 1]> (x) s = Slice (t, zero, one, two)
            q = Squeeze (s, two) y = ReduceSumSquare<keepdims=0> (q) }"""
    )
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float32)
    derived = gradient(model, of="y", wrt=["x"])
    wanted = np.where(np.arange(5) == 0, 2 * x, 0)
    (found,) = ort.InferenceSession(derived.SerializeToString()).run(["x_grad"], {"x": x})
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
