"""Gradients of activation functions. At a kink they choose the same subgradient as torch."""

from __future__ import annotations

import math

from onward.autodiff.registry import gradient_rule
from onward.autodiff.rules.elementwise import keep, keep_positive, step


@gradient_rule("Relu")
def relu(op, node, dz):
    """z = max(x, 0)   ⇒   dx = dz where x > 0"""
    # Of the result rather than x: the forward pass may then drop x, since whoever comes next reads the result
    # anyway.
    return keep_positive(op, dz, node.outputs[0])


@gradient_rule("LeakyRelu")
def leaky_relu(op, node, dz):
    """z = x where x > 0, else α·x   ⇒   dx = dz where x > 0, else α·dz"""
    alpha = node.attributes.get_float("alpha", 0.01)
    slope = op.Add(op.Mul(step(op, node.inputs[0]), 1.0 - alpha), alpha)
    return op.Mul(dz, slope)


@gradient_rule("PRelu")
def prelu(op, node, dz):
    """z = x where x > 0, else s·x   ⇒   dx = dz where x > 0, else s·dz;  ds = dz·min(x, 0)"""
    x, slope = node.inputs
    dx = op.Where(op.Greater(x, 0.0), dz, op.Mul(dz, slope)) if op.needs_gradient(x) else None
    if not op.needs_gradient(slope):
        return dx
    return dx, op.sum_to(op.Mul(dz, op.Min(x, op.constant_like(0.0, x))), slope)


@gradient_rule("ThresholdedRelu")
def thresholded_relu(op, node, dz):
    """z = x where x > α, else 0   ⇒   dx = dz where x > α"""
    return keep(op, dz, op.Greater(node.inputs[0], node.attributes.get_float("alpha", 1.0)))


@gradient_rule("Shrink")
def shrink(op, node, dz):
    """z = x + b where x < −λ, x − b where x > λ, else 0   ⇒   dx = dz where z is not that 0"""
    x, limit = node.inputs[0], node.attributes.get_float("lambd", 0.5)
    return keep(op, dz, op.Or(op.Less(x, -limit), op.Greater(x, limit)))


@gradient_rule("Elu")
def elu(op, node, dz):
    """z = x where x > 0, else α·(eˣ − 1)   ⇒   dx = dz where x > 0, else dz·(z + α)"""
    x, z = node.inputs[0], node.outputs[0]
    alpha = node.attributes.get_float("alpha", 1.0)
    if alpha == 1.0:
        return op.Mul(dz, op.Exp(op.Min(x, op.constant_like(0.0, x))))
    return op.Where(op.Greater(x, 0.0), dz, op.Mul(dz, op.Add(z, alpha)))


@gradient_rule("Selu")
def selu(op, node, dz):
    """z = γ·x where x > 0, else γ·α·(eˣ − 1)   ⇒   dx = γ·dz where x > 0, else dz·(z + γ·α)"""
    x, z = node.inputs[0], node.outputs[0]
    alpha = node.attributes.get_float("alpha", 1.67326319217681884765625)
    gamma = node.attributes.get_float("gamma", 1.05070102214813232421875)
    return op.Where(op.Greater(x, 0.0), op.Mul(dz, gamma), op.Mul(dz, op.Add(z, gamma * alpha)))


@gradient_rule("Celu")
def celu(op, node, dz):
    """z = max(0, x) + min(0, α·(exp(x/α) − 1))   ⇒   dx = dz·exp(min(x, 0)/α)"""
    x = node.inputs[0]
    alpha = node.attributes.get_float("alpha", 1.0)
    below = op.Min(x, op.constant_like(0.0, x))
    return op.Mul(dz, op.Exp(below if alpha == 1.0 else op.Mul(below, 1.0 / alpha)))


@gradient_rule("Sigmoid")
def sigmoid(op, node, dz):
    """z = σ(x)   ⇒   dx = dz·z·(1 − z)"""
    z = node.outputs[0]
    return op.Mul(dz, op.Mul(z, op.Sub(1.0, z)))


