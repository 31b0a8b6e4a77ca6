"""Reverse-mode differentiation: visits nodes in reverse order, from the loss to the values it depends on.

Knows no operator by name. Collects the contributions to each value's gradient, sums them, sums over
broadcast axes, and reports every operator without a rule at once, before anything is built.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import onnx_ir as ir

from onward.autodiff import registry
from onward.autodiff.sequences import add
from onward.errors import ModelError, OnwardError, UnsupportedOps
from onward.graph.builder import Builder
from onward.graph.nodes import captured_values, is_differentiable, stops_gradient, subgraphs_of
from onward.graph.shapes.dims import dims_of


class DifferentiableBuilder(Builder):
    """The builder that rules receive: it also tells which values need a gradient."""

    def __init__(self, graph: ir.Graph, *, parent: Builder | None = None) -> None:
        # Shared: rules of neighbouring nodes ask for the same sizes, transposes and masks.
        super().__init__(graph, parent=parent, share=True)
        self.active: set[ir.Value] = set()
        # the nodes that were differentiated, in reverse order
        self.visits: list[Visit] = []
        self._saved: list[_Saved] = []

    def needs_gradient(self, value: ir.Value | None) -> bool:
        """Whether a gradient with respect to this value is needed; a rule may skip the work if not."""
        return value in self.active

    def save(
        self, node: ir.Node, likes: Sequence[ir.Value], compute: Callable[[], Sequence[ir.Value]]
    ) -> list[ir.Value]:
        """Values of the forward pass that a rule reads, though the model does not output them.

        Returns a placeholder of the type and shape of each of `likes`. Rules change no forward node: when all of them
        are done, `compute` adds what is used, with new nodes placed before `node`, and returns the values.
        """
        values = []
        # A placeholder, and not the output itself: a rule that changed its forward node would change what later
        # rules see.
        for like in likes:
            value = ir.Value(name=self.namer(f"{self.scope}/saved"), type=like.type)
            value.shape = None if like.shape is None else ir.Shape(like.shape)
            values.append(value)
        self._saved.append(_Saved(node, values, compute, self.scope))
        return values

    def compute_saved(self) -> None:
        """Let forward nodes compute the values that rules asked for with `save`."""
        # the list stays: equal nodes are found by the identity of their inputs, which must not be reused
        for saved in self._saved:
            # Nothing reads what a later simplification dropped: then the forward pass need not compute it.
            if not any(value.uses() for value in saved.values):
                continue
            self.scope = saved.scope
            with self.inserting(before=saved.node):
                ir.convenience.replace_all_uses_with(saved.values, list(saved.compute()))

    def adopt(self, node: ir.Node) -> None:
        """Append a node that was made elsewhere; equal nodes that are emitted later become this one."""
        self.graph.append(node)
        self._remember(node)


@dataclasses.dataclass(frozen=True)
class _Saved:
    """Placeholders for values of the forward pass, what computes them, and the scope for names."""

    node: ir.Node
    values: list[ir.Value]
    compute: Callable[[], Sequence[ir.Value]]
    scope: str


@dataclasses.dataclass(frozen=True)
class Visit:
    """A forward node, the gradients that arrived for it, and the last node before those that its rule added."""

    node: ir.Node
    arriving: list[ir.Value]
    before: ir.Node


@dataclasses.dataclass(frozen=True)
class Path:
    """The nodes between what is differentiated and what with respect to, in forward order."""

    nodes: list[ir.Node]
    active: set[ir.Value]


def backward(
    op: DifferentiableBuilder, cotangents: Mapping[ir.Value, ir.Value], wrt: Sequence[ir.Value]
) -> dict[ir.Value, ir.Value | None]:
    """Gradients of Σ⟨cotangent, value⟩ with respect to each of `wrt`; None where nothing depends on it.

    Appends to the builder's graph. All values belong to that graph or to one around it.
    """
    # Before anything is built: an error must leave the graph as it was.
    path = find_path(op.graph, set(cotangents), wrt)
    _refuse_unsupported(path, wrt)
    op.active = path.active
    gradients: dict[ir.Value, list[ir.Value]] = {value: [seed] for value, seed in cotangents.items()}
    sources = set(wrt)
    for node in reversed(path.nodes):
        # In reverse order every reader of an output has been visited by now, so that its gradient is complete.
        arriving = [_sum(op, gradients.pop(output, []), output) for output in node.outputs]
        # A rule further on may have found that nothing arrives here: a gradient of zero, which costs no nodes.
        if all(dy is None for dy in arriving):
            continue
        op.visits.append(Visit(node, [dy for dy in arriving if dy is not None], op.graph[-1]))
        # what is differentiated by may lie on the way to another of its kind
        for output, dy in zip(node.outputs, arriving):
            if dy is not None and output in sources:
                gradients[output] = [dy]
        rule = registry.find(node.op_type, node.domain)
        assert rule is not None, node.op_type
        op.scope = f"{node.name or node.op_type}/grad"
        for value, contribution in _contributions(rule, op, node, arriving):
            if value in path.active:
                # Here and not in the rules: unbroadcasting is the same for all of them.
                if rule.broadcasts:
                    contribution = op.sum_to(contribution, value)
                gradients.setdefault(value, []).append(_describe(contribution, value))
    op.scope = ""
    # Before `compute_saved`: the sums may be what reads a saved value.
    totals = {value: _sum(op, gradients.get(value, []), value) for value in wrt}
    op.compute_saved()
    op.scope = ""
    return totals


def add_cotangent(
    op: Builder, cotangents: dict[ir.Value, ir.Value], value: ir.Value, gradient: ir.Value
) -> None:
    """Add a contribution to a value's gradient."""
    earlier = cotangents.get(value)
    total = None if earlier is None else _sum(op, [earlier, gradient], value)
    cotangents[value] = gradient if total is None else total


