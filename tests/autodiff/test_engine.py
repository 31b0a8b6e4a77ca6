"""The backward walk: what the gradient of a whole graph is, whatever its operators."""

from __future__ import annotations

import sys

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from onward.autodiff.check import GradientMismatch, check_gradient
from onward.autodiff.gradient import gradient, vector_jacobian
from onward.autodiff.registry import gradient_rule as register
from onward.errors import ModelError, UnsupportedOps

X = np.array([0.5, -1.5, 2.0], np.float32)
W = np.array([1.5, 0.25, -2.0], np.float32)


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g ' + text)


def run(graph: onnx.ModelProto, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    onnx.checker.check_model(graph, full_check=True)
    names = [value.name for value in graph.graph.output]
    return dict(zip(names, ReferenceEvaluator(graph).run(None, feeds)))


# ---- what a gradient is ------------------------------------------------------------------------------

WHOLE_GRAPHS = {
    "one value used several times": "(float[3] x) => (float[3] y) { a = Mul(x, x)  b = Add(a, x)  y = Mul(b, x) }",
    "an output that other nodes read": "(float[3] x) => (float[3] y, float[3] z) { y = Mul(x, x)  z = Mul(y, x) }",
    "an output twice as an operand": "(float[3] x) => (float[3] y, float[3] z) { y = Mul(x, x)  z = Mul(y, y) }",
    "tied weights": (
        "(float[2, 3] x, float[3, 3] w) => (float[2, 3] y)"
        "{ h = Gemm(x, w)  a = Mul(h, h)  y = Gemm <transB = 1> (a, w) }"
    ),
    "an input that is an output": "(float[3] x) => (float[3] x, float[3] y) { y = Mul(x, x) }",
    "an output that reads no input": (
        "(float[3] x) => (float[3] y, float[3] z) <float[3] c = {1, 2, 3}> { y = Mul(x, x)  z = Mul(c, c) }"
    ),
    "an input that nothing reads": "(float[3] x, float[3] u) => (float[3] y) { y = Mul(x, x) }",
    "a parameter read only inside a body": (
        """(bool p, float[3] x, float[3] w) => (float[3] y) {
            y = If (p) <
                then_branch = then () => (float[3] u) { u = Mul(x, w) },
                else_branch = otherwise () => (float[3] v) { v = Identity(x) }
            >
        }"""
    ),
}


@pytest.mark.parametrize("text", WHOLE_GRAPHS.values(), ids=WHOLE_GRAPHS.keys())
def test_whole_graphs_agree_with_finite_differences(text):
    graph = model(text)
    rng = np.random.default_rng(0)
    feeds = {}
    for value in graph.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        is_flag = kind.elem_type == onnx.TensorProto.BOOL
        feeds[value.name] = np.array(True) if is_flag else rng.normal(size=shape).astype(np.float32)
    check_gradient(graph, feeds)


def test_a_value_that_is_not_reached_has_a_zero_gradient():
    graph = model("(float[3] x, float[N] u) => (float y) { a = Mul(x, x)  y = ReduceSum <keepdims = 0> (a) }")
    found = run(gradient(graph, of="y", wrt=["x", "u"]), x=X, u=np.ones(5, np.float32))
    np.testing.assert_array_equal(found["u_grad"], np.zeros(5, np.float32))
    np.testing.assert_allclose(found["x_grad"], 2 * X)


def test_intermediate_values_have_gradients_too_and_pass_them_on():
    graph = model(
        "(float[3] x) => (float y) { h = Mul(x, x)  k = Mul(h, h)  y = ReduceSum <keepdims = 0> (k) }"
    )
    found = run(gradient(graph, of="y", wrt=["h", "x", "k"]), x=X)
    np.testing.assert_allclose(found["h_grad"], 2 * X**2)
    np.testing.assert_allclose(found["x_grad"], 4 * X**3, rtol=1e-6)
    np.testing.assert_array_equal(found["k_grad"], np.ones(3))


def test_a_value_differentiated_by_itself():
    graph = model("(float x) => (float y) { y = Mul(x, x) }")
    assert run(gradient(graph, of="x", wrt=["x"]), x=np.float32(3))["x_grad"] == 1


def test_initializers_are_differentiated_by_name():
    graph = model(
        "(float[3] x) => (float y) <float[3] w = {1, 2, 3}> { a = Mul(x, w)  y = ReduceSum <keepdims = 0> (a) }"
    )
    np.testing.assert_allclose(run(gradient(graph, of="y", wrt="w"), x=X)["w_grad"], X)


def test_several_cotangents_add_up():
    graph = model("(float[3] x) => (float[3] y, float[3] z) { y = Mul(x, x)  z = Mul(y, x) }")
    derived, of, wrt = vector_jacobian(graph)
    found = run(derived, x=X, y_cotangent=W, z_cotangent=X)
    assert (of, wrt) == (["y", "z"], ["x"])
    np.testing.assert_allclose(found["x_grad"], 2 * X * W + 3 * X**2 * X, rtol=1e-6)


def test_rows_of_a_table_are_added_to_its_other_gradients():
    graph = model(
        "(float[200, 3] t, int64[4] i, int64[2] j) => (float y)"
        "{ a = Gather(t, i)  b = Gather(t, j)  s = ReduceSumSquare <keepdims = 0> (a)"
        "  u = ReduceSumSquare <keepdims = 0> (b)  v = ReduceSumSquare <keepdims = 0> (t)  y = Sum(s, u, v) }"
    )
    derived = gradient(graph, of="y", wrt=["t"])
    assert [node.op_type for node in derived.graph.node].count("ScatterElements") == 2
    assert not any(node.op_type == "Add" for node in derived.graph.node)
    table = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    i, j = np.array([7, 7, -1, 0]), np.array([7, 100])
    wanted = 2 * table * (1 + np.bincount(i % 200, minlength=200) + np.bincount(j, minlength=200))[:, None]
    np.testing.assert_allclose(run(derived, t=table, i=i, j=j)["t_grad"], wanted, rtol=1e-6)


def test_the_same_gradient_under_two_names_gives_two_outputs():
    graph = model("(float[3] x, float[3] u) => (float y) { a = Add(x, u)  y = ReduceSum <keepdims = 0> (a) }")
    derived = gradient(graph, of="y", wrt=["x", "u"])
    assert [value.name for value in derived.graph.output] == ["y", "x_grad", "u_grad"]
    found = run(derived, x=X, u=W)
    np.testing.assert_array_equal(found["x_grad"], found["u_grad"])


def test_a_gradient_that_is_a_value_of_the_model_leaves_that_value_its_name():
    graph = model(
        "(float[3] x, float[3] w) => (float y, float[3] v)"
        "{ v = Identity(w)  a = Mul(x, w)  y = ReduceSum <keepdims = 0> (a) }"
    )
    derived = gradient(graph, of="y", wrt=["x"])
    found = run(derived, x=X, w=W)
    assert list(found) == ["y", "v", "x_grad"]
    np.testing.assert_array_equal(found["x_grad"], W)
    np.testing.assert_array_equal(found["v"], W)


def test_a_name_asked_for_twice_is_answered_once():
    graph = model("(float[3] x) => (float y) { y = ReduceSum <keepdims = 0> (x) }")
    assert [v.name for v in gradient(graph, of="y", wrt=["x", "x"]).graph.output] == ["y", "x_grad"]


def test_a_gradient_has_its_name_even_where_a_value_inside_has_it():
    graph = model("(float[3] x) => (float y) { x_grad = Mul(x, x)  y = ReduceSum <keepdims = 0> (x_grad) }")
    np.testing.assert_allclose(run(gradient(graph, of="y", wrt=["x"]), x=X)["x_grad"], 2 * X)


def test_a_gradient_beside_an_output_of_its_name_gets_another():
    graph = model(
        "(float[3] x) => (float y, float[3] x_grad) { x_grad = Mul(x, x)  y = ReduceSum <keepdims = 0> (x_grad) }"
    )
    found = run(gradient(graph, of="y", wrt=["x"]), x=X)
    np.testing.assert_allclose(found["x_grad"], X * X)
    np.testing.assert_allclose(found["x_grad_1"], 2 * X)


SECOND_ORDER = {
    "Scan": """(float[N] h, float[T, N] x, float[N, N] w) => (float y) {
        last, each = Scan <num_scan_inputs = 1, body = body (float[N] s, float[N] v) => (float[N] t, float[N] u) {
            a = MatMul(s, w)  b = Add(a, v)  t = Tanh(b)  u = Mul(t, t)
        }> (h, x)
        y = ReduceSum <keepdims = 0> (each)
    }""",
    "Loop": """(float[N] h, float[T, N] x, float[N, N] w) => (float y) <int64 n = {2}> {
        last = Loop (n, , h) <body = body (int64 i, bool on, float[N] s) => (bool more, float[N] t) {
            more = Identity(on)  a = MatMul(s, w)  v = Gather(x, i)  b = Add(a, v)  t = Tanh(b)
        }>
        y = ReduceSum <keepdims = 0> (last)
    }""",
}


@pytest.mark.parametrize("operator", SECOND_ORDER)
def test_gradients_of_gradients(operator):
    rng = np.random.default_rng(1)
    feeds = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in {"h": (2,), "x": (3, 2), "w": (2, 2)}.items()
    }
    first = gradient(model(SECOND_ORDER[operator]), of="y", wrt=["w"])
    check_gradient(first, feeds, of=["w_grad"], wrt=["w", "x", "h"])


