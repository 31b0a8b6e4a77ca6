"""Expands fused operators of `com.microsoft`, as graph optimizers and exporters emit them, to standard operators.

Each module here registers its operators in one table: `table.py` says how to add one.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

import onnx_ir as ir

from onward.graph.dialect.contrib.table import TABLE

if TYPE_CHECKING:
    from onward.graph.dialect.rewrite import Expansion

__all__ = ["contrib_operators", "expand_contrib"]

# Importing the modules of this package fills the table.
for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def expand_contrib(node: ir.Node) -> Expansion | None:
    """The expansion of a fused operator to standard ones; None for other operators."""
    return TABLE.get((node.domain, node.op_type))


def contrib_operators() -> dict[tuple[str, str], str]:
    """Every (domain, operator) that is expanded, with the first line of its expansion's docstring."""
    return {
        key: (expansion.__doc__ or "").strip().splitlines()[0] for key, expansion in sorted(TABLE.items())
    }
