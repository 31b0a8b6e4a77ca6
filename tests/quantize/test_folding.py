"""Training for fewer bits: the deployed file computes what the training graph computed, with integer kernels."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onward import artifacts, contract
from onward.api import CheckpointState, Module, Optimizer
from onward.errors import ExportError, ModelError
from onward.export import for_inference
from onward.graph.dialect.saturation import integer_products
from onward.graph.load import load_model
from onward.graph.prune import prune
from quantize.networks import encoder, pixels, residual, words

ROWS = 1000


def train(
    model: onnx.ModelProto,
    samples: dict[str, np.ndarray],
    folder: Path,
    scheme: str,
    steps: int = 6,
    rate: float = 1e-3,
) -> Any:
    """Train a model for a scheme against its float self; returns the state."""
    artifacts.generate_artifacts(
        model, optimizer="adamw", artifact_directory=folder, teacher="self", quantize=scheme,
        calibration={name: array[:64] for name, array in samples.items()},
    )  # fmt: skip
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(rate)
    module.train()
    for step in range(steps):
        module(*(array[step % 6 * 16 : step % 6 * 16 + 16] for array in samples.values()))
        optimizer.step()
        module.lazy_reset_grad()
    return state


def training_answers(folder: Path, state: Any, samples: dict[str, np.ndarray]) -> np.ndarray:
    """What the evaluation graph, which rounds in float, answers with the trained parameters."""
    part = prune(load_model(folder / "eval_model.onnx"), ["y"])
    session = onnxruntime.InferenceSession(ir.to_proto(part).SerializeToString())
    data = state.to_data()
    values = {**samples, **data.trainable, **data.frozen}
    return np.asarray(
        session.run(None, {value.name: values[value.name] for value in session.get_inputs()})[0]
    )


def run(path: Path, samples: dict[str, np.ndarray], *, optimize: bool = True) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return np.asarray(onnxruntime.InferenceSession(path, options).run(None, samples)[0])


def fused_operators(path: Path, folder: Path) -> Counter[str]:
    """The operators that onnxruntime really runs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(path, options)
    return Counter(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)


# model, samples, scheme: what must be fused, the share of rows that must be equal, and the largest size
CASES = {
    "convolutions": (residual, pixels, "int8", {"QLinearConv": 4, "QLinearAdd": 1, "QGemm": 1}, 0.95, 0.75),
    "matrices": (encoder, words, "int8", {"DynamicQuantizeMatMul": 2}, 1.0, 0.35),
    "static": (encoder, words, "int8-static", {"QGemm": 1}, 0.99, 0.35),
    "bytes": (encoder, words, "int8-weights", {"MatMulNBits": 2}, 1.0, 0.35),
    "nibbles": (encoder, words, "int4", {"MatMulNBits": 2}, 1.0, 0.30),
}


@pytest.mark.parametrize("case", CASES)
def test_the_deployed_file_computes_what_the_training_graph_does(case: str, tmp_path: Path) -> None:
    make, samples_of, scheme, operators, equal, size = CASES[case]
    model, samples = make(), samples_of(ROWS)
    state = train(model, samples, tmp_path, scheme)
    written = for_inference(
        tmp_path / "eval_model.onnx", state, ["y"], tmp_path / "small.onnx", inputs=samples
    )
    expected = training_answers(tmp_path, state, samples)
    # as it is written, the file is the training graph to the last bits: what differs is the fused kernels' sums
    literal = run(written.path, samples, optimize=False)
    assert np.abs(literal - expected).max() <= 2e-6 * np.abs(expected).max()
    agreement = written.integers
    assert agreement is not None and agreement.rows == ROWS
    assert agreement.equal >= equal * ROWS
    # in the other rows a tie was rounded to the other side: a level of one value, which the answer shows
    assert agreement.largest <= 0.02 * np.abs(expected).max()
    assert f"{agreement.equal} of {ROWS} rows equal" in str(written)
    fused = fused_operators(written.path, tmp_path)
    assert {name: fused[name] for name in operators} == operators
    assert written.size < size * model.ByteSize()
    assert not any(product.saturates for product in integer_products(load_model(written.path)))