def _contributions(
    rule: registry.Rule, op: Builder, node: ir.Node, arriving: list[ir.Value | None]
) -> Iterable[tuple[ir.Value, ir.Value]]:
    try:
        gradients = rule.function(op, node, *arriving)
    except (OnwardError, MemoryError):
        raise
    except Exception as error:
        # A mistake in a user's rule is theirs to see, with its own traceback.
        if not rule.function.__module__.startswith("onward."):
            raise  # a user's own rule
        raise ModelError(
            f"{node.op_type} '{node.name}' is not as ONNX has it, so that it has no gradient: {error!r}"
        ) from error
    # Rules of If, Loop and Scan also reach values that their bodies capture, which are no inputs.
    if isinstance(gradients, Mapping):
        pairs: Iterable[tuple[ir.Value | None, ir.Value | None]] = gradients.items()
    else:
        if gradients is None or isinstance(gradients, ir.Value):
            gradients = (gradients,)
        # A rule may end early: missing gradients at the end are zero.
        pairs = zip(node.inputs, gradients)
    for value, contribution in pairs:
        if value is not None and contribution is not None:
            yield value, contribution


def _describe(gradient: ir.Value, primal: ir.Value) -> ir.Value:
    """Give a gradient the type and shape of its primal value, where inference lost them."""
    if (gradient.producer() is not None and gradient.shape is None) or _is_vaguer(
        gradient.shape, primal.shape
    ):
        gradient.shape = None if primal.shape is None else ir.Shape(primal.shape)
    return gradient


def _is_vaguer(have: ir.Shape | None, reference: ir.Shape | None) -> bool:
    if have is None or reference is None or have.rank() != reference.rank():
        return False
    return any(not isinstance(h, int) and k is not None for h, k in zip(have, dims_of(reference)))


def _sum(op: Builder, parts: list[ir.Value], primal: ir.Value) -> ir.Value | None:
    """The sum of what contributes to a value's gradient; None where nothing does."""
    if len(parts) < 2:
        return parts[0] if parts else None
    if isinstance(primal.type, ir.SequenceType | ir.OptionalType):
        return functools.reduce(functools.partial(add, op), parts)
    # a Sum of three and more copies what it has so far
    return _describe(functools.reduce(op.Add, parts), primal)


