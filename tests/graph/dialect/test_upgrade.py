"""Models of old and new opsets mean the same in the dialect."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases
from onnx.reference import ReferenceEvaluator

from graph.running import assert_same, in_dialect, node_model, run
from onward.contract import OPSET
from onward.errors import ModelError
from onward.graph.dialect.normalize import normalize
from onward.graph.shapes.model import unknown_ranks

RANDOM = np.random.default_rng(0)


def f(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def of(op: str, opset: int, *inputs: np.ndarray | None, **rest: Any) -> Any:
    label = " ".join([op, str(opset), rest.pop("label", "")]).strip()
    return pytest.param(op, opset, inputs, rest, id=label)


NORM = [f(2, 3, 4, 4), f(3), f(3), f(3), np.abs(f(3)) + 1]
POINTS = np.array([[0, 2], [1, 0]], np.int64)
IMAGE = f(1, 2, 3, 4)

OLD = [
    of("Squeeze", 7, f(1, 3, 1), axes=[0]),
    of("Squeeze", 11, f(1, 3, 1), axes=[-1]),
    of("Squeeze", 12, f(1, 3, 1), label="all"),
    of("Unsqueeze", 7, f(3, 4), axes=[0, 2]),
    of("Unsqueeze", 11, f(3, 4), axes=[-1]),
    *[
        of(f"Reduce{kind}", 11, np.abs(f(2, 3, 4)), axes=[0, -1], keepdims=keep, label=f"keepdims={keep}")
        for kind in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
        for keep in (0, 1)
    ],
    of("ReduceSum", 7, f(2, 3), label="all"),
    of("ReduceMean", 13, f(2, 3), axes=[1]),
    of("ReduceMax", 17, f(2, 3), axes=[1]),
    of("Split", 7, f(6, 2), outputs=3, label="even"),
    of("Split", 11, f(6, 2), outputs=2, split=[2, 4]),
    of("Split", 13, f(6, 2), outputs=2, label="even"),
    of("Slice", 7, f(5, 6), starts=[1, -3], ends=[4, 1000], axes=[0, 1]),
    of("Slice", 9, f(5, 6), starts=[1], ends=[-1], label="no axes"),
    of("Clip", 7, f(4, 5), min=-0.5, max=0.5),
    of("Clip", 10, f(4, 5), max=0.1),
    of("Clip", 10, f(4, 5), label="open"),
    of("Pad", 7, f(2, 3), pads=[1, 0, 0, 2], value=1.5),
    of("Pad", 10, f(4, 5), pads=[1, 2, 1, 0], mode="reflect"),
    of("Pad", 10, f(4, 5), pads=[0, 1, 0, 1], mode="edge"),
    of("TopK", 7, f(3, 6), k=2, outputs=2),
    of("TopK", 10, f(3, 6), np.array([2]), axis=0, outputs=2),
    of("Dropout", 7, f(3, 4), ratio=0.9),
    of("Dropout", 10, f(3, 4), ratio=0.9),
    of("Dropout", 12, f(3, 4), np.array(0.4, np.float32)),
    of("BatchNormalization", 7, *NORM),
    of("BatchNormalization", 7, *NORM, spatial=1, epsilon=1e-3, label="spatial"),
    of("BatchNormalization", 9, *NORM, momentum=0.8),
    of("BatchNormalization", 7, f(2, 3, 4), *[f(3, 4) for _ in range(3)], np.abs(f(3, 4)), spatial=0),
    *[
        of(kind, opset, f(2, 3, 4), axis=axis, label=f"axis={axis}")
        for kind in ("Softmax", "LogSoftmax", "Hardmax")
        for opset, axis in ((7, 1), (11, 0), (11, 2), (11, -2), (12, 1), (13, 1))
    ],
    of("Softmax", 9, f(3, 4), label="default"),
    of("Softmax", 11, f(3, 4, 1, 1), label="trailing ones"),
    of("Upsample", 7, IMAGE, scales=[1.0, 1.0, 2.0, 3.0]),
    of("Upsample", 9, IMAGE, np.array([1, 1, 2, 1.5], np.float32), mode="linear", constants=[1]),
    of("Resize", 10, IMAGE, np.array([1, 1, 2.5, 0.5], np.float32), constants=[1]),
    of("Resize", 10, IMAGE, np.array([1, 1, 2, 2], np.float32), mode="linear", constants=[1]),
    of("Resize", 11, IMAGE, f(0), np.array([1, 1, 2, 2], np.float32), mode="cubic", constants=[1, 2]),
    of(
        "Resize",
        11,
        IMAGE,
        f(0),
        f(0),
        np.array([1, 2, 5, 3]),
        mode="linear",
        constants=[1, 2, 3],
        label="sizes",
    ),
    of(
        "Resize",
        *[11, IMAGE, f(0), np.array([1, 1, 2, 2], np.float32)],
        coordinate_transformation_mode="tf_half_pixel_for_nn",
        nearest_mode="floor",
        constants=[1, 2],
        label="half pixel",
    ),
    of("Resize", 13, IMAGE, None, np.array([1, 1, 2, 2], np.float32), constants=[2]),
    of("Scatter", 9, f(3, 3), POINTS, f(2, 2), axis=0),
    of("ScatterElements", 11, f(3, 3), POINTS, f(2, 2), axis=1),
    of("GroupNormalization", 18, f(2, 6, 4), f(3), f(3), num_groups=3),
    of("RoiAlign", 10, f(1, 2, 8, 8), np.array([[0, 0, 5, 5.0]], np.float32), np.array([0]), output_height=2),
    of("RoiAlign", 16, f(1, 2, 8, 8), np.array([[0, 0, 5, 5.0]], np.float32), np.array([0]), output_width=2),
    of("GridSample", 16, IMAGE, np.tanh(f(1, 3, 3, 2))),
    of("GridSample", 16, IMAGE, np.tanh(f(1, 3, 3, 2)), mode="bicubic"),
    of("DFT", 17, f(2, 5, 1), axis=1),
    of("DFT", 17, f(2, 5, 6, 1), axis=2, onesided=1),
    of("MaxPool", 7, IMAGE, kernel_shape=[2, 2], auto_pad="SAME_UPPER"),
    of("AveragePool", 7, IMAGE, kernel_shape=[2, 2], pads=[1, 1, 1, 1], count_include_pad=1),
    of("Gemm", 7, f(3, 4), f(4, 5), f(5), alpha=0.5, beta=2.0),
    of("DepthToSpace", 7, f(1, 8, 2, 3), blocksize=2),
    of("OneHot", 9, np.array([0, 2, 1]), np.array(3), np.array([0, 1], np.float32), axis=0),
    of("GatherND", 11, f(3, 4), np.array([[0, 1], [2, 3]])),
    of("LSTM", 7, f(4, 2, 3), f(1, 20, 3), f(1, 20, 5), hidden_size=5, outputs=3),
    of("PRelu", 7, f(2, 3, 4), f(4)),
    of("Sum", 7, f(3, 4), f(3, 4), f(3, 4)),
    of("Flatten", 9, f(2, 3, 4), axis=2),
    of(
        "DequantizeLinear", 10, np.arange(6, dtype=np.uint8), np.array(0.5, np.float32), np.array(3, np.uint8)
    ),
    of("QuantizeLinear", 10, f(6), np.array(0.1, np.float32), np.array(3, np.uint8)),
    of("Cast", 9, f(3), to=7),
    of("LayerNormalization", 17, f(2, 3, 4), f(4), f(4), axis=-1),
]


@pytest.mark.parametrize(("op", "opset", "inputs", "rest"), OLD)
def test_an_old_operator_keeps_its_meaning(op: str, opset: int, inputs: Any, rest: dict[str, Any]) -> None:
    model, feeds = node_model(op, inputs, opset=opset, **rest)
    assert_same(run(model, feeds), run(in_dialect(model), feeds))


def test_flattening_softmax_works_on_symbolic_shapes() -> None:
    model, feeds = node_model("Softmax", [f(2, 3, 4)], opset=11, dynamic=True, axis=1)
    assert_same(run(model, feeds), run(in_dialect(model), feeds))


def test_training_outputs_of_old_batch_normalization_become_the_new_ones() -> None:
    names = ["y", "mean", "var", "saved_mean", "saved_var"]
    model, feeds = node_model("BatchNormalization", NORM, opset=9, outputs=names, momentum=0.9)
    x, scale, bias, mean, var = NORM
    batch_mean, batch_var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    shaped = [v.reshape(1, 3, 1, 1) for v in (batch_mean, batch_var, scale, bias)]
    y = (x - shaped[0]) / np.sqrt(shaped[1] + 1e-5) * shaped[2] + shaped[3]
    running = [0.9 * mean + 0.1 * batch_mean, 0.9 * var + 0.1 * batch_var]
    assert_same([y, *running, batch_mean, batch_var], run(in_dialect(model), feeds))


def parse(opset: int, text: str, extra: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}{extra}]> {text}')


def test_bodies_are_converted_too() -> None:
    model = parse(
        10,
        """g (float[2, 3, 4] x, bool c) => (float[2, 3, 4] y) {
            y = If (c) <then_branch = t () => (float[2, 3, 4] a) { a = Softmax <axis=1> (x) },
                        else_branch = e () => (float[2, 3, 4] b) { b = Clip <min=0.0> (x) }>
        }""",
    )
    for condition in (True, False):
        feeds = {"x": f(2, 3, 4), "c": np.array(condition)}
        assert_same(run(model, feeds), run(in_dialect(model), feeds))


BODIES = {
    "equal names in both branches": """
        y = If (c) <then_branch = t () => (float[2, 3] a) { k = Constant<value_float = 2.0>()  a = Mul(x, k) },
                    else_branch = e () => (float[2, 3] a) { k = Constant<value_float = 3.0>()  a = Mul(x, k) }>""",
    "branches of outer values": """
        z = Neg(x)
        y = If (c) <then_branch = t () => (float[2, 3] a) { a = Identity(x) },
                    else_branch = e () => (float[2, 3] b) { b = Identity(z) }>""",
    "branches of constants": """
        k = If (c) <then_branch = t () => (float a) { a = Constant<value_float = 2.0>() },
                    else_branch = e () => (float b) { b = Constant<value_float = 3.0>() }>
        y = Mul(x, k)""",
    "map over a sequence": """
        s = SequenceConstruct(x, x)
        t = SequenceMap (s) <body = m (float[2, 3] a) => (float[2, 3] b) { b = Neg(a) }>
        i = Constant<value_int = 1>()  y = SequenceAt(t, i)""",
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_keep_their_meaning(name: str) -> None:
    model = parse(17, f"g (float[2, 3] x, bool c) => (float[2, 3] y) {{ {BODIES[name]} }}")
    proto = ir.to_proto(normalize(model))
    onnx.checker.check_model(proto, full_check=True)
    for condition in (True, False):
        feeds = {"x": f(2, 3), "c": np.array(condition)}
        assert_same(run(model, feeds), run(proto, feeds))


def test_scan_of_opset_eight_is_a_scan_over_samples() -> None:
    model = parse(
        8,
        """g (float[B, 3] s, float[B, T, 3] x) => (float[B, 3] z, float[B, T, 3] y) {
            z, y = Scan <num_scan_inputs = 1, directions = [1], body = step (float[3] a, float[3] b)
                    => (float[3] c, float[3] d) { c = Add(a, b)  d = Mul(c, b) }> ("", s, x)
        }""",
    )
    feeds = {"s": f(2, 3), "x": f(2, 4, 3)}
    assert_same(run(model, feeds), run(in_dialect(model), feeds))


def test_loops_of_old_opsets_keep_their_meaning() -> None:
    model = parse(
        9,
        """g (float[3] x, int64 n, bool c) => (float[3] z, float[T, 3] y) {
            z, y = Loop (n, c, x) <body = step (int64 i, bool k, float[3] a)
                    => (bool go, float[3] b, float[3] seen) {
                go = Identity(k)  b = Add(a, a)  up = Unsqueeze<axes=[0]>(b)
                seen = Squeeze<axes=[0]>(up) }>
        }""",
    )
    feeds = {"x": f(3), "n": np.array(3), "c": np.array(True)}
    assert_same(run(model, feeds), run(in_dialect(model), feeds))


FUNCTIONS = """
    <domain: "local", opset_import: ["": {inner}, "local": 1]> scaled <axis>(x) => (y) {{
        total = ReduceSum <axes = @axis> (x)   y = Mul(x, total) }}
    <domain: "local", opset_import: ["": {inner}, "local": 1]> twice (x) => (y) {{
        a = local.scaled <axis = [0]> (x)   y = local.scaled <axis = [1]> (a) }}
