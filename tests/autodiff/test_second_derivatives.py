"""The gradient of every rule's gradient, with respect to the inputs and to the incoming gradients."""

from __future__ import annotations

import os

import numpy as np
import pytest
from test_gradients import CASES

from onward.autodiff.check import _evaluator, check_gradient
from onward.autodiff.gradient import vector_jacobian

_ZEROS = "where a factor is 0 the rule counts zeros instead of dividing by one, which is a step function of the factor"
EXCEPTIONS = {
    "ReduceProd-zeros": _ZEROS,
    "ScatterElements-zero-factors": _ZEROS,
    "ScatterND-zero-factors": _ZEROS,
    "RoiAlign-symbolic-avg-no-region": (
        "of no region at all, its gradient multiplies matrices of no columns: the rules of MatMul and Mul reshape by "
        'a size, and 0 means "as before" to Reshape'
    ),
}
# The reference evaluator's OneHot takes no more than 64 rows.
_LARGE = ("Gather-large-table", "Gather-large-table-int32")


def _chosen() -> list:
    """The first and the last case of each operator, and every exception; all of them where asked for."""
    by_operator: dict[str, list] = {}
    for case in CASES:
        by_operator.setdefault(case.op, []).append(case)
    ends = {id(case) for cases in by_operator.values() for case in (cases[0], cases[-1])}
    return [
        pytest.param(
            case,
            id=str(case),
            marks=pytest.mark.xfail(strict=True, reason=EXCEPTIONS[str(case)])
            if str(case) in EXCEPTIONS
            else (),
        )
        for case in CASES
        if os.environ.get("ONWARD_ALL_CASES") or id(case) in ends or str(case) in EXCEPTIONS
    ]


@pytest.mark.parametrize("case", _chosen())
def test_second_derivative(case):
    model, of, wrt = vector_jacobian(case.model(), wrt=case.wrt)
    inputs = case.inputs()
    outputs = _evaluator(case.model(), case.reference)(inputs)
    rng = np.random.default_rng(1)
    incoming = {
        f"{name}_cotangent": rng.uniform(0.5, 1.5, np.shape(outputs[name])).astype(
            np.asarray(outputs[name]).dtype
        )
        for name in of
    }
    known = {value.name for value in model.graph.input}
    feeds = {name: value for name, value in {**inputs, **incoming}.items() if name in known}
    check_gradient(
        model,
        feeds,
        wrt=[name for name in (*wrt, *incoming) if name in feeds],
        rtol=max(case.rtol, 1e-3),
        runtime_rtol=max(case.runtime_rtol, 1e-3),
        runtime_atol=1e-4,
        reference="onnxruntime" if str(case) in _LARGE else case.reference,
    )
