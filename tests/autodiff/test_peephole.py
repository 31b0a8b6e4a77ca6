"""What is rewritten behind the rules, and how many nodes a convolutional network's training graph has."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onward.autodiff.engine
from onward import artifacts, gradient
from onward.graph.proto.accumulation import specialize_reset
from onward.graph.proto.known_shapes import specialize_shapes

HEAD = '<ir_version: 10, opset_import: ["": 21]> g '


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def test_the_engine_knows_no_operator_by_name() -> None:
    source = Path(onward.autodiff.engine.__file__).read_text()
    named = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    known = {schema.name for schema in onnx.defs.get_all_schemas()}
    assert not named & known


def test_a_gradient_behind_a_product_is_not_clipped() -> None:
    model = onnx.parser.parse_model(
        HEAD + "(float[n, 3] x, float[3, 2] w) => (float y) { r = Relu (x)  z = MatMul (r, w)  q = Mul (z, z)"
        "  y = ReduceSum<keepdims=0> (q) }"
    )
    assert operators(gradient(model, wrt=["x"]))["Clip"] == 0


def test_a_gradient_that_may_be_infinite_is_clipped() -> None:
    model = onnx.parser.parse_model(
        HEAD + "(float[n] x) => (float y) { r = Relu (x)  z = Sqrt (r)  y = ReduceSum<keepdims=0> (z) }"
    )
    derived = gradient(model, wrt=["x"])
    assert operators(derived)["Clip"] == 1
    session = ort.InferenceSession(derived.SerializeToString())
    (found,) = session.run(["x_grad"], {"x": np.array([-1.0, 4.0], np.float32)})
    np.testing.assert_array_equal(found, [0.0, 0.25])


def network(layers: int, *, depthwise: bool = False, width: int = 16) -> onnx.ModelProto:
    """Convolutions with batch norms and Relu, every other one with a way around it.

    Of 3×3; with `depthwise` every third is, and the others are of 1×1, as in mobile networks.
    """
    rng = np.random.default_rng(0)
    nodes, weights = [], {}

    def add(kind: str, inputs: list[str], outputs: int = 1, **attributes: Any) -> str:
        names = [f"v{len(nodes)}_{index}" for index in range(outputs)]
        nodes.append(helper.make_node(kind, inputs, names, f"n{len(nodes)}", **attributes))
        return names[0]

    def weight(name: str, *shape: int) -> str:
        weights[name] = rng.uniform(0.1, 0.5, shape).astype(np.float32)
        return name

    x = "x"
    for layer in range(layers):
        inside = 3 if layer == 0 else width
        grouped = depthwise and layer % 3 == 1
        size = 3 if grouped or not depthwise else 1
        kernel = weight(f"w{layer}", width, 1 if grouped else inside, size, size)
        y = add("Conv", [x, kernel], pads=[size // 2] * 4, group=width if grouped else 1)
        state = [weight(f"{part}{layer}", width) for part in ("scale", "shift", "mean", "var")]
        y = add("BatchNormalization", [y, *state], 3, training_mode=1)
        x = add("Relu", [add("Add", [x, y]) if layer % 2 else y])
    pooled = add("Flatten", [add("GlobalAveragePool", [x])])
    nodes.append(helper.make_node("Gemm", [pooled, weight("v", width, 5)], ["scores"], "last"))
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 12, 12])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 5])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.parametrize(("depthwise", "most", "specialized"), [(False, 10, 8), (True, 12, 10)])
def test_training_a_convolutional_network_takes_few_times_its_nodes(
    depthwise: bool, most: int, specialized: int, tmp_path: Path
) -> None:
    model = network(16, depthwise=depthwise)
    trained = [t.name for t in model.graph.initializer if not t.name.startswith(("mean", "var"))]
    artifacts.generate_artifacts(
        model, requires_grad=trained, loss=artifacts.LossType.CrossEntropyLoss, artifact_directory=tmp_path
    )
    training = onnx.load(tmp_path / "training_model.onnx")
    forward = len(model.graph.node)
    assert len(training.graph.node) <= most * forward
    special = specialize_reset(training, reset=True, keep_shapes=True)
    specialize_shapes(special, {"x": (4, 3, 12, 12), "labels": (4,)})
    assert len(special.graph.node) <= specialized * forward


def test_gradients_of_many_batch_norms_equal_those_of_each_alone() -> None:
    model = network(10)
    names = [t.name for t in model.graph.initializer if t.name.startswith(("scale", "shift"))]
    total = helper.make_node("ReduceSum", ["scores"], ["y"], keepdims=0)
    model.graph.node.append(total)
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, []))
    feeds = {"x": np.random.default_rng(1).normal(size=(3, 3, 12, 12)).astype(np.float32)}

    def run(wrt: list[str]) -> dict[str, np.ndarray]:
        derived = gradient(model, of="y", wrt=wrt)
        assert (operators(derived)["Split"] == 2) == (len(wrt) > 2)  # one is that of the scratch memory
        outputs = [f"{name}_grad" for name in wrt]
        session = ort.InferenceSession(derived.SerializeToString())
        return dict(zip(wrt, session.run(outputs, feeds)))  # type: ignore[arg-type]

    together = run(names)
    for name in names[::7]:
        np.testing.assert_allclose(together[name], run([name])[name], rtol=1e-6, atol=1e-7, err_msg=name)


# (model, its inputs' shapes, operators that its gradient must not have, operators that it has)
REWRITTEN = {
    "silu": (
        "(float[n, 4] x) => (float y) { s = Sigmoid (x)  z = Mul (x, s)  q = Mul (z, z)"
        "  y = ReduceSum<keepdims=0> (q) }",
        (5, 4), {"Sub": 1, "Sigmoid": 1, "Mul": 5},
    ),
    "halves": (
        "(float[n, 6] x) => (float y) <int64[1] low = {0}, int64[1] half = {3}, int64[1] end = {9},"
        "  int64[1] one = {1}> {"
        "  a = Slice (x, low, half, one)  b = Slice (x, half, end, one)  m = Neg (b)  r = Concat<axis=1> (m, a)"
        "  q = Mul (r, r)  y = ReduceSum<keepdims=0> (q) }",
        (5, 6), {"Pad": 0},
    ),
    "parts in the middle": (
        "(float[n, 8] x) => (float y) <int64[1] low = {1}, int64[1] half = {3}, int64[1] end = {6},"
        "  int64[1] one = {1}> {"
        "  a = Slice (x, low, half, one)  b = Slice (x, half, end, one)  m = Exp (b)  r = Concat<axis=1> (m, a)"
        "  q = Mul (r, r)  y = ReduceSum<keepdims=0> (q) }",
        (5, 8), {"Pad": 1},
    ),
    "parts that overlap": (
        "(float[n, 8] x) => (float y) <int64[1] low = {0}, int64[1] half = {3}, int64[1] end = {5},"
        "  int64[1] one = {1}> {"
        "  a = Slice (x, low, end, one)  b = Slice (x, half, end, one)  r = Concat<axis=1> (b, a)"
        "  q = Mul (r, r)  y = ReduceSum<keepdims=0> (q) }",
        (5, 8), {"Pad": 2},
    ),
    "mean of squares": (
        "(float[n, 6] x) => (float y) <float two = {2.0}, int64[1] one = {1}> {"
        "  p = Pow (x, two)  v = ReduceMean (p, one)  r = Sqrt (v)  z = Div (x, r)  q = Mul (z, z)  c = Mul (q, z)"
        "  y = ReduceSum<keepdims=0> (c) }",
        (5, 6), {"Expand": 0},
    ),
    "turned twice": (
        "(float[n, 3, 6] x) => (float y) <float[2, 6] w = {1,2,3,4,5,6,7,8,9,10,11,12}> {"
        "  t = Transpose<perm=[1, 0]> (w)  z = MatMul (x, t)  q = Mul (z, z)  y = ReduceSum<keepdims=0> (q) }",
        (2, 3, 6), {"Transpose": 1, "Gemm": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_rewritten_gradient_is_the_derivative(name: str) -> None:
    text, shape, counts = REWRITTEN[name]
    model = onnx.parser.parse_model(HEAD + text)
    derived = gradient(model, wrt=["x"])
    found = operators(derived)
    assert {kind: found[kind] for kind in counts} == counts
    rng = np.random.default_rng(0)
    x, direction = (rng.uniform(0.5, 2.0, shape).astype(np.float32) for _ in range(2))
    slope = ort.InferenceSession(derived.SerializeToString()).run(["x_grad"], {"x": x})[0]
    plain = ort.InferenceSession(model.SerializeToString())
    ahead, behind = (
        float(plain.run(None, {"x": (x + step * direction).astype(np.float32)})[0]) for step in (1e-2, -1e-2)
    )
    np.testing.assert_allclose(np.sum(slope * direction), (ahead - behind) / 2e-2, rtol=5e-3)
