"""The node tests that ship in the onnx package: every gradient that exists at their data is right.

`python tests/autodiff/node_tests.py --summary` shows the same by operator.
"""

from __future__ import annotations

import node_tests
import pytest

SHARDS = 2
# Tests whose gradient is not asked for, each with the reason.
_RANK = (
    "AffineGrid's definition squeezes every axis of size 1 of a value whose size is read from an input: "
    "its rank, which the gradient of MatMul needs, is known at run time only"
)
EXPECTED: dict[str, str] = {
    "test_affine_grid_2d_expanded": _RANK,
    "test_affine_grid_2d_align_corners_expanded": _RANK,
}


@pytest.mark.parametrize("shard", range(SHARDS))
def test_gradients_at_the_data_of_node_tests(shard: int) -> None:
    cases = list(node_tests.counted(node_tests.load()[shard::SHARDS]))
    outcomes = [node_tests.judge(case) for case in cases]
    failing = [o for o in outcomes if o.verdict not in ("right", "not smooth") and o.name not in EXPECTED]
    smooth = [o for o in outcomes if o.verdict != "not smooth"]
    assert len(smooth) > 0.9 * len(cases) > 100  # kinks are rare, and the tests were found at all
    assert not failing, node_tests.summary(outcomes)
