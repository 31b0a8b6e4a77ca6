"""Every gradient rule against finite differences, and every produced graph against the standard."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import onnx
import pytest

from onward.autodiff.check import check_gradient
from onward.autodiff.registry import registered_ops, straight_through_ops

FAMILIES = sorted(
    m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name.startswith("cases_")
)
CASES = [case for family in FAMILIES for case in importlib.import_module(family).CASES]


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
