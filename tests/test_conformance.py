"""Conformance: what a runtime computes beside onnxruntime's CPU provider, and the report of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import pytest

from onward.conformance import (
    NETWORKS,
    Conformance,
    Run,
    check_conformance,
    onnxruntime_on,
    openvino,
    reference,
)
from onward.errors import DeviceError
from onward.runtime.operator_cases import operators_of


def test_onnx_reference_passes_the_whole_suite() -> None:
    """What we write is the standard, as its own implementation reads it; workarounds are for what that one lacks."""
    report = check_conformance(reference(), name="onnx.reference")
    assert [f"{row.subject}, {row.part}: {row.verdict}" for row in report.failures] == []
    assert report.passed
    forms = {form for several in report.workarounds for form in several.split(", ")}
    assert forms == {"forward scans", "depths of rank 0", "loop conditions", "groups apart"}
    subjects = {row.subject for row in report.rows}
    assert {network.name for network in NETWORKS} <= subjects
    assert len([row for row in report.rows if row.part == "backward"]) > 80


def wrong(operator: str) -> Run:
    """The CPU's provider, with an operator's results off by a hundredth wherever it is in a model."""
    right = onnxruntime_on("cpu")

    def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        outputs = right(model, feeds)
        off = any(node.op_type == operator for node in operators_of(model.graph))
        return [array * 1.01 if off and array.dtype == np.float32 else array for array in outputs]

    return run


@pytest.fixture(scope="module")
def broken() -> Conformance:
    return check_conformance(
        wrong("Tanh"), name="<broken>", environment={"device": "a & b"},
        subjects=lambda subject: subject in ("Tanh", "Sigmoid", "Scan", "MLP"),
    )  # fmt: skip


def test_what_is_wrong_is_named_with_its_part(broken: Conformance) -> None:
    assert not broken.passed
    assert {(row.subject, row.part) for row in broken.failures} == {
        ("Tanh", "forward"), ("Tanh", "backward"), ("Scan", "forward"), ("Scan", "backward"),
    }  # fmt: skip
    assert "0 failing" in broken.summary() and "4 wrong" in broken.summary()


def test_a_report_is_json_and_a_page(broken: Conformance) -> None:
    content = json.loads(broken.to_json())
    assert content["runtime"] == "<broken>" and content["environment"]["device"] == "a & b"
    assert content["passed"] is False and len(content["rows"]) == len(broken.rows)
    page = broken.to_html()
    assert "&lt;broken&gt;" in page and "a &amp; b" in page and "<broken>" not in page


def test_a_runtime_that_raises_fails_with_its_message() -> None:
    def refuse(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL : no kernel\nstack")

    report = check_conformance(refuse, subjects=lambda subject: subject == "Sign")
    assert [str(row.verdict) for row in report.rows] == ["fails: no kernel"]


def test_results_of_another_type_are_wrong() -> None:
    right = onnxruntime_on("cpu")
    report = check_conformance(
        lambda model, feeds: [np.asarray(array, np.float64) for array in right(model, feeds)],
        subjects=lambda subject: subject == "Shape",
    )
    assert not report.passed
    assert json.loads(report.to_json())["rows"][0]["difference"] is None  # infinite, which JSON does not have


def test_openvino_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "openvino", None)
    with pytest.raises(DeviceError, match="pip install openvino"):
        openvino()