def test_ranges_of_activations_are_learned_and_tables_are_not(tmp_path: Path) -> None:
    samples = pixels(96)
    learned = train(residual(), samples, tmp_path, "int8").to_data().trainable
    ranges = {name: float(value) for name, value in learned.items() if name.endswith(".range")}
    assert {"x.range", "sum.range"} <= set(ranges) and any(abs(value) > 1e-4 for value in ranges.values())
    assert "table" not in train(encoder(), words(96), tmp_path / "words", "int8").to_data().trainable


def test_what_is_rounded_trains_at_a_low_rate(tmp_path: Path) -> None:
    """It knows its task: at the rate of fine-tuning an encoder's vectors turn away from the float ones."""
    train(encoder(), words(32), tmp_path, "int8", steps=0)
    about = load_model(tmp_path / "training_model.onnx").metadata_props
    assert json.loads(about[contract.DEFAULTS])["learning_rate"] == 2e-5


def test_training_makes_the_rounded_model_more_like_the_float_one(tmp_path: Path) -> None:
    samples = words(96)
    session = onnxruntime.InferenceSession(encoder().SerializeToString())
    whole = np.asarray(session.run(None, samples)[0])

    def error(steps: int) -> float:
        folder = tmp_path / str(steps)
        state = train(encoder(), samples, folder, "int4", steps=steps, rate=2e-3)
        vectors = training_answers(folder, state, samples)
        sizes = np.linalg.norm(vectors, axis=1) * np.linalg.norm(whole, axis=1)
        return float(np.mean(1 - np.sum(vectors * whole, axis=1) / sizes))

    assert error(36) < 0.85 * error(0)


def test_a_model_that_was_trained_for_one_scheme_takes_no_other(tmp_path: Path) -> None:
    state = train(encoder(), words(32), tmp_path, "int8", steps=1)
    target = tmp_path / "small.onnx"
    for_inference(tmp_path / "eval_model.onnx", state, ["y"], target, quantize="int8", inputs=words(4))
    with pytest.raises(ExportError, match="was trained for int8, and is quantized already"):
        for_inference(tmp_path / "eval_model.onnx", state, ["y"], target, quantize="int4")
    with pytest.raises(ModelError, match=r"quantized already \(.*name the float model|quantized already"):
        artifacts.generate_artifacts(
            target, loss="mse", artifact_directory=tmp_path / "again", quantize="int8"
        )


# what `generate_artifacts` is given, and what its error says
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no samples": (residual, {"quantize": "int8"}, "4 convolutions needs samples of the data"),
    "other names": (
        residual,
        {"quantize": "int8", "calibration": {"z": pixels(2)["x"]}},
        "no samples of the input 'x': it has z",
    ),
    "no rows": (residual, {"quantize": "int8", "calibration": pixels(0)}, "calibration needs samples"),
    "not finite": (
        residual,
        {"quantize": "int8", "calibration": {"x": np.full((2, 3, 16, 16), np.nan, np.float32)}},
        "'x' is not finite on the samples",
    ),
    "convolutions in four bits": (
        residual,
        {"quantize": "int4"},
        "int4 stores matrices, and .*% of this model's",
    ),
    "batch norm": (
        residual,
        {"quantize": "int8", "calibration": pixels(2), "batch_norm": "train"},
        "batch_norm='train' does not go with quantize",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_for_is_an_error(case: str, tmp_path: Path) -> None:
    make, options, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        artifacts.generate_artifacts(make(), loss="mse", artifact_directory=tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_an_unknown_scheme_lists_those_that_can_be_trained(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="what can be trained is one of int8, int8-static, int8-weights, int4"
    ):
        artifacts.generate_artifacts(encoder(), loss="mse", artifact_directory=tmp_path, quantize="fp16")
