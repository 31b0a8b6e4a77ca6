"""Pads of all axes, in place of pads with a list of axes.

onnxruntime moves transposes across a Pad as if it named all axes, and then reads past the end of its list.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.graph.builder import Builder
from onward.graph.nodes import nodes_within, subgraphs_of

__all__ = ["all_pads", "spell_out_pads"]


def spell_out_pads(model: ir.Model) -> ir.Model:
    """Make every Pad list all axes, where the rank and the axes are known."""
    nodes = [
        node
        for node in nodes_within(model.graph)
        if node.op_type == "Pad" and node.domain == "" and len(node.inputs) > 3 and node.inputs[3] is not None
    ]
    if nodes:
        _spell_out(Builder(model.graph), model.graph, set(nodes))
    return model


def _spell_out(op: Builder, graph: ir.Graph, nodes: set[ir.Node]) -> None:
    for node in list(graph):
        for inner in subgraphs_of(node):
            _spell_out(Builder(inner, parent=op), inner, nodes)
        if node not in nodes:
            continue
        op.before, op.scope = node, node.name or ""
        pads = all_pads(op, node)
        op.before, op.scope = None, ""
        if pads is not None:
            node.replace_input_with(1, pads)
            node.resize_inputs(3)


def all_pads(op: Builder, node: ir.Node) -> ir.Value | None:
    """The pads of a Pad with a list of axes, for all axes; None where rank or axes are not known."""
    x, pads, axes = node.inputs[0], node.inputs[1], node.inputs[3]
    assert x is not None and pads is not None and axes is not None
    named = op.const_value(axes)
    if named is None or x.shape is None:
        return None
    rank = x.shape.rank()
    first = np.asarray(named, np.int64).reshape(-1) % rank
    places = np.concatenate([first, first + rank])
    given = op.const_value(pads)
    if given is None:
        pads.type = pads.type or ir.TensorType(ir.DataType.INT64)
        zeros = op.constant(np.zeros(2 * rank, np.int64), name="pads")
        return op.ScatterElements(zeros, op.constant(places, name="places"), pads, axis=0)
    full = np.zeros(2 * rank, np.int64)
    full[places] = given
    return op.constant(full, name="pads")
