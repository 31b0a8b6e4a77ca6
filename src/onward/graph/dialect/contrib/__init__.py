"""Fused operators of `com.microsoft`, as optimizers and exporters leave them, in standard operators.

Each module here registers its operators in one table: `table.py` says how to add one.
"""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.dialect.contrib import activations, attentions, norms, products, quantized, training
from onward.graph.dialect.contrib.table import TABLE
from onward.graph.dialect.rewrite import Expansion

__all__ = ["contrib_operators", "expand_contrib"]

# Named, so that importing this package fills the table and no reader wonders whether it does.
_MODULES = (activations, attentions, norms, products, quantized, training)


def expand_contrib(node: ir.Node) -> Expansion | None:
    """How a fused operator is written in standard ones; None where it is none of ours."""
    return TABLE.get((node.domain, node.op_type))


def contrib_operators() -> dict[tuple[str, str], str]:
    """Every (domain, operator) that is expanded, with the first line that its expansion says of it."""
    return {
        key: (expansion.__doc__ or "").strip().splitlines()[0] for key, expansion in sorted(TABLE.items())
    }
