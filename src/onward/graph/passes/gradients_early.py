"""Orders a training graph's nodes, which determines onnxruntime's execution order."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["schedule_gradients_early"]


def schedule_gradients_early(graph: ir.Graph, *, flag: str) -> None:
    """Order the nodes so that onnxruntime computes each gradient as early as possible.

    It takes the nodes whose outputs nothing reads from the last to the first, each with all that it needs. As they
    were made, most parameters' gradients would come at the very end, from values that were kept for that: up to
    twice the memory, and long out of the processor's caches. Gradients are added to buffers or selected by `flag`
    (Where(flag, gradient, buffer + gradient)); what computes one without that comes in order too, since programs
    that know the flag take the rest away.
    """
    made_at: dict[ir.Node | None, int] = {node: index for index, node in enumerate(graph)}
    selections = [node for node in graph if node.op_type == "Where" and _name(node.inputs[0]) == flag]
    selections = [node for node in selections if not _readers(node)]
    selections.sort(key=lambda node: made_at.get(_producer(node.inputs[1]), -1))
    sums = list(dict.fromkeys(made for node in selections if (made := _producer(node.inputs[2])) is not None))
    chain = {*selections, *sums}
    ends = [node for node in graph if node not in chain and _readers(node) <= chain]
    moved = [*ends[::-1], *sums[::-1], *selections[::-1]]
    graph.remove(moved)  # at once: each call looks at all outputs
    graph.extend(moved)


def _readers(node: ir.Node) -> set[ir.Node]:
    return {user for value in node.outputs for user in value.consumers()}


def _producer(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()


def _name(value: ir.Value | None) -> str | None:
    return None if value is None else value.name
