"""Keeps examples that share a row apart: a token attends to its own example alone, and positions begin anew in each.

Works on a decoder in the dialect that has no cache: every softmax over [batch, heads, queries, keys] hides what
belongs to another example, by an input that numbers the examples of each row. Positions that are counted from the
attention mask come from an input instead; rotary and relative ones need nothing, as only differences count. Whether
that was all through which tokens meet, the caller finds by comparing losses.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.nodes import producer_of, required_input

SEGMENTS, POSITIONS = "segment_ids", "position_ids"
# Low enough that its exponential is zero, and far from where sums with a mask would overflow.
_HIDDEN = -1e30


def separate_examples(model: ir.Model) -> None:
    """Add the input `segment_ids`, and `position_ids` where positions are counted from the mask, in place."""
    graph = model.graph
    ids = next((value for value in graph.inputs if value.name == "input_ids"), None)
    scores = [node for node in graph if node.op_type == "Softmax" and _is_attention(node)]
    if ids is None or ids.shape is None or not scores:
        raise ModelError(
            "packing needs a decoder whose tokens meet in attention alone, and no attention was found in this one",
            hint="train without packing",
        )
    op = Builder(graph)
    segments = op.input(SEGMENTS, ir.DataType.INT64, ids.shape)
    op.before = next(iter(graph))
    # [batch, 1, queries, keys]: one mask for all heads and layers.
    same = op.Equal(op.Unsqueeze(segments, [1, 3]), op.Unsqueeze(segments, [1, 2]))
    for node in scores:
        op.before = node
        logits = required_input(node)
        node.replace_input_with(0, op.Where(same, logits, op.constant_like(_HIDDEN, logits)))
    for node in [node for node in graph if node.op_type == "CumSum" and _counts_mask(node)]:
        op.before = node
        existing = next((value for value in graph.inputs if value.name == POSITIONS), None)
        positions = existing or op.input(POSITIONS, ir.DataType.INT64, ids.shape)
        # The model subtracts one from the count, since CumSum of a mask starts at one.
        counted = op.Add(positions, np.int64(1))
        kind = node.outputs[0].dtype
        if kind is not None and kind != ir.DataType.INT64:
            counted = op.Cast(counted, to=kind)
        ir.convenience.replace_all_uses_with(node.outputs[0], counted)
        graph.remove(node, safe=True)
    op.before = None


def _is_attention(node: ir.Node) -> bool:
    """Whether a softmax is over keys of which the number is known only when the model runs, for each of the queries.

    There are as many as queries where there is no cache, though inference may have found another name for them.
    """
    value = node.inputs[0]
    if value is None or value.shape is None or value.shape.rank() != 4:
        return False
    by_key = node.attributes.get_int("axis", -1) in (-1, 3)
    return by_key and all(isinstance(size, ir.SymbolicDim) for size in value.shape[2:])


def _counts_mask(node: ir.Node) -> bool:
    value = node.inputs[0]
    while (producer := producer_of(value, "Cast", "Identity")) is not None:
        value = producer.inputs[0]
    return value is not None and value.is_graph_input() and value.name == "attention_mask"
