"""The activations that recurrent operators name, with their derivatives. Registers no rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import onnx_ir as ir

from onward.errors import ModelError

__all__ = ["Activation", "read_activations"]

# name: default α and β (None: the function has none)
_DEFAULTS: dict[str, tuple[float | None, float | None]] = {
    "relu": (None, None),
    "tanh": (None, None),
    "sigmoid": (None, None),
    "affine": (1.0, 0.0),
    "leakyrelu": (0.01, None),
    "thresholdedrelu": (1.0, None),
    "scaledtanh": (1.0, 1.0),
    "hardsigmoid": (0.2, 0.5),
    "elu": (1.0, None),
    "softsign": (None, None),
    "softplus": (None, None),
}


@dataclasses.dataclass(frozen=True)
class Activation:
    """One activation function; its argument is clipped to ±clip first where clip is not None."""

    name: str
    alpha: float = 0.0
    beta: float = 0.0
    clip: float | None = None

    @property
    def needs_argument(self) -> bool:
        """Whether the derivative cannot be computed from the function's value alone."""
        return self.clip is not None or self.name in ("leakyrelu", "elu")

    def apply(self, op, z: ir.Value) -> ir.Value:
        """f(z)"""
        if self.clip is not None:
            z = op.Clip(z, op.constant_like(-self.clip, z), op.constant_like(self.clip, z))
        forms: dict[str, Callable[[], ir.Value]] = {
            "relu": lambda: op.Relu(z),
            "tanh": lambda: op.Tanh(z),
            "sigmoid": lambda: op.Sigmoid(z),
            "affine": lambda: op.Add(op.Mul(z, self.alpha), self.beta),
            "leakyrelu": lambda: op.LeakyRelu(z, alpha=self.alpha),
            "thresholdedrelu": lambda: op.Where(op.Greater(z, self.alpha), z, op.constant_like(0.0, z)),
            "scaledtanh": lambda: op.Mul(op.Tanh(op.Mul(z, self.beta)), self.alpha),
            "hardsigmoid": lambda: op.HardSigmoid(z, alpha=self.alpha, beta=self.beta),
            "elu": lambda: op.Elu(z, alpha=self.alpha),
            "softsign": lambda: op.Div(z, op.Add(op.Abs(z), 1.0)),
            "softplus": lambda: op.Softplus(z),
        }
        return forms[self.name]()

    def derivative(self, op, y: ir.Value, z: ir.Value | None) -> ir.Value:
        """f′ at z, written in y = f(z) where that suffices."""

        def number(value: float) -> ir.Value:
            return op.constant_like(value, y)

        def where(condition: ir.Value, then: object, other: float) -> ir.Value:
            return op.Where(condition, then if isinstance(then, ir.Value) else number(then), number(other))  # type: ignore[arg-type]

        forms: dict[str, Callable[[], ir.Value]] = {
            "relu": lambda: where(op.Greater(y, 0.0), 1.0, 0.0),
            "tanh": lambda: op.Sub(1.0, op.Mul(y, y)),
            "sigmoid": lambda: op.Mul(y, op.Sub(1.0, y)),
            "affine": lambda: op.Expand(number(self.alpha), op.shape(y)),
            "leakyrelu": lambda: where(op.Less(z, 0.0), self.alpha, 1.0),
            "thresholdedrelu": lambda: where(op.Equal(y, 0.0), 0.0, 1.0),
            "scaledtanh": lambda: op.Mul(
                op.Sub(1.0, op.Mul(op.Mul(y, y), self.alpha**-2)), self.alpha * self.beta
            ),
            "hardsigmoid": lambda: where(op.And(op.Greater(y, 0.0), op.Less(y, 1.0)), self.alpha, 0.0),
            "elu": lambda: where(op.Less(z, 0.0), op.Add(y, self.alpha), 1.0),
            "softsign": lambda: op.Mul(op.Sub(1.0, op.Abs(y)), op.Sub(1.0, op.Abs(y))),
            "softplus": lambda: op.Sub(1.0, op.Exp(op.Neg(y))),
        }
        slope = forms[self.name]()
        if self.clip is not None:
            slope = op.Where(op.LessOrEqual(op.Abs(z), self.clip), slope, number(0.0))
        return slope


def read_activations(node: ir.Node, *, defaults: Sequence[str], directions: int) -> list[list[Activation]]:
    """The activations of each direction; α and β are consumed, in order, by the functions that have them."""
    attributes = node.attributes
    names = attributes["activations"].as_strings() if "activations" in attributes else []
    names = [*names] or [*defaults] * directions
    alphas = _numbers(node, "activation_alpha")
    betas = _numbers(node, "activation_beta")
    clip = attributes["clip"].as_float() if "clip" in attributes else None
    clip = clip if clip is not None and clip > 0 else None
    found = []
    for name in names:
        if name.lower() not in _DEFAULTS:
            raise ModelError(f"{node.op_type} '{node.name}' names an activation that ONNX lacks: '{name}'")
        alpha, beta = _DEFAULTS[name.lower()]
        alpha = next(alphas, alpha) if alpha is not None else 0.0
        beta = next(betas, beta) if beta is not None else 0.0
        found.append(Activation(name.lower(), alpha or 0.0, beta or 0.0, clip))
    each = len(defaults)
    return [found[d * each : (d + 1) * each] for d in range(directions)]


def _numbers(node: ir.Node, attribute: str) -> Iterator[float]:
    return iter(node.attributes[attribute].as_floats() if attribute in node.attributes else ())
