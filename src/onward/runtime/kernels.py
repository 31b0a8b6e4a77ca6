"""Small graphs that move, change and reduce the memory of a device between steps; their sessions are cached."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnx.parser

from onward.ort_session import create_session, quiet_options

if TYPE_CHECKING:
    import onnxruntime as ort

    from onward.runtime.devices import Device

_HEADER = '<ir_version: 8, opset_import: ["": 18]>'
# In ONNX's textual syntax. Vectors change in place: `x` and `y` are bound to the same memory.
_GRAPHS = {
    "zeros": "(int64[1] n) => (uint8[m] y) { y = ConstantOfShape <value = uint8[1] {0}> (n) }",
    "copy": "(uint8[n] x) => (uint8[n] y) { y = Identity (x) }",
    "scale": "(float[n] x, float[m] s) => (float[n] y) { y = Mul (x, s) }",
    "add": "(float[n] x, float[m] s) => (float[n] y) { y = Add (x, s) }",
    # not 0·x, which is NaN where x is
    "clear": "(float[n] x, float[m] s) => (float[n] y) <bool[1] yes = {1}> { y = Where (yes, s, x) }",
}
# One number from each part of a vector; a session of them reduces a part at a time.
_REDUCTIONS = {
    # float32 on the device: where it overflows, the host sums in float64
    "norm": "y%d = ReduceSumSquare <keepdims = 1> (x%d)",
    # 0·x is 0, or NaN where x is not finite
    "zero": "m%d = Mul (x%d, none)  y%d = ReduceSum <keepdims = 1> (m%d)",
}


@functools.cache
def kernel(device: Device, name: str) -> ort.InferenceSession:
    """A session of one operator on a device."""
    return _open(device, _GRAPHS[name])


@functools.cache
def shared_reduction(device: Device, name: str, parts: int) -> ort.InferenceSession:
    """A session that reduces a vector in so many parts, of any sizes."""
    return reduction(device, name, [f"n{index}" for index in range(parts)])


def reduction(
    device: Device, name: str, parts: Sequence[int | str], *, capture: bool = False
) -> ort.InferenceSession:
    """A session that reduces a vector in parts of these sizes."""
    one = _REDUCTIONS[name]
    inputs = ", ".join(f"float[{size}] x{index}" for index, size in enumerate(parts))
    nodes = "  ".join(one.replace("%d", str(index)) for index in range(len(parts)))
    numbers = ", ".join(f"y{index}" for index in range(len(parts)))
    body = f"{nodes}  y = Sum ({numbers})"
    return _open(
        device, f"({inputs}) => (float[1] y) <float[1] none = {{0.0}}> {{ {body} }}", capture=capture
    )


@functools.cache
def upload(device: Device, kind: str) -> ort.InferenceSession:
    """A session that copies a tensor of a type to a device."""
    return _open(device, f"({kind}[] x) => ({kind}[] y) {{ y = Identity (x) }}")


@functools.cache
def scale_all(device: Device, shapes: tuple[tuple[int, ...], ...]) -> ort.InferenceSession:
    """A session that multiplies tensors of these shapes by a number."""
    inputs = ", ".join(_declare(shape, index) for index, shape in enumerate(shapes))
    outputs = ", ".join(f"float[] y{index}" for index in range(len(shapes)))
    nodes = "  ".join(f"y{index} = Mul (x{index}, factor)" for index in range(len(shapes)))
    return _open(device, f"({inputs}, float factor) => ({outputs}) {{ {nodes} }}")


@functools.cache
def norm_of_all(device: Device, shapes: tuple[tuple[int, ...], ...]) -> ort.InferenceSession:
    """A session of the squared norm of tensors of these shapes together."""
    inputs = ", ".join(_declare(shape, index) for index, shape in enumerate(shapes))
    nodes = "  ".join(
        f"v{index} = Reshape (x{index}, flat)  y{index} = ReduceSumSquare <keepdims = 1> (v{index}, axis)"
        for index in range(len(shapes))
    )
    squares = ", ".join(f"y{index}" for index in range(len(shapes)))
    total = f"squares = Concat <axis = 0> ({squares})  y = ReduceSum <keepdims = 1> (squares, axis)"
    constants = "<int64[1] flat = {-1}, int64[1] axis = {0}>"
    return _open(device, f"({inputs}) => (float[1] y) {constants} {{ {nodes}  {total} }}")


def _declare(shape: Sequence[int], index: int) -> str:
    # `float` is a number without axes, `float[]` anything
    return f"float{list(shape) if shape else ''} x{index}"


def _open(device: Device, graph: str, *, capture: bool = False) -> ort.InferenceSession:
    model = onnx.parser.parse_model(f"{_HEADER} kernel {graph}")
    return create_session(model, quiet_options(threads=1), providers=device.providers(capture=capture))