def find_path(graph: ir.Graph, targets: Set[ir.Value], wrt: Iterable[ir.Value]) -> Path:
    """The values and nodes on paths from some values of a graph to others."""
    reached = set(wrt)
    order: list[tuple[ir.Node, list[ir.Value]]] = []
    quantized: set[ir.Value] = set()  # integers that stand for real numbers
    # integers pass no gradient on, but those that quantization made of real numbers do
    for node in graph:
        # A declared constant and a mark of `detach` end the path; an operator without a rule does not, it is an
        # error.
        if registry.is_constant(node.op_type, node.domain) or stops_gradient(node):
            continue
        values = [value for value in node.inputs if value in reached]
        if subgraphs_of(node):
            values.extend(value for value in captured_values(node) if value in reached)
        if values:
            order.append((node, values))  # type: ignore[arg-type]
            rule = registry.find(node.op_type, node.domain)
            if (rule is not None and rule.straight_through) or not quantized.isdisjoint(values):  # type: ignore[arg-type]
                quantized.update(output for output in node.outputs if not is_differentiable(output))
                reached.update(node.outputs)
            else:
                # a custom operator's outputs have no known type: they may be real, and unknown is not zero
                reached.update(v for v in node.outputs if v.type is None or is_differentiable(v))
    needed = set(targets)
    nodes: list[ir.Node] = []
    for node, values in reversed(order):
        # Both ways: a node that no parameter reaches, or that the loss does not need, gets no gradient.
        if any(output in needed and output in reached for output in node.outputs):
            nodes.append(node)
            needed.update(values)
    nodes.reverse()
    return Path(nodes, reached & needed)


@dataclasses.dataclass(frozen=True)
class _Missing:
    """A node without a rule, and the names of the trainable values that reach it."""

    node: ir.Node
    sources: tuple[str, ...]


def _refuse_unsupported(path: Path, wrt: Sequence[ir.Value]) -> None:
    if not _lacks_rules(path):
        return
    missing = list(_missing(path, {value: {value.name or "?"} for value in wrt}))
    rows = [(_kind(lacking.node), f"node '{lacking.node.name}'", lacking.sources) for lacking in missing]
    kinds, nodes = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = []
    for kind, node, names in rows:
        more = f" (+{len(names) - 1} more)" if len(names) > 1 else ""
        lines.append(f"  {kind:<{kinds}}  {node:<{nodes}}  reached from '{names[0] if names else '?'}'{more}")
    which = "1 operator" if len(missing) == 1 else f"{len(missing)} operators"
    verb = "has" if len(missing) == 1 else "have"
    raise UnsupportedOps(
        f"{which} between the loss and trainable parameters {verb} no gradient:\n"
        + "\n".join(lines)
        + "\nFreeze those parameters (frozen_params=…), or register a rule: see docs/adding-a-gradient.md"
    )


def _kind(node: ir.Node) -> str:
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


def _lacks_rules(path: Path) -> bool:
    """Whether a node on a path has no rule. Checked first: finding which values reach it takes longer."""
    for node in path.nodes:
        rule = registry.find(node.op_type, node.domain)
        if rule is None:
            return True
        # An operator without a rule inside a body would otherwise surface in the middle of building.
        if rule.bodies is not None:
            inner = rule.bodies(node, path.active, path.active)
            if any(_lacks_rules(find_path(body, results, varying)) for body, varying, results in inner):
                return True
    return False


def _missing(path: Path, sources: dict[ir.Value, set[str]]) -> Iterable[_Missing]:
    """Nodes on a path that have no rule, including those in subgraphs that would be differentiated."""
    sources = dict(sources)
    for node in path.nodes:
        values = [*node.inputs, *(captured_values(node) if subgraphs_of(node) else [])]
        union = set().union(*(sources.get(value, set()) for value in values if value is not None))
        # Which parameters reach a node is only worked out once there is something to report.
        sources.update(dict.fromkeys(node.outputs, union))
        rule = registry.find(node.op_type, node.domain)
        if rule is None:
            yield _Missing(node, tuple(sorted(union)))
        elif rule.bodies is not None:
            for body, varying, results in rule.bodies(node, path.active, path.active):
                inner = {value: sources.get(value, union) for value in varying}
                yield from _missing(find_path(body, results, varying), inner)
