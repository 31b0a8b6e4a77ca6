"""Cases of quantization that finite differences can see: scales, and values that saturate."""

import numpy as np
from cases import Case, normal, positive

_Q = np.arange(-6, 6, dtype=np.int8).reshape(3, 4)


def _far(rng, shape):
    """Beyond what 8 bits hold at a scale of 0.01."""
    return normal(rng, shape) * np.float32(100)


def _fine(rng, shape):
    return positive(rng, shape) * np.float32(0.01)


def _pair(scale: str, axis: int, label: str, symbolic: bool = False) -> Case:
    dims = "N,M" if symbolic else "2,3"
    text = (
        '<ir_version: 10, opset_import: ["": 21]> g (float[{dims}] x0, float{scale} x1) => (float[{dims}] y) '
        "<int8 z = {{3}}> {{ q = QuantizeLinear<axis={axis}>(x0, x1{zero})"
        "  y = DequantizeLinear<axis={axis}>(q, x1{zero}) }}"
    )
    zero = "" if scale else ", z"
    shape = (3,) if scale else ()
    return Case(
        "QuantizeLinear",
        shapes=[(2, 3), shape],
        sample=[_far, _fine],
        text=text.format(dims=dims, scale=scale, axis=axis, zero=zero),
        label=label,
    )


CASES = [
    Case("DequantizeLinear", shapes=[()], sample=positive, constants={0: _Q}),
    Case("DequantizeLinear", shapes=[(1,)], sample=positive, constants={0: _Q, 2: np.array([2], np.int8)}),
    Case(
        "DequantizeLinear", shapes=[(4,)], sample=positive, constants={0: _Q, 2: np.arange(4, dtype=np.int8)}
    ),
    Case("DequantizeLinear", shapes=[(3,)], sample=positive, constants={0: _Q}, attributes={"axis": -2}),
    Case(
        "DequantizeLinear",
        shapes=[(3, 2)],
        sample=positive,
        constants={0: _Q, 2: np.arange(6, dtype=np.int8).reshape(3, 2)},
        attributes={"axis": 1, "block_size": 2},
    ),
    _pair("", 1, "saturated"),
    _pair("[3]", 1, "saturated-axis"),
    _pair("[3]", -1, "saturated-axis-symbolic", symbolic=True),
]
