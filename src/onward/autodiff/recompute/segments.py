"""Parses `recompute=`: segments by scope names, or by a memory budget for activations.

Reads scopes from node names. `budget` estimates sizes, and `rewrite` recomputes a segment.
"""

from __future__ import annotations

import difflib
import fnmatch
import logging
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from onward.autodiff.recompute.budget import ActivationBudget, is_bytes, plans_within
from onward.autodiff.recompute.copies import Plan, Tape, plan_segment, recompute_segments
from onward.errors import ModelError
from onward.graph.nodes import subgraphs_of

if TYPE_CHECKING:
    from onward.autodiff.engine import DifferentiableBuilder

__all__ = ["POINTWISE", "ActivationBudget", "Recompute", "recompute_activations"]

_log = logging.getLogger("onward")
# recompute="pointwise": activation functions and what multiplies them, which take little time
POINTWISE = "pointwise"
_FUNCTIONS = frozenset(
    {"Sigmoid", "Tanh", "Erf", "Gelu", "Relu", "Softplus", "HardSigmoid", "HardSwish", "Elu", "Celu", "Mish"}
)
_ARITHMETIC = frozenset({"Mul", "Add", "Sub", "Div", "Neg"})
# of a gate's product with an activation function, or of one that is written out
_LONGEST = 8
Recompute = bool | float | str | Sequence[str] | ActivationBudget | None


def recompute_activations(
    op: DifferentiableBuilder,
    forward: Sequence[ir.Node],
    wanted: Recompute,
    *,
    results: Sequence[ir.Value] = (),
) -> int:
    """Drop values of the forward pass as requested; returns how many nodes run twice.

    `forward` are the nodes that were there before the gradients, `results` the outputs that hold gradients.
    """
    if wanted is None or wanted is False:
        return 0
    tape = Tape(op, forward, results)
    cheap = wanted == POINTWISE
    budget = None if cheap else _budget(wanted)
    if cheap:
        plans = [plan for nodes in _activations(tape) if _saves(tape, plan := plan_segment(tape, nodes))]
    elif budget is not None:
        plans = plans_within(tape, budget)
    else:
        patterns = [wanted] if isinstance(wanted, str) else list(wanted)  # type: ignore[arg-type]
        plans = [plan_segment(tape, nodes) for nodes in _matched(tape, patterns).values()]
        if not any(plan.needed for plan in plans):
            _log.warning("recompute: the backward pass needs nothing from inside of %s", ", ".join(patterns))
    repeated = sum(len(plan.nodes) for plan in plans)
    if repeated:
        recompute_segments(tape, plans, rest_waits=not cheap)
    count = sum(bool(plan.nodes) for plan in plans)
    _log.info("recompute: %d nodes in %d segments run twice", repeated, count)
    return repeated


def _activations(tape: Tape) -> Iterator[list[ir.Node]]:
    """Each activation function with the arithmetic behind it: y = x·σ(x), y·z"""
    order = {node: place for place, node in enumerate(tape.forward)}
    taken: set[ir.Node] = set()
    for node in tape.forward:
        if node.op_type not in _FUNCTIONS or node in taken:
            continue
        group, waiting = [node], [node]
        while waiting and len(group) < _LONGEST:
            for user in (user for value in waiting.pop().outputs for user in value.consumers()):
                if user in order and user.op_type in _ARITHMETIC and user not in group and user not in taken:
                    group.append(user)
                    waiting.append(user)
        taken.update(group)
        yield sorted(group, key=order.__getitem__)


def _saves(tape: Tape, plan: Plan) -> bool:
    """Whether more values are dropped than must be kept in their place: Relu's input instead of its result, say."""
    kept = [value for value in plan.inputs if tape.is_forward(value) and not tape.read_backward(value)]
    return len(plan.needed) > len(kept)


def _budget(wanted: Recompute) -> ActivationBudget | None:
    """The request as a budget; None for patterns."""
    if isinstance(wanted, ActivationBudget):
        return wanted
    if wanted is True:
        return ActivationBudget()
    if isinstance(wanted, int | float) or (isinstance(wanted, str) and is_bytes(wanted)):
        return ActivationBudget(wanted)
    if isinstance(wanted, str) or (
        isinstance(wanted, Sequence) and wanted and all(isinstance(item, str) for item in wanted)
    ):
        return None
    raise TypeError(
        f"recompute is {wanted!r}: pass True, a share of memory between 0 and 1, bytes such as '500MB', "
        "'pointwise', patterns of scopes such as 'encoder.layer.*', or an ActivationBudget"
    )


def _matched(tape: Tape, patterns: Sequence[str]) -> dict[str, list[ir.Node]]:
    """The nodes of each scope that a pattern names, by the scope."""
    segments: dict[str, list[ir.Node]] = {}
    unused = set(patterns)
    for node in tape.forward:
        found = _first_match(node, patterns)
        if found is not None:
            scope, pattern = found
            segments.setdefault(scope, []).append(node)
            unused.discard(pattern)
    for pattern in patterns:
        if pattern in unused and not any(_first_match(node, [pattern]) for node in tape.forward):
            raise ModelError(_unmatched(tape, pattern))
    return segments


def _first_match(node: ir.Node, patterns: Sequence[str]) -> tuple[str, str] | None:
    """The outermost scope of a node that a pattern names, and the pattern."""
    for scope in _scopes(node):
        for pattern in patterns:
            plain = pattern.strip("/").replace("/", ".")
            if fnmatch.fnmatchcase(scope, plain) or fnmatch.fnmatchcase(scope, f"*.{plain}"):
                return scope, pattern
    return None


def _scopes(node: ir.Node) -> Iterator[str]:
    """Each scope that a node is in, the outermost first: `/a/b.0/Add` is in a, a.b and a.b.0."""
    parts = re.split(r"[/.]", (node.name or "").strip("/"))[:-1]
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])


def _unmatched(tape: Tape, pattern: str) -> str:
    bodies = [
        node.name
        for node in tape.forward
        for graph in subgraphs_of(node)
        if any(_first_match(inner, [pattern]) for inner in graph)
    ]
    if bodies:
        return (
            f"recompute: '{pattern}' matches only nodes in the body of '{bodies[0]}': what a loop or a branch "
            "computes is not recomputed; choose a scope outside of it"
        )
    known = list(dict.fromkeys(scope for node in tape.forward for scope in _scopes(node)))
    near = _near(pattern, known)
    if near:
        return f"recompute: '{pattern}' matches no scope; did you mean {', '.join(map(repr, near))}?"
    there = (
        f"there are {', '.join(known[:5])}{', …' if len(known) > 5 else ''}" if known else "there are none"
    )
    return (
        f"recompute: '{pattern}' matches no scope: {there}; recompute=True or a share such as 0.5 needs none"
    )


def _near(pattern: str, known: Sequence[str]) -> list[str]:
    """Up to three scopes similar to a pattern, compared by their ends: patterns may omit the beginning."""
    plain = pattern.strip("/").replace("/", ".")
    length = plain.count(".") + 1
    likeness = {
        scope: difflib.SequenceMatcher(None, plain, ".".join(scope.split(".")[-length:])).ratio()
        for scope in known
    }
    return [scope for scope in sorted(known, key=lambda scope: -likeness[scope])[:3] if likeness[scope] > 0.5]
