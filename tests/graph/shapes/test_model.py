"""What published models leave open, or say wrongly, about the shapes of their values."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from onward import gradient
from onward.errors import LimitError
from onward.graph.dialect.normalize import normalize
from onward.graph.load import load_model
from onward.graph.shapes.dims import Symbols
from onward.graph.shapes.model import infer_shapes


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 13]> g ' + text)


def test_a_size_of_minus_one_is_not_known() -> None:
    source = model("(float[N, 3] x) => (float[N, 3] y) { y = Neg (x) }")
    for value in (*source.graph.input, *source.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -1
    loaded = load_model(source)
    assert loaded.graph.inputs[0].shape == loaded.graph.outputs[0].shape == [None, 3]
    assert source.graph.input[0].type.tensor_type.shape.dim[0].dim_value == -1


def test_an_output_has_the_rank_that_its_operator_gives_it() -> None:
    loaded = load_model(
        model("(float[2, s, 3] x) => (float[2, s] y) <float[3] b = {1, 2, 3}> { y = Add (x, b) }")
    )
    infer_shapes(loaded)
    assert loaded.graph.outputs[0].shape is not None and loaded.graph.outputs[0].shape.rank() == 3


def test_a_branch_that_may_drop_an_axis_before_a_convolution() -> None:
    source = model(
        """(float[1, 2, 5, s] x, float[3, 2, 3] w) => (float y)
        <int64 last = {3}, int64[1] one = {1}, int64[1] axis = {3}> {
            shape = Shape (x)  size = Gather (shape, last)  single = Equal (size, one)
            r = If (single) <
                then_branch = a () => (float[1, 2, 5] t) { t = Squeeze (x, axis) },
                else_branch = b () => (float[1, 2, 5, s] u) { u = Identity (x) }>
            c = Relu (r)  z = Conv (c, w)  y = ReduceSumSquare <keepdims = 0> (z) }"""
    )
    rng = np.random.default_rng(0)
    x = np.abs(rng.normal(size=(1, 2, 5, 1))).astype(np.float32)
    w = rng.normal(size=(3, 2, 3)).astype(np.float32)
    derived = gradient(source, of="y", wrt=["x", "w"])
    session = ort.InferenceSession(derived.SerializeToString())
    dx, dw = (np.asarray(r) for r in session.run(["x_grad", "w_grad"], {"x": x, "w": w}))

    def loss(x: np.ndarray, w: np.ndarray) -> float:
        rows = x.reshape(1, 2, -1).astype(np.float64)
        windows = np.lib.stride_tricks.sliding_window_view(rows[0], 3, axis=1)
        return float(np.sum(np.einsum("cpk,ock->op", windows, w.astype(np.float64)) ** 2))

    for name, value, found in (("x", x, dx), ("w", w, dw)):
        for place in [(0, 0, 0), (0, 1, 2)]:
            index = (*place, 0)[: value.ndim]
            moved = [value.astype(np.float64), value.astype(np.float64)]
            for array, by in zip(moved, (1e-6, -1e-6)):
                array[index] += by
            ends = [loss(array, w) if name == "x" else loss(x, array) for array in moved]
            np.testing.assert_allclose(found[index], (ends[0] - ends[1]) / 2e-6, rtol=1e-4)


def test_axes_that_are_not_padded_keep_their_names() -> None:
    loaded = load_model(
        model(
            "(float[n, s, 3] x) => (float[a, b, c] y) <int64[6] p = {0, 1, 2, 0, -1, 1}> { y = Pad (x, p) }"
        )
    )
    infer_shapes(loaded)
    (pad,) = loaded.graph
    Symbols().refine(pad)
    assert pad.outputs[0].shape == ["n", "s", 6]


def test_a_vector_joined_with_itself_again_and_again_is_refused_soon() -> None:
    """ONNX's inference would write out every number of it."""
    joins = " ".join(f"a{i + 1} = Concat <axis = 0> (a{i}, a{i})" for i in range(40))
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[2] a0) => (float[n] y) {{ {joins} y = Neg(a40) }}'
    )
    with pytest.raises(LimitError, match="value_bytes"):
        normalize(model)
