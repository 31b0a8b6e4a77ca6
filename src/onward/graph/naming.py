"""Unique names for new values and nodes, deterministic between runs."""

from __future__ import annotations

import functools

import onnx_ir as ir

from onward.graph.nodes import subgraphs_of


class Namer:
    """Gives names that are unique in a model, and the same in every run."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._next: dict[str, int] = {}

    @functools.cached_property
    def _taken(self) -> set[str]:
        """The names in the graph, looked up when the first new one is asked for: many passes add nothing."""
        taken: set[str] = set()
        _collect(self._graph, taken)
        return taken

    def take(self, name: str) -> None:
        """Mark a name as used."""
        self._taken.add(name)

    def is_free(self, name: str) -> bool:
        """Whether nothing has this name."""
        return name not in self._taken

    def __call__(self, wish: str) -> str:
        """A free name: `wish` itself, or `wish` with a number behind it."""
        name = wish
        while name in self._taken or not name:
            count = self._next.get(wish, 0) + 1
            self._next[wish] = count
            name = f"{wish}_{count}"
        self._taken.add(name)
        return name


def _collect(graph: ir.Graph, names: set[str]) -> None:
    for value in [*graph.inputs, *graph.initializers.values()]:
        names.add(value.name or "")
    for node in graph:
        names.add(node.name or "")
        for value in node.outputs:
            names.add(value.name or "")
        for inner in subgraphs_of(node):
            _collect(inner, names)
