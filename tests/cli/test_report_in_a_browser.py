"""The report and the page of `onward inspect` open in a browser, without a network."""

from __future__ import annotations

import json
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
    assert "training_model" in shown["artifacts.html"] and "checksum verified" in shown["artifacts.html"]


def rendered(page: Path, profile: Path) -> str:
    """What the browser made of a page."""
    command = [str(BROWSER), *_FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(BROWSER is None, reason=NO_CHROMIUM)
def test_the_report_fits_a_phone(trained: Path, run: Any, tmp_path: Path) -> None:
    """Nothing but a table in its own scroll box is wider than a screen of 390 pixels."""
    run(
        "train", "artifacts", "-d", "data.npz", "--hold-out", 0.2, "-m", "accuracy", "-m", "auc", "--lr", "auto",
        "-o", "other",
    )  # fmt: skip
    page = Path("other/report.html").read_text(encoding="utf-8")
    measure = (
        "<script>const f = document.createElement('iframe'); f.style.width = '390px'; f.style.border = 0;"
        f"f.srcdoc = {json.dumps(page).replace('</', '<' + chr(92) + '/')};"
        "f.onload = () => { const d = f.contentDocument.documentElement;"
        "document.title = `wide ${d.scrollWidth} of ${d.clientWidth}`; }; document.body.append(f);</script>"
    )
    Path("other/frame.html").write_text(f"<!doctype html><body>{measure}</body>", encoding="utf-8")
    found = rendered(tmp_path / "other/frame.html", tmp_path / "profile")
    wide = re.search(r"wide (\d+) of (\d+)", found)
    assert wide is not None and int(wide[1]) <= int(wide[2]) <= 390, found[:400]
    assert "prefers-color-scheme: dark" in page and "Confusion matrix" in page
