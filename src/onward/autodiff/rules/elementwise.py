"""Gradients of elementwise arithmetic and mathematical functions.

Activation functions are in `activation`; the engine sums over broadcast axes. The masking functions here are
used by other families too.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onward.autodiff.registry import gradient_rule, no_gradient

# The largest finite float32, and a factor that takes every normal float32 to 1 or beyond.
_LARGEST = 3.4028234663852886e38
_STEEP = 3e38


def keep(op, dz, condition):
    """dz where the condition holds, 0 elsewhere, also where dz is infinite.

    In float32 a product with the mask: Where takes two to three times as long on the CPU provider. The clip
    costs little and keeps 0·∞ from becoming NaN, so that √max(x, 0) has a gradient of 0 below 0.
    """
    if op.dtype(dz) != ir.DataType.FLOAT:
        return op.Where(condition, dz, 0.0)
    return op.Mul(op.Clip(dz, -_LARGEST, _LARGEST), mask(op, condition, like=dz))


def keep_positive(op, dz, x):
    """dz where x > 0, 0 elsewhere; for float32 without a comparison, which is slow on the CPU provider."""
    if op.dtype(dz) != ir.DataType.FLOAT:
        return keep(op, dz, op.Greater(x, 0.0))
    return op.Mul(op.Clip(dz, -_LARGEST, _LARGEST), step(op, x))


def mask(op, condition, *, like):
    """1 where the condition holds, 0 elsewhere, in another value's type."""
    return op.Cast(condition, to=op.dtype(like))


def step(op, x):
    """1 where x > 0, 0 elsewhere."""
    if op.dtype(x) == ir.DataType.FLOAT:
        return op.HardSigmoid(x, alpha=_STEEP, beta=0.0)
    return mask(op, op.Greater(x, 0.0), like=x)


def sign(op, x):
    """−1, 0 or 1; in float32 five times as fast as Sign on the CPU provider."""
    if op.dtype(x) == ir.DataType.FLOAT:
        return op.Clip(op.Mul(x, _STEEP), -1.0, 1.0)
    return op.Sign(x)


@gradient_rule("Add", broadcasts=True)
def add(op, node, dz):
    """z = x + y   ⇒   dx = dz,  dy = dz"""
    return dz, dz


@gradient_rule("Sub")
def sub(op, node, dz):
    """z = x − y   ⇒   dx = dz,  dy = −dz, negated after the sum, where it is smaller"""
    x, y = node.inputs
    dx = op.sum_to(dz, x) if op.needs_gradient(x) else None
    return dx, op.Neg(op.sum_to(dz, y)) if op.needs_gradient(y) else None


@gradient_rule("Mul", broadcasts=True)
def mul(op, node, dz):
    """z = x·y   ⇒   dx = dz·y,  dy = dz·x"""
    x, y = node.inputs
    return op.Mul(dz, y) if op.needs_gradient(x) else None, op.Mul(dz, x) if op.needs_gradient(y) else None


@gradient_rule("Div")
def div(op, node, dz):
    """z = x/y   ⇒   dx = dz/y,  dy = −z·dz/y"""
    x, y = node.inputs
    # Once for both gradients: a division takes longer than a product.
    over = op.Div(dz, y)
    dx = op.sum_to(over, x) if op.needs_gradient(x) else None
    dy = op.Neg(op.sum_to(op.Mul(over, node.outputs[0]), y)) if op.needs_gradient(y) else None
    return dx, dy


@gradient_rule("Mod", broadcasts=True)
def mod(op, node, dz):
    """z = x − n·y with n = x/y truncated or rounded down   ⇒   dx = dz,  dy = −n·dz"""
    x, y = node.inputs
    if not op.needs_gradient(y):
        return dz
    n = op.Floor(op.Add(op.Div(op.Sub(x, node.outputs[0]), y), 0.5))  # Round has no bfloat16
    return dz, op.Neg(op.Mul(dz, n))


@gradient_rule("Pow", broadcasts=True)
def power(op, node, dz):
    """z = xᵖ   ⇒   dx = dz·p·xᵖ⁻¹,  dp = dz·z·ln x

    At x = 0, dp is 0 for p ≥ 0; for x < 0 it is not a number. Where p = 0, dx is 0 also at x = 0.
    """
    x, p = node.inputs
    z = node.outputs[0]
    dx = dp = None
    if op.needs_gradient(x):
        dx = _power_base(op, dz, x, p, z)
    # The exponent hardly ever trains, and a logarithm of every element is dear.
    if op.needs_gradient(p):
        # z·ln x is 0·(−∞) there, and 0 in the limit.
        nothing = op.And(op.Equal(x, 0.0), op.GreaterOrEqual(p, 0.0))
        dp = op.Mul(dz, op.Mul(z, op.Log(op.Where(nothing, op.constant_like(1.0, x), x))))
        dp = dp if op.dtype(p) == op.dtype(x) else op.Cast(dp, to=op.dtype(p))
    return dx, dp


