"""Makes randomness explicit: the training step becomes a pure function of its inputs and a seed.

The runtime's own random operators keep hidden state, so a resumed run could not continue their sequence.
Here each random number is a hash of its position, the operator's index in the graph and the step's seed:
the same on every machine, provider and thread count. It is also faster than the runtime's Dropout.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onward.contract import SEED
from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.nodes import optional_input, required_input, single_number

# Odd 64-bit constants with irregular bits (from the golden ratio, √2 and √3), as signed numbers.
_SEED_KEY = np.int64(-7046029254386353131)
_NODE_KEY = np.int64(7640891576956012809)
_POSITION_KEY = np.int64(-4942790177534073029)
_ROUND_KEY = np.int64(2685821657736338717)
_SPAN = 2.0**64


def make_random_explicit(model: ir.Model) -> ir.Value | None:
    """Replace random operators by a hash of an int64[1] input `random_seed`, which is returned.

    None where the model has no random operator. Those inside loops and branches are left as they are.
    """
    nodes = [node for node in model.graph if _is_random(node)]
    if not nodes:
        return None
    op = Builder(model.graph)
    seed = op.input(SEED, ir.DataType.INT64, [1])
    op.before = nodes[0]
    # products carry bits upwards only: what a seed has in its upper half is brought down first
    spread = op.Mul(seed, _SEED_KEY)
    spread = op.Mul(op.Add(spread, op.Div(spread, np.int64(2**32))), _ROUND_KEY)
    for index, node in enumerate(nodes):
        op.before = node
        op.scope = node.name or node.op_type
        key = op.Add(spread, np.int64((index + 1) * int(_NODE_KEY) % 2**63))
        replacements = _REWRITES[node.op_type](op, node, key)
        for old, new in zip(node.outputs, replacements):
            if old.is_graph_output():
                new.name, old.name = old.name, op.namer(f"{old.name}.random")
                new.type, new.shape = old.type, old.shape
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
    return seed


def _is_random(node: ir.Node) -> bool:
    if node.op_type == "Dropout" and node.domain in ("", "ai.onnx"):
        training, ratio = optional_input(node, 2), optional_input(node, 1)
        if training is None or single_number(ratio) == 0.0:
            return False
        return training.const_value is None or bool(training.const_value.numpy())
    return node.op_type in _REWRITES and node.domain in ("", "ai.onnx")


def _hash(op: Builder, key: ir.Value, count: ir.Value) -> ir.Value:
    """`count` int64 numbers, uniform over their whole range: a quartic polynomial of the position mod 2⁶⁴.

    Only high bits are used by what follows; they depend on every bit of position and key.
    """
    position = op.Range(np.int64(0), count, np.int64(1))
    x = op.Add(op.Mul(position, _POSITION_KEY), key)
    y = op.Add(op.Mul(x, x), _ROUND_KEY)
    return op.Add(op.Mul(y, y), x)


def _uniform(op: Builder, key: ir.Value, shape: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Numbers in [0, 1)."""
    bits = _hash(op, key, op.ReduceProd(shape, keepdims=0))
    unit = op.Add(op.Mul(op.Cast(bits, to=ir.DataType.FLOAT), 1.0 / _SPAN), 0.5)
    # the largest integers round up to 1 in float32
    numbers = op.Min(unit, float(np.nextafter(np.float32(1), np.float32(0))))
    numbers = op.Reshape(numbers, shape)
    return numbers if dtype == ir.DataType.FLOAT else op.Cast(numbers, to=dtype)


def _normal(op: Builder, key: ir.Value, shape: ir.Value, dtype: ir.DataType) -> ir.Value:
    """√(−2 ln u₁)·cos(2π u₂)"""
    first = op.Sub(1.0, _uniform(op, key, shape, ir.DataType.FLOAT))
    second = _uniform(op, op.Add(key, _ROUND_KEY), shape, ir.DataType.FLOAT)
    numbers = op.Mul(op.Sqrt(op.Mul(op.Log(first), -2.0)), op.Cos(op.Mul(second, 2.0 * np.pi)))
    return numbers if dtype == ir.DataType.FLOAT else op.Cast(numbers, to=dtype)