"""


@pytest.mark.parametrize("opset", [11, 12])
def test_functions_are_inlined_with_their_attributes(opset: int) -> None:
    text = "g (float[3, 4] x) => (float[3, 4] y) { a = local.twice(x)  y = local.twice(a) }"
    model = parse(opset, text + FUNCTIONS.format(inner=opset), ', "local": 1')
    x = f(3, 4)
    y = x
    for axis in (0, 1, 0, 1):
        y = y * y.sum(axis, keepdims=True)
    found = run(in_dialect(model), {"x": x})
    np.testing.assert_allclose(found[0], y, rtol=1e-4)


def test_a_function_may_be_of_another_opset_than_the_model() -> None:
    text = "g (float[3, 4] x) => (float[3, 4] y) { y = local.twice(x) }"
    model = parse(15, text + FUNCTIONS.format(inner=12), ', "local": 1')
    x = f(3, 4)
    y = x * x.sum(0, keepdims=True)
    y = y * y.sum(1, keepdims=True)
    np.testing.assert_allclose(run(in_dialect(model), {"x": x})[0], y, rtol=1e-4)


@pytest.mark.parametrize("opset", [1, 6])
def test_opsets_before_seven_are_refused(opset: int) -> None:
    with pytest.raises(ModelError, match=f"opset {opset}; opsets 7 to {onnx.defs.onnx_opset_version()}"):
        normalize(parse(opset, "g (float[N] x) => (float[N] y) { y = Neg(x) }"))


def test_opsets_newer_than_the_installed_onnx_are_refused() -> None:
    with pytest.raises(ModelError, match="update onnx"):
        normalize(parse(99, "g (float[N] x) => (float[N] y) { y = Neg(x) }"))


def test_a_newer_opset_stays_only_where_a_type_needs_it() -> None:
    text = "g ({0}[N] x) => ({0}[N] y) {{ y = Cos(x) }}"
    assert normalize(parse(24, text.format("float"))).graph.opset_imports[""] == OPSET
    assert normalize(parse(24, text.format("bfloat16"))).graph.opset_imports[""] == 22


def test_symbolic_names_stay_and_invented_ones_are_distinct() -> None:
    model = parse(
        17,
        """g (float[batch, length, 8] x, int64[2] s) => (float[batch, length, 8] y, float[p, q] z) {
            y = Relu(x)  a = NonZero(x)  b = Transpose(a)  c = Cast<to=1>(b)
            d = Reshape(x, s)  z = Neg(d) }""",
    )
    graph = normalize(model).graph
    values = {value.name: value for node in graph for value in node.outputs}
    assert [str(d) for d in values["y"].shape] == ["batch", "length", "8"]
    assert values["d"].shape.rank() == 2
    assert unknown_ranks(graph) == []


RANDOM_OPERATORS = {
    *("Dropout", "Bernoulli", "Multinomial"),
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
}
# Neither runtime here has them, or they have no numbers to compare.
LEFT_OUT = (
    "test_flexattention",
    "test_image_decoder",
    "test_gradient_of",
    "test_strnorm",
    "test_training_dropout",
    "test_range_bfloat16_type_positive_delta_expanded",  # the reference evaluator itself gets its shape wrong
)
# What onnx corrected in 1.23: Adam's epsilon, which this test computes with and did not give to the operator, and which
# of the soft cap and the mask Attention applies first.
CORRECTED = re.compile("test_adam_multiple$|test_attention_.*_with_.*qk_matmul_(bias|softcap)")
OLD = tuple(map(int, onnx.__version__.split(".")[:2])) < (1, 23)


def test_onnx_node_tests_give_the_same_outputs_in_the_dialect() -> None:
    """Every node test of the installed onnx: before and after on onnxruntime, or after against its data."""
    wrong: list[str] = []
    compared = 0
    with np.errstate(all="ignore"):
        cases = collect_testcases(None)  # type: ignore[arg-type]
    for case in cases:
        if case.model is None or case.name.startswith(LEFT_OUT) or (OLD and CORRECTED.match(case.name)):
            continue
        model = case.model
        versions = {entry.domain: entry.version for entry in model.opset_import}
        if versions.get("", 7) < 7 or RANDOM_OPERATORS & {node.op_type for node in model.graph.node}:
            continue
        inputs, expected = case.data_sets[0]
        feeds = {info.name: _plain(value) for info, value in zip(model.graph.input, inputs)}
        after = ir.to_proto(normalize(model))
        before: Any = [_plain(value) for value in expected]
        with contextlib.suppress(Exception):
            before = run(model, feeds)
        try:
            found = run(after, feeds)
        except Exception:
            found = ReferenceEvaluator(after).run(None, feeds)
        compared += 1
        small = any(getattr(v, "dtype", np.dtype("f4")).itemsize < 4 for v in before)
        try:
            assert_same(before, found, tolerance=2e-2 if small else 1e-4)
        except AssertionError:
            try:
                assert_same([_plain(v) for v in expected], found, tolerance=2e-2 if small else 1e-4)
            except AssertionError:
                wrong.append(case.name)
    assert compared > 1500
    assert wrong == []


def _plain(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value
