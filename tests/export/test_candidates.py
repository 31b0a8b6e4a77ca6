"""Quantization that is decided by measurement: what is tried, what is taken, and which layers stay float."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onward.errors import ExportError
from onward.export.quantize import candidates
from onward.export.quantize.candidates import Candidate
from onward.export.quantize.quantizer import QuantizationReport
from quantize.networks import encoder, pixels, residual, words

FLOAT = Candidate("float", Path("float.onnx"), 1000, 10.0, 1.0, 1.0, 1.0, 0.9)
SMALL = dataclasses.replace(FLOAT, name="int8", size=300, speedup=2.0, cosine_mean=0.999, metric=0.897)
# what is changed, and why the candidate is refused
JUDGED = [
    ({}, ""),
    ({"size": 1000}, "larger than float"),
    ({"speedup": 0.25}, "4.0 times as slow as float"),
    ({"speedup": 0.97}, ""),
    ({"metric": 0.85}, "loses 0.05 of the metric"),
    ({"metric": None, "cosine_mean": 0.95}, "cosine 0.950"),
    ({"metric": None}, ""),
]


@pytest.mark.parametrize(("change", "refusal"), JUDGED)
def test_what_is_larger_slower_or_worse_is_refused(change: dict[str, float], refusal: str) -> None:
    candidate = dataclasses.replace(SMALL, **change)
    assert candidates.judge(candidate, FLOAT, allowed_loss=0.005) == refusal


@pytest.mark.parametrize(
    ("before", "after", "speedup", "message"),
    [
        (1 << 20, 1 << 21, 2.0, "int8 is larger than the float model"),
        (1 << 20, 1 << 18, 0.5, "int8 is 2.0 times as slow"),
        (1 << 20, 1 << 18, 0.97, None),
        (1 << 10, 1 << 11, 0.5, None),  # so small that neither says anything
    ],
)
def test_one_way_that_was_named_is_refused_where_it_is_larger_or_slower(
    before: int, after: int, speedup: float, message: str | None
) -> None:
    report = QuantizationReport(before, after, 1.0, 1.0, 1.0, 1.0, (), speedup, "")
    if message is None:
        candidates.refuse_worse(report, "int8")
        return
    with pytest.raises(ExportError, match=message) as raised:
        candidates.refuse_worse(report, "int8")
    assert "--force" in str(raised.value.hint)


def test_the_fastest_is_taken_and_of_equals_the_smallest() -> None:
    slower = dataclasses.replace(SMALL, name="slower", speedup=1.2, size=100)
    smaller = dataclasses.replace(SMALL, name="smaller", speedup=1.95, size=250)
    worse = dataclasses.replace(SMALL, name="worse", speedup=9.0, refusal="loses 0.05 of the metric")
    assert candidates.choose_best([FLOAT, SMALL, slower, smaller, worse]) is smaller
    assert candidates.choose_best([FLOAT, worse]) is FLOAT


def test_every_way_that_fits_is_measured(tmp_path: Path) -> None:
    onnx.save(encoder(), tmp_path / "float.onnx")
    tried = candidates.try_schemes(tmp_path / "float.onnx", words(32), tmp_path, repeats=1)
    by_name = {one.name: one for one in tried}
    assert {"float", "int8", "int8-static", "int8-weights", "int4"} <= set(by_name)
    assert all(one.size < 0.4 * tried[0].size and one.cosine_mean > 0.98 for one in tried[1:])
    onnx.save(residual(), tmp_path / "float.onnx")
    tried = candidates.try_schemes(tmp_path / "float.onnx", pixels(16), tmp_path, repeats=1)
    refusals = {one.name: one.refusal for one in tried}
    assert "int4 stores matrices" in refusals["int4"] and "int4 stores matrices" not in refusals["int8"]


def test_the_layer_that_loses_the_metric_stays_float(tmp_path: Path) -> None:
    """A 1×1 convolution has almost all of its range in one of its inputs, so that the others are rounded away."""
    model = residual()
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "third.weight")
    values = np.frombuffer(weight.raw_data, np.float32).reshape(8, 8).copy()
    values[:, 0] *= 300
    weight.raw_data = values.tobytes()
    onnx.save(model, tmp_path / "float.onnx")
    samples = pixels(64)

    def scores(path: Path) -> np.ndarray:
        return np.asarray(onnxruntime.InferenceSession(path).run(None, samples)[0])

    whole = scores(tmp_path / "float.onnx")
    spread = np.abs(whole).max()

    def likeness(path: Path) -> float:
        return 1 - float(np.abs(scores(path) - whole).mean() / spread)

    target = tmp_path / "small.onnx"
    all_int8 = candidates.quantize_sensitively(
        tmp_path / "float.onnx", target, samples, score=likeness, allowed_loss=1.0
    )
    assert all_int8 == []
    lost = 1 - likeness(target)
    layers = candidates.quantize_sensitively(
        tmp_path / "float.onnx", target, samples, score=likeness, allowed_loss=lost / 2
    )
    assert 1 <= len(layers) < 5 and 1 - likeness(target) <= lost / 2
    kinds = [node.op_type for node in onnx.load(target).graph.node]
    assert "QuantizeLinear" in kinds
    with pytest.raises(ExportError, match="no layer can be int8 without losing more"):
        candidates.quantize_sensitively(
            tmp_path / "float.onnx", target, samples, score=lambda path: float("small" not in path.name),
            allowed_loss=0.1,
        )  # fmt: skip
