"""The gradient of If: both branches are differentiated, and the one that ran is recomputed."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.autodiff import subgraphs
from onward.autodiff.registry import gradient_rule
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
    captured = [value for value in captured_values(node) if op.wanted(value)]
    branches = {name: node.attributes[name].as_graph() for name in ("then_branch", "else_branch")}
    made = {}
    for name, branch in branches.items():
        inner = subgraphs.body_builder(op, name)
        kept = {
            value: subgraphs.argument(inner, value, "kept") for value in subgraphs.random_values(op, branch)
        }
        results = subgraphs.inline(inner, branch, [], given=kept)
        found = subgraphs.differentiate_body(inner, list(zip(results, dys)), captured)
        made[name] = inner, found, kept
    reached = [value for value in captured if any(found[value] is not None for _, found, _ in made.values())]
    if not reached:
        return {}
    for name, (inner, found, kept) in made.items():
        subgraphs.close(inner, [found[value] for value in reached], reached)
        for value, placeholder in kept.items():
            if placeholder.uses():
                ir.convenience.replace_all_uses_with(placeholder, _export(op, node, branches, name, value))
    graphs = {name: inner.graph for name, (inner, _, _) in made.items()}
    return dict(zip(reached, subgraphs.emit(op, "If", node.inputs, graphs, likes=reached)))


def _export(op, node, branches, name, value):
    """A value of one branch as an additional output of If; the other branch outputs an empty one."""
    for key, branch in branches.items():
        if key == name:
            branch.outputs.append(subgraphs.copy_into(op, branch, value))
        else:
            empty = op.constant(np.zeros([0] * op.rank(value), op.dtype(value).numpy()), name="empty")
            branch.outputs.append(subgraphs.copy_into(op, branch, empty))
    return subgraphs.new_output(
        op, node, value.type, None if value.shape is None else [None] * value.shape.rank()
    )
