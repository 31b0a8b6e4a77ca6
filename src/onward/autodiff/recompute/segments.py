"""Parses `recompute=`: segments by scope names, or by a memory budget for activations.

Reads scopes from node names. `copies` recomputes a segment.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import itertools
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from onward.autodiff.recompute.copies import Plan, Tape, plan_segment, recompute_segments
from onward.errors import ModelError
from onward.graph.nodes import producer_of, required_input, subgraphs_of

if TYPE_CHECKING:
    from onward.autodiff.engine import DifferentiableBuilder


@dataclasses.dataclass(frozen=True)
class ActivationBudget:
    """A memory budget for activations: values of the forward pass that are stored for the backward pass.

    `limit` is a fraction of what they take without recomputation (a number between 0 and 1) or bytes (an
    integer, or a string such as "500MB"); without a limit, memory is minimized. `sizes` are the sizes of symbolic
    dimensions, for estimates: a limit in bytes requires them.

    >>> ActivationBudget("500MB", sizes={"batch": 8}).limit
    '500MB'
    """

    limit: float | int | str | None = None
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)


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
    request: Recompute,
    *,
    results: Sequence[ir.Value] = (),
) -> int:
    """Drop values of the forward pass as requested; returns how many nodes run twice.

    `forward` are the nodes that were there before the gradients, `results` the outputs that hold gradients.
    """
    if request is None or request is False:
        return 0
    tape = Tape(op, forward, results)
    cheap = request == POINTWISE
    budget = None if cheap else _budget(request)
    if cheap:
        plans = [plan for nodes in _activations(tape) if _saves(tape, plan := plan_segment(tape, nodes))]
    elif budget is not None:
        plans = plans_within(tape, budget)
    else:
        patterns = [request] if isinstance(request, str) else list(request)  # type: ignore[arg-type]
        plans = [plan_segment(tape, nodes) for nodes in _matched(tape, patterns).values()]
        # A pattern that matched and saves nothing is likely a mistake, but no wrong result.
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
    order = {node: index for index, node in enumerate(tape.forward)}
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
    stored = [value for value in plan.inputs if tape.is_forward(value) and not tape.read_backward(value)]
    return len(plan.needed) > len(stored)


def _budget(request: Recompute) -> ActivationBudget | None:
    """The request as a budget; None for patterns."""
    if isinstance(request, ActivationBudget):
        return request
    if request is True:
        return ActivationBudget()
    if isinstance(request, int | float) or (isinstance(request, str) and is_bytes(request)):
        return ActivationBudget(request)
    if isinstance(request, str) or (
        isinstance(request, Sequence) and request and all(isinstance(item, str) for item in request)
    ):
        return None
    raise TypeError(
        f"recompute is {request!r}: pass True, a share of memory between 0 and 1, bytes such as '500MB', "
        "'pointwise', patterns of scopes such as 'encoder.layer.*', or an ActivationBudget"
    )


def _matched(tape: Tape, patterns: Sequence[str]) -> dict[str, list[ir.Node]]:
    """The nodes of each scope that a pattern names, by the scope."""
    segments: dict[str, list[ir.Node]] = {}
    unused = set(patterns)
    for node in tape.forward:
        match = _first_match(node, patterns)
        if match is not None:
            scope, pattern = match
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
    scopes = list(dict.fromkeys(scope for node in tape.forward for scope in _scopes(node)))
    near = _near(pattern, scopes)
    if near:
        return f"recompute: '{pattern}' matches no scope; did you mean {', '.join(map(repr, near))}?"
    there = (
        f"there are {', '.join(scopes[:5])}{', …' if len(scopes) > 5 else ''}" if scopes else "there are none"
    )
    return (
        f"recompute: '{pattern}' matches no scope: {there}; recompute=True or a share such as 0.5 needs none"
    )


def _near(pattern: str, scopes: Sequence[str]) -> list[str]:
    """Up to three scopes similar to a pattern, compared by their ends: patterns may omit the beginning."""
    plain = pattern.strip("/").replace("/", ".")
    length = plain.count(".") + 1
    # Of as many last parts as the pattern has: users leave the model's own name out.
    likeness = {
        scope: difflib.SequenceMatcher(None, plain, ".".join(scope.split(".")[-length:])).ratio()
        for scope in scopes
    }
    return [
        scope for scope in sorted(scopes, key=lambda scope: -likeness[scope])[:3] if likeness[scope] > 0.5
    ]


# --- Chooses the segments of a forward pass to recompute so that activations fit a memory budget.
#
# Estimates the bytes of values and the cost of nodes, splits the forward pass where few values cross, and
# keeps segments that need not be recomputed.

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?((?:[kmg]i?)?)b", re.IGNORECASE)
# Assumed for an unknown size: estimates are only compared with each other.
_UNKNOWN_SIZE = 128
# Their outputs share memory with their inputs.
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
# How many ways to split a model are compared.
_TRIALS = 24


def is_bytes(text: str) -> bool:
    """Whether text is a number of bytes, such as "500MB"."""
    return _BYTES.fullmatch(text.strip()) is not None


def plans_within(tape: Tape, budget: ActivationBudget) -> list[Plan]:
    """Segments that keep the estimated peak within a budget, with the least recomputation found."""
    sizes = _Sizes(budget.sizes)
    estimate = _Estimate(tape, sizes)
    everything = estimate.peak([])
    limit = _limit(budget, everything, sizes)
    if limit is not None and everything <= limit:
        return []
    best: tuple[tuple[float, float], list[Plan]] | None = None
    least = everything
    for segments in _divisions(tape, estimate):
        plans = [plan_segment(tape, nodes) for nodes in segments]
        plans = estimate.spare(plans, estimate.peak(plans) if limit is None else limit)
        peak = estimate.peak(plans)
        least = min(least, peak)
        if limit is not None and peak > limit:
            continue
        work = sum(sizes.work(node) for plan in plans for node in plan.nodes)
        score = (peak, work) if limit is None else (work, peak)
        if best is None or score < best[0]:
            best = score, plans
    if best is None:
        assert limit is not None
        raise ModelError(
            f"recompute: activations cannot be kept in {_describe(limit, everything)}: the least that was found "
            f"is {_describe(least, everything)}; recompute=True takes that"
        )
    _log.info(
        "recompute: activations take about %.0f %% of what they would",
        100 * estimate.peak(best[1]) / everything,
    )
    return best[1]


def _describe(number: float, everything: float) -> str:
    return f"{number / everything:.2f} of their memory ({number / 1e6:.1f} MB)"


def _limit(budget: ActivationBudget, everything: float, sizes: _Sizes) -> float | None:
    limit = budget.limit
    if unknown := sorted(set(budget.sizes) - sizes.used):
        raise ModelError(
            f"recompute: no activation has a dimension '{unknown[0]}'; "
            f"there are {', '.join(sorted(sizes.used | sizes.guessed)) or 'numbers only'}"
        )
    if limit is None:
        return None
    if isinstance(limit, str):
        match = _BYTES.fullmatch(limit.strip())
        if match is None:
            raise ValueError(f"recompute: '{limit}' is no number of bytes: write it as '500MB' or '2GiB'")
        limit = float(match[1]) * _UNITS[match[2].lower()]
    elif isinstance(limit, float) and 0 < limit <= 1:
        return limit * everything
    elif isinstance(limit, float) or limit <= 0:
        raise ValueError(
            f"recompute: {limit!r} is neither a share between 0 and 1 nor a whole number of bytes above 0"
        )
    if sizes.guessed:
        names = ", ".join(f"'{name}'" for name in sorted(sizes.guessed))
        raise ModelError(
            f"recompute: a budget in bytes needs the sizes of {names}: pass "
            f"ActivationBudget({budget.limit!r}, sizes={{{names.split(', ')[0]}: …}}), or a share such as 0.5"
        )
    return float(limit)


class _Sizes:
    """Estimated bytes of values and work of nodes."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        # names of dimensions whose size was given, and of those where it is assumed
        self.used: set[str] = set()
        self.guessed: set[str] = set()

    def count(self, value: ir.Value) -> int:
        """Elements of a value."""
        return math.prod(self._dim(dim) for dim in (() if value.shape is None else value.shape))

    def bytes(self, value: ir.Value) -> float:
        """Bytes of a value."""
        return self.count(value) * (4 if value.dtype is None else value.dtype.itemsize)

    def work(self, node: ir.Node) -> float:
        """Operations of a node: products count the length of their sums, the rest one for each element."""
        results = sum(self.count(value) for value in node.outputs)
        if node.op_type in ("MatMul", "Gemm", "Conv", "ConvTranspose") and len(node.inputs) > 1:
            weight, result = required_input(node, 1), node.outputs[0]
            if node.op_type.startswith("Conv"):
                return results * self.count(weight) / max(self._first(weight), 1)
            # elements of both factors and of the product are n·k, k·m and n·m (for each of a batch)
            return math.sqrt(self.count(required_input(node)) * self.count(weight) * self.count(result))
        return results

    def _first(self, value: ir.Value) -> int:
        return self._dim(value.shape[0]) if value.shape is not None and value.shape.rank() else 1

    def _dim(self, dim: int | ir.SymbolicDim) -> int:
        if isinstance(dim, int):
            return dim
        size = 1
        for part in (dim.value or "?").split("*"):
            if part.isdigit():
                size *= int(part)
            elif part in self._sizes:
                self.used.add(part)
                size *= self._sizes[part]
            else:
                self.guessed.add(part)
                size *= _UNKNOWN_SIZE
        return size


