"""A headless Chromium under the tests' control, through the node program beside this file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODULES = ROOT / "web" / "node_modules"

NO_CHROMIUM = (
    "needs Chromium, Chrome or Edge (Debian: apt-get install chromium; elsewhere: set CHROMIUM=path)"
)
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge", "chrome")
_PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
    "C:/Program Files/Google/Chrome/Application/chrome.exe",
    "C:/Program Files (x86)/Microsoft/Edge/Application/msedge.exe",
)


class BrowserError(AssertionError):
    """What the browser answered instead of doing it."""


def why_not() -> str | None:
    """What is missing for tests in a browser; None where nothing is."""
    if shutil.which("node") is None:
        return "needs Node.js with npm, which drives the browser (https://nodejs.org)"
    if executable() is None:
        return NO_CHROMIUM
    if not (MODULES / "playwright-core").is_dir():
        return "needs npm packages (make test gets them; by hand: npm ci --prefix web --ignore-scripts)"
    return None


def executable() -> str | None:
    """A Chromium, Chrome or Edge: the one that CHROMIUM names, on the path, or where systems put it."""
    named = os.environ.get("CHROMIUM")
    if named:
        return named
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    return found or next((place for place in _PLACES if Path(place).is_file()), None)


class Browser:
    """One page. Every method waits until the browser has done it."""

    def __init__(self) -> None:
        command = ["node", str(Path(__file__).with_name("driver.mjs")), str(MODULES), str(executable())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BrowserError("the browser's driver has ended")
        return json.loads(line)

    def __call__(self, command: str, **given: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **given}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        if "error" in answer:
            raise BrowserError(answer["error"])
        return answer["value"]

    def evaluate(self, source: str, argument: Any = None) -> Any:
        """The answer of a JavaScript function."""
        return self("evaluate", source=source, argument=argument)

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression holds."""
        self("wait", source=condition)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
