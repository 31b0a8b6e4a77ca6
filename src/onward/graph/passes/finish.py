"""The last pass over a graph that was made here, before it is written."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.cleanup import remove_identities, remove_unused
from onward.graph.dialect.pads import spell_out_pads
from onward.graph.dialect.vectors import widen_vectors
from onward.graph.nodes import GRADIENT

__all__ = ["finish"]


def finish(model: ir.Model) -> ir.Model:
    """Remove dead code and Identity nodes, and work around bugs of onnxruntime."""
    spell_out_pads(model)
    widen_vectors(model)
    remove_identities(model)
    _remove_choices_of_the_same(model)
    return remove_unused(model)


def _remove_choices_of_the_same(model: ir.Model) -> None:
    """Where(c, x, x) of x's own shape: a choice that only mattered to gradients, of rows with and without one."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
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
