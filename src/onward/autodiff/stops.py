"""Says why a parameter gets no gradient: the operators on its way to the loss that nothing trains through."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onward.autodiff import registry
from onward.autodiff.engine import find_path
from onward.graph.nodes import captured_values, stops_gradient, subgraphs_of

__all__ = ["untrainable"]

# Operators that only look at the shape of what they read: they stop nothing.
_OF_SHAPES = frozenset({"Shape", "Size", "ConstantOfShape", "EyeLike"})


def untrainable(graph: ir.Graph, loss: ir.Value, parameters: Sequence[ir.Value]) -> list[str]:
    """One sentence for each parameter that reaches the loss only through operators without a slope.

    A parameter that does not reach the loss at all is none of them: freezing parts of a model is common.
    """
    active = find_path(graph, {loss}, parameters).active
    idle = [value for value in parameters if value not in active]
    if not idle:
        return []
    needed = _needed(graph, loss)
    lines = []
    for value in idle:
        stops = _stops(graph, value, needed)
        if stops:
            shown = ", ".join(f"{node.op_type} '{node.name}'" for node in stops[:3])
            lines.append(
                f"'{value.name}' gets no gradient: {shown} between it and the loss "
                f"{'is' if len(stops) == 1 else 'are'} constant almost everywhere, so nothing can train through "
                f"{'it' if len(stops) == 1 else 'them'}"
            )
    return lines


def _reads(node: ir.Node) -> list[ir.Value]:
    captured = captured_values(node) if subgraphs_of(node) else []
    return [value for value in [*node.inputs, *captured] if value is not None]


def _needed(graph: ir.Graph, loss: ir.Value) -> set[ir.Value]:
    needed = {loss}
    for node in reversed(graph):
        if any(output in needed for output in node.outputs):
            needed.update(_reads(node))
    return needed


def _stops(graph: ir.Graph, source: ir.Value, needed: set[ir.Value]) -> list[ir.Node]:
    reached, found = {source}, []
    for node in graph:
        if not any(value in reached for value in _reads(node)) or node.op_type in _OF_SHAPES:
            continue
        if not any(output in needed for output in node.outputs):
            continue
        if registry.is_constant(node.op_type, node.domain):
            found.append(node)
        elif not stops_gradient(node):
            reached.update(node.outputs)
    return found
