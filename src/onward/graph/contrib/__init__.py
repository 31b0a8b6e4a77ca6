"""Fused operators of `com.microsoft`, as optimizers and exporters leave them, in standard operators.

Each module registers its operators in one table; `contrib_operators` lists them.
"""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.contrib import table
from onward.graph.rewrite import Expansion

__all__ = ["contrib_operators", "expand_contrib"]


def expand_contrib(node: ir.Node) -> Expansion | None:
    """How a fused operator is written in standard ones; None where it is none of ours."""
    return table.TABLE.get((node.domain, node.op_type))


def contrib_operators() -> list[tuple[str, str]]:
    """Every (domain, operator) that is expanded."""
    return sorted(table.TABLE)