def _dropout(op: Builder, node: ir.Node, key: ir.Value) -> list[ir.Value]:
    x = required_input(node)
    ratio = optional_input(node, 1)
    constant = np.float32(0.5) if ratio is None else op.const_value(ratio)
    dtype = op.dtype(x)
    if constant is not None:
        rate = float(constant)
        limit = op.constant(np.int64(max(-(2**63), min(2**63 - 1, int(rate * 2**64) - 2**63))), name="limit")
        scale = op.constant(np.asarray(1.0 / (1.0 - rate) if rate < 1 else 0.0, dtype.numpy()), name="scale")
    else:
        wide = op.Cast(ratio, to=ir.DataType.DOUBLE)
        # the largest double below 2⁶³: a ratio of 1 must not run over
        bound = op.Min(op.Sub(op.Mul(wide, _SPAN), _SPAN / 2), 2.0**63 - 1024)
        limit = op.Cast(bound, to=ir.DataType.INT64)
        scale = op.Reciprocal(op.Sub(1.0, op.Cast(ratio, to=dtype)))
    dropped = op.Less(_hash(op, key, op.ReduceProd(op.shape(x), keepdims=0)), limit)
    training = node.inputs[2]
    if op.const_value(training) is None:
        dropped = op.And(dropped, training)
        scale = op.Where(training, scale, 1.0)
    factors = op.Reshape(op.Where(dropped, 0.0, scale), op.shape(x))
    outputs = [op.Mul(x, factors)]
    if len(node.outputs) > 1:
        outputs.append(op.Reshape(op.Not(dropped), op.shape(x)))
    return outputs


def _random_dtype(node: ir.Node, default: ir.DataType | None) -> ir.DataType:
    code = node.attributes.get_int("dtype", None)
    if code is None:
        return default or ir.DataType.FLOAT
    try:
        return ir.DataType(code)
    except ValueError:
        raise ModelError(
            f"{node.op_type} '{node.name}' has the dtype {code}, which ONNX does not have"
        ) from None


def _random_uniform(op: Builder, node: ir.Node, key: ir.Value) -> list[ir.Value]:
    low, high = node.attributes.get_float("low", 0.0), node.attributes.get_float("high", 1.0)
    shape, dtype = _target(op, node)
    unit = _uniform(op, key, shape, dtype)
    return [unit if (low, high) == (0.0, 1.0) else op.Add(op.Mul(unit, high - low), low)]


def _random_normal(op: Builder, node: ir.Node, key: ir.Value) -> list[ir.Value]:
    mean, scale = node.attributes.get_float("mean", 0.0), node.attributes.get_float("scale", 1.0)
    shape, dtype = _target(op, node)
    return [op.Add(op.Mul(_normal(op, key, shape, dtype), scale), mean)]


def _bernoulli(op: Builder, node: ir.Node, key: ir.Value) -> list[ir.Value]:
    x = required_input(node)
    drawn = op.Less(_uniform(op, key, op.shape(x), op.dtype(x)), x)
    return [op.Cast(drawn, to=_random_dtype(node, op.dtype(x)))]


def _multinomial(op: Builder, node: ir.Node, key: ir.Value) -> list[ir.Value]:
    """How many steps of the cumulated distribution lie below a uniform number, for each sample."""
    x = required_input(node)
    samples = np.asarray([node.attributes.get_int("sample_size", 1)], np.int64)
    steps = op.CumSum(op.Softmax(x, axis=1), np.int64(1))
    drawn = _uniform(op, key, op.Concat(op.dim(x, 0), samples, axis=0), op.dtype(x))
    passed = op.LessOrEqual(op.Unsqueeze(steps, [1]), op.Unsqueeze(drawn, [2]))
    count = op.ReduceSum(op.Cast(passed, to=ir.DataType.INT64), [2], keepdims=0)
    # the steps may end below 1 by rounding
    chosen = op.Min(count, op.Sub(op.Squeeze(op.dim(x, 1), [0]), np.int64(1)))
    return [op.Cast(chosen, to=_random_dtype(node, ir.DataType.INT32))]


def _target(op: Builder, node: ir.Node) -> tuple[ir.Value, ir.DataType]:
    if node.op_type.endswith("Like"):
        like = required_input(node)
        return op.shape(like), _random_dtype(node, like.dtype)
    shape = np.asarray(node.attributes.get_ints("shape", ()), np.int64)
    return op.constant(shape, name="shape"), _random_dtype(node, None)


_REWRITES: dict[str, Callable[[Builder, ir.Node, ir.Value], list[ir.Value]]] = {
    "Dropout": _dropout,
    "RandomUniform": _random_uniform,
    "RandomUniformLike": _random_uniform,
    "RandomNormal": _random_normal,
    "RandomNormalLike": _random_normal,
    "Bernoulli": _bernoulli,
    "Multinomial": _multinomial,
}
