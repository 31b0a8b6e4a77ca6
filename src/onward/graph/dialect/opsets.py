"""Rewrites operators of older and newer opsets to opset 21.

Two tables. Of opsets 7 to 20: for each operator whose attributes, inputs or meaning changed, the version of the change
and the function that writes the newer form; operators whose later versions only accept more types are not there. Of
opsets 22 to 28: for each operator the function that builds it from older ones. Works in subgraphs and on models of any
size: it edits nodes, not files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.dialect import attention
from onward.graph.forms.cumulative import cumulative
from onward.graph.nodes import ACTIVE, DROPOUT, attribute, is_used, optional_input, required_input

if TYPE_CHECKING:
    from onward.graph.builder import Builder, Operand
    from onward.graph.dialect.rewrite import Expansion


# Before it, broadcasting was an attribute and training a flag of each operator.
OLDEST = 7

_UPGRADES: dict[str, list[tuple[int, Expansion]]] = {}


def upgrade(node: ir.Node, version: int) -> Expansion | None:
    """The rewrite of a node of this opset version to opset 21; None where it is unchanged."""
    for below, expansion in _UPGRADES.get(node.op_type, ()):
        if version < below:
            return expansion
    return None


def _until(below: int, *op_types: str) -> Callable[[Expansion], Expansion]:
    """Register the form of these operators for models of opsets before `below`."""

    def register(expansion: Expansion) -> Expansion:
        for op_type in op_types:
            forms = _UPGRADES.setdefault(op_type, [])
            forms.append((below, expansion))
            # The oldest form first: a node of opset 9 must not be read as one of 17.
            forms.sort(key=lambda form: form[0])
        return expansion

    return register


def _rebuild(
    op: Builder,
    node: ir.Node,
    inputs: Sequence[Operand],
    *,
    without: Sequence[str] = (),
    **attributes: object,
) -> tuple[ir.Value, ...]:
    """The same operator with other inputs; keeps all attributes except those named."""
    old: dict[str, object] = {k: v for k, v in node.attributes.items() if k not in without}
    return op.node(node.op_type, inputs, {**old, **attributes}, outputs=len(node.outputs))


def _ints(node: ir.Node, name: str) -> np.ndarray | None:
    value = attribute(node, name)
    return None if value is None else np.asarray(value, np.int64)


@_until(13, "Squeeze", "Unsqueeze", "ReduceSum")
@_until(18, "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin")
@_until(18, "ReduceProd", "ReduceSumSquare")
def _axes_as_input(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    return _rebuild(op, node, [node.inputs[0], _ints(node, "axes")], without=["axes"])


@_until(18, "Split")
def _split(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    sizes = _ints(node, "split") if optional_input(node, 1) is None else optional_input(node, 1)
    # Since opset 18 equal parts have to be counted, by an attribute that excludes sizes.
    count = None if sizes is not None else len(node.outputs)
    return _rebuild(op, node, [node.inputs[0], sizes], without=["split"], num_outputs=count)


@_until(10, "Slice")
def _slice(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    inputs = [node.inputs[0], _ints(node, "starts"), _ints(node, "ends"), _ints(node, "axes")]
    return _rebuild(op, node, inputs, without=["starts", "ends", "axes"])


@_until(11, "Clip")
def _clip(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    x = required_input(node)
    bounds = (attribute(node, name) for name in ("min", "max"))
    limits = [None if bound is None else op.constant_like(bound, x) for bound in bounds]
    return _rebuild(op, node, [x, *limits], without=["min", "max"])


@_until(11, "Pad")
def _pad(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    x = required_input(node)
    # In x's type: the attribute is a float32 whatever is padded.
    value = op.constant_like(attribute(node, "value", 0.0), x)
    if attribute(node, "mode", "constant") != "constant":
        value = None
    return _rebuild(op, node, [x, _ints(node, "pads"), value], without=["pads", "value"])


@_until(10, "TopK")
def _top_k(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    k = np.asarray([attribute(node, "k")], np.int64)
    return _rebuild(op, node, [node.inputs[0], k], without=["k"])


@_until(12, "Dropout")
def _dropout(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """Before opset 12 the operator had no training mode: it is the identity, unless an export marked it."""
    x = required_input(node)
    if node.metadata_props.get(DROPOUT) == ACTIVE:
        ratio = op.constant(np.asarray(attribute(node, "ratio", 0.5), np.float32))
        return op.node(
            "Dropout", [x, ratio, op.constant(np.asarray(True))], outputs=2 if is_used(node, 1) else 1
        )
    if not is_used(node, 1):
        return [x]
    mask_type = node.outputs[1].dtype
    mask = op.Expand(np.ones((1,), np.bool_), op.shape(x))
    if mask_type not in (None, ir.DataType.BOOL):
        mask = op.Cast(mask, to=mask_type.value)
    return [x, mask]


@_until(14, "BatchNormalization")
def _batch_normalization(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    x, scale, bias, mean, var = (required_input(node, index) for index in range(5))
    # Until opset 8: one mean for each place, not for each channel.
    if attribute(node, "spatial", 1) == 0:
        if any(is_used(node, index) for index in range(1, len(node.outputs))):
            raise ModelError("training with spatial=0 has no standard form")
        epsilon = op.constant_like(attribute(node, "epsilon", 1e-5), x)
        normal = op.Div(op.Sub(x, mean), op.Sqrt(op.Add(var, epsilon)))
        return [op.Add(op.Mul(normal, scale), bias)]
    training = len(node.outputs) > 1 and any(value.name for value in node.outputs[1:])
    attributes = {k: v for k, v in node.attributes.items() if k in ("epsilon", "momentum")}
    if not training:
        return op.node("BatchNormalization", list(node.inputs), attributes)
    outputs: list[ir.Value | None] = list(
        op.node("BatchNormalization", list(node.inputs), {**attributes, "training_mode": 1}, outputs=3)
    )
    if is_used(node, 3) or is_used(node, 4):
        axes = np.asarray([0, *range(2, op.rank(x))], np.int64)
        centre = op.ReduceMean(x, axes, keepdims=1)
        spread = op.Sub(x, centre)
        outputs.append(op.ReduceMean(x, axes, keepdims=0))
        outputs.append(op.ReduceMean(op.Mul(spread, spread), axes, keepdims=0))
    return outputs


@_until(13, "Softmax", "LogSoftmax", "Hardmax")
def _softmax(op: Builder, node: ir.Node) -> ir.Value:
    """Until opset 12 the axes from `axis` on were flattened into one."""
    x = required_input(node)
    rank = op.rank(x)
    axis = attribute(node, "axis", 1)
    axis = axis + rank if axis < 0 else axis
    if axis == rank - 1 or (
        axis < rank and all(op.static_dim(x, other) == 1 for other in range(axis + 1, rank))
    ):
        return op.node(node.op_type, [x], {"axis": axis if axis < rank else -1})[0]
    # One row per index of the leading axes, also where there are none of either kind.
    flat = op.Flatten(x, axis=axis)
    return op.Reshape(op.node(node.op_type, [flat], {"axis": -1})[0], op.shape(x), allowzero=1)


@_until(10, "Upsample")
def _upsample(op: Builder, node: ir.Node) -> ir.Value:
    scales = optional_input(node, 1)
    if scales is None:
        scales = op.constant(np.asarray(attribute(node, "scales"), np.float32))
    return _resize_by(op, node, scales)


@_until(11, "Resize")
def _resize_ten(op: Builder, node: ir.Node) -> ir.Value:
    return _resize_by(op, node, required_input(node, 1))


def _resize_by(op: Builder, node: ir.Node, scales: ir.Value) -> ir.Value:
    mode = attribute(node, "mode", "nearest")
    return op.Resize(
        node.inputs[0],
        None,
        scales,
        mode="linear" if mode == "bilinear" else mode,
        # All that Upsample and Resize-10 did: out/scale, rounded down.
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )


@_until(22, "Resize")
def _resize(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """One spelling: inputs that are empty are left out, and a mode that opset 13 dropped is replaced."""
    inputs: list[ir.Value | None] = [node.inputs[0], *(optional_input(node, index) for index in (1, 2, 3))]
    for index in (1, 2, 3):
        value = inputs[index]
        # Opset 11 required all inputs, so that exporters wrote empty tensors for "not given".
        if value is not None and value.shape is not None and op.static_shape(value) == (0,):
            inputs[index] = None
    mode = attribute(node, "coordinate_transformation_mode", "half_pixel")
    if mode != "tf_crop_and_resize":
        inputs[1] = None
    if mode == "tf_half_pixel_for_nn":
        if attribute(node, "mode", "nearest") != "nearest" or attribute(node, "nearest_mode") != "floor":
            raise ModelError(
                "coordinate_transformation_mode 'tf_half_pixel_for_nn' has a standard form with floor only"
            )
        return _rebuild(
            op, node, inputs, coordinate_transformation_mode="half_pixel", nearest_mode="round_prefer_ceil"
        )
    return _rebuild(op, node, inputs)


@_until(11, "Scatter")
def _scatter(op: Builder, node: ir.Node) -> ir.Value:
    return op.ScatterElements(*node.inputs, axis=attribute(node, "axis", 0))


@_until(21, "GroupNormalization")
def _group_normalization(op: Builder, node: ir.Node) -> ir.Value:
    """Scale and bias were one number per group; now they are one per channel."""
    x, scale, bias = (required_input(node, index) for index in range(3))
    groups = attribute(node, "num_groups")
    size = op.Div(op.dim(x, 1), [groups])
    shape = op.Concat([groups], size, axis=0)

    def per_channel(value: ir.Value) -> ir.Value:
        return op.Reshape(op.Expand(op.Unsqueeze(value, [1]), shape), [-1])

    return op.GroupNormalization(
        x, per_channel(scale), per_channel(bias), num_groups=groups, epsilon=attribute(node, "epsilon", 1e-5)
    )


@_until(16, "RoiAlign")
def _roi_align(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    # The default became half_pixel with opset 16, and was this before.
    return _rebuild(op, node, list(node.inputs), coordinate_transformation_mode="output_half_pixel")


@_until(20, "GridSample")
def _grid_sample(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    mode = attribute(node, "mode", "bilinear")
    return _rebuild(
        op, node, list(node.inputs), mode={"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    )


@_until(20, "DFT")
def _dft(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    axis = np.asarray(attribute(node, "axis", 1), np.int64)
    return _rebuild(op, node, [node.inputs[0], optional_input(node, 1), axis], without=["axis"])


@_until(9, "Scan")
def _scan(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Opset 8 ran the body once per sample of a batch: a scan over samples around the scan over time."""
    if node.inputs[0] is not None:
        raise ModelError("Scan of opset 8 with sequence_lens has no standard form")
    body = attribute(node, "body")
    scanned = attribute(node, "num_scan_inputs")
    outside = [value for value in node.inputs[1:] if value is not None]
    sample = op.subgraph("sample")
    rows = []
    for value in outside:
        shape = None if value.shape is None else ir.Shape(list(value.shape)[1:])
        rows.append(sample.input(f"{value.name}_row", value.dtype, shape))
    attributes: dict[str, object] = {"body": body, "num_scan_inputs": scanned}
    if (directions := attribute(node, "directions")) is not None:
        attributes["scan_input_directions"] = directions
    results = sample.node("Scan", rows, attributes, outputs=len(node.outputs))
    sample.graph.outputs.extend(results)
    return op.node("Scan", outside, {"body": sample, "num_scan_inputs": len(outside)}, outputs=len(results))


