"""Convolutions of small images: one product for all images of a batch, with the results of one for each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.graph.proto.known_shapes import resolve_symbols
from onward.graph.proto.small_images import batch_convolutions, has_small_images
from onward.runtime.sessions import make_session
from small_models import one_thread, start, with_weights

CASES = {
    "3×3": ("Conv <pads = [1, 1, 1, 1]> (x, w)", (9, 3, 3, 2), (7, 3, 3, 3)),
    "uneven": ("Conv <pads = [1, 0, 0, 2], strides = [2, 1], dilations = [1, 2]> (x, w)", (8, 2, 5, 3), (10, 2, 2, 2)),
    "one axis": ("Conv <pads = [1, 1]> (x, w)", (8, 2, 4), (6, 2, 3)),
    "transposed": ("ConvTranspose <pads = [1, 1, 1, 1]> (x, w)", (32, 3, 3, 2), (3, 4, 3, 3)),
    "transposed, uneven": (
        "ConvTranspose <pads = [0, 1, 1, 0], dilations = [1, 2]> (x, w)", (33, 2, 4, 3), (2, 3, 2, 3)
    ),
}  # fmt: skip
LEFT = {
    "few images": ("Conv <pads = [1, 1, 1, 1]> (x, w)", (7, 3, 3, 2), (7, 3, 3, 3)),
    "large images": ("Conv <pads = [1, 1, 1, 1]> (x, w)", (9, 3, 3, 3), (9, 3, 3, 3)),
    "groups": ("Conv <group = 2> (x, w)", (9, 4, 3, 3), (8, 2, 3, 3)),
    "one tap": ("Conv (x, w)", (9, 4, 2, 2), (8, 4, 1, 1)),
    "few gradients": ("ConvTranspose <pads = [1, 1, 1, 1]> (x, w)", (31, 3, 3, 2), (3, 4, 3, 3)),
    "strides": ("ConvTranspose <strides = [2, 2]> (x, w)", (32, 3, 3, 2), (3, 4, 3, 3)),
    "cut": ("ConvTranspose <pads = [3, 3, 3, 3]> (x, w)", (32, 3, 9, 9), (3, 4, 3, 3)),
    "three axes": ("Conv (x, w)", (9, 2, 3, 3, 3), (30, 2, 3, 3, 3)),
}


def network(text: str, x: tuple[int, ...], w: tuple[int, ...], *, batch: str | int = "n") -> onnx.ModelProto:
    dims = [", ".join(map(str, shape)) for shape in ((batch, *x[1:]), w)]
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> '
        f"g (float[{dims[0]}] x, float[{dims[1]}] w) => (float y) {{ y = {text} }}"
    )
    return onnx.shape_inference.infer_shapes(model)


@pytest.mark.parametrize("name", CASES)
def test_all_images_at_once_have_the_results_of_each(name: str) -> None:
    text, x, w = CASES[name]
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal(x, np.float32), "w": rng.standard_normal(w, np.float32)}
    model = network(text, x, w)
    expected = make_session(model, options=one_thread()).run(None, feeds)[0]
    assert has_small_images(model)
    assert batch_convolutions(model, resolve_symbols(model.graph, {"x": x})) == 1
    assert len(model.graph.node) > 4
    found = make_session(model, options=one_thread()).run(None, feeds)[0]
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LEFT)
def test_others_are_left(name: str) -> None:
    text, x, w = LEFT[name]
    model = network(text, x, w)
    assert batch_convolutions(model, resolve_symbols(model.graph, {"x": x})) == 0
    assert not has_small_images(network(text, x, w, batch=x[0]))


def test_constant_weights_are_left() -> None:
    text, x, w = CASES["3×3"]
    model = network(text, x, w)
    del model.graph.input[1:]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(w, np.float32), "w"))
    assert batch_convolutions(model, resolve_symbols(model.graph, {"x": x})) == 0


def test_a_step_and_many_steps_use_them_where_batches_are_large(tmp_path: Path) -> None:
    model = with_weights(
        """net (float[n, 3, 4, 4] x) => (float[n, 3] scores) {
            a = Conv <pads = [1, 1, 1, 1]> (x, k1)  b = Relu (a)  c = Conv <pads = [1, 1, 1, 1]> (b, k2)
            g = GlobalAveragePool (c)  f = Flatten (g)  scores = MatMul (f, o) }""",
        k1=(18, 3, 3, 3), k2=(17, 18, 3, 3), o=(17, 3),
    )  # fmt: skip
    generate_artifacts(
        model, requires_grad=["k1", "k2", "o"], loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW,
        artifact_directory=tmp_path,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    xs, ys = rng.standard_normal((3, 32, 3, 4, 4), np.float32), rng.integers(0, 3, (3, 32))
    state, module, optimizer = start(tmp_path)
    other, whole, _optimizer = start(tmp_path)
    made, _ = module.step.prepared(reset=True, shapes={"x": (32, 3, 4, 4), "labels": (32,)})  # type: ignore[attr-defined]
    assert sum(node.name.endswith("/together") for node in made.graph.node) == 3  # two forward, one back
    few, _ = module.step.prepared(reset=True, shapes={"x": (7, 3, 4, 4), "labels": (7,)})  # type: ignore[attr-defined]
    assert not any(node.name.endswith("/together") for node in few.graph.node)
    losses = []
    for x, y in zip(xs, ys):
        losses.append(np.ravel(module(x, y))[0])
        optimizer.step()
        module.lazy_reset_grad()
    np.testing.assert_array_equal(losses, np.ravel(whole.train_steps(xs, ys)))
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.data, other.parameters[name].data)
