"""Prepares a forward graph, so that a gradient rule needs to look at its own node only.

Knows what lies around a node; rules do not.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onward.graph.nodes import GRADIENT, MASKED, is_used, nodes_within, producer_of


def prepare(graph: ir.Graph, targets: Collection[ir.Value]) -> None:
    """Mark and rewrite forward nodes whose gradient depends on their neighbours; `targets` are differentiated."""
    for node in nodes_within(graph):
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "Softmax" and _is_replaced(node.outputs[0]):
            node.metadata_props[GRADIENT] = MASKED
        elif node.op_type == "SoftmaxCrossEntropyLoss" and len(node.outputs) > 1:
            if not is_used(node, 1) and node.outputs[1] not in targets:
                node.resize_outputs(1)
        elif node.op_type == "ConcatFromSequence":
            _join_tensors(node)


def _is_replaced(value: ir.Value) -> bool:
    """Whether the model puts something else in place of parts of a value."""
    return any(
        user.op_type == "Where"
        or (user.op_type in ("Cast", "CastLike", "Identity") and _is_replaced(user.outputs[0]))
        for user in value.consumers()
    )


def _join_tensors(node: ir.Node) -> None:
    """ConcatFromSequence(SequenceConstruct(a, b, …))   →   Concat(a, b, …): its gradient needs no sequence."""
    construct = producer_of(node.inputs[0], "SequenceConstruct")
    if construct is None or node.attributes.get_int("new_axis", 0):
        return
    node.op_type = "Concat"
    node.attributes.pop("new_axis", None)
    node.resize_inputs(len(construct.inputs))
    for index, part in enumerate(construct.inputs):
        node.replace_input_with(index, part)
