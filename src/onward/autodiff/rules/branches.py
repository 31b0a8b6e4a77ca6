"""The gradient of If: both branches are differentiated, and the one that ran is recomputed."""

from __future__ import annotations

from onward.autodiff import subgraphs
from onward.autodiff.registry import gradient_rule
from onward.autodiff.saved.iterated_values import saved_from_branch
from onward.graph.nodes import captured_values, subgraphs_of


def _if_bodies(node, varying, mattering):
    reads = {value for value in captured_values(node) if value in varying}
    return [
        (branch, reads, {inner for outer, inner in zip(node.outputs, branch.outputs) if outer in mattering})
        for branch in subgraphs_of(node)
    ]


@gradient_rule("If", bodies=_if_bodies)
def if_(op, node, *dys):
    """y = f(c) if p else g(c)   ⇒   dc = fᵀ'(c)·dy if p else gᵀ'(c)·dy"""
    captured = [value for value in captured_values(node) if op.needs_gradient(value)]
    branches = {name: node.attributes[name].as_graph() for name in ("then_branch", "else_branch")}
    derived = {}
    for name, branch in branches.items():
        inner = subgraphs.body_builder(op, name)
        drawn = {d: subgraphs.argument(inner, d.like, "random") for d in subgraphs.random_values(branch)}
        results = subgraphs.inline(inner, branch, [], drawn_values=drawn)
        gradients = subgraphs.differentiate_body(inner, list(zip(results, dys)), captured)
        derived[name] = inner, gradients, drawn
    # A value that one branch reads gets zeros from the other.
    reached = [
        value
        for value in captured
        if any(gradients[value] is not None for _, gradients, _ in derived.values())
    ]
    if not reached:
        return {}
    for name, (inner, gradients, drawn) in derived.items():
        subgraphs.close(inner, [gradients[value] for value in reached], reached)
        for key, placeholder in subgraphs.used(drawn).items():
            subgraphs.bind(placeholder, saved_from_branch(op, node, name, key))
    bodies = {name: inner for name, (inner, _, _) in derived.items()}
    return dict(zip(reached, subgraphs.emit(op, "If", node.inputs, bodies, likes=reached)))
