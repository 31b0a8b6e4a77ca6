"""Gradients of reductions and of the cumulative sum.

Axes may be absent, constant or known at run time only, and no axes may mean all or none: every rule works on
reduced values whose axes are put back as 1 (`restore_axes`), and so broadcasts against the input.
"""

from __future__ import annotations

import numpy as np

from onward.autodiff.registry import gradient_rule, no_gradient
from onward.autodiff.rules.elementwise import mask, sign
from onward.graph.nodes import optional_input


def restore_axes(op, node, value):
    """A reduced value with its axes put back as 1, so that it broadcasts against the input."""
    if node.attributes.get_int("keepdims", 1):
        return value
    axes = axes_of(op, node)
    if axes is not None:
        return op.Unsqueeze(value, axes)
    if node.attributes.get_int("noop_with_empty_axes", 0) or node.inputs[0].shape is None:
        return value  # of unknown rank: a scalar broadcasts as it is
    return op.Reshape(value, [1] * op.rank(node.inputs[0]))


def axes_of(op, node):
    """The axes that a reduction was given, or None where it was given none or an empty list."""
    axes = optional_input(node, 1)
    constant = op.const_value(axes)
    return None if constant is not None and constant.size == 0 else axes


def sum_same_axes(op, node, value):
    """Σ of a value of the input's shape over the same axes, which stay as 1."""
    noop = node.attributes.get_int("noop_with_empty_axes", 0)
    return op.ReduceSum(value, axes_of(op, node), keepdims=1, noop_with_empty_axes=noop)


@gradient_rule("ReduceSum")
def reduce_sum(op, node, dz):
    """z = Σ x   ⇒   dx = dz spread over the axes that were summed"""
    return op.Expand(restore_axes(op, node, dz), op.shape(node.inputs[0]))


@gradient_rule("ReduceMean")
def reduce_mean(op, node, dz):
    """z = Σ x / n   ⇒   dx = dz/n spread over the axes that were summed"""
    x = node.inputs[0]
    return op.Expand(restore_axes(op, node, op.Div(dz, _count(op, node))), op.shape(x))


def _count(op, node):
    """How many elements one mean is of, as a scalar of the input's type."""
    x, z = node.inputs[0], node.outputs[0]
    axes = axes_of(op, node)
    constant = op.const_value(axes)
    kind = int(op.dtype(x))
    if axes is None and node.attributes.get_int("noop_with_empty_axes", 0):
        return 1.0
    if axes is None and x.shape is None:
        return op.Cast(op.Size(x), to=kind)
    if axes is None or constant is not None:
        every = range(op.rank(x)) if constant is None else constant.reshape(-1).tolist()
        sizes = [op.static_dim(x, axis) for axis in every]
        if all(size is not None for size in sizes):
            return float(np.prod(sizes))
        if axes is None:
            return op.Cast(op.Size(x), to=kind)
        return op.Cast(op.ReduceProd(op.Gather(op.Shape(x), axes, axis=0), keepdims=0), to=kind)
    # Floats: no integer division by zero where the result is empty.
    size, left = (op.Cast(op.Size(value), to=1) for value in (x, z))
    return op.Cast(op.Div(size, left), to=kind)


@gradient_rule("ReduceMax", "ReduceMin")
def reduce_extremum(op, node, dz):
    """z = max x   ⇒   dx = dz where x = z; equal ones share it"""
    x = node.inputs[0]
    # By value, since the operator gives no index; equal maxima share the gradient, as in torch's amax.
    chosen = mask(op, op.Equal(x, restore_axes(op, node, node.outputs[0])), like=x)
    return op.Mul(chosen, op.Div(restore_axes(op, node, dz), sum_same_axes(op, node, chosen)))


@gradient_rule("ReduceProd")
def reduce_prod(op, node, dz):
    """z = Π x   ⇒   dxᵢ = dz·Π of the others, which is 0 where another one is 0"""
    x = node.inputs[0]
    # z/x would be 0/0 where x is 0, though the product of the others may be anything.
    zero = op.Equal(x, 0.0)
    safe = op.Where(zero, op.constant_like(1.0, x), x)
    zeros = mask(op, zero, like=x)
    noop = node.attributes.get_int("noop_with_empty_axes", 0)
    product = op.ReduceProd(safe, axes_of(op, node), keepdims=1, noop_with_empty_axes=noop)
    others = op.Div(op.Mul(restore_axes(op, node, dz), product), safe)
    return op.Where(op.Equal(sum_same_axes(op, node, zeros), zeros), others, 0.0)


@gradient_rule("ReduceL1")
def reduce_l1(op, node, dz):
    """z = Σ |x|   ⇒   dx = dz·sign x"""
    return op.Mul(sign(op, node.inputs[0]), restore_axes(op, node, dz))


@gradient_rule("ReduceL2")
def reduce_l2(op, node, dz):
    """z = √Σ x²   ⇒   dx = x·dz/z, and 0 where z is"""
    x, z = node.inputs[0], node.outputs[0]
    # Where the norm is 0, x is 0 too, and so the gradient is whatever z is replaced by.
    safe = op.Where(op.Equal(z, 0.0), op.constant_like(1.0, z), z)
    return op.Mul(x, restore_axes(op, node, op.Div(dz, safe)))


@gradient_rule("ReduceSumSquare")
def reduce_sum_square(op, node, dz):
    """z = Σ x²   ⇒   dx = 2·x·dz"""
    return op.Mul(node.inputs[0], restore_axes(op, node, op.Mul(dz, 2.0)))


@gradient_rule("ReduceLogSum")
def reduce_log_sum(op, node, dz):
    """z = ln Σ x   ⇒   dx = dz/eᶻ spread over the axes that were summed"""
    x = node.inputs[0]
    return op.Expand(restore_axes(op, node, op.Div(dz, op.Exp(node.outputs[0]))), op.shape(x))


@gradient_rule("ReduceLogSumExp")
def reduce_log_sum_exp(op, node, dz):
    """z = ln Σ eˣ   ⇒   dx = dz·exp(x − z), and 0 where every x is −∞"""
    x, z = node.inputs[0], node.outputs[0]
    # −∞ − (−∞) would be NaN; with 0 in z's place exp(−∞) is 0.
    finite = op.Where(op.IsInf(z, detect_positive=0), op.constant_like(0.0, z), z)
    return op.Mul(op.Exp(op.Sub(x, restore_axes(op, node, finite))), restore_axes(op, node, dz))


@gradient_rule("CumSum")
def cum_sum(op, node, dz):
    """zᵢ = Σ xⱼ for j ≤ i   ⇒   dxⱼ = Σ dzᵢ for i ≥ j: the same sum from the other end"""
    reverse = node.attributes.get_int("reverse", 0)
    exclusive = node.attributes.get_int("exclusive", 0)
    return op.CumSum(dz, node.inputs[1], reverse=1 - reverse, exclusive=exclusive)


no_gradient("ArgMax", "ArgMin", because="an index")
