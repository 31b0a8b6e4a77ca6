"""Gradients of pooling and of MaxUnpool."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onward.autodiff.forms.sampling import add_into
from onward.autodiff.forms.separable import identity, multiply
from onward.autodiff.registry import gradient_rule
from onward.autodiff.saved.optional_outputs import saved_output
from onward.graph.forms.windows import ints, ranked, spatial, tap_slice, window_of


@gradient_rule("MaxPool")
def max_pool(op, node, dy, _=None):
    """y = x[i], i the first largest of each window   ⇒   dx[i] = Σ dy"""
    if dy is None:
        return None
    x = node.inputs[0]
    dy = ranked(dy, x)
    form = max_formulation(op, node, x)
    if form == "compare":
        return _first_equal(op, node, x, dy)
    indices = _indices(op, node)
    if form == "write":
        kernel, strides = (list(node.attributes.get_ints(name)) for name in ("kernel_shape", "strides"))
        return op.MaxUnpool(dy, indices, kernel_shape=kernel, strides=strides)
    length = op.ReduceProd(op.shape(x), keepdims=1)
    flat = add_into(op, length, op.Reshape(indices, [-1, 1]), op.Reshape(dy, [-1]))
    return op.Reshape(flat, op.shape(x))


@gradient_rule("AveragePool")
def average_pool(op, node, dy):
    """y = x·P along each axis, P the means of each window   ⇒   dx = dy·Pᵀ"""
    x = node.inputs[0]
    dy = ranked(dy, x)
    kernel = list(node.attributes.get_ints("kernel_shape"))
    if _exact_tiles(op, node, x):
        return _repeat(op, op.Div(dy, float(math.prod(kernel))), kernel)
    return multiply(op, dy, _axis_matrices(op, node, x))


@gradient_rule("LpPool")
def lp_pool(op, node, dy):
    """y = (Σ |x|ᵖ)^(1/p)   ⇒   dx = sign(x)·|x|ᵖ⁻¹ · Σ over its windows of dy·y¹⁻ᵖ"""
    x, y = node.inputs[0], node.outputs[0]
    dy = ranked(dy, x)
    p = node.attributes.get_int("p", 2)
    scaled = _over_norm(op, dy, y, p)
    return op.Mul(multiply(op, scaled, _axis_matrices(op, node, x, p=1)), _power_slope(op, x, p))


@gradient_rule("GlobalAveragePool")
def global_average_pool(op, node, dy):
    """y = Σ x / n   ⇒   dx = dy / n everywhere"""
    x = node.inputs[0]
    size = spatial(op, x)
    if isinstance(size, np.ndarray):
        each = op.Div(dy, float(max(int(np.prod(size)), 1)))
    else:
        each = op.Div(dy, op.CastLike(op.ReduceProd(size, keepdims=0), dy))
    return op.Expand(each, op.shape(x))


@gradient_rule("GlobalMaxPool")
def global_max_pool(op, node, dy):
    """y = x[i], i the first largest   ⇒   dx[i] = dy"""
    x = node.inputs[0]
    size = spatial(op, x)
    length = (
        op.constant(np.prod(size, keepdims=True)) if isinstance(size, np.ndarray) else op.ReduceProd(size)
    )
    flat = op.Reshape(x, op.Concat([0, 0], length, axis=0))
    # The first of equal ones, as the runtime's own pooling and torch have it.
    first = op.ArgMax(flat, axis=2, keepdims=1)
    chosen = op.Where(op.Equal(op.positions(length), first), op.Reshape(dy, [0, 0, 1]), 0.0)
    return op.Reshape(chosen, op.shape(x))


@gradient_rule("GlobalLpPool")
def global_lp_pool(op, node, dy):
    """y = (Σ |x|ᵖ)^(1/p)   ⇒   dx = dy·y¹⁻ᵖ·sign(x)·|x|ᵖ⁻¹"""
    x, y = node.inputs[0], node.outputs[0]
    p = node.attributes.get_int("p", 2)
    return op.Mul(_over_norm(op, dy, y, p), _power_slope(op, x, p))


@gradient_rule("MaxUnpool")
def max_unpool(op, node, dy):
    """y[i] = x   ⇒   dx = dy[i]"""
    x, indices = node.inputs[:2]
    dy = ranked(dy, x)
    taken = op.Gather(op.Reshape(dy, [-1]), op.Reshape(indices, [-1]))
    return op.Reshape(taken, op.shape(x))


def max_formulation(op, node: ir.Node, x: ir.Value) -> str:
    """Choose the formulation of MaxPool's gradient; measured with one thread on the CPU provider.

    "compare": find each maximum again, tap by tap; the runtime pools ten times slower with indices than
    without, so this is 1.4 times as fast for few taps. "write": no pixel is in two windows, so that MaxUnpool's
    writing is adding. "scatter": add at the indices; any shapes.
    """
    kind = op.dtype(x)
    # The runtime has neither Col2Im nor MaxUnpool in float64.
    if not _exact_tiles(op, node, x) or kind == ir.DataType.DOUBLE:
        return "scatter"
    few = int(np.prod(ints(node, "kernel_shape", []))) <= 4
    return "compare" if few and kind == ir.DataType.FLOAT and op.static_dim(x, 1) is not None else "write"


def _first_equal(op, node: ir.Node, x: ir.Value, dy: ir.Value) -> ir.Value:
    """dy at the first element of each tile that equals its maximum, 0 elsewhere."""
    size = np.asarray(spatial(op, x))
    window = window_of(op, node, x, ints(node, "kernel_shape", []))
    count = size // window.strides
    parts, free = [], None
    for tap in window.taps():
        equal = op.Equal(tap_slice(op, x, tap, window, count, axes=window.axes), node.outputs[0])
        first = equal if free is None else op.And(equal, free)
        free = op.Not(equal) if free is None else op.And(free, op.Not(equal))
        parts.append(op.Unsqueeze(op.Where(first, dy, 0.0), [2]))
    columns = op.Reshape(
        op.Concat(*parts, axis=2), [0, op.static_dim(x, 1) * len(parts), int(np.prod(count))]
    )
    return op.Col2Im(columns, size, window.kernel, strides=window.strides.tolist())


def _indices(op, node: ir.Node) -> ir.Value:
    """Where each maximum is, counted row by row over the whole input: the node's own second output.

    The forward node is given that output where it has none: pooling once more would cost more.
    """
    # Column-major indices are of another layout than the tensors that they are used on here.
    if node.attributes.get_int("storage_order", 0):
        attributes = dict(node.attributes.items())
        attributes.pop("storage_order")
        return op.node("MaxPool", node.inputs, attributes, outputs=2)[1]
    return saved_output(op, node, 1, dtype=ir.DataType.INT64, shape=node.outputs[0].shape)


def _exact_tiles(op, node: ir.Node, x: ir.Value) -> bool:
    """Whether the windows are known to lie side by side and to cover the input exactly."""
    kernel = ints(node, "kernel_shape", [])
    rank = len(kernel)
    strides, dilations = ints(node, "strides", [1] * rank), ints(node, "dilations", [1] * rank)
    if not np.array_equal(strides, kernel) or np.any(dilations != 1):
        return False
    if node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET" and ints(node, "pads", [0] * rank).any():
        return False
    size = spatial(op, x)
    return isinstance(size, np.ndarray) and not np.any(size % kernel)


def _repeat(op, value: ir.Value, times: list[int]) -> ir.Value:
    """Each element repeated along the spatial axes."""
    # Resize by whole factors repeats pixels; Expand would need twice as many axes and a Reshape.
    scales = np.asarray([1, 1, *times], np.float32)
    return op.Resize(
        value, None, scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    )


def _axis_matrices(op, node: ir.Node, x: ir.Value, **changed: int) -> dict[int, ir.Value]:
    """For each spatial axis, the pooling operator applied to the identity matrix of that axis."""
    count = op.rank(x) - 2
    matrices = {}
    for axis in range(count):
        attributes = {**dict(node.attributes.items()), **changed}
        for name in ("kernel_shape", "strides", "dilations"):
            if values := list(node.attributes.get_ints(name, [])):
                attributes[name] = values[axis : axis + 1]
        if pads := list(node.attributes.get_ints("pads", [])):
            attributes["pads"] = [pads[axis], pads[axis + count]]
        # The identity along this axis: no product for it.
        single = attributes["kernel_shape"] == [1] and attributes.get("strides", [1]) == [1]
        if single and not any(pads):
            continue
        basis = op.Unsqueeze(identity(op, op.dim(x, axis + 2), like=x), [0])
        (pooled,) = op.node(node.op_type, [basis], attributes)
        if node.attributes.get_int("ceil_mode", 0):
            # inference counts one window too many where the last would start in the padding
            pooled = op.Slice(pooled, [0], op.dim(node.outputs[0], axis + 2), [2])
        matrices[axis + 2] = op.Squeeze(pooled, [0])
    return matrices


def _over_norm(op, dy: ir.Value, y: ir.Value, p: int) -> ir.Value:
    """dy·y¹⁻ᵖ, and 0 where the norm is 0: there every x is 0 too."""
    if p == 1:
        return dy
    # Pow takes forty times as long as a product on the CPU provider.
    power = y if p == 2 else op.Pow(y, float(p - 1))
    return op.Where(op.Greater(y, 0.0), op.Div(dy, power), 0.0)


def _power_slope(op, x: ir.Value, p: int) -> ir.Value:
    """sign(x)·|x|ᵖ⁻¹."""
    if p == 1:
        return op.Sign(x)
    if p == 2:
        return x
    return op.Mul(op.Sign(x), op.Pow(op.Abs(x), float(p - 1)))
