"""Sessions leave out what the runtime does to a model's disadvantage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

from onward.runtime.sessions import make_session, unwanted_fusions

RESIDUAL = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 4, 8] x, float[n, 4, 8] r) => (float[n, 4, 8] y)
<float[8] w = {1, 2, 3, 4, 5, 6, 7, 8}, float[8] b = {1, 1, 1, 1, 2, 2, 2, 2}> {
    s = Add (x, r)  y = LayerNormalization <axis = -1> (s, w, b)
}"""

PRODUCT = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 2] y)
<float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}, float[2] b = {1, 2}> { p = MatMul (x, w)  y = Add (p, b) }"""


def operators(file: Path) -> set[str]:
    return {node.op_type for node in onnx.load(file).graph.node}


def test_residual_layer_norms_stay_two_operators_on_the_cpu(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(RESIDUAL)
    results = []
    for name in ("plain", "ours"):
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / name)
        options.log_severity_level = 3
        if name == "plain":
            session = ort.InferenceSession(model.SerializeToString(), options)
        else:
            session = make_session(model, options=options)
        x = np.random.default_rng(0).normal(size=(2, 2, 4, 8)).astype(np.float32)
        results.append(session.run(None, {"x": x[0], "r": x[1]})[0])
    assert "SkipLayerNormalization" in operators(tmp_path / "plain")
    assert operators(tmp_path / "ours") == {"Add", "LayerNormalization"}
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_other_providers_have_kernels_of_their_own() -> None:
    cuda = [("CUDAExecutionProvider", {"device_id": "1"}), "CPUExecutionProvider"]
    assert unwanted_fusions(["CPUExecutionProvider"]) == ["SkipLayerNormFusion"]
    assert unwanted_fusions(cuda) == unwanted_fusions(["CUDAExecutionProvider"]) == ["MatMulAddFusion"]
    assert not unwanted_fusions(["OpenVINOExecutionProvider", "CPUExecutionProvider"])


def test_products_and_biases_stay_two_operators_without_their_fusion(tmp_path: Path) -> None:
    """As on CUDA, by the name of the optimizer that the runtime must know."""
    model = onnx.parser.parse_model(PRODUCT)
    results = []
    for name, unwanted in (("plain", []), ("apart", unwanted_fusions(["CUDAExecutionProvider"]))):
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / name)
        options.log_severity_level = 3
        session = ort.InferenceSession(model.SerializeToString(), options, disabled_optimizers=unwanted)
        results.append(session.run(None, {"x": np.arange(12, dtype=np.float32).reshape(3, 4)})[0])
    assert operators(tmp_path / "plain") == {"Gemm"}
    assert operators(tmp_path / "apart") == {"MatMul", "Add"}
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6)
