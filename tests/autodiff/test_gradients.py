"""Every gradient rule against finite differences, and every produced graph against the standard."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from onward.autodiff import forms, registry, rules
from onward.autodiff.check import check_gradient
from onward.autodiff.registry import registered_ops, straight_through_ops
from onward.graph.nodes import subgraphs_of

FAMILIES = sorted(
    m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name.startswith("cases_")
)
CASES = [case for family in FAMILIES for case in importlib.import_module(family).CASES]


def _forward(graph):
    """Everything that a rule could change in the nodes of a graph, bodies included."""
    return [
        (
            node, node.op_type, tuple(node.inputs), tuple(node.outputs), dict(node.metadata_props),
            {name: attr.value for name, attr in node.attributes.items()},
            [(body, list(body.inputs), list(body.outputs)) for body in subgraphs_of(node)],
        )
        for node in ir.traversal.RecursiveGraphIterator(graph)
    ]  # fmt: skip


@pytest.fixture
def pure_rules(monkeypatch):
    """Rules that must leave the nodes before them as they are: they only add some."""
    find = registry.find

    def find_checked(op_type, domain=""):
        rule = find(op_type, domain)

        def checked(op, node, *arriving):
            before = _forward(op.graph)
            found = rule.function(op, node, *arriving)
            after = {row[0]: row for row in _forward(op.graph)}
            for row in before:
                assert after.get(row[0]) == row, f"the rule of {op_type} changed {row[1]} '{row[0].name}'"
            return found

        return None if rule is None else dataclasses.replace(rule, function=checked)

    monkeypatch.setattr(registry, "find", find_checked)


def test_rules_look_at_no_neighbours():
    """A rule reads its own node: it reaches no producer or user of a value and no graph, and changes no node."""
    around = {"producer", "uses", "consumers", "predecessors", "successors", "graph"}
    changing = {"resize_outputs", "resize_inputs", "replace_input_with", "replace_all_uses_with"}
    reached = []
    for package in (rules, forms):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            path = Path(importlib.import_module(module.name).__file__ or "")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and node.attr in around | changing:
                    reached.append(f"{path.name}:{node.lineno} {node.attr}")
    assert not reached


@pytest.mark.usefixtures("pure_rules")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient(case):
    model = case.model()
    derived = check_gradient(
        model,
        case.inputs(),
        wrt=case.wrt,
        rtol=case.rtol,
        runtime_rtol=case.runtime_rtol,
        reference=case.reference,
    ).model
    onnx.checker.check_model(derived, full_check=True)
    assert {node.domain for node in derived.graph.node} <= {""}


def test_every_rule_has_a_case():
    # Straight-through rules are not derivatives of a function with steps: test_quantized.py has those.
    assert registered_ops() - straight_through_ops() <= {case.op for case in CASES}
