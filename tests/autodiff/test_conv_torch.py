"""Convolution gradients equal torch's, also where ONNX's reference evaluator is wrong (grouped transposes)."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from onward.autodiff.gradient import vector_jacobian

# operator, x, w, attributes
TABLE = [
    ("Conv", (2, 4, 9), (6, 2, 3), {"group": 2, "strides": [2], "pads": [1, 1]}),
    ("Conv", (2, 4, 7, 6), (6, 2, 3, 3), {"group": 2, "strides": [2, 1], "pads": [1, 2, 1, 2]}),
    ("Conv", (2, 3, 7, 6), (3, 1, 3, 3), {"group": 3, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("Conv", (2, 2, 6, 6), (4, 1, 3, 3), {"group": 2, "dilations": [2, 1]}),
    ("Conv", (2, 32, 34, 33), (8, 32, 3, 3), {"pads": [1, 1, 1, 1]}),
    ("Conv", (2, 3, 22, 19), (5, 3, 3, 2), {"dilations": [2, 3], "pads": [3, 1, 3, 1]}),
    ("Conv", (2, 3, 300), (4, 3, 5), {"dilations": [3], "pads": [2, 2]}),
    ("Conv", (2, 3, 8, 7, 8), (4, 3, 3, 2, 3), {"pads": [1, 1, 1, 1, 1, 1]}),
    ("Conv", (1, 16, 140, 130), (2, 16, 3, 3), {"pads": [1, 1, 1, 1]}),
    ("Conv", (1, 2, 260, 130), (2, 1, 3, 3), {"group": 2, "strides": [2, 1], "pads": [1, 1, 1, 1]}),
    ("Conv", (2, 32, 9, 9), (8, 32, 3, 3), {"strides": [2, 2]}),
    ("Conv", (1, 4, 4, 5, 4), (4, 2, 2, 3, 2), {"group": 2, "strides": [2, 1, 1], "pads": [0, 1, 0] * 2}),
    ("ConvTranspose", (2, 4, 3, 4), (4, 3, 3, 2), {"group": 2, "strides": [2, 3], "pads": [1, 0, 1, 0]}),
    ("ConvTranspose", (2, 4, 3), (4, 1, 3), {"group": 4, "strides": [2], "output_padding": [1]}),
    ("ConvTranspose", (1, 1, 3, 2), (1, 2, 2, 2), {"dilations": [2, 3], "output_padding": [1, 2]}),
    ("ConvTranspose", (1, 2, 3, 2, 2), (2, 2, 2, 2, 2), {"strides": [2, 2, 1], "output_padding": [1, 0, 0]}),
]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(("kind", "x_shape", "w_shape", "attributes"), TABLE)
def test_gradients_equal_torch(kind, x_shape, w_shape, attributes, symbolic):
    rank = len(x_shape) - 2
    pads = attributes.get("pads", [0] * rank)[:rank]
    options = {
        "stride": attributes.get("strides", 1),
        "padding": pads,
        "dilation": attributes.get("dilations", 1),
        "groups": attributes.get("group", 1),
    }
    if kind == "ConvTranspose":
        options["output_padding"] = attributes.get("output_padding", 0)
    name = {"Conv": "conv", "ConvTranspose": "conv_transpose"}[kind] + f"{rank}d"
    generator = torch.Generator().manual_seed(0)
    outputs = w_shape[0] if kind == "Conv" else w_shape[1] * options["groups"]
    x, w, b = (torch.randn(s, generator=generator).requires_grad_() for s in (x_shape, w_shape, (outputs,)))
    y = getattr(torch.nn.functional, name)(x, w, b, **options)
    dy = torch.randn(y.shape, generator=generator)
    y.backward(dy)

    derived, _, _ = vector_jacobian(_model(kind, [x_shape, w_shape, (outputs,)], attributes, symbolic))
    session = onnxruntime.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"x": x, "w": w, "b": b, "y_cotangent": dy}
    wanted = {value.name for value in session.get_inputs()}
    got = session.run(
        ["x_grad", "w_grad", "b_grad"], {k: v.detach().numpy() for k, v in feeds.items() if k in wanted}
    )
    for mine, theirs in zip(got, (x.grad, w.grad, b.grad)):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def _model(kind: str, shapes: list[tuple[int, ...]], attributes: dict, symbolic: bool) -> onnx.ModelProto:
    def dims(name: str, shape: tuple[int, ...]) -> list[int | str]:
        return [f"{name}{i}" for i in range(len(shape))] if symbolic else list(shape)

    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, dims(n, s)) for n, s in zip("xwb", shapes)]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shapes[0]))
    graph = helper.make_graph(
        [helper.make_node(kind, list("xwb"), ["y"], **attributes)], "g", inputs, [output]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
