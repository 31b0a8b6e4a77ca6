"""Rewrites operators and attributes of opsets 22 to 28 to opset 21.

One table: operator → function that builds it from older ones. An operator that has only gained types is not
here: it is unchanged, and `normalize` finds whether the types in use still need the newer opset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.dialect import attention
from onward.graph.forms.cumulative import cumulative
from onward.graph.nodes import attribute, is_used, optional_input, required_input

if TYPE_CHECKING:
    from onward.graph.builder import Builder
    from onward.graph.dialect.rewrite import Expansion

_TABLE: dict[str, Expansion] = {}


def downgrade(node: ir.Node, version: int) -> Expansion | None:
    """The rewrite of a node of this opset version to opset 21; None where it is unchanged."""
    expansion, applies = _TABLE.get(node.op_type), _ONLY_WITH.get(node.op_type)
    return None if version < 22 or (applies is not None and not applies(node)) else expansion


def expanded_operators() -> list[str]:
    """The operators that are new since opset 22 and are written in older ones."""
    return sorted(set(_TABLE) - set(_ONLY_WITH))


_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_FLOATS = (ir.DataType.FLOAT, *_HALVES)
# Operators that need rewriting only where a newer attribute or type is in use.
_ONLY_WITH: dict[str, Callable[[ir.Node], bool]] = {
    "Cast": lambda node: "round_mode" in node.attributes,
    "CastLike": lambda node: "round_mode" in node.attributes,
    "DequantizeLinear": lambda node: "output_dtype" in node.attributes,
    "QuantizeLinear": lambda node: (
        "precision" in node.attributes or required_input(node).dtype != required_input(node, 1).dtype
    ),
    "Range": lambda node: "stash_type" in node.attributes or required_input(node).dtype in _HALVES,
    "SpaceToDepth": lambda node: "mode" in node.attributes,
}


def _newer(*op_types: str) -> Callable[[Expansion], Expansion]:
    def register(expansion: Expansion) -> Expansion:
        _TABLE.update(dict.fromkeys(op_types, expansion))
        return expansion

    return register


@_newer("Attention")
def _attention(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    q, k, v = (required_input(node, index) for index in range(3))
    flat = op.rank(q) == 3
    if flat:
        q = attention.split_heads(op, q, attribute(node, "q_num_heads"))
        k, v = (attention.split_heads(op, x, attribute(node, "kv_num_heads")) for x in (k, v))
    queries = op.dim(q, 2)
    past_key, past_value, valid = optional_input(node, 4), optional_input(node, 5), optional_input(node, 6)
    offset = None
    if past_key is not None and past_value is not None:
        offset = op.dim(past_key, 2)
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    present = [k, v]
    if valid is not None and past_key is None:
        offset = op.Unsqueeze(op.Sub(valid, queries), [1, 2, 3])
    mask = _mask(op, node, q, op.dim(k, 2), offset, valid)
    times = _heads_per_key(op, q, k)
    k, v = attention.repeat_heads(op, k, times), attention.repeat_heads(op, v, times)
    precision = attribute(node, "softmax_precision")
    attended = attention.attend(
        op,
        *(q, k, v),
        scale=attribute(node, "scale"),
        mask=mask,
        softcap=attribute(node, "softcap", 0.0),
        softmax_type=None if precision is None else ir.DataType(precision),
    )
    mode = attribute(node, "qk_matmul_output_mode", 0)
    seen = [attended.scores, attended.capped, attended.masked, attended.probabilities][mode]
    if mode == 2 and mask.allowed is not None and is_used(node, 3):
        seen = op.Where(mask.allowed, seen, op.constant_like(-np.inf, q))
    output = attention.merge_heads(op, attended.output) if flat else attended.output
    return [output, *present, seen if is_used(node, 3) else None]


def _heads_per_key(op: Builder, q: ir.Value, k: ir.Value) -> int:
    """How many query heads share one head of keys."""
    heads, stored = op.static_dim(q, 1), op.static_dim(k, 1)
    if heads is None or stored is None:
        if q.shape is not None and k.shape is not None and q.shape[1] == k.shape[1]:
            return 1
        raise ModelError("its numbers of heads are unknown; give its inputs a fixed size there")
    return heads // stored


def _mask(
    op: Builder, node: ir.Node, q: ir.Value, total: ir.Value, offset: ir.Value | None, valid: ir.Value | None
) -> attention.Mask:
    mask = attention.Mask(may_be_empty=False)
    attn_mask = optional_input(node, 3)
    if attn_mask is not None:
        mask.may_be_empty = True
        attn_mask = _padded(op, attn_mask, total)
        if op.dtype(attn_mask) == ir.DataType.BOOL:
            mask.allow(op, attn_mask)
        else:
            mask.add(op, attn_mask)
    left, right = attribute(node, "left_window_size", -1), attribute(node, "right_window_size", -1)
    causal = attribute(node, "is_causal", 0)
    if causal or left >= 0 or right >= 0:
        row, column = attention.query_positions(op, q, offset), attention.key_positions(op, total)
        if causal:
            mask.allow(op, op.LessOrEqual(column, row))
        if left >= 0:
            mask.allow(op, op.GreaterOrEqual(column, op.Sub(row, left)))
        if right >= 0:
            mask.allow(op, op.LessOrEqual(column, op.Add(row, right)))
        if left >= 0 or right >= 0 or valid is not None:
            mask.may_be_empty = True
    if valid is not None:
        column = op.Unsqueeze(op.positions(total), [0, 1, 2])
        mask.allow(op, op.Less(column, op.Unsqueeze(valid, [1, 2, 3])))
        mask.may_be_empty = True
    return mask


def _padded(op: Builder, mask: ir.Value, total: ir.Value) -> ir.Value:
    """A mask may be shorter than the keys: keys beyond it are not attended."""
    length, full = op.static_dim(mask, -1), op.const_value(total)
    if length is not None and full is not None and length == int(full[0]):
        return mask
    pads = op.Concat([0], op.Sub(total, op.dim(mask, -1)), axis=0)
    last = np.asarray([-1], np.int64)
    if op.dtype(mask) != ir.DataType.BOOL:
        return op.Pad(mask, pads, op.constant_like(-np.inf, mask), last)
    # Not every runtime pads booleans.
    as_bytes = op.Pad(op.Cast(mask, to=ir.DataType.UINT8), pads, np.asarray(0, np.uint8), last)
    return op.Cast(as_bytes, to=ir.DataType.BOOL)


@_newer("RMSNormalization")
def _rms_normalization(op: Builder, node: ir.Node) -> ir.Value:
    """y = x / √(mean(x²) + ε) · scale"""
    x, scale = required_input(node), required_input(node, 1)
    rank = op.rank(x)
    axis = attribute(node, "axis", -1) % rank
    stash = ir.DataType(attribute(node, "stash_type", 1))
    wide = x if op.dtype(x) == stash else op.Cast(x, to=stash.value)
    mean = op.ReduceMean(op.Mul(wide, wide), list(range(axis, rank)), keepdims=1)
    normal = op.Div(wide, op.Sqrt(op.Add(mean, op.constant_like(attribute(node, "epsilon", 1e-5), mean))))
    if op.dtype(x) != stash:
        normal = op.Cast(normal, to=op.dtype(x))
    if op.dtype(scale) != op.dtype(x):
        normal = op.Cast(normal, to=op.dtype(scale))
    return op.Mul(normal, scale)


@_newer("RotaryEmbedding")
def _rotary_embedding(op: Builder, node: ir.Node) -> ir.Value:
    (x, cos, sin), ids = (required_input(node, index) for index in range(3)), optional_input(node, 3)
    flat = op.rank(x) == 3
    if flat:
        x = attention.split_heads(op, x, attribute(node, "num_heads"))
    if ids is not None:
        cos, sin = op.Gather(cos, ids, axis=0), op.Gather(sin, ids, axis=0)
    cos, sin = op.Unsqueeze(cos, [1]), op.Unsqueeze(sin, [1])
    rotary, interleaved = attribute(node, "rotary_embedding_dim", 0), attribute(node, "interleaved", 0)
    turned = attention.rotate(op, x, cos, sin, rotary=rotary, interleaved=bool(interleaved))
    return attention.merge_heads(op, turned) if flat else turned


@_newer("Swish")
def _swish(op: Builder, node: ir.Node) -> ir.Value:
    return _swish_of(op, required_input(node), attribute(node, "alpha", 1.0))


@_newer("SwiGLU")
def _swiglu(op: Builder, node: ir.Node) -> ir.Value:
    return op.Mul(_swish_of(op, required_input(node), attribute(node, "alpha", 1.0)), required_input(node, 1))


def _swish_of(op: Builder, x: ir.Value, alpha: float) -> ir.Value:
    return op.Mul(x, op.Sigmoid(x if alpha == 1.0 else op.Mul(x, op.constant_like(alpha, x))))


@_newer("TensorScatter")
def _tensor_scatter(op: Builder, node: ir.Node) -> ir.Value:
    """Rows of the update go to consecutive places of the cache, from each sample's write index on."""
    cache, update, start = required_input(node), required_input(node, 1), optional_input(node, 2)
    rank = op.rank(cache)
    axis = attribute(node, "axis", -2) % rank
    index = op.positions(op.dim(update, axis))
    others = [i for i in range(rank) if i != axis]
    index = op.Unsqueeze(index, np.asarray(others, np.int64))
    if start is not None:
        index = op.Add(index, op.Unsqueeze(start, np.asarray(range(1, rank), np.int64)))
    if attribute(node, "mode", "linear") == "circular":
        index = op.Mod(index, op.dim(cache, axis))
    return op.ScatterElements(cache, op.Expand(index, op.shape(update)), update, axis=axis)


