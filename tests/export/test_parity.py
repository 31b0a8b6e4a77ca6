"""onward.export.parity: what counts as the same output, and how a difference is reported."""

import numpy as np
import pytest

from onward.errors import ParityError
from onward.export.parity import compare, merge

ONE = np.float32([1.0, -2.0, 0.0])

CASES = {
    "equal": (ONE, ONE, True),
    "within rtol of the largest element": (ONE, ONE + np.float32([0, 0, 1.5e-5]), True),
    "outside": (ONE, ONE + np.float32([0, 0, 1e-4]), False),
    "another shape": (ONE, ONE[:2], False),
    "a broadcastable shape": (ONE, ONE[None], False),
    "integers for floats": (ONE, ONE.astype(np.int64), False),
    "wider float": (ONE, ONE.astype(np.float64), True),
    "the same NaN": (np.float32([np.nan, 1]), np.float32([np.nan, 1]), True),
    "the same infinity": (np.float32([-np.inf, 1]), np.float32([-np.inf, 1]), True),
    "NaN for a number": (ONE, np.float32([1, np.nan, 0]), False),
    "infinity of the other sign": (np.float32([np.inf]), np.float32([-np.inf]), False),
    "empty": (np.zeros((0, 3)), np.zeros((0, 3)), True),
    "booleans": (np.array([True]), np.array([True]), True),
    "unequal booleans": (np.array([True]), np.array([False]), False),
    "all zeros against a number": (np.zeros(2), np.float64([0, 1]), False),
}


@pytest.mark.parametrize("reference, got, passes", CASES.values(), ids=CASES)
def test_outputs_agree_when_error_is_small_against_the_tensor(reference, got, passes):
    assert compare({"y": reference}, {"y": got}, rtol=1e-5, atol=1e-6).passed is passes


def test_a_missing_output_fails_and_an_extra_one_does_not():
    assert "missing" in str(compare({"y": ONE}, {"z": ONE}))
    assert compare({"y": ONE}, {"y": ONE, "z": ONE}).passed


def test_nothing_compared_is_no_proof():
    assert not compare({}, {"y": ONE}).passed


def test_figures_are_the_largest_over_outputs():
    report = compare({"a": ONE, "b": ONE}, {"a": ONE, "b": ONE + np.float32(0.5)}, rtol=0, atol=0)
    assert (report.max_abs, report.max_rel) == (0.5, 0.25)


def test_failure_raises_with_the_whole_report():
    fine, broken = compare({"a": ONE}, {"a": ONE}, case="batch 3"), compare({"b": ONE}, {"b": ONE * 2})
    with pytest.raises(ParityError, match=r"(?s)model 'm'.*ok   a \[3\] at batch 3.*FAIL b"):
        merge(fine, broken).raise_if_failed("model 'm'")


def test_an_overflow_of_the_originals_own_float32_is_reported_and_allows_nothing():
    exact = np.float64([1.0, 1e39, 2.0])
    plain = np.float32([1.0, np.inf, 2.0])
    report = compare({"y": exact}, {"y": np.float32([1.0, np.inf, 2.0])}, plain={"y": plain})
    assert report.passed and "own float32 is inf" in str(report)
    assert not compare({"y": exact}, {"y": np.float32([1.5, np.inf, 2.0])}, plain={"y": plain}).passed
    assert not compare({"y": exact}, {"y": np.float32([np.inf, np.inf, 2.0])}, plain={"y": plain}).passed


def test_equal_infinities_do_not_hide_the_originals_own_rounding():
    exact, plain = np.float64([-np.inf, 1.0]), np.float32([-np.inf, 1.001])
    assert compare({"y": exact}, {"y": np.float32([-np.inf, 0.998])}, plain={"y": plain}).passed
