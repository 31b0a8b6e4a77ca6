"""WebGPU by choice: the same losses where it can run a model, WebAssembly where it cannot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from web.test_training import python_curve

if TYPE_CHECKING:
    from web.browser import Browser

# (model, whether WebGPU is hidden, what it runs on, what is said)
CASES = [
    ("mlp", False, "webgpu", None),
    ("cnn", False, "wasm", "WebGPU cannot run the model"),  # batch norm in training mode
    ("mlp", True, "wasm", "this browser offers no WebGPU"),
]


@pytest.mark.parametrize(("name", "hidden", "provider", "said"), CASES)
def test_webgpu_or_what_stands_in_for_it(
    harness: Browser, models: dict[str, Path], name: str, hidden: bool, provider: str, said: str | None
) -> None:
    if not hidden and not os.environ.get("ONWARD_WEBGPU"):
        pytest.skip("WebGPU in software takes 20 s: set ONWARD_WEBGPU=1 to run it")
    found = harness.evaluate("harness.webgpu", {"name": name, "count": 4, "hidden": hidden})
    assert found["provider"] == provider
    assert (found["fallback"] or "").startswith(said or "")
    assert (found["fallback"] is None) == (said is None)
    losses, _ = python_curve(models[name], name, count=4)
    np.testing.assert_allclose(found["losses"], losses, rtol=0, atol=1e-4)
