"""Gradients of random graphs over all differentiable operators, against finite differences in float64.

A few with a fixed seed in CI, 10,000 new ones by `make fuzz`; hypothesis shrinks a graph that fails.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from random_graphs import RECIPES, Unusable, build, check

from onward.autodiff.coverage import coverage
from onward.autodiff.registry import registered_ops

LONG = "ONWARD_FUZZ" in os.environ
PARTS, GRAPHS = (20, 500) if LONG else (1, 30)  # parts run beside each other, and show how far it is
# differentiable operators that no random graph has, and why
LEFT_OUT = {
    **dict.fromkeys(
        ["QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger"],
        "straight-through: the rule is not the derivative of a function with steps (test_quantized.py)",
    ),
    **dict.fromkeys(
        ["CausalConvWithState", "CumProd", "LinearAttention", "SwiGLU", "Swish", "TensorScatter"],
        "newer than the opset of these graphs; written out in operators that are here (cases_attention.py)",
    ),
}


def test_random_graphs_cover_every_differentiable_operator() -> None:
    expanded = {row.operator for row in coverage() if row.kind == "expanded"}
    assert {*RECIPES, *LEFT_OUT} == registered_ops() | expanded
    assert not RECIPES.keys() & LEFT_OUT.keys()


def test_every_recipe_makes_its_operator() -> None:
    for op_type, recipe in RECIPES.items():
        for seed in range(5):
            try:
                graph = build(random.Random(seed), [op_type], length=1)
            except Unusable:
                continue
            assert op_type in {node.op_type for node in graph.nodes}, recipe
            break
        else:
            pytest.fail(f"five graphs of {op_type} in a row had numbers out of range")


@pytest.mark.parametrize("part", range(PARTS))
def test_gradients_of_random_graphs(part: int) -> None:
    verdicts: Counter[str] = Counter()

    @settings(
        max_examples=GRAPHS, derandomize=not LONG, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.randoms(use_true_random=False), st.sampled_from(sorted(RECIPES)), st.booleans())
    def run(source: random.Random, op_type: str, symbolic: bool) -> None:
        try:
            verdict = check(build(source, [op_type]), symbolic=symbolic).verdict
        except Unusable:
            verdict = "out of range"
        event(verdict)
        verdicts[verdict] += 1

    run()
    assert verdicts["right"] > 0.8 * verdicts.total(), verdicts


@pytest.mark.parametrize("wrong", ["scaled", "missing"])
def test_a_wrong_rule_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from onward.autodiff import registry

    right = registry.find("Sin")
    assert right is not None

    def rule(op, node, dy):
        if wrong == "missing":
            return None
        return op.Mul(right.function(op, node, dy), 1.01)

    monkeypatch.setitem(registry._rules, ("", "Sin"), registry.Rule("Sin", rule, False))
    found = 0
    for seed in range(5):
        graph = build(random.Random(seed), ["Sin"], length=1)
        try:
            check(graph)
        except AssertionError as error:
            found += "differences give" in str(error)
    assert found == 5
