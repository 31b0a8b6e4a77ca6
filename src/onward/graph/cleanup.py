"""Takes out of a graph what its outputs do not need."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as passes

__all__ = ["finish", "remove_unused"]


def remove_unused(model: ir.Model) -> ir.Model:
    """Drop nodes, initializers and opset imports that no output needs; inputs stay."""
    passes.RemoveUnusedNodesPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    return model


def finish(model: ir.Model) -> ir.Model:
    """The last pass over a graph that was built: no dead code, no needless Identity."""
    passes.IdentityEliminationPass()(model)
    return remove_unused(model)
