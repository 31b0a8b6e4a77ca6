"""The last pass over a graph that was made here, before it is written."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.builder import Builder
from onward.graph.cleanup import remove_identities, remove_unused
from onward.graph.dialect.pads import spell_out_pads
from onward.graph.nodes import GRADIENT, nodes_within, subgraphs_of

__all__ = ["finish", "widen_vectors"]


def finish(model: ir.Model) -> ir.Model:
    """Remove dead code and Identity nodes, and work around bugs of onnxruntime."""
    spell_out_pads(model)
    widen_vectors(model)
    remove_identities(model)
    _remove_choices_of_the_same(model)
    return remove_unused(model)


def _remove_choices_of_the_same(model: ir.Model) -> None:
    """Where(c, x, x) of x's own shape: a choice that only mattered to gradients, of rows with and without one."""
    for node in nodes_within(model.graph):
        node.metadata_props.pop(GRADIENT, None)
        if (
            node.op_type != "Where"
            or node.inputs[1] is not node.inputs[2]
            or node.outputs[0].is_graph_output()
        ):
            continue
        source, result = node.inputs[1], node.outputs[0]
        if source is not None and source.shape is not None and source.shape == result.shape and node.graph:
            ir.convenience.replace_all_uses_with(result, source)
            node.graph.remove(node, safe=True)


def widen_vectors(model: ir.Model) -> ir.Model:
    """Give a vector that is the second factor of a MatMul an axis of size 1, where the first factor is computed."""
    if any(_is_at_risk(node) for node in nodes_within(model.graph)):
        _widen(Builder(model.graph), model.graph)
    return model


def _is_at_risk(node: ir.Node) -> bool:
    if node.op_type != "MatMul" or node.domain != "":
        return False
    matrix, vector = node.inputs
    shapes = [None if value is None else value.shape for value in (matrix, vector)]
    ranks = [-1 if shape is None else shape.rank() for shape in shapes]
    return matrix is not None and matrix.producer() is not None and ranks[0] > 1 and ranks[1] == 1


def _widen(op: Builder, graph: ir.Graph) -> None:
    for node in list(graph):
        for inner in subgraphs_of(node):
            _widen(Builder(inner, parent=op), inner)
        if not _is_at_risk(node):
            continue
        (result,) = node.outputs
        matrix, vector = node.inputs
        with op.inserting(node):
            op.scope = node.name or ""
            narrow = op.Squeeze(op.MatMul(matrix, op.Unsqueeze(vector, [1])), [-1])
            op.scope = ""
        name, kind, shape = result.name, result.type, result.shape
        ir.convenience.replace_all_uses_with(result, narrow, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        narrow.name, narrow.type, narrow.shape = name, kind, shape
