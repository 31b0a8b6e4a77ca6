"""A model for known sizes gives the same results with fewer nodes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from onward import artifacts
from onward.contract import RESET
from onward.graph.proto.accumulation import specialize_reset
from onward.graph.proto.known_shapes import specialize_shapes

HEAD = '<ir_version: 10, opset_import: ["": 21]> g '
SIZES = (
    HEAD
    + """(float[batch, length, 4] x) => (float[batch, m, k] y, int64[r] rows)
<int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] rest = {-1}, int64[2] pads = {0, 0},
 int64[1] width = {4}, int64[1] many = {9223372036854775807}> {
    s = Shape (x)  b = Gather (s, zero)  l = Gather (s, one)  rows = Mul (b, l)
    flat_shape = Concat<axis=0> (rows, rest)  flat = Reshape (x, flat_shape)
    again_shape = Concat<axis=0> (b, l, rest)  again = Reshape (flat, again_shape)
    same_shape = Concat<axis=0> (b, one, one)  same = Expand (again, same_shape)
    padded = Pad (same, pads, , two)
    cut = Slice (padded, zero, many, one)
    turned = Slice (cut, rest, rest, two, rest)
    half = Div (l, two)
    parts = Slice (cut, zero, half, one)
    y = Identity (parts)
}"""
)
LOOP = (
    HEAD
    + """(float[batch, 4] x) => (float[n, m] y) <int64 one = {1}, int64[1] axis = {0}> {
    s = Shape (x)  count = Size (x)  same = Reshape (x, s)
    y = Loop (count, , x) <body = step (int64 i, bool more, float[b, k] seen)
        => (bool next, float[b, k] then) {
            next = Identity (more)  moved = Add (seen, same)  then = Reshape (moved, s) }>
}"""
)
CONV = (
    HEAD
    + """(float[batch, 3, 8, 8] x) => (float[batch, 5] y)
{
    c = Conv<pads=[1, 1, 1, 1], strides=[2, 2]> (x, w)
    n, m2, v2 = BatchNormalization<training_mode=1> (c, scale, shift, mean, var)
    r = Relu (n)  p = GlobalAveragePool (r)  f = Flatten (p)  y = Gemm<transB=1> (f, v)
}"""
)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options)
    names = [value.name for value in session.get_outputs()]
    wanted = {value.name for value in session.get_inputs()}
    made = session.run(names, {name: array for name, array in feeds.items() if name in wanted})
    return dict(zip(names, made))  # type: ignore[arg-type]


def check_same(model: onnx.ModelProto, feeds: dict[str, np.ndarray], given: list[str]) -> Counter[str]:
    special = onnx.ModelProto()
    special.CopyFrom(model)
    specialize_shapes(special, {name: feeds[name].shape for name in given})
    before, after = run(model, feeds), run(special, feeds)
    assert list(before) == list(after)
    for name in before:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    return Counter(node.op_type for node in special.graph.node)


def test_sizes_are_computed_and_what_changes_nothing_goes() -> None:
    x = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)
    left = check_same(onnx.parser.parse_model(SIZES), {"x": x}, ["x"])
    assert left == {"Mul": 1, "Slice": 1, "Identity": 1}  # the first gives an output


def test_a_size_takes_the_type_of_another_value() -> None:
    """As the mean of a loss divides by the number of its samples: nothing but the type of `like` is read."""
    model = onnx.parser.parse_model(
        HEAD
        + """(float[batch, 4] x) => (float y) <float one = {1}> {
        count = Size (x)  like = Tanh (x)  number = CastLike (count, like)  share = Div (one, number)
        total = ReduceSum <keepdims=0> (like)  y = Mul (total, share) }"""
    )
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    assert check_same(model, {"x": x}, ["x"]) == {"Tanh": 1, "ReduceSum": 1, "Mul": 1}


def test_a_body_reads_what_was_computed_outside() -> None:
    x = np.ones((2, 4), np.float32)
    left = check_same(onnx.parser.parse_model(LOOP), {"x": x}, ["x"])
    assert left == {"Loop": 1}


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    folder: Path = tmp_path_factory.mktemp("conv")
    model = onnx.parser.parse_model(CONV)
    rng = np.random.default_rng(0)
    for name, shape in (
        ("w", (4, 3, 3, 3)),
        ("scale", 4),
        ("shift", 4),
        ("mean", 4),
        ("var", 4),
        ("v", (5, 4)),
    ):
        array = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    artifacts.generate_artifacts(
        model,
        requires_grad=["w", "scale", "shift", "v"],
        loss=artifacts.LossType.CrossEntropyLoss,
        artifact_directory=folder,
    )
    return onnx.load(folder / "training_model.onnx")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("keep_shapes", [True, False])
def test_a_training_step_is_the_same_to_the_bit(
    batch: int, keep_shapes: bool, training: onnx.ModelProto
) -> None:
    special = specialize_reset(training, reset=True, keep_shapes=keep_shapes)
    rng = np.random.default_rng(1)
    feeds: dict[str, np.ndarray] = {}
    for value in special.graph.input:
        shape = [dim.dim_value or batch for dim in value.type.tensor_type.shape.dim]
        integer = value.type.tensor_type.elem_type == onnx.TensorProto.INT64
        feeds[value.name] = (
            rng.integers(0, 5, shape) if integer else rng.uniform(0.5, 1.5, shape).astype(np.float32)
        )
    left = check_same(special, feeds, ["x", "labels"])
    assert not left.keys() & {"Shape", "Size", "Identity"}
    assert sum(left.values()) < len(special.graph.node)
    assert RESET not in feeds


def test_symbols_that_inputs_contradict_stay_open() -> None:
    model = onnx.parser.parse_model(
        HEAD
        + "(float[n, 1] x, float[n, 3] y) => (float[a, 3] z, int64[2] s) { z = Add (x, y)  s = Shape (z) }"
    )
    feeds = {"x": np.ones((1, 1), np.float32), "y": np.ones((4, 3), np.float32)}
    assert check_same(model, feeds, ["x", "y"]) == {"Add": 1, "Shape": 1}


@pytest.mark.parametrize("shape", [(2, 4), (2, 6, 5)])
def test_a_shape_that_the_model_does_not_take_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"input 'x' has the shape .*the model expects \['batch', 'length', 4\]"
    ):
        specialize_shapes(onnx.parser.parse_model(SIZES), {"x": shape})


def test_constants_in_other_files_and_large_ones_are_not_touched() -> None:
    model = onnx.parser.parse_model(
        HEAD + "(float[n, 3] x) => (float[n, 3] y) { s = Shape (x)  z = Add (x, big)  y = Reshape (z, s) }"
    )
    tensor = model.graph.initializer.add(name="big", data_type=onnx.TensorProto.FLOAT, dims=[20000, 3])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    specialize_shapes(model, {"x": (20000, 3)})
    assert [node.op_type for node in model.graph.node] == ["Add", "Reshape"]
    assert model.graph.initializer[0].external_data[0].value == "weights.bin"