# --- Rewrites operators and attributes of opsets 22 to 28 to opset 21.
#
# An operator that has only gained types is not here: it is unchanged, and `normalize` finds whether the types in use
# still need the newer opset.


_DOWNGRADES: dict[str, Expansion] = {}


def downgrade(node: ir.Node, version: int) -> Expansion | None:
    """The rewrite of a node of this opset version to opset 21; None where it is unchanged."""
    expansion, applies = _DOWNGRADES.get(node.op_type), _ONLY_WITH.get(node.op_type)
    return None if version < 22 or (applies is not None and not applies(node)) else expansion


def expanded_operators() -> list[str]:
    """The operators that are new since opset 22 and are written in older ones."""
    return sorted(set(_DOWNGRADES) - set(_ONLY_WITH))


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
        _DOWNGRADES.update(dict.fromkeys(op_types, expansion))
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
        # A cache outside of the operator: the queries are the last of the keys that count.
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
        # Zeros in front only: a state from before the beginning.
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
    # Counting in float16 stops at 2,048, where adding 1 changes nothing.
    wide = [op.Cast(value, to=attribute(node, "stash_type", 1)) for value in node.inputs]
    return op.Cast(op.Range(*wide), to=dtype.value)


@_newer("SpaceToDepth")
def _space_to_depth(op: Builder, node: ir.Node) -> ir.Value:
    x, block = required_input(node), attribute(node, "blocksize")
    # DCR is what the operator did before it had a mode.
    if attribute(node, "mode", "DCR") == "DCR":
        return op.SpaceToDepth(x, blocksize=block)
    size = np.asarray([block], np.int64)
    height, width = op.Div(op.dim(x, 2), size), op.Div(op.dim(x, 3), size)
    blocks = op.Concat(op.dim(x, 0), op.dim(x, 1), height, size, width, size, axis=0)
    turned = op.Transpose(op.Reshape(x, blocks), perm=[0, 1, 3, 5, 2, 4])
    channels = op.Mul(op.dim(x, 1), [block * block])
    return op.Reshape(turned, op.Concat(op.dim(x, 0), channels, height, width, axis=0))
