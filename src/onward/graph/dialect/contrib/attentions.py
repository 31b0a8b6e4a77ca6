"""The fused attentions, in matrix products, softmax and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.dialect.attention import (
    Mask,
    attend,
    key_positions,
    merge_heads,
    query_positions,
    repeat_heads,
    rotate,
    split_heads,
)
from onward.graph.dialect.contrib.table import add_optional, fused, refuse
from onward.graph.nodes import attribute, is_used, optional_input, required_input

if TYPE_CHECKING:
    from onward.graph.builder import Builder

_END = np.iinfo(np.int64).max


@fused("Attention")
def _attention(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """Attention with one product for queries, keys and values"""
    if attribute(node, "past_present_share_buffer", 0) or attribute(node, "do_rotary", 0):
        raise ModelError("a shared cache or rotary embedding inside Attention has no standard form here")
    heads = attribute(node, "num_heads")
    product = op.MatMul(required_input(node), required_input(node, 1))
    joined = add_optional(op, product, optional_input(node, 2))
    # Values may be wider than queries and keys.
    sizes = attribute(node, "qkv_hidden_sizes")
    if sizes:
        parts = op.Split(joined, np.asarray(sizes, np.int64), axis=2, outputs=3)
    else:
        parts = op.Split(joined, num_outputs=3, axis=2, outputs=3)
    q, k, v = (split_heads(op, part, heads) for part in parts)
    past = optional_input(node, 4)
    offset = None
    # Keys and values of a cache are one tensor here, [2, batch, heads, length, size].
    if past is not None:
        old_k, old_v = (op.Gather(past, index, axis=0) for index in (0, 1))
        offset = op.dim(old_k, 2)
        k, v = op.Concat(old_k, k, axis=2), op.Concat(old_v, v, axis=2)
    present = None
    if is_used(node, 1):
        present = op.Concat(op.Unsqueeze(k, [0]), op.Unsqueeze(v, [0]), axis=0)
    mask = _mask(op, node, q, k, optional_input(node, 3), optional_input(node, 5), offset)
    attended = attend(op, q, k, v, scale=attribute(node, "scale") or None, mask=mask)
    return [merge_heads(op, attended.output), present]


@fused("MultiHeadAttention")
def _multi_head_attention(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """Attention of separate or packed queries, keys and values"""
    refuse(node, 8, 9)
    heads = attribute(node, "num_heads")
    q, k, v = _projections(op, node, heads)
    past_key, past_value = optional_input(node, 6), optional_input(node, 7)
    offset = None
    if past_key is not None and past_value is not None:
        offset = op.dim(past_key, 2)
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    mask = _mask(op, node, q, k, optional_input(node, 4), optional_input(node, 5), offset)
    attended = attend(op, q, k, v, scale=attribute(node, "scale") or None, mask=mask)
    return [merge_heads(op, attended.output), k, v, None]


def _projections(op: Builder, node: ir.Node, heads: int) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Queries, keys and values as [batch, heads, length, size], from whichever form they come in."""
    q, (k, v, bias) = required_input(node), (optional_input(node, index) for index in (1, 2, 3))
    # Packed queries, keys and values: the runtime tells the forms apart by the rank alone.
    if op.rank(q) == 5:
        return _packed(op, q, 0), _packed(op, q, 1), _packed(op, q, 2)
    if k is None:
        raise ModelError("keys are missing")
    if op.rank(k) == 5:
        if bias is not None:
            q = op.Add(q, op.Slice(bias, [0], op.dim(q, 2), [0]))
        return split_heads(op, q, heads), _packed(op, k, 0), _packed(op, k, 1)
    if v is None:
        raise ModelError("values are missing")
    if bias is not None:
        width = op.dim(q, 2)
        q = op.Add(q, op.Slice(bias, [0], width, [0]))
        if op.rank(k) == 3:
            twice = op.Add(width, width)
            k = op.Add(k, op.Slice(bias, width, twice, [0]))
            v = op.Add(v, op.Slice(bias, twice, [_END], [0]))
    if op.rank(k) == 4:
        return split_heads(op, q, heads), k, v
    return split_heads(op, q, heads), split_heads(op, k, heads), split_heads(op, v, heads)


def _packed(op: Builder, x: ir.Value, index: int) -> ir.Value:
    """One of the parts of [batch, length, heads, parts, size]."""
    return op.Transpose(op.Gather(x, index, axis=3), perm=[0, 2, 1, 3])


def _mask(
    op: Builder,
    node: ir.Node,
    q: ir.Value,
    k: ir.Value,
    padding: ir.Value | None,
    bias: ir.Value | None,
    offset: ir.Value | None,
) -> Mask:
    mask = Mask(bias, may_be_empty=False)
    if padding is not None:
        keep = _attended_keys(op, padding, q, k)
        # Added rather than −∞: a row in which all keys are padding stays finite, as the runtime's own does.
        filler = attribute(node, "mask_filter_value", -10000.0)
        hidden = op.Where(keep, op.constant_like(0.0, q), op.constant_like(filler, q))
        mask.bias = hidden if mask.bias is None else op.Add(mask.bias, hidden)
    if attribute(node, "unidirectional", 0):
        row = query_positions(op, q, offset)
        mask.allow(op, op.LessOrEqual(key_positions(op, op.dim(k, 2)), row))
    return mask


