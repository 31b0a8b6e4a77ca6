"""Products with vectors, which onnxruntime's optimizer gets wrong behind a transposition, are written otherwise."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

from onward.graph.dialect.normalize import normalize
from onward.graph.passes.finish import finish

CASES = {
    "matrix": ("float[3,4] a, float[3] v", "t = Transpose <perm = [1, 0]> (a) y = MatMul (t, v)", (3, 4)),
    "batch": (
        "float[N,3,4] a, float[3] v",
        "t = Transpose <perm = [0, 2, 1]> (a) y = MatMul (t, v)",
        (2, 3, 4),
    ),
    "behind more": (
        "float[3,4] a, float[3] v",
        "t = Transpose <perm = [1, 0]> (a) r = Identity (t) z = MatMul (r, v) y = Identity (z)",
        (3, 4),
    ),
}


@pytest.mark.parametrize("inputs, nodes, shape", CASES.values(), ids=CASES)
def test_a_transposed_matrix_times_a_vector(inputs: str, nodes: str, shape: tuple[int, ...]) -> None:
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> g ({inputs}) => (y) {{ {nodes} }}'
    )
    proto = ir.to_proto(finish(normalize(model)))
    rng = np.random.default_rng(0)
    a, v = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(3).astype(np.float32)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == ["y"]
    np.testing.assert_allclose(session.run(None, {"a": a, "v": v})[0], np.swapaxes(a, -1, -2) @ v, rtol=1e-5)
