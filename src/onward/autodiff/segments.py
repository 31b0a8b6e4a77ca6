"""Which parts of a forward pass are computed again: by the names of scopes, or by how much memory they may take.

Knows names and estimated sizes of values; knows nothing of how a segment is recomputed, nor of operators
(save which ones move no data, and which ones take most time).
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

import onnx_ir as ir

from onward.autodiff.engine import DifferentiableBuilder
from onward.autodiff.recompute import Plan, Tape, plan_segment, recompute_segments
from onward.errors import ModelError
from onward.graph.nodes import subgraphs_of

__all__ = ["ActivationBudget", "Recompute", "recompute_activations"]

_log = logging.getLogger("onward")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?((?:[kmg]i?)?)b", re.IGNORECASE)
# Stands for a size that is not known: estimates are compared with each other only.
_UNKNOWN_SIZE = 32
# Their results share memory with what they read.
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
# How many ways to divide a model are compared.
_TRIALS = 24


@dataclasses.dataclass(frozen=True)
class ActivationBudget:
    """What values of the forward pass may take of memory while they wait for the backward pass.

    `limit` is a share of what they take without recomputation (a number between 0 and 1) or bytes (a whole
    number, or text such as "500MB"); without one, they take as little as can be had. `sizes` are numbers for
    symbolic dimensions, for estimates: bytes cannot be told without them.

    >>> ActivationBudget("500MB", sizes={"batch": 8}).limit
    '500MB'
    """

    limit: float | int | str | None = None
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)


Recompute = bool | float | str | Sequence[str] | ActivationBudget | None


def recompute_activations(
    op: DifferentiableBuilder,
    forward: Sequence[ir.Node],
    wanted: Recompute,
    *,
    results: Sequence[ir.Value] = (),
) -> int:
    """Drop values of the forward pass as asked for; returns how many nodes run twice.

    `forward` are the nodes that were there before the gradients, `results` the outputs that hold gradients.
    """
    if wanted is None or wanted is False:
        return 0
    tape = Tape(op, forward, results)
    budget = _budget(wanted)
    if budget is not None:
        plans = _within(tape, budget)
    else:
        patterns = [wanted] if isinstance(wanted, str) else list(wanted)  # type: ignore[arg-type]
        plans = [plan_segment(tape, nodes) for nodes in _matched(tape, patterns).values()]
        if not any(plan.needed for plan in plans):
            _log.warning("recompute: the backward pass needs nothing from inside of %s", ", ".join(patterns))
    repeated = sum(len(plan.nodes) for plan in plans)
    if repeated:
        recompute_segments(tape, plans)
    count = sum(bool(plan.nodes) for plan in plans)
    _log.info("recompute: %d nodes in %d segments run twice", repeated, count)
    return repeated


def _budget(wanted: Recompute) -> ActivationBudget | None:
    """What was asked for as a budget; None where it is patterns."""
    if isinstance(wanted, ActivationBudget):
        return wanted
    if wanted is True:
        return ActivationBudget()
    if isinstance(wanted, int | float) or (isinstance(wanted, str) and _BYTES.fullmatch(wanted.strip())):
        return ActivationBudget(wanted)
    if isinstance(wanted, str) or (
        isinstance(wanted, Sequence) and wanted and all(isinstance(item, str) for item in wanted)
    ):
        return None
    raise TypeError(
        f"recompute is {wanted!r}: pass True, a share of memory between 0 and 1, bytes such as '500MB', "
        "patterns of scopes such as 'encoder.layer.*', or an ActivationBudget"
    )


# ---- by name ---------------------------------------------------------------------------------------


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
    """Up to three scopes like a pattern, by their ends: what they begin with may be left out of patterns."""
    plain = pattern.strip("/").replace("/", ".")
    length = plain.count(".") + 1
    likeness = {
        scope: difflib.SequenceMatcher(None, plain, ".".join(scope.split(".")[-length:])).ratio()
        for scope in known
    }
    return [scope for scope in sorted(known, key=lambda scope: -likeness[scope])[:3] if likeness[scope] > 0.5]


# ---- by memory -------------------------------------------------------------------------------------


def _within(tape: Tape, budget: ActivationBudget) -> list[Plan]:
    """Segments that keep the estimated peak within a budget, with as little repeated work as was found."""
    sizes = _Sizes(budget.sizes)
    estimate = _Estimate(tape, sizes)
    everything = estimate.peak([])
    limit = _limit(budget, everything, sizes)
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
    if limit is not None and everything <= limit:
        return []
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
    if limit is None:
        return None
    if isinstance(limit, str):
        found = _BYTES.fullmatch(limit.strip())
        if found is None:
            raise ValueError(f"recompute: '{limit}' is no number of bytes: write it as '500MB' or '2GiB'")
        limit = float(found[1]) * _UNITS[found[2].lower()]
    elif isinstance(limit, float) and 0 < limit <= 1:
        return limit * everything
    elif isinstance(limit, float) or limit <= 0:
        raise ValueError(
            f"recompute: {limit!r} is neither a share between 0 and 1 nor a whole number of bytes above 0"
        )
    if sizes.guessed:
        names = ", ".join(f"'{name}'" for name in sorted(sizes.guessed))
        raise ModelError(
            f"recompute: bytes cannot be told without the sizes of {names}: pass "
            f"ActivationBudget({budget.limit!r}, sizes={{{names.split(', ')[0]}: …}}), or a share such as 0.5"
        )
    return float(limit)


class _Sizes:
    """Estimated bytes of values and work of nodes."""

    def __init__(self, given: Mapping[str, int]) -> None:
        self._given = given
        # names of dimensions whose size had to be guessed
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
            weight, result = node.inputs[1], node.outputs[0]
            assert weight is not None
            if node.op_type.startswith("Conv"):
                return results * self.count(weight) / max(self._first(weight), 1)
            x = node.inputs[0]
            assert x is not None
            # elements of both factors and of the product are n·k, k·m and n·m (for each of a batch)
            return math.sqrt(self.count(x) * self.count(weight) * self.count(result))
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
            elif part in self._given:
                size *= self._given[part]
            else:
                self.guessed.add(part)
                size *= _UNKNOWN_SIZE
        return size


class _Estimate:
    """How much memory values of the forward pass take at each point of the backward pass."""

    def __init__(self, tape: Tape, sizes: _Sizes) -> None:
        self.tape = tape
        self.sizes = sizes
        self.place = {node: index for index, node in enumerate(tape.forward)}
        # what each value shares its memory with, and who in the backward pass reads which memory
        self._readers: dict[ir.Value, list[ir.Value]] = {}
        self.last_read: dict[ir.Value, int] = {}
        for node in tape.forward:
            for value in node.outputs:
                root = self.root(value)
                if tape.read_backward(value):
                    self._readers.setdefault(root, []).append(value)
                for reader in tape.read_forward(value):
                    self.last_read[root] = max(self.last_read.get(root, 0), self.place[reader])

    def root(self, value: ir.Value) -> ir.Value:
        """The value whose memory a value shares."""
        while (node := value.producer()) in self.place and node.op_type in _VIEWS:  # type: ignore[union-attr]
            source = node.inputs[0]  # type: ignore[union-attr]
            assert source is not None
            value = source
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
        kept = {
            root
            for root, values in self._readers.items()
            if root not in dropped and any(value not in dropped for value in values)
        }
        kept |= {self.root(value) for plan in plans for value in plan.inputs}
        steps = [(self._at(root), self.sizes.bytes(root)) for root in kept if root.producer() in self.place]
        # copies are there while the backward pass goes through the segment: from its last node on
        for plan in plans:
            at = max((self.place[node] for node in plan.nodes), default=0)
            copies = {self.root(value) for value in plan.needed}
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
        """Recompute nothing in some segments, the most laborious first, while the peak stays within the limit."""
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
        return self.place[node]


def _divisions(tape: Tape, estimate: _Estimate) -> Iterator[list[list[ir.Node]]]:
    """Ways to divide the forward pass into segments of about equal memory, cut where little passes."""
    nodes, saved = tape.forward, estimate.saved()
    passing = [0.0] * (len(nodes) + 1)
    own = [0.0] * len(nodes)
    for node in nodes:
        at = estimate.place[node]
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
    """Where to cut for segments of about a size: where the least passes between half and all of it."""
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