def _power_base(op, dz, x, p, z):
    constant = op.const_value(p)
    if constant is None or constant.size != 1:
        # In x's type: few integer types have kernels, and unsigned ones no p − 1.
        p = p if op.dtype(p) == op.dtype(x) else op.Cast(p, to=op.dtype(x))
        lower = op.Where(op.Equal(p, 0.0), op.constant_like(1.0, p), op.Sub(p, 1.0))
        return op.Mul(dz, op.Mul(p, op.Pow(x, lower)))
    exponent = float(constant.reshape(()))
    if exponent == 0:
        return op.zeros_like(dz)
    if exponent == 1:
        return dz
    if exponent == 0.5:
        return op.Div(op.Mul(dz, 0.5), z)
    if exponent == -1:
        return op.Mul(op.Mul(dz, z), op.Neg(z))
    # The provider's Pow is forty times as slow as a product, except for the exponents 2 and 3.
    shortcuts = {2.0: lambda: x, 3.0: lambda: op.Mul(x, x), 1.5: lambda: op.Sqrt(x)}
    lower = shortcuts.get(exponent, lambda: op.Pow(x, op.constant_like(exponent - 1, x)))()
    return op.Mul(op.Mul(dz, exponent), lower)


@gradient_rule("Max", "Min", broadcasts=True)
def extremum(op, node, dz):
    """z = max(x₁, …)   ⇒   dxᵢ = dz where xᵢ = z; equal ones share it"""
    z = node.outputs[0]
    if len(node.inputs) == 1:
        return dz
    if sum(op.needs_gradient(x) for x in node.inputs) == 1:
        return [keep(op, dz, op.Equal(x, z)) if op.needs_gradient(x) else None for x in node.inputs]
    chosen = [mask(op, op.Equal(x, z), like=z) for x in node.inputs]
    # Ties are likely with integers cast to floats and with zeros; half each is a subgradient, and torch's choice.
    share = op.Div(dz, op.Sum(*chosen))
    return [op.Mul(share, one) for one in chosen]


@gradient_rule("Sum", broadcasts=True)
def variadic_sum(op, node, dz):
    """z = Σ xᵢ   ⇒   dxᵢ = dz"""
    return [dz] * len(node.inputs)


@gradient_rule("Mean", broadcasts=True)
def mean(op, node, dz):
    """z = Σ xᵢ / n   ⇒   dxᵢ = dz/n"""
    return [op.Mul(dz, 1.0 / len(node.inputs))] * len(node.inputs)


@gradient_rule("Where", broadcasts=True)
def where(op, node, dz):
    """z = x where c, else y   ⇒   dx = dz where c,  dy = dz where not c"""
    condition, x, y = node.inputs
    dx = keep(op, dz, condition) if op.needs_gradient(x) else None
    dy = keep(op, dz, op.Not(condition)) if op.needs_gradient(y) else None
    return None, dx, dy


@gradient_rule("Clip")
def clip(op, node, dz):
    """z = min(max(x, a), b)   ⇒   dx = dz where a ≤ x ≤ b,  da = Σ dz where x < a,  db = Σ dz where x > b

    Bounds that cross leave b everywhere: then all of the gradient is b's.
    """
    x, low, high = (*node.inputs, None, None)[:3]
    if low is None and high is None:
        return dz
    # At a bound itself x = z, and the gradient passes: torch's choice.
    dx = keep(op, dz, op.Equal(x, node.outputs[0])) if op.needs_gradient(x) else None
    dlow = dhigh = None
    if op.needs_gradient(low):
        # Before the second bound is looked at: where bounds cross, ONNX's order is max first, then min.
        below = op.Less(x, low)
        dlow = op.sum_to(keep(op, dz, below if high is None else op.And(below, op.Less(low, high))), low)
    if op.needs_gradient(high):
        above = op.Greater(x, high)
        dhigh = op.sum_to(keep(op, dz, above if low is None else op.Or(above, op.Greater(low, high))), high)
    return dx, dlow, dhigh


@gradient_rule("Cast", "CastLike")
def cast(op, node, dz):
    """z = x in another type   ⇒   dx = dz in the first; that of a quantized x stays a floating tensor"""
    # A real x gets its gradient in its own type, whatever it was cast to; of an integer x only a quantized one has
    # any.
    kind = op.dtype(node.inputs[0])
    return op.Cast(dz, to=int(kind)) if kind.is_floating_point() else dz