def _attended_keys(op: Builder, padding: ir.Value, q: ir.Value, k: ir.Value) -> ir.Value:
    """Which keys count, as booleans that broadcast over [batch, heads, queries, keys]."""
    rank = op.rank(padding)
    if rank == 1:
        columns = op.Unsqueeze(op.positions(op.dim(k, 2)), [0])
        lengths, batch = op.static_dim(padding, 0), op.static_dim(q, 0)
        bounds = op.Cast(padding, to=ir.DataType.INT64)
        if lengths is not None and batch is not None and lengths == 2 * batch:
            ends, starts = op.Split(op.Unsqueeze(bounds, [1]), num_outputs=2, axis=0, outputs=2)
            keep = op.And(op.Less(columns, ends), op.GreaterOrEqual(columns, starts))
        elif lengths is None or batch is None or lengths == batch:
            keep = op.Less(columns, op.Unsqueeze(bounds, [1]))
        else:
            raise ModelError("this form of its mask (3·batch + 2 numbers) has no standard form here")
        return op.Unsqueeze(keep, [1, 2])
    keep = op.Cast(padding, to=ir.DataType.BOOL)
    if rank == 2:
        return op.Unsqueeze(keep, [1, 2])
    if rank == 3:
        return op.Unsqueeze(keep, [1])
    raise ModelError(f"a mask of {rank} dimensions has no standard form here")


@fused("GroupQueryAttention")
def _group_query_attention(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """Causal attention with fewer key heads than query heads; new keys are appended to the past ones"""
    refuse(node, 11, 12, 13, 14, 15)
    for name in ("smooth_softmax", "sliding_window_cache", "kv_cache_bit_width", "qk_output"):
        if attribute(node, name, 0) not in (0, -1):
            raise ModelError(f"its attribute {name} has no standard form here")
    heads, stored = attribute(node, "num_heads"), attribute(node, "kv_num_heads")
    q, k, v = required_input(node), optional_input(node, 1), optional_input(node, 2)
    if k is None or v is None:
        width = op.static_dim(q, 2)
        if width is None:
            raise ModelError("the width of the packed queries, keys and values is unknown")
        # Packed: first all query heads, then the fewer ones of keys and of values.
        size = width // (heads + 2 * stored)
        q, k, v = op.Split(q, [heads * size, stored * size, stored * size], axis=2, outputs=3)
    q, k, v = split_heads(op, q, heads), split_heads(op, k, stored), split_heads(op, v, stored)
    length = op.dim(q, 2)
    past_key, past_value = optional_input(node, 3), optional_input(node, 4)
    before = None if past_key is None or past_value is None else op.dim(past_key, 2)
    query_positions = op.positions(length)
    row = query_positions if before is None else op.Add(query_positions, before)
    if attribute(node, "do_rotary", 0):
        ids = optional_input(node, 9)
        ids = op.Unsqueeze(row, [0]) if ids is None else ids
        cos, sin = (op.Unsqueeze(op.Gather(required_input(node, i), ids, axis=0), [1]) for i in (7, 8))
        pairs = op.static_dim(required_input(node, 7), 1)
        turn = {
            "rotary": 0 if pairs is None else 2 * pairs,
            "interleaved": bool(attribute(node, "rotary_interleaved", 0)),
        }
        q, k = rotate(op, q, cos, sin, **turn), rotate(op, k, cos, sin, **turn)
    if past_key is not None and past_value is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    present = [k, v]
    mask = Mask(optional_input(node, 10), may_be_empty=False)
    if attribute(node, "causal", 1):
        column, here = key_positions(op, op.dim(k, 2)), op.Unsqueeze(row, [1])
        mask.allow(op, op.LessOrEqual(column, here))
        window = attribute(node, "local_window_size", -1)
        # The token itself counts as one of the window.
        if window > 0:
            mask.allow(op, op.Greater(column, op.Sub(here, window)))
    k, v = (repeat_heads(op, x, heads // stored) for x in (k, v))
    scale, softcap = attribute(node, "scale") or None, attribute(node, "softcap", 0.0)
    attended = attend(op, q, k, v, scale=scale, mask=mask, softcap=softcap)
    return [merge_heads(op, attended.output), *present, None]


@fused("RotaryEmbedding")
def _rotary_embedding(op: Builder, node: ir.Node) -> ir.Value:
    """Rotary embedding; one position stands for a run that starts there"""
    if attribute(node, "is_packed_batching", 0):
        raise ModelError("packed batches have no standard form here")
    x, ids, cos, sin = (required_input(node, index) for index in range(4))
    pairs = op.static_dim(cos, 1)
    if pairs is None:
        raise ModelError("the width of its cosines is unknown")
    flat = op.rank(x) == 3
    rotary, heads = attribute(node, "rotary_embedding_dim", 0), attribute(node, "num_heads", 0)
    if flat:
        width = op.static_dim(x, 2)
        if not heads and width is None:
            raise ModelError("the width of its input is unknown")
        x = split_heads(op, x, heads or (width or 0) // (2 * pairs))
    if op.rank(ids) == 1:
        ids = op.Unsqueeze(op.Add(op.positions(op.dim(x, 2)), ids), [0])
    cos, sin = (op.Unsqueeze(op.Gather(table, ids, axis=0), [1]) for table in (cos, sin))
    turned = rotate(op, x, cos, sin, rotary=rotary, interleaved=bool(attribute(node, "interleaved", 0)))
    return merge_heads(op, turned) if flat else turned