def test_a_non_scalar_needs_a_cotangent():
    graph = model("(float[3] x) => (float[3] y) { y = Mul(x, x) }")
    with pytest.raises(ModelError, match="cotangent"):
        gradient(graph, of="y", wrt=["x"])
    found = run(gradient(graph, of="y", wrt=["x"], cotangent="dy"), x=X, dy=W)
    np.testing.assert_allclose(found["x_grad"], 2 * X * W)


def test_a_scalar_whose_shape_is_symbolic():
    graph = model("(float[N] x) => (float[N] y) { y = Mul(x, x) }")
    found = run(gradient(graph, of="y", wrt=["x"]), x=X[:1])
    np.testing.assert_allclose(found["x_grad"], 2 * X[:1])


@pytest.mark.parametrize(
    ("of", "wrt", "message"),
    [
        ("y", ["xx"], "'xx' is not found.*did you mean 'x'"),
        ("y", ["n"], "'n' is .*only floating"),
        ("k", ["x"], "'k' is .*only floating"),
    ],
)
def test_what_cannot_be_asked_for_is_named(of, wrt, message):
    graph = model(
        "(float[3] x, int64 n) => (float y, int64[1] k) { k = Shape(x)  y = ReduceSum <keepdims = 0> (x) }"
    )
    with pytest.raises(ModelError, match=message):
        gradient(graph, of=of, wrt=wrt)