@gradient_rule("Identity")
def identity(op, node, dz):
    """z = x   ⇒   dx = dz"""
    return dz


@gradient_rule("Neg")
def neg(op, node, dz):
    """z = −x   ⇒   dx = −dz"""
    return op.Neg(dz)


@gradient_rule("Abs")
def absolute(op, node, dz):
    """z = |x|   ⇒   dx = dz·sign x"""
    return op.Mul(dz, sign(op, node.inputs[0]))


@gradient_rule("Exp")
def exp(op, node, dz):
    """z = eˣ   ⇒   dx = dz·z"""
    return op.Mul(dz, node.outputs[0])


@gradient_rule("Log")
def log(op, node, dz):
    """z = ln x   ⇒   dx = dz/x"""
    return op.Div(dz, node.inputs[0])


@gradient_rule("Sqrt")
def sqrt(op, node, dz):
    """z = √x   ⇒   dx = dz/2z"""
    return op.Div(op.Mul(dz, 0.5), node.outputs[0])


@gradient_rule("Reciprocal")
def reciprocal(op, node, dz):
    """z = 1/x   ⇒   dx = −dz·z²"""
    z = node.outputs[0]
    return op.Mul(op.Mul(dz, z), op.Neg(z))


@gradient_rule("Erf")
def erf(op, node, dz):
    """z = erf x   ⇒   dx = dz·2/√π·exp(−x²)"""
    x = node.inputs[0]
    # The factor 2/√π is in the exponent: a constant less to multiply every element by.
    return op.Mul(dz, op.Exp(op.Sub(math.log(2 / math.sqrt(math.pi)), op.Mul(x, x))))


@gradient_rule("Sin")
def sin(op, node, dz):
    """z = sin x   ⇒   dx = dz·cos x"""
    return op.Mul(dz, op.Cos(node.inputs[0]))


@gradient_rule("Cos")
def cos(op, node, dz):
    """z = cos x   ⇒   dx = −dz·sin x"""
    return op.Mul(dz, op.Neg(op.Sin(node.inputs[0])))


@gradient_rule("Tan")
def tan(op, node, dz):
    """z = tan x   ⇒   dx = dz·(1 + z²)"""
    z = node.outputs[0]
    return op.Mul(dz, op.Add(op.Mul(z, z), 1.0))


@gradient_rule("Sinh")
def sinh(op, node, dz):
    """z = sinh x   ⇒   dx = dz·cosh x"""
    return op.Mul(dz, op.Cosh(node.inputs[0]))


@gradient_rule("Cosh")
def cosh(op, node, dz):
    """z = cosh x   ⇒   dx = dz·sinh x"""
    return op.Mul(dz, op.Sinh(node.inputs[0]))


@gradient_rule("Asin")
def asin(op, node, dz):
    """z = asin x   ⇒   dx = dz/√(1 − x²)"""
    x = node.inputs[0]
    return op.Div(dz, op.Sqrt(op.Sub(1.0, op.Mul(x, x))))


@gradient_rule("Acos")
def acos(op, node, dz):
    """z = acos x   ⇒   dx = −dz/√(1 − x²)"""
    x = node.inputs[0]
    return op.Neg(op.Div(dz, op.Sqrt(op.Sub(1.0, op.Mul(x, x)))))


@gradient_rule("Atan")
def atan(op, node, dz):
    """z = atan x   ⇒   dx = dz/(1 + x²)"""
    x = node.inputs[0]
    return op.Div(dz, op.Add(op.Mul(x, x), 1.0))


@gradient_rule("Asinh")
def asinh(op, node, dz):
    """z = asinh x   ⇒   dx = dz/√(x² + 1)"""
    x = node.inputs[0]
    return op.Div(dz, op.Sqrt(op.Add(op.Mul(x, x), 1.0)))


@gradient_rule("Acosh")
def acosh(op, node, dz):
    """z = acosh x   ⇒   dx = dz/√(x² − 1)"""
    x = node.inputs[0]
    return op.Div(dz, op.Sqrt(op.Sub(op.Mul(x, x), 1.0)))


@gradient_rule("Atanh")
def atanh(op, node, dz):
    """z = atanh x   ⇒   dx = dz/(1 − x²)"""
    x = node.inputs[0]
    return op.Div(dz, op.Sub(1.0, op.Mul(x, x)))


no_gradient("Floor", "Ceil", "Round", "Sign")
no_gradient(
    "IsNaN", "IsInf", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", because="a truth value"
)
no_gradient("And", "Or", "Xor", "Not", because="of truth values")
no_gradient("BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", because="of integers")
no_gradient("BitCast", because="the same bits as another type, not the same number")
