"""Takes out of a graph what its outputs do not need."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as passes

__all__ = ["finish", "remove_identities", "remove_unused"]


def remove_unused(model: ir.Model) -> ir.Model:
    """Drop nodes, initializers and opset imports that no output needs; inputs stay."""
    passes.RemoveUnusedNodesPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    return model


def remove_identities(model: ir.Model) -> ir.Model:
    """Let the users of each Identity read its input; outputs keep their names.

    An Identity stays where a graph's output would otherwise be an input, an initializer, a value of a graph
    around, or the same value as another output.
    """
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type != "Identity" or node.domain not in ("", "ai.onnx"):
            continue
        source, result = node.inputs[0], node.outputs[0]
        if source is None or node.graph is None:
            continue
        if not result.is_graph_output():
            ir.convenience.replace_all_uses_with(result, source)
            node.graph.remove(node, safe=True)
            continue
        producer = source.producer()
        if producer is None or producer.graph is not node.graph or source.is_graph_output():
            continue
        name, kind, shape = result.name, result.type, result.shape
        ir.convenience.replace_all_uses_with(result, source, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)
        source.name = name
        source.type = source.type or kind
        source.shape = source.shape if shape is None else shape
    return model


def finish(model: ir.Model) -> ir.Model:
    """The last pass over a graph that was built: no dead code, no needless Identity."""
    remove_identities(model)
    return remove_unused(model)
