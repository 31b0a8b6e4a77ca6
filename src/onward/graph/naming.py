"""Unique names for new values and nodes, deterministic between runs."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.nodes import subgraphs_of

__all__ = ["Namer"]


class Namer:
    """Gives names that are unique in a model, and the same in every run."""

    def __init__(self, graph: ir.Graph) -> None:
        self._taken: set[str] = set()
        self._next: dict[str, int] = {}
        self._collect(graph)

    def _collect(self, graph: ir.Graph) -> None:
        for value in [*graph.inputs, *graph.initializers.values()]:
            self._taken.add(value.name or "")
        for node in graph:
            self._taken.add(node.name or "")
            for value in node.outputs:
                self._taken.add(value.name or "")
            for inner in subgraphs_of(node):
                self._collect(inner)

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
