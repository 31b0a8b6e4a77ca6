"""Gradients of reductions and of cumulative operators."""

from __future__ import annotations

from onward.autodiff.registry import gradient


@gradient("ReduceSum")
def reduce_sum(op, node, dz):
    """z = Σ x   ⇒   dx = dz spread over the axes that were summed"""
    return op.Expand(kept(op, node, dz), op.shape(node.inputs[0]))


def kept(op, node, value):
    """A reduced value with its axes put back as 1, so that it broadcasts against the input."""
    if node.attributes.get_int("keepdims", 1):
        return value
    x, axes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if axes is None:
        if node.attributes.get_int("noop_with_empty_axes", 0):
            return value
        return op.Reshape(value, [1] * op.rank(x))
    return op.Unsqueeze(value, axes)
