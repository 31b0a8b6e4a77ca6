"""The backward walk: from what is differentiated back to what it depends on.

Knows no operator by name. Collects the contributions to each value's gradient, sums them, undoes
broadcasting, and reports every operator without a rule at once, before anything is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from onward.autodiff import registry
from onward.errors import UnsupportedOps
from onward.graph.builder import Builder, subgraphs_of

__all__ = ["DifferentiableBuilder", "backward", "captured_values", "is_differentiable"]

_FLOATING = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


class DifferentiableBuilder(Builder):
    """The builder that rules receive: it also knows which values' gradients are wanted."""

    def __init__(self, graph: ir.Graph, *, parent: Builder | None = None) -> None:
        super().__init__(graph, parent=parent, share=True)
        self.active: set[ir.Value] = set()

    def wanted(self, value: ir.Value | None) -> bool:
        """Whether a gradient with respect to this value is needed; a rule may skip the work if not."""
        return value in self.active


@dataclasses.dataclass
class _Path:
    """The nodes between what is differentiated and what with respect to, in forward order."""

    nodes: list[ir.Node]
    active: set[ir.Value]


def backward(
    op: DifferentiableBuilder, cotangents: Mapping[ir.Value, ir.Value], wrt: Sequence[ir.Value]
) -> dict[ir.Value, ir.Value | None]:
    """Gradients of Σ⟨cotangent, value⟩ with respect to each of `wrt`; None where nothing depends on it.

    Appends to the builder's graph. All values belong to that graph or to one around it.
    """
    path = _find_path(op.graph, set(cotangents), wrt)
    _refuse_unsupported(path, wrt)
    op.active = path.active
    gradients: dict[ir.Value, list[ir.Value]] = {value: [seed] for value, seed in cotangents.items()}
    for node in reversed(path.nodes):
        arriving = [_total(op, gradients.pop(output, []), output) for output in node.outputs]
        if all(dy is None for dy in arriving):
            continue
        rule = registry.find(node.op_type, node.domain)
        assert rule is not None, node.op_type
        op.scope = f"{node.name or node.op_type}/grad"
        for value, contribution in _contributions(rule, op, node, arriving):
            if value in path.active:
                if rule.broadcasts:
                    contribution = op.sum_to(contribution, value)
                gradients.setdefault(value, []).append(_describe(contribution, value))
    op.scope = ""
    return {value: _total(op, gradients.get(value, []), value) for value in wrt}


def is_differentiable(value: ir.Value | None) -> bool:
    """Whether a value holds real numbers: a floating tensor, or a sequence or optional of them."""
    if value is None:
        return False
    kind = value.type
    while isinstance(kind, ir.SequenceType | ir.OptionalType):
        kind = kind.elem_type
    return isinstance(kind, ir.TensorType) and kind.dtype in _FLOATING


def captured_values(node: ir.Node) -> list[ir.Value]:
    """Values of the graphs around a node that the bodies in its attributes read, each once, in order."""
    captured: dict[ir.Value, None] = {}

    def visit(graph: ir.Graph, inside: set[ir.Value]) -> None:
        own = inside | set(graph.inputs) | set(graph.initializers.values())
        for inner in graph:
            for value in inner.inputs:
                if value is not None and value not in own:
                    captured.setdefault(value)
            for nested in subgraphs_of(inner):
                visit(nested, own)
            own.update(inner.outputs)
        for value in graph.outputs:
            if value not in own:
                captured.setdefault(value)

    for graph in subgraphs_of(node):
        visit(graph, set())
    return list(captured)


def _contributions(
    rule: registry.Rule, op: Builder, node: ir.Node, arriving: list[ir.Value | None]
) -> Iterable[tuple[ir.Value, ir.Value]]:
    found = rule.function(op, node, *arriving)
    if isinstance(found, Mapping):
        pairs: Iterable[tuple[ir.Value | None, ir.Value | None]] = found.items()
    else:
        if found is None or isinstance(found, ir.Value):
            found = (found,)
        pairs = zip(node.inputs, found)
    for value, contribution in pairs:
        if value is not None and contribution is not None:
            yield value, contribution


def _describe(gradient: ir.Value, primal: ir.Value) -> ir.Value:
    """A gradient has its primal's type and shape, also where inference lost it on the way."""
    if (gradient.producer() is not None and gradient.shape is None) or _vaguer(gradient.shape, primal.shape):
        gradient.shape = primal.shape
    return gradient


def _vaguer(have: ir.Shape | None, known: ir.Shape | None) -> bool:
    if have is None or known is None or have.rank() != known.rank():
        return False
    return any(
        not isinstance(h, int) and (isinstance(k, int) or k.value is not None) for h, k in zip(have, known)
    )


def _total(op: Builder, parts: list[ir.Value], primal: ir.Value) -> ir.Value | None:
    if not parts:
        return None
    if isinstance(primal.type, ir.SequenceType | ir.OptionalType):
        from onward.autodiff.sequences import add_sequences

        total = parts[0]
        for part in parts[1:]:
            total = add_sequences(op, total, part)
        return total
    if len(parts) == 1:
        return parts[0]
    return _describe(op.Add(*parts) if len(parts) == 2 else op.Sum(*parts), primal)


def _find_path(graph: ir.Graph, targets: set[ir.Value], wrt: Iterable[ir.Value]) -> _Path:
    reached = set(wrt)
    order: list[ir.Node] = []
    reads: dict[ir.Node, list[ir.Value]] = {}
    for node in graph:
        if registry.is_constant(node.op_type, node.domain):
            continue
        values = [value for value in node.inputs if value is not None]
        if subgraphs_of(node):
            values.extend(captured_values(node))
        values = [value for value in values if value in reached]
        if values:
            order.append(node)
            reads[node] = values
            reached.update(output for output in node.outputs if is_differentiable(output))
    needed = set(targets)
    nodes: list[ir.Node] = []
    for node in reversed(order):
        if any(output in needed and output in reached for output in node.outputs):
            nodes.append(node)
            needed.update(reads[node])
    nodes.reverse()
    return _Path(nodes, reached & needed)


def _refuse_unsupported(path: _Path, wrt: Sequence[ir.Value]) -> None:
    missing = [node for node in path.nodes if registry.find(node.op_type, node.domain) is None]
    if not missing:
        return
    sources = _sources(path, wrt)
    lines = []
    for node in missing:
        names = sorted(
            {name for value in node.inputs if value is not None for name in sources.get(value, ())}
        )
        more = f" (+{len(names) - 1} more)" if len(names) > 1 else ""
        kind = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
        lines.append(f"  {kind}   node '{node.name}'   reached from '{names[0] if names else '?'}'{more}")
    plural = "operator has" if len(missing) == 1 else "operators have"
    raise UnsupportedOps(
        f"{len(missing)} {plural} no gradient between the loss and trainable parameters:\n"
        + "\n".join(lines)
        + "\nFreeze those parameters (frozen_params=…), or register a rule: see docs/adding-a-gradient.md"
    )


def _sources(path: _Path, wrt: Sequence[ir.Value]) -> dict[ir.Value, set[str]]:
    """For each value on the path, the names of the trainable values that it depends on."""
    sources: dict[ir.Value, set[str]] = {value: {value.name or "?"} for value in wrt}
    for node in path.nodes:
        union: set[str] = set()
        for value in [*node.inputs, *(captured_values(node) if subgraphs_of(node) else [])]:
            if value is not None:
                union |= sources.get(value, set())
        for output in node.outputs:
            sources[output] = union
    return sources
