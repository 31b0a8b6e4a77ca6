"""What is done before rounding: ranges from samples, batch norms folded, channels balanced."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper

from onward import contract
from onward.graph.dialect.normalize import normalize
from onward.quantize.calibration import METHODS, answer_error, find_range, layer_errors, round_model
from onward.quantize.planning import Quantization, plan_quantization
from onward.quantize.preparation import (
    balance_products,
    equalize_channels,
    find_balanced,
    fold_batch_norms,
)
from quantize.networks import Network, pixels, residual


def answers(model: ir.Model, samples: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    return np.asarray(session.run(None, samples)[0])


def test_folding_batch_norms_and_balancing_channels_change_no_answer() -> None:
    samples, model = pixels(8), normalize(residual())
    before = answers(model, samples)
    assert fold_batch_norms(model) == 4
    assert not any(node.op_type == "BatchNormalization" for node in model.graph)
    np.testing.assert_allclose(answers(model, samples), before, atol=2e-5 * np.abs(before).max())
    # the one pair that nothing else reads and no bound lies between
    net = Network()
    net.add("Relu", [net.convolution("x", "one", 3, 8, 3, spread=50)], "a")
    net.convolution("a", "two", 8, 8, 3, group=8)
    pair = normalize(net.model(residual().graph.input[:], [onnx_output("two.norm")]))
    fold_batch_norms(pair)
    before, names = answers(pair, samples), ("one.weight", "two.weight")
    assert equalize_channels(pair) == 1
    np.testing.assert_allclose(answers(pair, samples), before, atol=2e-5 * np.abs(before).max())
    first, second = (np.abs(pair.graph.initializers[n].const_value.numpy()).max((1, 2, 3)) for n in names)  # type: ignore[union-attr]
    np.testing.assert_allclose(first, second, rtol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_balancing_products_changes_no_answer_and_evens_their_inputs(shared: bool) -> None:
    """Two channels are large: with one range for all, the others get few levels."""
    net = Network()
    gamma = np.ones(64)
    gamma[:2] = 60
    net.add(
        "LayerNormalization", ["x", net.weight("gamma", gamma), net.weight("beta", np.zeros(64))], "normed"
    )
    net.add("MatMul", ["normed", net.weight("w", net.random.normal(size=(64, 32)) / 8)], "y")
    if shared:  # whoever else reads it must not see the balanced channels
        net.add("ReduceMax", ["normed"], "peak", keepdims=0)
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in {"y": ["n", 32], **({"peak": []} if shared else {})}.items()
    ]
    proto = net.model([helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])], outputs)
    samples = {"x": np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32)}
    model = normalize(proto)
    before = answers(model, samples)
    groups = find_balanced(plan_quantization(model, Quantization("int8")))
    centered = samples["x"] - samples["x"].mean(axis=1, keepdims=True)
    sizes = {"normed": np.abs(centered / centered.std(axis=1, keepdims=True) * gamma).max(axis=0)}
    balance_products(model, groups, sizes, 0.65)
    assert [node.op_type for node in model.graph].count("Mul") == int(shared)
    np.testing.assert_allclose(answers(model, samples), before, atol=1e-5 * np.abs(before).max())

    def error(**options: bool) -> float:
        rounded = normalize(proto)
        round_model(rounded, Quantization("int8", **options), samples)
        return answer_error([before], [answers(rounded, samples)])

    assert error() < 0.5 * error(equalize=False)


def onnx_output(name: str) -> object:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8, 16, 16])


def test_ranges_leave_out_what_costs_more_than_it_is_worth() -> None:
    numbers = np.append(np.random.default_rng(0).normal(size=100_000), 1000.0)
    widths = {method: np.subtract(*find_range(numbers, method)[::-1]) for method in METHODS}
    assert widths["minmax"] > 1000 and widths["percentile"] < 10
    assert widths["error"] < widths["minmax"]
    with pytest.raises(ValueError, match="it is auto, minmax, percentile, error"):
        find_range(numbers, "median")


def test_the_method_is_chosen_by_the_answers() -> None:
    """One pixel in a thousand is enormous: its range would leave the others a level or two."""
    samples = pixels(32)
    samples["x"][0, 0, 0, 0] = 3e4
    model = normalize(residual())
    round_model(model, Quantization("int8"), samples)
    about = json.loads(model.metadata_props[contract.QUANTIZATION])
    assert about["scheme"] == "int8" and about["calibration"] in METHODS and about["products"] == 5
    plain = normalize(residual())
    round_model(plain, Quantization("int8", calibration="minmax"), samples)
    usual = pixels(16, seed=5)
    whole = answers(normalize(residual()), usual)
    assert np.abs(answers(model, usual) - whole).mean() <= np.abs(answers(plain, usual) - whole).mean()


def test_layers_are_ordered_by_what_rounding_each_costs() -> None:
    """A layer whose one channel has almost all of the range is the worst, wherever it stands."""
    model = residual()
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "third.weight")
    values = np.frombuffer(weight.raw_data, np.float32).reshape(8, 8).copy()
    values[:, 0] *= 300  # one input channel: a scale for each output does not help
    weight.raw_data = values.tobytes()
    samples = pixels(16)
    samples["x"] *= 0.1
    errors = layer_errors(normalize(model), Quantization("int8"), samples)
    assert set(errors) == {"first.conv", "second.conv", "third.conv", "fourth.conv", "y"}
    assert list(errors.values()) == sorted(errors.values(), reverse=True)
    assert max(errors.values()) > 2 * min(errors.values()) > 0
