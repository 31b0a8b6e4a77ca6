"""Multiply-adds of an optimizer model as one-row products: the same to the bit, and never over their own factor."""

from __future__ import annotations

import collections
import platform

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from onward.graph.proto.optimizer_models import as_rows, fuse_multiply_add, split_scalars

SCALARS = ("rate",)


def model(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        rule (float[N] x, float[N] y, float[1] rate) => (float[N] x.next)
        <float[1] half = {{0.5}}> {{ {body} }}""".replace("x.next", '"x.next"')
    )


CASES = {
    "a scaled vector is added": ("t = Mul(y, half) out = Add(x, t)", {"Gemm": 1}),
    "in either order": ("t = Mul(half, y) out = Add(t, x)", {"Gemm": 1}),
    "or taken away": ("t = Mul(y, rate) out = Sub(x, t)", {"Gemm": 1}),
    "but not taken from": ("t = Mul(y, rate) out = Sub(t, x)", {"Mul": 1, "Sub": 1}),
    "nor where the product is used twice": (
        "t = Mul(y, rate) u = Add(x, t) out = Mul(u, t)",
        {"Mul": 2, "Add": 1},
    ),
    "nor where the result overwrites the factor": ("t = Mul(x, half) out = Add(y, t)", {"Mul": 1, "Add": 1}),
    "nor where a scalar is added": ("t = Mul(y, half) out = Add(t, rate)", {"Mul": 1, "Add": 1}),
}


@pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="only used where kernels round alike"
)
@pytest.mark.parametrize("case", CASES)
def test_what_is_fused(case: str) -> None:
    body, expected = CASES[case]
    whole = model(body.replace("out =", "x.next ="))
    program, slim = split_scalars(whole, SCALARS)
    program, fused = fuse_multiply_add(as_rows(slim), program, SCALARS)
    assert collections.Counter(node.op_type for node in fused.graph.node) == expected
    rng = np.random.default_rng(0)
    for size in (1, 7, 8, 63, 1000):
        x, y = rng.normal(size=(2, size)).astype(np.float32)
        rate = np.float32(0.3)
        feeds = {"x": x, "y": y, "rate": rate.reshape(1)}
        wanted = run(whole, feeds)
        values = dict(zip(program.results, program.run(float(rate))))
        rows = {"x": x[None], "y": y[None], "rate": rate.reshape(1, 1)}
        rows |= {name: np.full((1, 1), value, np.float32) for name, value in values.items()}
        np.testing.assert_array_equal(run(fused, rows)[0], wanted)


def run(of: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = ort.InferenceSession(of.SerializeToString())
    wanted = {value.name for value in session.get_inputs()}
    return np.asarray(session.run(None, {k: v.copy() for k, v in feeds.items() if k in wanted})[0])
