"""What cleanup takes out, and what it must leave."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from graph.running import assert_same, run
from onward.errors import ModelError
from onward.graph.cleanup import share_constants, simplify
from onward.graph.dialect.normalize import normalize
from onward.graph.prune import prune

RANDOM = np.random.default_rng(0)


def f(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def parse(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> ' + text)
    model.graph.initializer.extend(numpy_helper.from_array(w, name) for name, w in weights.items())
    return model


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def test_shape_arithmetic_over_known_sizes_becomes_a_constant() -> None:
    source = parse(
        """g (float[2, 3, 4] x) => (float[p, q] y) {
            s = Shape(x)  i = Constant<value_int = 0>()  b = Gather<axis = 0>(s, i)
            a = Constant<value_ints = [0]>()  c = Unsqueeze(b, a)  m = Constant<value_ints = [-1]>()
            t = Concat<axis = 0>(c, m)  r = Reshape(x, t)
            h = Cast<to = 1>(b)  k = Sqrt(h)  y = Mul(r, k) }"""
    )
    model = simplify(normalize(source))
    assert operators(model) == ["Reshape", "Mul"]
    x = f(2, 3, 4)
    assert_same(run(source, {"x": x}), run(ir.to_proto(model), {"x": x}))


def test_sizes_known_only_at_run_time_stay() -> None:
    source = parse(
        """g (float[N, 3] x) => (float[q] y) {
            s = Shape(x)  n = ReduceProd<keepdims = 1>(s)  y = Reshape(x, n) }"""
    )
    assert operators(simplify(normalize(source))) == ["Shape", "ReduceProd", "Reshape"]


def test_parameters_are_neither_folded_nor_merged() -> None:
    zeros = np.zeros(4, np.float32)
    source = parse(
        """g (float[N, 4] x) => (float[N, 4] y) {
            t = Transpose(w)  a = MatMul(x, t)  b = Add(a, bias1)  c = MatMul(b, t)  y = Add(c, bias2) }""",
        w=f(4, 4),
        bias1=zeros,
        bias2=zeros,
    )
    model = simplify(normalize(source))
    assert {"w", "bias1", "bias2"} <= set(model.graph.initializers)
    assert "Transpose" in operators(model)


def test_constants_that_are_no_parameters_are_merged() -> None:
    ones = np.ones(2, np.float32)
    source = parse(
        "g (float[2] x) => (float[2] y) { b = Add(x, c1)  d = Add(b, c2)  y = Add(d, p) }",
        c1=ones,
        c2=ones,
        p=ones,
    )
    model = share_constants(normalize(source), parameters=["p"])
    assert set(model.graph.initializers) == {"c1", "p"}


def test_equal_computations_are_done_once_and_random_ones_are_not() -> None:
    source = parse(
        """g (float[3] x) => (float[3] y, float[3] z) {
            a = Exp(x)  b = Exp(x)  s = Add(a, b)  y = Neg(s)
            r = RandomUniformLike(x)  t = RandomUniformLike(x)  z = Sub(r, t) }"""
    )
    assert sorted(operators(simplify(normalize(source)))) == sorted(
        ["Exp", "Add", "Neg", "RandomUniformLike", "RandomUniformLike", "Sub"]
    )


def test_two_dropouts_of_one_value_draw_twice() -> None:
    source = parse(
        """g (float[3] x, bool t) => (float[3] y) {
            r = Constant<value_float = 0.5>()  a = Dropout(x, r, t)  b = Dropout(x, r, t)  y = Add(a, b) }"""
    )
    assert operators(simplify(normalize(source))).count("Dropout") == 2


def test_identities_go_and_outputs_keep_their_names() -> None:
    source = parse(
        "g (float[3] x) => (float[3] y, float[3] z) { a = Identity(x)  y = Exp(a)  z = Identity(x) }"
    )
    model = simplify(normalize(source))
    assert operators(model) == ["Exp", "Identity"]
    assert [value.name for value in model.graph.outputs] == ["y", "z"]


TRAINING = """g (float[N, 3] x, float[N, 2] t) => (float loss) {
    h = MatMul(x, w)  logits = Add(h, b)  d = Sub(logits, t)  q = Mul(d, d)  loss = ReduceMean<keepdims=0>(q)
    extra = Mul(x, unused) }"""


def training_model() -> ir.Model:
    return normalize(parse(TRAINING, w=f(3, 2), b=f(2), unused=f(3)))


@pytest.mark.parametrize(
    ("outputs", "inputs", "weights"),
    [
        (["logits"], ["x"], ["b", "w"]),
        (["h", "loss"], ["x", "t"], ["b", "w"]),
        (["extra"], ["x"], ["unused"]),
        (["w"], [], ["w"]),
    ],
    ids=lambda names: "+".join(names),
)
def test_pruning_keeps_what_the_outputs_need(
    outputs: list[str], inputs: list[str], weights: list[str]
) -> None:
    model = prune(training_model(), outputs)
    assert [value.name for value in model.graph.outputs] == outputs
    assert [value.name for value in model.graph.inputs] == inputs
    assert sorted(model.graph.initializers) == weights
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [(["logit"], "did you mean 'logits'"), ([], "non empty"), ("logits", "non empty"), (["h", "h"], "twice")],
    ids=str,
)
def test_bad_output_names_are_explained(outputs: list[str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        prune(training_model(), outputs)
