"""Sums and products along an axis so far, as a Scan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from onward.graph.nodes import attribute

if TYPE_CHECKING:
    from onward.graph.builder import Builder


def cumulative(op: Builder, node: ir.Node, x: ir.Value, axis: int, *, combine: str, start: float) -> ir.Value:
    """`combine` (Add, Mul) along an axis from `start` on; `exclusive` and `reverse` as the node has them."""
    rank = op.rank(x)
    element_shape = None if x.shape is None else ir.Shape([d for i, d in enumerate(x.shape) if i != axis])
    body = op.subgraph("cumulative")
    so_far, element = (
        body.input("so_far", x.dtype, element_shape),
        body.input("element", x.dtype, element_shape),
    )
    (total,) = body.node(combine, [so_far, element])
    # A state output may not be a scan output too: each is an output of its own.
    seen = body.Identity(so_far if attribute(node, "exclusive", 0) else total)
    body.graph.outputs.extend([total, seen])
    shape = op.Concat(*[op.dim(x, i) for i in range(rank) if i != axis], axis=0) if rank > 1 else None
    first = op.constant_like(start, x)
    backwards = attribute(node, "reverse", 0)
    _, result = op.Scan(
        first if shape is None else op.Expand(first, shape),
        x,
        body=body.graph,
        num_scan_inputs=1,
        scan_input_axes=[axis],
        scan_output_axes=[axis],
        scan_input_directions=[backwards],
        scan_output_directions=[backwards],
        outputs=2,
    )
    return result
