"""Numbers to predict: of any size, of several sizes at once, and with the head that a model has already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onward
from onward.errors import DataError
from onward.graph.passes.head import SCALE
from onward.head import replace_head
from small_models import with_weights

X = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
PRICES = (1e5 + 3e4 * X[:, :1] - 2e4 * np.tanh(X[:, 1:2])).astype(np.float32)
SETTINGS: dict[str, Any] = {"epochs": 25, "learning_rate": 0.02}


def network(numbers: int = 1) -> onnx.ModelProto:
    text = f"""net (float[n, 4] x) => (float[n, {numbers}] y) {{
        a = Gemm (x, w1, b1)  h = Tanh (a)  y = Gemm (h, w2, b2) }}"""
    return with_weights(text, w1=(4, 16), b1=(16,), w2=(16, numbers), b2=(numbers,))


def weights(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


@pytest.mark.parametrize("loss", ["mse", "l1", "huber", "smooth-l1"])
def test_prices_train_like_shares_of_one(loss: str) -> None:
    result = onward.finetune(network(), (X, PRICES), loss=loss, **SETTINGS)
    alike = onward.finetune(network(), (X, (PRICES - 1e5) / 3e4), loss=loss, **SETTINGS)
    assert result.metrics["mae"] < 0.25 * PRICES.std()
    assert result.metrics["mae"] / 3e4 == pytest.approx(alike.metrics["mae"], rel=1e-3)


def test_numbers_of_different_sizes_are_all_learned(tmp_path: Path) -> None:
    targets = np.concatenate([PRICES, 1e-3 * X[:, 2:3], 40 + 10 * X[:, 3:]], axis=1)
    result = onward.finetune(network(3), (X, targets), **SETTINGS)
    result.export(tmp_path / "model.onnx")
    answers = np.asarray(onward.load(tmp_path / "model.onnx")(X))
    assert (np.abs(answers - targets).mean(axis=0) < 0.25 * targets.std(axis=0)).all()


def test_a_convolution_predicts_numbers_of_different_sizes() -> None:
    model = with_weights(
        """net (float[n, 4, 1, 1] x) => (float[n, 2, 1, 1] y) {
        a = Conv (x, w1, b1)  h = Tanh (a)  y = Conv (h, w2, b2) }""",
        w1=(16, 4, 1, 1), b1=(16,), w2=(2, 16, 1, 1), b2=(2,),
    )  # fmt: skip
    targets = np.concatenate([PRICES, 1e-3 * X[:, 2:3]], axis=1)
    result = onward.finetune(model, (X[:, :, None, None], targets), task="image-regression", **SETTINGS)
    # in deviations; the mean of both is judged by the larger
    assert result.metrics["eval_loss"] < 0.1 and result.metrics["mae"] < 0.15 * PRICES.std()


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_models_of_both_types_learn_numbers(kind: Any) -> None:
    model = network()
    for tensor in model.graph.initializer:
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(kind), tensor.name)
        )
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    result = onward.finetune(model, (X.astype(kind), PRICES.astype(kind)), **SETTINGS)
    assert result.metrics["mae"] < 0.25 * PRICES.std()


def test_a_head_that_goes_on_keeps_its_scale_and_a_new_one_does_without(tmp_path: Path) -> None:
    first = tmp_path / "first.onnx"
    onward.finetune(network(), (X, PRICES), **SETTINGS).export(first)
    again = onward.finetune(first, (X, PRICES), epochs=1)
    again.export(tmp_path / "second.onnx")
    before, after = weights(first), weights(tmp_path / "second.onnx")
    for name in SCALE:
        np.testing.assert_array_equal(after[name], before[name])
    # the bias of one output is a weight like others
    assert all((after[name] != before[name]).any() for name in ("head.weight", "head.bias"))
    assert again.metrics["mae"] < 0.25 * PRICES.std()
    classes = replace_head(str(first), classes=["low", "high"])
    assert [node.op_type for node in classes.graph.node] == ["Gemm", "Tanh", "Gemm"]
    assert not {tensor.name for tensor in classes.graph.initializer} & set(SCALE)


def test_numbers_that_are_none_are_refused() -> None:
    targets = PRICES.copy()
    targets[17] = np.nan
    with pytest.raises(DataError, match="of sample 17 is nan"):
        onward.finetune(network(), (X, targets), epochs=1)


def test_numbers_that_are_all_the_same_are_learned() -> None:
    assert onward.finetune(network(), (X, np.full_like(PRICES, 7.5)), **SETTINGS).metrics["mae"] < 0.5
