"""Dead code and common-subexpression elimination; `simplify` folds constants too.

Trainable values are initializers like any other constant, so floating
initializers are folded or merged only if the caller says which ones are parameters.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir
import onnx_ir.passes.common as passes

from onward.graph.fold import SMALL, fold_constants
from onward.graph.nodes import computation_key, nodes_within, subgraphs_of


def remove_unused(model: ir.Model) -> ir.Model:
    """Drop nodes, initializers and opset imports that no output needs; inputs stay."""
    # listed first: the graph does not lead to a node that has been removed
    bodies = {node: subgraphs_of(node) for node in nodes_within(model.graph)}
    bodies = {node: graphs for node, graphs in bodies.items() if graphs}
    while True:
        # onnx-ir's own, which also takes away optional outputs that nothing reads.
        passes.RemoveUnusedNodesPass()(model)
        # the pass leaves what the body of a removed Scan captured in use
        removed = [node for node in bodies if node.graph is None]
        for node in removed:
            for inner in (inner for graph in bodies.pop(node) for inner in nodes_within(graph)):
                for index in range(len(inner.inputs)):
                    inner.replace_input_with(index, None)
        if not removed:
            break
    passes.RemoveUnusedOpsetsPass()(model)
    return model


def remove_identities(model: ir.Model) -> ir.Model:
    """Remove Identity nodes; outputs keep their names.

    An Identity stays where a graph's output would otherwise be an input, an initializer, a value of a graph
    around, or the same value as another output.
    """
    for node in nodes_within(model.graph):
        if node.op_type != "Identity" or node.domain not in ("", "ai.onnx"):
            continue
        source, result = node.inputs[0], node.outputs[0]
        if source is None or node.graph is None:
            continue
        # An input, an initializer and an outer value can be read in an Identity's place, but not be an output in it.
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
        # The output's name is the model's interface; the inner name is nobody's.
        source.name = name
        source.type = source.type or kind
        source.shape = source.shape if shape is None else shape
    return model


def simplify(model: ir.Model, *, parameters: Collection[str] | None = None) -> ir.Model:
    """Fold constants, merge equal nodes and remove dead code, without changing a result.

    `parameters` names the initializers that may change later; without it, every floating one may.
    """
    fold_constants(model)
    remove_identities(model)
    share_constants(model, parameters=parameters)
    share_subexpressions(model)
    return remove_unused(model)


def share_constants(model: ir.Model, *, parameters: Collection[str] | None = None) -> ir.Model:
    """Keep one of equal small constants; never one in the place of a parameter."""
    unique: dict[tuple, ir.Value] = {}
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        # Equal large constants are rare, and comparing them reads whatever is mapped from a file.
        if tensor is None or tensor.size > SMALL or value.is_graph_input() or value.is_graph_output():
            continue
        # Two equal weights, such as biases of zeros, train apart.
        if tensor.dtype.is_floating_point() if parameters is None else name in parameters:
            continue
        if tensor.dtype == ir.DataType.STRING:  # has no bytes to compare
            continue
        first = unique.setdefault((tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes()), value)
        if first is not value:
            ir.convenience.replace_all_uses_with(value, first)
            del model.graph.initializers[name]
    return model


def share_subexpressions(model: ir.Model) -> ir.Model:
    """Common-subexpression elimination; random operators and subgraphs are not changed."""
    _share(model.graph, {})
    return model


def _share(graph: ir.Graph, outer: dict[tuple, ir.Node]) -> None:
    unique = dict(outer)
    for node in list(graph):
        for inner in subgraphs_of(node):
            _share(inner, unique)
        key = computation_key(node)
        if key is None:
            continue
        first = unique.setdefault(key, node)
        # Two outputs of a model may not be one value, however equal they are.
        if first is node or any(value.is_graph_output() for value in node.outputs):
            continue
        # one leaves out an output that the other has
        if any(bool(a.name) != bool(b.name) for a, b in zip(first.outputs, node.outputs)):
            continue
        ir.convenience.replace_all_uses_with(list(node.outputs), list(first.outputs))
        graph.remove(node, safe=True)
