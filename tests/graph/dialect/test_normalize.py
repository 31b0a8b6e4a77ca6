"""What normal form spells out that files leave empty."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from onward.graph.dialect.normalize import normalize


def test_a_loop_that_ends_in_an_empty_condition_has_one() -> None:
    """Names that are empty at the end are lost when a model is written, and a Loop has two inputs at least."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]> g (int64 n, float[N, 2] x) => (float[M, 2] y) {
            y = Loop (n, "") <body = rows (int64 i, bool going) => (bool more, float[2] row) {
                more = Identity (going)
                row = Gather <axis = 0> (x, i)
            }>
        }""")
    session = ort.InferenceSession(ir.to_proto(normalize(model)).SerializeToString())
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    np.testing.assert_array_equal(session.run(None, {"n": np.array(3), "x": x})[0], x[:3])
