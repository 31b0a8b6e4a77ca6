"""Resize refuses gradients that it does not have, instead of giving zero."""

import onnx.parser
import pytest

from onward.autodiff.gradient import vector_jacobian
from onward.errors import UnsupportedOps

MODEL = """<ir_version: 10, opset_import: ["": 21]>
g (float[1,1,4,4] x, float[4] scales) => (float[1,1,H,W] y) {{ y = Resize<mode="{mode}">(x, , scales) }}"""


def test_scales_of_an_interpolation_are_refused_by_name():
    model = onnx.parser.parse_model(MODEL.format(mode="linear"))
    with pytest.raises(UnsupportedOps, match="no gradient with respect to its scales"):
        vector_jacobian(model, wrt=["x", "scales"])


def test_scales_may_be_an_input_that_is_not_differentiated():
    model = onnx.parser.parse_model(MODEL.format(mode="linear"))
    derived, _, names = vector_jacobian(model, wrt=["x"])
    assert names == ["x"]
    assert "x_grad" in [value.name for value in derived.graph.output]
