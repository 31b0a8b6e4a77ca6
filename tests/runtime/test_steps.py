"""Steps of unusual models: gradients that are shared, constant, an input, or none; scalars; other outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward.artifacts import OptimType, generate_artifacts
from small_models import load, start, with_weights

X = np.arange(6, dtype=np.float32).reshape(2, 3) + 1

CASES: dict[str, tuple[str, dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "two parameters share a gradient": (
        "net (float[n, 3] x) => (float loss) { s = Add (a, b)  y = Mul (x, s)  loss = ReduceSum <keepdims = 0> (y) }",
        {"a": (3,), "b": (3,)},
        {"a": X.sum(0), "b": X.sum(0)},
    ),
    "a gradient is constant": (
        "net (float[n, 3] x) => (float loss) "
        "{ p = ReduceSum <keepdims = 0> (x)  q = ReduceSum <keepdims = 0> (w)  loss = Add (p, q) }",
        {"w": (4,)},
        {"w": np.ones(4)},
    ),
    "a gradient is an input": (
        "net (float[2, 3] x) => (float loss) { y = Mul (x, w)  loss = ReduceSum <keepdims = 0> (y) }",
        {"w": (2, 3)},
        {"w": X},
    ),
    "a gradient is a parameter": (
        "net (float[n, 3] x) => (float loss) "
        "{ p = Mul (a, b)  q = ReduceSum <keepdims = 0> (p)  r = ReduceMean <keepdims = 0> (x)  loss = Mul (q, r) }",
        {"a": (2,), "b": (2,)},
        {},
    ),
    "a parameter has no part in the loss": (
        "net (float[n, 3] x) => (float loss) { y = Mul (x, w)  loss = ReduceSum <keepdims = 0> (y)  z = Neg (u) }",
        {"w": (3,), "u": (5,)},
        {"w": X.sum(0), "u": np.zeros(5)},
    ),
    "scalars": (
        "net (float[n, 3] x) => (float loss) { y = Mul (x, w)  loss = ReduceSum <keepdims = 0> (y) }",
        {"w": ()},
        {"w": X.sum()},
    ),
    "the loss has one element": (
        "net (float[n, 3] x) => (float[1, 1] loss) { y = Mul (x, w)  loss = ReduceSum <keepdims = 1> (y) }",
        {"w": (3,)},
        {"w": X.sum(0)},
    ),
}


@pytest.mark.parametrize(("text", "shapes", "expected"), CASES.values(), ids=CASES)
def test_gradients_replace_add_up_and_update(
    text: str, shapes: dict[str, tuple[int, ...]], expected: dict[str, Any], tmp_path: Path
) -> None:
    model = with_weights(text, **shapes)
    generate_artifacts(
        model, requires_grad=list(shapes), optimizer=OptimType.SGD, artifact_directory=tmp_path
    )
    state, module, optimizer = start(tmp_path)
    values = {name: state.parameters[name].data for name in shapes}
    if not expected:
        expected = {"a": values["b"] * X.mean(), "b": values["a"] * X.mean()}

    def check(times: float) -> None:
        for name, wanted in expected.items():
            found = state.parameters[name].grad
            assert found is not None and found.shape == shapes[name]
            np.testing.assert_allclose(found, times * np.asarray(wanted), rtol=1e-5, atol=1e-6)

    first = module(X)
    check(1)
    module(X)
    module(X)
    check(3)
    module.lazy_reset_grad()
    np.testing.assert_array_equal(module(X), first)
    check(1)
    optimizer.set_learning_rate(0.5)
    optimizer.step()
    for name, wanted in expected.items():
        np.testing.assert_allclose(
            state.parameters[name].data, values[name] - 0.5 * np.asarray(wanted), rtol=1e-5, atol=1e-6
        )


def test_outputs_of_every_type_come_back(tmp_path: Path) -> None:
    text = """net (float[n, 3] x) => (float loss) {
        y = Mul (x, w)  loss = ReduceSum <keepdims = 0> (y)
        best = ArgMax <axis = 1> (y)  large = Greater (y, x)  half = Cast <to = 10> (y)  wide = Cast <to = 11> (y) }"""
    generate_artifacts(
        with_weights(text, w=(3,)), requires_grad=["w"], artifact_directory=tmp_path,
        additional_output_names=["best", "large", "half", "wide", "x", "w"],
    )  # fmt: skip
    state, module = load(tmp_path)
    for mode in (module.train, module.eval):
        mode()
        loss, best, large, half, wide, x, w = module(X)
        y = X * state.parameters["w"].data
        np.testing.assert_allclose(loss, y.sum(), rtol=1e-5)
        assert [a.dtype for a in (best, large, half, wide)] == [np.int64, np.bool_, np.float16, np.float64]
        np.testing.assert_array_equal(best[:, 0], y.argmax(1))
        np.testing.assert_array_equal(large, y > X)
        np.testing.assert_array_equal(x, X)
        np.testing.assert_array_equal(w, state.parameters["w"].data)


def test_strings_are_inputs_like_others(tmp_path: Path) -> None:
    text = """net (string[n] word) => (float loss) {
        i = LabelEncoder (word)  e = Gather (w, i)  s = Mul (e, e)
        loss = ReduceMean <keepdims = 0> (s) }"""
    model = with_weights(text, w=(3, 2))
    encoder = next(node for node in model.graph.node if node.op_type == "LabelEncoder")
    encoder.domain = "ai.onnx.ml"
    encoder.attribute.extend(
        [
            onnx.helper.make_attribute("keys_strings", ["red", "green"]),
            onnx.helper.make_attribute("values_int64s", [0, 1]),
            onnx.helper.make_attribute("default_int64", 2),
        ]
    )
    model.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
    generate_artifacts(model, requires_grad=["w"], optimizer=OptimType.SGD, artifact_directory=tmp_path)
    state, module, optimizer = start(tmp_path)
    w = state.parameters["w"].data
    for words in (np.array(["green", "blue"], object), np.array(["green", "blue"]), ["green", "blue"]):
        module.lazy_reset_grad()
        np.testing.assert_allclose(module(words), np.mean(w[1:] ** 2), rtol=1e-6)
        gradient = state.parameters["w"].grad
        np.testing.assert_allclose(gradient, np.concatenate([np.zeros((1, 2)), w[1:] / 2]), rtol=1e-6)
    module(["green", "blue"])
    np.testing.assert_allclose(state.parameters["w"].grad, 2 * gradient, rtol=1e-6)
    optimizer.step()
    assert module.eval()(["red"]) == pytest.approx(float(np.mean(w[0] ** 2)))