@gradient_rule("Tanh")
def tanh(op, node, dz):
    """z = tanh x   ⇒   dx = dz·(1 − z²)"""
    z = node.outputs[0]
    return op.Mul(dz, op.Sub(1.0, op.Mul(z, z)))


@gradient_rule("HardSigmoid")
def hard_sigmoid(op, node, dz):
    """z = min(max(α·x + β, 0), 1)   ⇒   dx = α·dz where 0 < z < 1"""
    z = node.outputs[0]
    # Strictly: at both kinks the slope is 0, as in torch.
    inside = op.And(op.Greater(z, 0.0), op.Less(z, 1.0))
    return keep(op, op.Mul(dz, node.attributes.get_float("alpha", 0.2)), inside)


@gradient_rule("HardSwish")
def hard_swish(op, node, dz):
    """z = x·h with h = min(max(x/6 + ½, 0), 1)   ⇒   dx = dz·(h + x/6 where |x| < 3)"""
    x = node.inputs[0]
    h = op.HardSigmoid(x, alpha=1 / 6, beta=0.5)
    # One mask for both kinks.
    inside = step(op, op.Sub(3.0, op.Abs(x)))
    return op.Mul(dz, op.Add(h, op.Mul(op.Mul(x, 1 / 6), inside)))


@gradient_rule("Softplus")
def softplus(op, node, dz):
    """z = ln(1 + eˣ)   ⇒   dx = dz·σ(x)"""
    return op.Mul(dz, op.Sigmoid(node.inputs[0]))


@gradient_rule("Softsign")
def softsign(op, node, dz):
    """z = x/(1 + |x|)   ⇒   dx = dz/(1 + |x|)²"""
    below = op.Add(op.Abs(node.inputs[0]), 1.0)
    return op.Div(dz, op.Mul(below, below))


@gradient_rule("Mish")
def mish(op, node, dz):
    """z = x·t with t = tanh(softplus(x))   ⇒   dx = dz·(t + x·σ(x)·(1 − t²))"""
    x = node.inputs[0]
    # Softplus is computed without overflow by the operator; ln(1 + eˣ) written out would be infinite from 89 on.
    t = op.Tanh(op.Softplus(x))
    return op.Mul(dz, op.Add(t, op.Mul(op.Mul(x, op.Sigmoid(x)), op.Sub(1.0, op.Mul(t, t)))))


@gradient_rule("Gelu")
def gelu(op, node, dz):
    """z = x·Φ(x)   ⇒   dx = dz·(Φ(x) + x·φ(x))"""
    x = node.inputs[0]
    if node.attributes.get_string("approximate", "none") == "tanh":
        return _gelu_tanh(op, dz, x)
    a = op.Mul(x, math.sqrt(0.5))
    # Φ = ½ + ½·erf a and x·φ = a·exp(−a²)/√π, the factor being in the exponent
    bell = op.Exp(op.Sub(-0.5 * math.log(math.pi), op.Mul(a, a)))
    return op.Mul(dz, op.Add(op.Mul(op.Erf(a), 0.5), op.Add(op.Mul(a, bell), 0.5)))


def _gelu_tanh(op, dz, x):
    """z = x·σ(u), u = a·x + b·x³   ⇒   dx = dz·σ·(1 + (1 − σ)·(u + 2b·x³)); ½·(1 + tanh u/2) is σ(u)"""
    a = 2 * math.sqrt(2 / math.pi)
    cubic = op.Mul(op.Mul(x, x), 0.044715 * a)
    u = op.Mul(op.Add(cubic, a), x)
    s = op.Sigmoid(u)
    slope = op.Add(u, op.Mul(op.Add(cubic, cubic), x))
    return op.Mul(dz, op.Mul(op.Add(op.Mul(op.Sub(1.0, s), slope), 1.0), s))