@_newer("CumProd")
def _cum_prod(op: Builder, node: ir.Node) -> ir.Value:
    x, axis = required_input(node), required_input(node, 1)
    rank = op.rank(x)
    constant = op.const_value(axis)
    if constant is not None:
        return cumulative(op, node, x, int(constant.item()) % rank, combine="Mul", start=1)
    # An axis known only at run time: one branch for each possible axis.
    index = op.Mod(op.Add(op.Cast(op.Reshape(axis, []), to=7), rank), rank)
    return _product_by_case(op, node, x, index, 0)


def _product_by_case(op: Builder, node: ir.Node, x: ir.Value, index: ir.Value, axis: int) -> ir.Value:
    if axis == op.rank(x) - 1:
        return cumulative(op, node, x, axis, combine="Mul", start=1)
    here, other = op.subgraph("here"), op.subgraph("other")
    here.graph.outputs.append(cumulative(here, node, x, axis, combine="Mul", start=1))
    other.graph.outputs.append(_product_by_case(other, node, x, index, axis + 1))
    return op.If(op.Equal(index, axis), then_branch=here, else_branch=other)


@_newer("CausalConvWithState")
def _causal_conv(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """A depthwise convolution over the past and the present, which sees no future."""
    x, weight = required_input(node), required_input(node, 1)
    bias, past = optional_input(node, 2), optional_input(node, 3)
    channels, kernel = op.static_dim(weight, 0), op.static_dim(weight, 2)
    if channels is None or kernel is None:
        raise ModelError("the shape of the weight is unknown")
    if past is None:
        pads = np.asarray([0, 0, kernel - 1, 0, 0, 0], np.int64)
        whole = op.Pad(x, pads, op.constant_like(0.0, x))
    else:
        whole = op.Concat(past, x, axis=2)
    y = op.Conv(whole, weight, bias, group=channels)
    activation = attribute(node, "activation", "none")
    if activation in ("silu", "swish"):
        y = op.Mul(y, op.Sigmoid(y))
    elif activation not in ("none", ""):
        raise ModelError(f"activation {activation!r} is not defined")
    end = op.dim(whole, 2)
    start = op.Sub(end, [kernel - 1])
    return [y, op.Slice(whole, start, end, [2])]


@_newer("Cast", "CastLike")
def _cast(op: Builder, node: ir.Node) -> ir.Value | Sequence[ir.Value]:
    """`round_mode` speaks of one 8-bit type only; for all others it means nothing."""
    attributes = dict(node.attributes)
    if node.outputs[0].dtype is not ir.DataType.FLOAT8E8M0:
        attributes.pop("round_mode", None)
    return op.node(node.op_type, list(node.inputs), attributes)


@_newer("DequantizeLinear")
def _dequantize(op: Builder, node: ir.Node) -> ir.Value | Sequence[ir.Value]:
    attributes = dict(node.attributes)
    wish = ir.DataType(attributes.pop("output_dtype").as_int())
    scale = required_input(node, 1)
    if wish in (ir.DataType.UNDEFINED, scale.dtype):
        return op.node("DequantizeLinear", list(node.inputs), attributes)
    if scale.dtype not in _FLOATS:
        return op.node("DequantizeLinear", list(node.inputs), dict(node.attributes))
    return op.Cast(op.node("DequantizeLinear", list(node.inputs), attributes)[0], to=wish.value)


@_newer("QuantizeLinear")
def _quantize(op: Builder, node: ir.Node) -> ir.Value | Sequence[ir.Value]:
    attributes = dict(node.attributes)
    precision = attributes.pop("precision", None)
    x, scale = required_input(node), required_input(node, 1)
    if scale.dtype not in _FLOATS:
        return op.node("QuantizeLinear", list(node.inputs), dict(node.attributes))
    wish = ir.DataType(
        precision.as_int() if precision is not None and precision.as_int() else op.dtype(scale)
    )
    x, scale = (value if value.dtype == wish else op.Cast(value, to=wish.value) for value in (x, scale))
    return op.node("QuantizeLinear", [x, scale, *node.inputs[2:]], attributes)


@_newer("Range")
def _range(op: Builder, node: ir.Node) -> ir.Value | Sequence[ir.Value]:
    dtype = op.dtype(required_input(node))
    if dtype not in _HALVES:
        return op.Range(*node.inputs)
    wide = [op.Cast(value, to=attribute(node, "stash_type", 1)) for value in node.inputs]
    return op.Cast(op.Range(*wide), to=dtype.value)


@_newer("SpaceToDepth")
def _space_to_depth(op: Builder, node: ir.Node) -> ir.Value:
    x, block = required_input(node), attribute(node, "blocksize")
    if attribute(node, "mode", "DCR") == "DCR":
        return op.SpaceToDepth(x, blocksize=block)
    size = np.asarray([block], np.int64)
    height, width = op.Div(op.dim(x, 2), size), op.Div(op.dim(x, 3), size)
    blocks = op.Concat(op.dim(x, 0), op.dim(x, 1), height, size, width, size, axis=0)
    turned = op.Transpose(op.Reshape(x, blocks), perm=[0, 1, 3, 5, 2, 4])
    channels = op.Mul(op.dim(x, 1), [block * block])
    return op.Reshape(turned, op.Concat(op.dim(x, 0), channels, height, width, axis=0))
