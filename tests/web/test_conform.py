"""`onward conform` over a browser: onnxruntime-web beside onnxruntime's CPU provider."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import numpy as np
import onnx.parser
import pytest

from onward.conformance import check_conformance
from onward.errors import DeviceError
from onward.web import serving
from onward.web.serving import run_in_browser
from web.browser import MODULES

if TYPE_CHECKING:
    from web.browser import Browser

SUBJECTS = ("Tanh", "Less (a row broadcast)", "Equal (int64)", "Scan (backwards)", "MLP")


def open_page(browser: Browser, address: str) -> None:
    """Without waiting: the page is there once a server answers, in the thread that waits for it."""
    threading.Thread(target=lambda: browser("goto", url=address), daemon=True).start()


def test_onnxruntime_web_is_right_on_webassembly(browser: Browser) -> None:
    with run_in_browser("wasm", packages=MODULES, announce=lambda address: open_page(browser, address)) as (
        run,
        about,
    ):
        report = check_conformance(
            run, name="onnxruntime-web", environment=about, subjects=lambda name: name in SUBJECTS
        )
        broken = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) { y = Missing (x) }'
        )
        with pytest.raises(RuntimeError, match="Missing"):
            run(broken, {"x": np.zeros(2, np.float32)})
    assert {row.subject for row in report.rows} == set(SUBJECTS)
    assert report.passed and not report.workarounds
    assert "Chrom" in report.environment["browser"] and report.environment["onnxruntime-web"]


@pytest.mark.skipif(not os.environ.get("ONWARD_WEBGPU"), reason="takes a minute: set ONWARD_WEBGPU=1")
def test_onnxruntime_web_on_webgpu_needs_the_forms_that_sites_are_written_in(browser: Browser) -> None:
    with run_in_browser("webgpu", packages=MODULES, announce=lambda address: open_page(browser, address)) as (
        run,
        about,
    ):
        subjects = ("MatMul (matrix by column)", "BatchNormalization (training)", "Softmax")
        report = check_conformance(run, environment=about, subjects=lambda name: name in subjects)
    assert report.passed and report.environment["adapter"]
    assert "batch statistics" in report.workarounds


def test_nobody_opens_the_page(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_OPENING", 0.1)
    told: list[str] = []
    with (
        pytest.raises(DeviceError, match="no browser opened the page"),
        run_in_browser("wasm", packages=MODULES, announce=told.append),
    ):
        pass
    assert told[0].startswith("http://localhost:")
