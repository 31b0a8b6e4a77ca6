"""Replaces nodes by their expansions, in place and in order.

Visits every node of a model, subgraphs included, looks up its expansion, and puts the new nodes in its place,
under the old names. Types are inferred on the way, so that an expansion sees the ranks and types of its inputs.
Independent of the operators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.nodes import is_used, subgraphs_of
from onward.graph.shapes.dims import dims_of

# Builds what the node computes and returns its outputs, in order; None where an output is not wanted.
Expansion = Callable[[Builder, ir.Node], ir.Value | Sequence[ir.Value | None]]
Lookup = Callable[[ir.Node], Expansion | None]


class Unknown(ModelError):
    """An expansion needs a rank or type that is not known yet."""


def rewrite(model: ir.Model, lookup: Lookup, *, opset: int, infer: Callable[[ir.Model], None]) -> int:
    """Expand every node for which `lookup` has an expansion; returns how many. `infer` supplies missing ranks."""
    op = _Recorder(model.graph)
    op.opset = opset
    count = 0
    while True:
        walk = _Walk(lookup)
        try:
            walk.graph(op, model.graph)
        except Unknown as problem:
            # A value's rank depends on sizes computed in the graph: look at the whole model, then go on.
            if walk.count == 0:  # nothing has changed since the last look: another would find no more
                raise ModelError(str(problem)) from problem
            infer(model)
            count += walk.count
            continue
        return count + walk.count


class _Recorder(Builder):
    """A builder that records the nodes it made since the last expansion."""

    def __init__(self, graph: ir.Graph, *, parent: Builder | None = None) -> None:
        super().__init__(graph, parent=parent)
        self.new_nodes: dict[ir.Node, None] = {}

    def node(self, *arguments: Any, **options: Any) -> tuple[ir.Value, ...]:
        """Append a node, and remember it."""
        results = super().node(*arguments, **options)
        producer = results[0].producer()
        assert producer is not None
        self.new_nodes[producer] = None
        return results


class _Walk:
    def __init__(self, lookup: Lookup) -> None:
        self.lookup = lookup
        self.count = 0

    def graph(self, op: _Recorder, graph: ir.Graph) -> None:
        for node in list(graph):
            for inner in subgraphs_of(node):
                builder = _Recorder(inner, parent=op)
                builder.opset = op.opset
                self.graph(builder, inner)
            expansion = self.lookup(node)
            if expansion is None:
                _infer_missing(op, node)
            else:
                op.before, op.scope = node, node.name or ""
                _replace(op, node, expansion)
                self.count += 1
        op.before, op.scope = None, ""


def _replace(op: _Recorder, node: ir.Node, expansion: Expansion) -> None:
    op.new_nodes.clear()
    try:
        result = expansion(op, node)
    except ModelError as error:
        # An expansion that gave up leaves half of its nodes, which would be dead code with wrong names.
        op.graph.remove(list(op.new_nodes), safe=False)
        # The builder says so where a rank or type that it needs is not known.
        kind = Unknown if "unknown" in str(error) else ModelError
        raise kind(f"{node.op_type} '{node.name}': {error}") from error
    results = [result] if isinstance(result, ir.Value) else list(result)
    taken: set[int] = set()
    for index, old in enumerate(node.outputs):
        new = results[index] if index < len(results) else None
        if new is None:
            if is_used(node, index):
                raise ModelError(
                    f"{node.op_type} '{node.name}': its output '{old.name}' has no standard form; "
                    "export the model without it"
                )
            continue
        producer = new.producer()
        # a value that was there before, or stands for another output too, keeps its own name
        fresh = producer in op.new_nodes and id(new) not in taken
        if not fresh and old.is_graph_output():
            new = op.Identity(new)
            fresh = True
        # What was inferred for the original may know names that the expansion's own nodes lose.
        if new.shape is None or (old.shape is not None and _is_sharper(old.shape, new.shape)):
            new.shape = old.shape
        if new.type is None:
            new.type = old.type
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        if fresh:
            name, old.name = old.name, None
            new.name = name
            taken.add(id(new))
    op.graph.remove(node, safe=True)


def _is_sharper(old: ir.Shape, new: ir.Shape) -> bool:
    return old.rank() == new.rank() and dims_of(old).count(None) < dims_of(new).count(None)


def _infer_missing(op: Builder, node: ir.Node) -> None:
    if all(value.type is not None and value.shape is not None for value in node.outputs):
        return
    if node.domain not in ("", "ai.onnx"):
        return
    before = [(value, value.type, value.shape) for value in node.outputs]
    with contextlib.suppress(ModelError):  # the whole-model inference that follows has its say
        op.infer(node)
    for value, kind, shape in before:
        value.type = value.type if kind is None else kind
        value.shape = value.shape if shape is None else shape
