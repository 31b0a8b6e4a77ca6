"""Gradients of operators that work element by element, with broadcasting where ONNX has it."""

from __future__ import annotations

from onward.autodiff.registry import gradient


@gradient("Add", broadcasts=True)
def add(op, node, dz):
    """z = x + y   ⇒   dx = dz,  dy = dz"""
    return dz, dz


@gradient("Sub", broadcasts=True)
def sub(op, node, dz):
    """z = x − y   ⇒   dx = dz,  dy = −dz"""
    return dz, op.Neg(dz)


@gradient("Mul", broadcasts=True)
def mul(op, node, dz):
    """z = x·y   ⇒   dx = dz·y,  dy = dz·x"""
    x, y = node.inputs
    return op.Mul(dz, y), op.Mul(dz, x)


@gradient("Relu")
def relu(op, node, dz):
    """z = max(x, 0)   ⇒   dx = dz where x > 0"""
    return op.Where(op.Greater(node.outputs[0], 0.0), dz, 0.0)
