"""The report and the page of `onward inspect` open in a browser, without a network."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from web.browser import NO_CHROMIUM, executable

_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
]  # fmt: skip
BROWSER = executable()


@pytest.mark.skipif(BROWSER is None, reason=NO_CHROMIUM)
def test_pages_open(trained: Path, run: Any, tmp_path: Path) -> None:
    run("inspect", "artifacts", "--html", "artifacts.html")
    shown = {
        name: rendered(tmp_path / name, tmp_path / "profile")
        for name in ("run/report.html", "artifacts.html")
    }
    report = shown["run/report.html"]
    assert "<h1>Training of artifacts</h1>" in report
    titles = re.findall(r"<h2>([^<]+)</h2>", report)
    assert {"Loss", "Learning rate", "Gradient norm", "Epochs", "Settings", "Environment", "Files"} <= set(
        titles
    )
    assert report.count("<polyline") >= 4
    assert "training_model" in shown["artifacts.html"] and "digest verified" in shown["artifacts.html"]


def rendered(page: Path, profile: Path) -> str:
    """What the browser made of a page."""
    command = [str(BROWSER), *_FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
