"""The table of fused operators: (domain, operator) → function that builds it from standard ones.

To add one: write a function of a builder and the node that returns the node's outputs in order, say in its
docstring what it computes, and decorate it with `@fused("Name")`. Then a row in tests/graph/dialect/test_contrib.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes import optional_input

if TYPE_CHECKING:
    from onward.graph.builder import Builder
    from onward.graph.dialect.rewrite import Expansion

TABLE: dict[tuple[str, str], Expansion] = {}


def fused(*op_types: str, domain: str = "com.microsoft") -> Callable[[Expansion], Expansion]:
    """Register the expansion of these operators."""

    def register(expansion: Expansion) -> Expansion:
        for op_type in op_types:
            TABLE[domain, op_type] = expansion
        return expansion

    return register


def add_optional(op: Builder, x: ir.Value, addend: ir.Value | None) -> ir.Value:
    """x + addend; x where there is none."""
    return x if addend is None else op.Add(x, addend)


def refuse(node: ir.Node, *inputs: int) -> None:
    """Raise an error for optional inputs that have no expansion."""
    for index in inputs:
        if optional_input(node, index) is not None:
            raise ModelError(f"input {index} ('{node.inputs[index].name}') has no standard form here")  # type: ignore[union-attr]
