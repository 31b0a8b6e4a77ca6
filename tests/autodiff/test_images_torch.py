"""Gradients of pooling, resizing and sampling equal torch's, also at ties between maxima."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from onward.autodiff.gradient import vector_jacobian

POOL = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
TILES = {"kernel_shape": [2, 2], "strides": [2, 2]}
HALF = {"coordinate_transformation_mode": "pytorch_half_pixel"}
CUBIC = {"mode": "cubic", "cubic_coeff_a": -0.75, **HALF}
IMAGE = (2, 3, 8, 10)
SIZES = {3: np.array([2, 3, 5, 13])}


def _resample(mode: str, padding: str, aligned: bool):
    long = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": int(aligned)}
    return (
        "GridSample",
        attributes,
        [(2, 3, 5, 6), (2, 4, 5, 2)],
        {},
        lambda x, g: F.grid_sample(x, g, mode=long, padding_mode=padding, align_corners=aligned),
    )


# operator, attributes, shapes, constant inputs by position, the same in torch
TABLE = [
    ("MaxPool", POOL, [IMAGE], {}, lambda x: F.max_pool2d(x, 3, 2, 1)),
    ("MaxPool", TILES, [IMAGE], {}, lambda x: F.max_pool2d(x, 2)),
    ("MaxPool", {**POOL, "ceil_mode": 1}, [IMAGE], {}, lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True)),
    ("GlobalMaxPool", {}, [IMAGE], {}, lambda x: F.adaptive_max_pool2d(x, 1)),
    ("AveragePool", POOL, [IMAGE], {}, lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
    ("AveragePool", {**POOL, "count_include_pad": 1}, [IMAGE], {}, lambda x: F.avg_pool2d(x, 3, 2, 1)),
    ("AveragePool", TILES, [IMAGE], {}, lambda x: F.avg_pool2d(x, 2)),
    (
        "Resize",
        {**HALF, "mode": "linear"},
        [IMAGE],
        SIZES,
        lambda x: F.interpolate(x, (5, 13), mode="bilinear"),
    ),
    ("Resize", CUBIC, [IMAGE], SIZES, lambda x: F.interpolate(x, (5, 13), mode="bicubic")),
    (
        "Resize",
        {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
        [IMAGE],
        SIZES,
        lambda x: F.interpolate(x, (5, 13), mode="nearest"),
    ),
    (
        "Resize",
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
        [IMAGE],
        SIZES,
        lambda x: F.interpolate(x, (5, 13), mode="bilinear", align_corners=True),
    ),
    (
        "Col2Im",
        {"strides": [2, 1], "pads": [1, 1, 1, 1]},
        [(2, 18, 30)],
        {1: np.array([8, 6]), 2: np.array([2, 3])},
        lambda x: F.fold(x, (8, 6), (2, 3), padding=1, stride=(2, 1)),
    ),
    *[
        _resample(mode, padding, aligned)
        for mode in ("linear", "nearest", "cubic")
        for padding in ("zeros", "border", "reflection")
        for aligned in (False, True)
    ],
]


@pytest.mark.parametrize(("kind", "attributes", "shapes", "constants", "same"), TABLE)
def test_gradients_equal_torch(kind, attributes, shapes, constants, same):
    rng = np.random.default_rng(0)
    # Whole numbers, so that many windows have two equal maxima; a grid is real.
    arrays = [rng.integers(-3, 4, shapes[0]).astype(np.float32)]
    arrays += [rng.uniform(-1.3, 1.3, shape).astype(np.float32) for shape in shapes[1:]]
    inputs = [torch.from_numpy(array).requires_grad_() for array in arrays]
    y = same(*inputs)
    dy = rng.standard_normal(y.shape).astype(np.float32)
    y.backward(torch.from_numpy(dy))

    derived, _, _ = vector_jacobian(_model(kind, attributes, shapes, constants, y.dim()))
    session = onnxruntime.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"y_cotangent": dy, **{f"x{i}": array for i, array in enumerate(arrays)}}
    known = {value.name for value in session.get_inputs()}
    got = session.run(None, {name: array for name, array in feeds.items() if name in known})
    for mine, theirs in zip(got, inputs):
        expected = theirs.grad.numpy()
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5 * max(np.abs(expected).max(), 1))


def _model(kind: str, attributes: dict, shapes: list, constants: dict, rank: int) -> onnx.ModelProto:
    names = [f"x{i}" for i in range(len(shapes))]
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in zip(names, shapes)]
    for position in constants:
        names += [""] * (position - len(names)) + [f"c{position}"]
    tensors = [onnx.numpy_helper.from_array(array, f"c{position}") for position, array in constants.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * rank)
    node = helper.make_node(kind, names, ["y"], **attributes)
    graph = helper.make_graph([node], "g", inputs, [output], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
