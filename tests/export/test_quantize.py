"""Quantization: what each scheme makes of the weights, and that the report tells the truth."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onward.errors import ModelError
from onward.export.quantize.quantizer import SCHEMES, measure, quantize, scheme_name

WORDS, WIDTH = 500, 64


def embedding_model() -> bytes:
    """Embeddings times a matrix whose channels differ in scale thirtyfold, which is divided out afterwards."""
    random = np.random.default_rng(0)
    scales = np.geomspace(1 / 30, 1, WIDTH)
    weights = {
        "table": random.normal(size=(WORDS, WIDTH)),
        "matrix": random.normal(size=(WIDTH, WIDTH)) * scales,
        "other": random.normal(size=(WIDTH, WIDTH)),
        "inverse": 1 / scales,
    }
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "ids"], ["vectors"], name="gather"),
            helper.make_node("MatMul", ["vectors", "matrix"], ["scaled"], name="scale"),
            helper.make_node("Mul", ["scaled", "inverse"], ["even"], name="unscale"),
            helper.make_node("MatMul", ["vectors", "other"], ["product"], name="product"),
            helper.make_node("Add", ["even", "product"], ["y"], name="add"),
        ],
        "embedding",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTH])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    helper.set_model_props(model, {"onward.export": "kept"})
    return model.SerializeToString()


FEEDS = [{"ids": np.arange(start, start + 50)} for start in (0, 300)]

# scheme, largest size against float32, smallest mean cosine. Rounding in steps of d adds noise of d/√12; over a
# range of ±3.5 deviations 8 bits give 0.8 % and 4 bits, in blocks of ±2, some 8 % of a weight: the cosine falls by
# half the square, for weights, embeddings and activations each.
EXPECTED = [
    ("int8", 0.30, 0.9995),
    ("int8-tensor", 0.30, 0.95),
    ("int8-weights", 0.40, 0.9999),
    ("int4", 0.36, 0.99),
    ("fp16", 0.55, 0.999999),
]


@pytest.mark.parametrize(("scheme", "size", "cosine"), EXPECTED, ids=[row[0] for row in EXPECTED])
def test_a_scheme_shrinks_the_model_and_keeps_its_answers(scheme: str, size: float, cosine: float) -> None:
    model = embedding_model()
    small = quantize(model, scheme)
    assert isinstance(small, bytes)
    report = measure(model, small, FEEDS, repeats=1)
    assert (report.bytes_before, report.bytes_after) == (len(model), len(small))
    assert len(small) < size * len(model)
    assert report.cosine_mean > cosine
    assert report.cosine_min <= report.cosine_mean
    assert report.speedup > 0


def test_every_scheme_has_a_case() -> None:
    assert {row[0] for row in EXPECTED} == set(SCHEMES)


def test_a_scale_for_each_channel_beats_one_for_the_tensor() -> None:
    model = embedding_model()
    channel, tensor = (measure(model, quantize(model, s), FEEDS, repeats=0) for s in ("int8", "int8-tensor"))
    assert 1 - channel.cosine_mean < (1 - tensor.cosine_mean) / 2


def test_the_report_of_a_model_against_itself_is_perfect() -> None:
    model = embedding_model()
    report = measure(model, model, FEEDS, repeats=1)
    assert report.cosine_min == pytest.approx(1.0, abs=1e-12)
    assert set(report.to_dict()) == {"bytes_before", "bytes_after", "cosine_min", "cosine_mean", "speedup"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inputs_outputs_and_metadata_stay(scheme: str) -> None:
    before, after = (
        onnx.load_from_string(m) for m in (embedding_model(), quantize(embedding_model(), scheme))
    )  # type: ignore[arg-type]
    for side in ("input", "output"):
        assert [v.name for v in getattr(after.graph, side)] == [v.name for v in getattr(before.graph, side)]
        elements = [[v.type.tensor_type.elem_type for v in getattr(m.graph, side)] for m in (before, after)]
        assert elements[0] == elements[1]
    assert {p.key: p.value for p in after.metadata_props} == {"onward.export": "kept"}
    onnxruntime.InferenceSession(after.SerializeToString(), providers=["CPUExecutionProvider"])


def test_excluded_nodes_stay_in_float() -> None:
    small = quantize(embedding_model(), "int8", exclude=["product"])
    assert isinstance(small, bytes)
    types = [node.op_type for node in onnx.load_from_string(small).graph.node]
    assert (types.count("MatMul"), types.count("MatMulInteger")) == (1, 1)


def test_a_file_is_written_whole_and_beside_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    source, target = tmp_path / "model.onnx", tmp_path / "small.onnx"
    source.write_bytes(embedding_model())
    assert quantize(source, "int8", output=target) == target
    assert target.read_bytes() == quantize(embedding_model(), "int8")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["model.onnx", "small.onnx", "temporary"]


def test_true_means_int8_and_unknown_names_are_refused() -> None:
    assert [scheme_name(value) for value in (True, False, None, "fp16")] == ["int8", None, None, "fp16"]
    with pytest.raises(ValueError, match="did you mean 'int8-tensor'"):
        scheme_name("int8-tensors")


@pytest.mark.parametrize(
    ("model", "message"),
    [(b"not a model", "not an ONNX model"), ("missing.onnx", "no model at 'missing.onnx'")],
)
def test_what_is_no_model_is_refused(model: bytes | str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        quantize(model)


def test_it_works_without_torch() -> None:
    program = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # importing either now fails
path = list(sys.path)
from onward.export.quantize import SCHEMES, quantize
model = sys.stdin.buffer.read()
for scheme in SCHEMES:
    assert len(quantize(model, scheme)) < len(model)
assert sys.path == path
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], input=embedding_model(), capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stderr.decode()


def test_schemes_follow_each_other_in_one_process() -> None:
    """The quantizers import their own modules lazily, by bare names: each order must work."""
    program = """
import sys
from onward.export.quantize import quantize
data = sys.stdin.buffer.read()
for scheme in ("fp16", "int8-tensor", "int4", "int8-weights"):
    print(len(quantize(data, scheme)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], input=embedding_model(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-400:]
    assert len(done.stdout.split()) == 4
