"""The last pass over a graph that was made here, before it is written."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onward.graph.builder import Builder
from onward.graph.cleanup import remove_identities, remove_unused
from onward.graph.dialect.pads import all_pads
from onward.graph.nodes import (
    GRADIENT,
    nodes_within,
    optional_input,
    producer_of,
    required_input,
    subgraphs_of,
)


def finish(model: ir.Model) -> ir.Model:
    """Remove dead code and Identity nodes, and work around bugs of onnxruntime."""
    for applies, rewrite in ((_names_axes, _name_all_axes), (_is_at_risk, _widen_vector)):
        if any(
            applies(node) for node in nodes_within(model.graph)
        ):  # few graphs have any: no builder for the others
            _rewrite_nodes(Builder(model.graph), applies, rewrite)
    # onnxruntime would do it too, at every load.
    remove_identities(model)
    _remove_choices_of_the_same(model)
    return remove_unused(model)


def _rewrite_nodes(
    op: Builder, applies: Callable[[ir.Node], bool], rewrite: Callable[[Builder, ir.Node], None]
) -> None:
    for node in list(op.graph):
        for inner in subgraphs_of(node):
            _rewrite_nodes(Builder(inner, parent=op), applies, rewrite)
        if applies(node):
            with op.inserting(node, node.name or "", share=True):
                rewrite(op, node)


def _remove_choices_of_the_same(model: ir.Model) -> None:
    """Where(c, x, x) of x's own shape: a choice that only mattered to gradients, of rows with and without one."""
    for node in nodes_within(model.graph):
        node.metadata_props.pop(GRADIENT, None)
        if node.op_type != "Where" or node.inputs[1] is not node.inputs[2]:
            continue
        source, result = node.inputs[1], node.outputs[0]
        # The condition may be larger than x, which would then be repeated.
        if source is None or source.shape is None or source.shape != result.shape or result.is_graph_output():
            continue
        ir.convenience.replace_all_uses_with(result, source)
        if node.graph is not None:
            node.graph.remove(node, safe=True)


def _names_axes(node: ir.Node) -> bool:
    """Whether a Pad has a list of axes."""
    return node.op_type == "Pad" and node.domain == "" and optional_input(node, 3) is not None


def _name_all_axes(op: Builder, node: ir.Node) -> None:
    pads = all_pads(op, node)
    if pads is not None:
        node.replace_input_with(1, pads)
        node.resize_inputs(3)


def _is_at_risk(node: ir.Node) -> bool:
    """Whether a MatMul has a vector for its second factor, and a first factor that is computed."""
    if node.op_type != "MatMul" or node.domain != "":
        return False
    matrix, vector = (required_input(node, index) for index in (0, 1))
    ranks = [-1 if value.shape is None else value.shape.rank() for value in (matrix, vector)]
    # onnxruntime's optimizer computes another result for a transposed matrix times a vector than for it times a
    # column.
    return matrix.producer() is not None and ranks[0] > 1 and ranks[1] == 1


def _widen_vector(op: Builder, node: ir.Node) -> None:
    """Give the vector an axis of size 1."""
    (result,), (matrix, vector) = node.outputs, node.inputs
    narrow = op.Squeeze(op.MatMul(matrix, op.Unsqueeze(vector, [1])), [-1])
    name, kind, shape = result.name, result.type, result.shape
    ir.convenience.replace_all_uses_with(result, narrow, replace_graph_outputs=True)
    op.graph.remove(node, safe=True)
    narrow.name, narrow.type, narrow.shape = name, kind, shape


# --- Orders a training graph's nodes, which determines onnxruntime's execution order.


def order_gradients(graph: ir.Graph, *, flag: str) -> None:
    """Order the nodes so that onnxruntime computes each gradient as early as possible.

    It takes the nodes whose outputs nothing reads from the last to the first, each with all that it needs. As they
    were made, most parameters' gradients would come at the very end, from values that were kept for that: up to
    twice the memory, and long out of the processor's caches. Gradients are added to buffers or selected by `flag`
    (Where(flag, gradient, buffer + gradient)); what computes one without that comes in order too, since programs
    that know the flag take the rest away.
    """
    order: dict[ir.Node | None, int] = {node: index for index, node in enumerate(graph)}
    choices = [node for node in graph if node.op_type == "Where" and required_input(node).name == flag]
    selections = [node for node in choices if not _readers(node)]
    # By where the gradient is computed: the runtime walks from the end of this list.
    selections.sort(key=lambda node: order.get(producer_of(node.inputs[1]), -1))
    producers = [producer_of(node.inputs[2]) for node in selections]
    sums = list(dict.fromkeys(node for node in producers if node is not None))
    chain = {*selections, *sums}
    ends = [node for node in graph if node not in chain and _readers(node) <= chain]
    # Backwards, since the runtime takes leaves from the last to the first.
    moved = [*ends[::-1], *sums[::-1], *selections[::-1]]
    graph.remove(moved)  # at once: each call looks at all outputs
    graph.extend(moved)


def _readers(node: ir.Node) -> set[ir.Node]:
    return {user for value in node.outputs for user in value.consumers()}
