"""The registry of gradient rules.

An operator has a rule, is declared constant (its derivative is zero almost everywhere, or it carries no real
numbers), or is unsupported. An unknown operator is an error, never a zero gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence, Set

import onnx_ir as ir

__all__ = [
    "Gradients",
    "Rule",
    "constant_ops",
    "find",
    "gradient_rule",
    "is_constant",
    "no_gradient",
    "registered_ops",
    "straight_through_ops",
]

# One gradient for each input (None is zero), or gradients by value where a rule also reaches captured values.
Gradients = Sequence[ir.Value | None] | Mapping[ir.Value, ir.Value | None] | ir.Value | None
RuleFunction = Callable[..., Gradients]
# For each body that a rule differentiates: the body, the values in it that may vary (its inputs or captured
# ones) and the outputs of it that matter; given the node, what varies around it and what matters there.
Bodies = Callable[
    [ir.Node, Set[ir.Value], Set[ir.Value]], Sequence[tuple[ir.Graph, set[ir.Value], set[ir.Value]]]
]


@dataclasses.dataclass(frozen=True)
# Frozen, and looked up by operator alone: a rule cannot depend on what was differentiated before.
class Rule:
    """A gradient rule and its options."""

    op_type: str
    function: RuleFunction
    broadcasts: bool
    domain: str = ""
    bodies: Bodies | None = None
    straight_through: bool = False


_rules: dict[tuple[str, str], Rule] = {}
_constant: dict[tuple[str, str], str] = {}


def gradient_rule(
    *op_types: str,
    broadcasts: bool = False,
    domain: str = "",
    bodies: Bodies | None = None,
    straight_through: bool = False,
) -> Callable[[RuleFunction], RuleFunction]:
    """Register the decorated function as the gradient rule of an operator.

    The rule is called as `rule(op, node, *dys)`: a builder, the forward node, and the gradient of each of
    the operator's outputs (None where there is no gradient). It returns one gradient for each input, in order;
    missing ones at the end are zero. With `broadcasts`, the engine sums each back to its input's shape.
    With `straight_through`, integer outputs carry gradients too (floating tensors), as quantized values do.
    For an operator with subgraphs, `bodies` says what of them is differentiated.
    """

    def register(function: RuleFunction) -> RuleFunction:
        for op_type in op_types:
            _rules[domain, op_type] = Rule(op_type, function, broadcasts, domain, bodies, straight_through)
        return function

    return register


def no_gradient(*op_types: str, because: str = "constant almost everywhere", domain: str = "") -> None:
    """Declare operators whose gradient is zero, and why."""
    for op_type in op_types:
        _constant[domain, op_type] = because


def find(op_type: str, domain: str = "") -> Rule | None:
    """The rule of an operator, or None."""
    _load_rules()
    return _rules.get((_plain(domain), op_type))


def is_constant(op_type: str, domain: str = "") -> bool:
    """Whether an operator is declared constant."""
    _load_rules()
    return (_plain(domain), op_type) in _constant


def registered_ops() -> set[str]:
    """Every ai.onnx operator that has a rule."""
    _load_rules()
    return {op_type for domain, op_type in _rules if domain == ""}


def straight_through_ops() -> set[str]:
    """Every ai.onnx operator whose rule is a straight-through estimator: rounding counts as the identity."""
    _load_rules()
    return {op_type for (domain, op_type), rule in _rules.items() if domain == "" and rule.straight_through}


def constant_ops() -> dict[str, str]:
    """Every ai.onnx operator that is declared constant, and why."""
    _load_rules()
    return {op_type: because for (domain, op_type), because in _constant.items() if domain == ""}


def _plain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


@functools.cache
def _load_rules() -> None:
    """Import the modules of rules, which register themselves; done on the first lookup."""
    # not with this module: rules import it
    from onward.autodiff import rules

    for module in pkgutil.iter_modules(rules.__path__):
        importlib.import_module(f"{rules.__name__}.{module.name}")