class _Estimate:
    """How much memory values of the forward pass take at each point of the backward pass."""

    def __init__(self, tape: Tape, sizes: _Sizes) -> None:
        self.tape = tape
        self.sizes = sizes
        self.position = {node: index for index, node in enumerate(tape.forward)}
        # what each value shares its memory with, and who in the backward pass reads which memory
        self._readers: dict[ir.Value, list[ir.Value]] = {}
        self.last_read: dict[ir.Value, int] = {}
        for node in tape.forward:
            for value in node.outputs:
                root = self.root(value)
                if tape.read_backward(value):
                    self._readers.setdefault(root, []).append(value)
                for reader in tape.read_forward(value):
                    self.last_read[root] = max(self.last_read.get(root, 0), self.position[reader])

    def root(self, value: ir.Value) -> ir.Value:
        """The value whose memory a value shares."""
        while (node := producer_of(value, *_VIEWS)) in self.position and node is not None:
            value = required_input(node)
        return value

    def saved(self) -> dict[ir.Value, float]:
        """Bytes of all that the backward pass reads, without recomputation."""
        return {root: self.sizes.bytes(root) for root in self._readers if root.producer() is not None}

    def peak(self, plans: Sequence[Plan]) -> float:
        """The most memory that is taken at once.

        When the backward pass is at a node, all that was kept before it in the forward pass is still there, and
        the copies of the segment that the node is in.
        """
        dropped = {value for plan in plans for value in plan.needed}
        stored = {
            root
            for root, values in self._readers.items()
            if root not in dropped and any(value not in dropped for value in values)
        }
        stored |= {self.root(value) for plan in plans for value in plan.inputs}
        steps = [
            (self._at(root), self.sizes.bytes(root)) for root in stored if root.producer() in self.position
        ]
        # copies are there while the backward pass goes through the segment: from its last node on
        for plan in plans:
            at = max((self.position[node] for node in plan.nodes), default=0)
            copies = {self.root(value) for value in plan.needed}
            # Negative and offset by one: marks copies of size zero too, and tells them from values that are kept.
            steps.append((at, -1.0 - sum(map(self.sizes.bytes, copies))))
        total = most = 0.0
        for _, size in sorted(steps, key=lambda step: (step[0], step[1] < 0)):
            if size >= 0:
                total += size
                most = max(most, total)
            else:
                most = max(most, total - size - 1.0)
        return most

    def spare(self, plans: list[Plan], limit: float) -> list[Plan]:
        """Keep some segments, the most expensive first, while the peak stays within the limit."""
        order = sorted(
            (plan for plan in plans if plan.nodes), key=lambda p: -sum(map(self.sizes.work, p.nodes))
        )
        for plan in order:
            fewer = [Plan(other.segment) if other is plan else other for other in plans]
            if self.peak(fewer) <= limit:
                plans = fewer
        return plans

    def _at(self, value: ir.Value) -> int:
        node = value.producer()
        assert node is not None
        return self.position[node]