# ---- what has no gradient ----------------------------------------------------------------------------


def unsupported_model() -> onnx.ModelProto:
    """Custom operators on the way to the loss, beside it, and in branches of an If in an If."""

    def custom(kind: str, inputs: list[str], output: str) -> onnx.NodeProto:
        return helper.make_node(kind, inputs, [output], name=f"at/{output}", domain="test.unknown")

    def info(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3])

    def branch(name: str, nodes: list[onnx.NodeProto], output: str) -> onnx.GraphProto:
        return helper.make_graph(
            nodes, name, [], [info(output)], value_info=[info(n.output[0]) for n in nodes]
        )

    deep = helper.make_node(
        "If",
        ["p"],
        ["d"],
        name="inner",
        then_branch=branch("deep", [custom("Deep", ["w"], "e")], "e"),
        else_branch=branch("plain", [helper.make_node("Identity", ["w"], ["f"])], "f"),
    )
    nodes = [
        custom("First", ["w"], "a"),
        custom("Beside", ["x"], "unused"),
        helper.make_node(
            "If",
            ["p"],
            ["b"],
            name="choose",
            then_branch=branch("then", [deep], "d"),
            else_branch=branch("else", [custom("Else", ["a"], "g")], "g"),
        ),
        helper.make_node("Mul", ["b", "u"], ["c"], name="product"),
        helper.make_node("ReduceSum", ["c"], ["y"], name="sum", keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [info("x"), helper.make_tensor_value_info("p", onnx.TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [])],
        [onnx.numpy_helper.from_array(W, "w"), onnx.numpy_helper.from_array(W, "u")],
        value_info=[info("a"), info("b"), info("c")],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("test.unknown", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def test_operators_without_a_rule_are_reported_all_at_once_with_those_in_bodies():
    graph = unsupported_model()
    before = graph.SerializeToString()
    with pytest.raises(UnsupportedOps) as caught:
        gradient(graph, of="y", wrt=["w", "u"])
    first, *rows, advice = str(caught.value).splitlines()
    assert first == "3 operators between the loss and trainable parameters have no gradient:"
    assert sorted(row.split() for row in rows) == [
        ["test.unknown.Deep", "node", "'at/e'", "reached", "from", "'w'"],
        ["test.unknown.Else", "node", "'at/g'", "reached", "from", "'w'"],
        ["test.unknown.First", "node", "'at/a'", "reached", "from", "'w'"],
    ]
    assert "frozen_params" in advice
    assert graph.SerializeToString() == before


def test_operators_off_the_path_need_no_rule():
    derived = gradient(unsupported_model(), of="y", wrt=["u"])
    assert [value.name for value in derived.graph.output] == ["y", "u_grad"]


def test_more_than_one_parameter_that_reaches_an_operator_is_counted():
    graph = unsupported_model()
    graph.graph.node[0].input.append("u")
    with pytest.raises(UnsupportedOps, match=r"reached from 'u' \(\+1 more\)"):
        gradient(graph, of="y", wrt=["w", "u"])


# ---- bodies ------------------------------------------------------------------------------------------


WITH_DROPOUT = {
    "Loop": """(float[64] x) => (float[64] y) <int64 n = {3}, float r = {0.25}, bool yes = {1}> {
        y = Loop (n, , x) <body = body (int64 i, bool on, float[64] s) => (bool more, float[64] t) {
            more = Identity(on)  u = Dropout(s, r, yes)  t = Mul(u, s)
        }>
    }""",
    "Scan": """(float[64] x) => (float[64] y) <float[3] turns = {1, 1, 1}, float r = {0.25}, bool yes = {1}> {
        y = Scan <num_scan_inputs = 1, body = body (float[64] s, float one) => (float[64] t) {
            u = Dropout(s, r, yes)  v = Mul(u, s)  t = Mul(v, one)
        }> (x, turns)
    }""",
    "If": """(float[64] x, bool p) => (float[64] y) <bool yes = {1}, float r = {0.25}> {
        y = If (p) <
            then_branch = then () => (float[64] t) {
                a, kept = Dropout(x, r, yes)  b = Mul(a, x)  c = Mul(b, b)  t = Mul(c, c)
            },
            else_branch = otherwise () => (float[64] w) { w = Identity(x) }
        >
    }""",
}


@pytest.mark.parametrize("operator", WITH_DROPOUT)
def test_random_numbers_drawn_in_a_body_are_the_same_in_the_backward_pass(operator):
    import onnxruntime

    derived = gradient(model(WITH_DROPOUT[operator]), of="y", wrt=["x"], cotangent="dy")
    session = onnxruntime.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.linspace(0.5, 1.5, 64, dtype=np.float32)
    flag = {"p": np.array(True)} if operator == "If" else {}
    y, dx = session.run(["y", "x_grad"], {"x": x, "dy": np.ones(64, np.float32), **flag})
    assert 0 < np.count_nonzero(y) < 64
    # What survives is c·x⁸, so that its derivative is 8·y/x; what does not is 0 and has none.
    np.testing.assert_allclose(dx, 8 * y / x, rtol=1e-5)


def test_a_branch_that_the_types_decide_is_put_in_the_place_of_its_if():
    graph = model(
        """(float[2, 3] x) => (float y) <int64 four = {4}, int64[1] first = {0}> {
            size = Size(x)
            large = Greater(size, four)
            h = If (large) <
                then_branch = then () => (float[3] u) { u = ReduceSum <keepdims = 0> (x, first) },
                else_branch = otherwise () => (float[2, 3] v) { v = Identity(x) }
            >
            hh = Mul(h, h)
            y = ReduceSum <keepdims = 0> (hh)
        }"""
    )
    derived = gradient(graph, of="y", wrt=["x"])
    assert "If" not in [node.op_type for node in derived.graph.node]
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_allclose(run(derived, x=x)["x_grad"], np.tile(2 * x.sum(axis=0), (2, 1)))


def test_a_loop_that_keeps_its_shape_is_not_run_twice():
    graph = model(
        """(int64 n, float[N] x) => (float[N] y) {
            y = Loop (n, , x) <body = body (int64 i, bool on, float[N] s) => (bool more, float[N] t) {
                more = Identity(on)
                t = Mul(s, s)
            }>
        }"""
    )
    derived = gradient(graph, of="y", wrt=["x"], cotangent="dy")
    assert [node.op_type for node in derived.graph.node].count("Loop") == 2
    assert not any("Sequence" in node.op_type for node in derived.graph.node)


# ---- building ----------------------------------------------------------------------------------------


def chain(length: int) -> onnx.ModelProto:
    nodes = [helper.make_node("Mul", [f"t{i}", "w"], [f"t{i + 1}"], name=f"n{i}") for i in range(length)]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("t0", onnx.TensorProto.FLOAT, ["N", 3])],
        [helper.make_tensor_value_info(f"t{length}", onnx.TensorProto.FLOAT, ["N", 3])],
        [onnx.numpy_helper.from_array(W, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_the_work_of_building_is_linear_in_the_graph():
    def calls(length: int) -> int:
        graph, count = chain(length), 0

        def tick(frame, event, argument):
            nonlocal count
            count += event == "call"

        sys.setprofile(tick)
        try:
            gradient(graph, wrt=["t0", "w"], cotangent="dy")
        finally:
            sys.setprofile(None)
        return count

    calls(10)
    # Ten times the nodes in about ten times the calls; quadratic building would take a hundred.
    assert calls(1000) < 12 * calls(100)


def test_two_runs_give_the_same_bytes():
    graph = chain(20)
    first, second = (gradient(graph, wrt=["t0", "w"], cotangent="dy").SerializeToString() for _ in range(2))
    assert first == second


# ---- check_gradient ----------------------------------------------------------------------------------

SQUARE = "(float[3] x, int64 n) => (float[3] y) <float[3] w = {1, 2, 3}> { h = Mul(x, x)  y = Mul(h, w) }"


@pytest.mark.parametrize(
    ("inputs", "wrt", "message"),
    [
        ({"x": X, "n": np.array(1), "z": X}, None, "'z' is not an input of the model, which has 'x', 'n'"),
        ({"x": X}, None, "no value is given for the model's input 'n'"),
        ({"x": X, "n": np.array(1)}, ["q"], "'q' is not found"),
        ({"x": X, "n": np.array(1)}, ["n"], "'n' is .*only floating"),
        ({"x": X, "n": np.array(1)}, ["h"], "'h' is computed by the model"),
    ],
)
def test_check_gradient_says_what_is_wrong_with_its_arguments(inputs, wrt, message):
    with pytest.raises(ModelError, match=message):
        check_gradient(model(SQUARE), inputs, wrt=wrt)


def test_check_gradient_checks_initializers():
    assert check_gradient(model(SQUARE), {"x": X, "n": np.array(1)}, wrt=["w", "x"]).wrt == ("w", "x")


def test_check_gradient_finds_a_wrong_rule(monkeypatch):
    from onward.autodiff import registry

    registry.find("Mul")
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))

    @register("Mul")
    def wrong(op, node, dz):
        return op.Mul(dz, node.inputs[1]), dz

    with pytest.raises(GradientMismatch, match="finite differences give"):
        check_gradient(model(SQUARE), {"x": X, "n": np.array(1)})


def test_an_operator_of_unknown_type_is_not_taken_for_a_constant() -> None:
    """Nothing is known of a custom operator's outputs, so the gradient must not silently end there."""
    unknown = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18, "custom": 1]>
        g (float[2] x, float[2] w) => (float loss) {
            a = Mul (x, w)  b = custom.First (a)  c = custom.Second (b)  loss = ReduceSum <keepdims = 0> (c) }""")
    with pytest.raises(UnsupportedOps) as caught:
        gradient(unknown, of="loss", wrt=["w"])
    assert "custom.First" in str(caught.value) and "custom.Second" in str(caught.value)


def test_what_the_reference_evaluator_does_not_take_is_a_model_error() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float x) => (float y)'
        "{ r = RandomNormal<shape: ints = []>() y = Add(x, r) }"
    )
    with pytest.raises(ModelError, match="reference evaluator does not take the model"):
        check_gradient(model, {"x": np.ones((), np.float32)})
