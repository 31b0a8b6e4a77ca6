"""Dropout: both passes drop the same elements, whatever the ratio and the mode are known from."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from onward.autodiff.gradient import gradient

INPUTS = {
    # name: graph inputs, initializers, the node's inputs
    "constant ratio": ("", "<float r = {0.25}, bool t = {1}>", "x, r, t"),
    "default ratio": ("", "<bool t = {1}>", "x, , t"),
    "ratio as input": (", float r", "<bool t = {1}>", "x, r, t"),
    "ratio and mode as inputs": (", float r, bool t", "", "x, r, t"),
    "not training": (", float r, bool t", "", "x, r, t"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_the_gradient_has_the_mask_and_scale_of_the_output(name):
    graph_inputs, initializers, inputs = INPUTS[name]
    text = (
        f'<ir_version: 10, opset_import: ["": 21]> g (float[N, M] x{graph_inputs}) => (float[N, M] y) '
        f"{initializers} {{ y = Dropout<seed=3>({inputs}) }}"
    )
    model = gradient(onnx.parser.parse_model(text), "y", ["x"], cotangent="dy")
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {
        "x": np.ones((20, 30), np.float32),
        "dy": np.random.default_rng(0).uniform(0.5, 1.5, (20, 30)).astype(np.float32),
        "r": np.float32(0.25),
        "t": np.array(name != "not training"),
    }
    y, dx = session.run(None, {value.name: np.asarray(feeds[value.name]) for value in session.get_inputs()})
    np.testing.assert_allclose(dx, feeds["dy"] * y, rtol=1e-6)
    assert len(np.unique(y)) == (1 if name == "not training" else 2)
