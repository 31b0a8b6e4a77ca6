"""Quantization: what each scheme makes of the weights, and that the report tells the truth."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onward.errors import ModelError
from onward.export.quantize.quantizer import (
    SCHEMES,
    QuantizationReport,
    SaturationWarning,
    measure,
    quantize,
    scheme_name,
)
from onward.graph.dialect.saturation import integer_products
from onward.graph.load import load_model

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


SAMPLES = {"ids": np.arange(WORDS)}
FEEDS = [{"ids": np.arange(start, start + 50)} for start in (0, 300)]

# scheme, largest size against float32, smallest mean cosine. Rounding in steps of d adds noise of d/√12; over a
# range of ±3.5 deviations 8 bits give 0.8 % and 4 bits, in blocks of ±2, some 8 % of a weight: the cosine falls by
# half the square, for weights, embeddings and activations each.
EXPECTED = [
    ("int8", 0.30, 0.9995),
    ("int8-static", 0.30, 0.999),
    ("int8-tensor", 0.30, 0.95),
    ("int8-weights", 0.40, 0.9999),
    ("int4", 0.36, 0.99),
    ("fp16", 0.55, 0.999999),
]


@pytest.mark.parametrize(("scheme", "size", "cosine"), EXPECTED, ids=[row[0] for row in EXPECTED])
def test_a_scheme_shrinks_the_model_and_keeps_its_answers(scheme: str, size: float, cosine: float) -> None:
    model = embedding_model()
    small = quantize(model, scheme, calibration=SAMPLES)
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
    assert report.reference_cosine_min == report.cosine_min and report.saturating == ()
    assert set(report.to_dict()) == {
        "bytes_before", "bytes_after", "cosine_min", "cosine_mean", "reference_cosine_min",
        "reference_cosine_mean", "saturating", "speedup", "cpu",
    }  # fmt: skip


# ---- the same answers on every CPU ----------------------------------------------------------------


def layer(nodes: str, shape: str, output: str, **weights: tuple[int, ...]) -> onnx.ModelProto:
    """A model of a few nodes with weights that are large wherever they are, so that full range saturates."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 14, "com.microsoft": 1]> g ({shape} x) => ({output} y) {{ {nodes} }}'
    )
    random = np.random.default_rng(1)
    for name, dims in weights.items():
        value = (random.uniform(0.9, 1.0, dims) * random.choice([-1, 1])).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    return model


LAYERS = {
    "MatMul": layer("y = MatMul(x, w)", "float[N,64]", "float[N,8]", w=(64, 8)),
    "odd MatMul": layer("y = MatMul(x, w)", "float[N,33]", "float[N,8]", w=(33, 8)),
    "transposed": layer(
        "t = Transpose<perm=[1, 0]>(w)  y = MatMul(x, t)", "float[N,64]", "float[N,8]", w=(8, 64)
    ),
    "Gemm": layer("y = Gemm<transB=1>(x, w, b)", "float[N,64]", "float[N,8]", w=(8, 64), b=(8,)),
    "Conv": layer("y = Conv(x, w)", "float[N,4,6,6]", "float[N,8,4,4]", w=(8, 4, 3, 3)),
    "LSTM": layer(
        "y = LSTM<hidden_size=8>(x, w, r)", "float[T,N,64]", "float[T,1,N,8]", w=(1, 32, 64), r=(1, 32, 8)
    ),
    "Attention": layer(
        "y = com.microsoft.Attention<num_heads=2>(x, w, b)",
        "float[N,T,16]",
        "float[N,T,16]",
        w=(16, 48),
        b=(48,),
    ),
}


@pytest.mark.parametrize(
    ("name", "scheme"),
    [(n, s) for n in LAYERS for s in ("int8", "int8-tensor") if (n, s) != ("Conv", "int8-tensor")],
)
def test_no_pair_of_products_in_the_written_file_passes_16_bits(
    name: str, scheme: str, tmp_path: Path
) -> None:
    path = tmp_path / "small.onnx"
    random = np.random.default_rng(2)
    pixels = {"x": random.uniform(-1, 1, (4, 4, 6, 6)).astype(np.float32)} if name == "Conv" else None
    quantize(LAYERS[name].SerializeToString(), scheme, path=path, calibration=pixels)
    model = load_model(path)
    products = integer_products(model)
    assert all(p.lowest >= -(2**15) and p.highest < 2**15 for p in products), products
    assert products
    integers = {"MatMulInteger", "DequantizeLinear", "QAttention", "DynamicQuantizeLSTM"}
    assert integers & {node.op_type for node in model.graph.all_nodes()}
    onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def test_the_scale_uses_the_range_that_pairs_leave() -> None:
    """Two neighbours together may have what one alone must not: more than half of the range, where it fits."""
    even, peaks = (np.full((8, 1), 0.5, np.float32) for _ in range(2))
    peaks[1::2] = 0.01
    for matrix, largest in ((even, 64), (peaks, 125)):
        model = layer("y = MatMul(x, w)", "float[N,8]", "float[N,1]")
        model.graph.initializer.append(numpy_helper.from_array(matrix, "w"))
        small = quantize(model.SerializeToString())
        assert isinstance(small, bytes)
        tensors = onnx.load_from_string(small).graph.initializer
        values = next(numpy_helper.to_array(t) for t in tensors if t.name == "w.int8")
        assert np.abs(values).max() == pytest.approx(largest, abs=1)


