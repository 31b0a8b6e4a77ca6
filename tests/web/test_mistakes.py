"""What is wrong is said in one sentence, and parameters stay as they were."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from web.browser import Browser

MISTAKES = {
    "label": ("RangeError", "'labels' has label 10 at 5: the model has 10 classes, so labels are 0 to 9"),
    "shape": ("RangeError", "input 'x' has shape [16,63], the model takes [batch,64]"),
    "type": ("TypeError", "input 'labels' is Float32Array, the model takes BigInt64Array"),
    "count": ("RangeError", "the model takes 2 inputs (x, labels), got 1"),
    "overlap": ("OnwardError", "a step of this module is still running: await it before the next call"),
}


def test_mistakes_are_refused_and_named(harness: Browser) -> None:
    found = harness.evaluate("harness.mistakes", {"policy": "raise"})
    assert {name: (found[name]["error"], found[name]["message"]) for name in MISTAKES} == MISTAKES


@pytest.mark.parametrize("policy", ["raise", "skip", "ignore"])
def test_a_loss_that_is_not_finite(harness: Browser, policy: str) -> None:
    found = harness.evaluate("harness.mistakes", {"policy": policy})
    if policy == "raise":
        assert found["nan"]["error"] == "NonFiniteError"
        assert "the loss is NaN at training step" in found["nan"]["message"]
        assert "parameters are unchanged" in found["nan"]["message"]
    if policy == "skip":
        assert found["step"] == {"answer": False}
        assert found["unchanged"]
        assert found["after"] == {"answer": [True, True, True]}
    if policy == "ignore":
        assert found["step"] == {"answer": True}
        assert not found["unchanged"]


def test_memory_stays_flat_over_two_thousand_steps(harness: Browser) -> None:
    """Less than 100 bytes a step may stay behind; one leaked gradient of this model would be 9,600."""
    found = harness.evaluate("harness.memory", {"name": "mlp", "warm": 500, "count": 2000})
    first, last = found["first"], found["last"]
    assert last[0] - first[0] < 100 * 2000
    assert len(first) >= 2
    assert last[1:] == first[1:]