def _divisions(tape: Tape, estimate: _Estimate) -> Iterator[list[list[ir.Node]]]:
    """Ways to split the forward pass into segments of about equal memory, cut where few values cross."""
    nodes, saved = tape.forward, estimate.saved()
    passing = [0.0] * (len(nodes) + 1)
    own = [0.0] * len(nodes)
    for node in nodes:
        at = estimate.position[node]
        for value in node.outputs:
            own[at] += saved.get(value, 0.0)
            last = estimate.last_read.get(value, at)
            if last > at and estimate.root(value) is value:
                passing[at] += estimate.sizes.bytes(value)
                passing[last] -= estimate.sizes.bytes(value)
    running = 0.0
    for index, change in enumerate(passing):
        running += change
        passing[index] = running
    total = sum(own)
    tried: set[tuple[int, ...]] = set()
    for trial in range(1, _TRIALS + 1):
        cuts = _cuts(own, passing, total / trial)
        if cuts in tried:
            continue
        tried.add(cuts)
        edges = [0, *cuts, len(nodes)]
        yield [nodes[a:b] for a, b in itertools.pairwise(edges)]


def _cuts(own: Sequence[float], passing: Sequence[float], size: float) -> tuple[int, ...]:
    """Where to cut for segments of about this size: where the least memory crosses, between half and all of it."""
    cuts: list[int] = []
    filled, best, amount = 0.0, -1, math.inf
    since = 0.0
    for index, more in enumerate(own):
        filled += more
        since += more
        if filled >= size / 2 and passing[index] <= amount:
            best, amount, since = index + 1, passing[index], 0.0
        if filled >= size and best > 0:
            cuts.append(best)
            filled, best, amount = since, -1, math.inf
    return tuple(cut for cut in cuts if cut < len(own))