def test_full_range_is_found_in_the_file_and_warned_of() -> None:
    whole = LAYERS["MatMul"].SerializeToString()
    full = quantize(whole, "int8", reduce_range=False)
    feeds = [{"x": np.random.default_rng(0).uniform(0, 1, (4, 64)).astype(np.float32)}]
    with pytest.warns(SaturationWarning, match=r"saturate on .*reduce_range=True"):
        report = measure(whole, full, feeds, repeats=0)
    assert len(report.saturating) == 1
    assert report.reference_cosine_min > 0.999  # whatever this CPU makes of it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = measure(whole, quantize(whole, "int8"), feeds, repeats=0)
    assert report.cosine_min > 0.999 and report.reference_cosine_min == pytest.approx(
        report.cosine_min, abs=1e-9
    )


def test_a_runtime_that_saturates_is_told_from_one_that_does_not() -> None:
    figures: dict[str, Any] = {"bytes_before": 4, "bytes_after": 1, "cosine_mean": 0.95, "saturating": ("a", "b"),
                               "reference_cosine_mean": 0.99, "speedup": 2.0, "cpu": "AVX2"}  # fmt: skip
    wrong = QuantizationReport(cosine_min=0.88, reference_cosine_min=0.98, **figures)
    assert "saturate on this CPU (AVX2): cosine min 0.8800 mean 0.9500, but 0.9800" in str(wrong.warning)
    right = QuantizationReport(cosine_min=0.98, reference_cosine_min=0.98, **figures)
    assert "'a' (+1 more) may saturate on CPUs without" in str(right.warning)
    assert (
        QuantizationReport(
            cosine_min=0.98, reference_cosine_min=0.98, **{**figures, "saturating": ()}
        ).warning
        is None
    )


QUANTIZED = """<ir_version: 8, opset_import: ["": 14]> g (float[N, 2] x) => (float[N, 1] y)
    <int8[2, 1] w = {127, 127}> { q, s, z = DynamicQuantizeLinear(x)  i = MatMulInteger(q, w, z)
    f = Cast<to=1>(i)  y = Mul(f, s) }"""
# scheme, model, and what its error says
REFUSED = {
    "already quantized": (
        "int8",
        onnx.parser.parse_model(QUANTIZED),
        r"quantized already \(DynamicQuantizeLinear",
    ),
    "no samples": ("int8", LAYERS["Conv"], "1 convolutions needs samples of the data"),
    "no samples, static": ("int8-static", LAYERS["MatMul"], "int8-static needs samples"),
    "int4 convolutions": (
        "int4",
        LAYERS["Conv"],
        "int4 stores matrices, and 100% of this model's weights are in conv",
    ),
    "no weights": (
        "int8",
        layer("y = Sin(x)", "float[N]", "float[N]"),
        "nothing to quantize.* operators are Sin",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_scheme_cannot_store_is_an_error(case: str) -> None:
    scheme, model, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        quantize(model.SerializeToString(), scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inputs_outputs_and_metadata_stay(scheme: str) -> None:
    before, after = (
        onnx.load_from_string(m)
        for m in (embedding_model(), quantize(embedding_model(), scheme, calibration=SAMPLES))
    )  # type: ignore[arg-type]
    for side in ("input", "output"):
        assert [v.name for v in getattr(after.graph, side)] == [v.name for v in getattr(before.graph, side)]
        elements = [[v.type.tensor_type.elem_type for v in getattr(m.graph, side)] for m in (before, after)]
        assert elements[0] == elements[1]
    assert {p.key: p.value for p in after.metadata_props} == {"onward.export": "kept"}
    onnxruntime.InferenceSession(after.SerializeToString(), providers=["CPUExecutionProvider"])


def test_products_of_values_whose_types_the_file_leaves_out_become_integers() -> None:
    """As traced models have them: equal biases are one initializer and an Identity of it."""
    nodes = "v = Identity(x)  c = Identity(b)  y = Gemm<transB=1>(v, w, c)"
    model = layer(nodes, "float[N,64]", "float[N,8]", w=(8, 64), b=(8,))
    small = quantize(model.SerializeToString(), "int8")
    assert measure(model.SerializeToString(), small, [{"x": np.ones((2, 64), np.float32)}]).cosine_min > 0.999


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
    assert quantize(source, "int8", path=target) == target
    assert target.read_bytes() == quantize(embedding_model(), "int8")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["model.onnx", "small.onnx", "temporary"]


def test_true_means_int8_and_unknown_names_are_refused() -> None:
    assert [scheme_name(value) for value in (True, False, None, "fp16")] == ["int8", None, None, "fp16"]
    with pytest.raises(ValueError, match="did you mean 'int8-tensor'"):
        scheme_name("int8-tensors")


@pytest.mark.parametrize(
    ("model", "message"),
    [(b"not a model", "not an ONNX model"), ("missing.onnx", "no model file at 'missing.onnx'")],
)
def test_what_is_no_model_is_refused(model: bytes | str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        quantize(model)


def test_it_works_without_torch() -> None:
    program = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # importing either now fails
path = list(sys.path)
import numpy as np
from onward.export.quantize import SCHEMES, quantize
model = sys.stdin.buffer.read()
for scheme in SCHEMES:
    assert len(quantize(model, scheme, calibration={"ids": np.arange(500)})) < len(model)
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
