"""The stored results, from which the page is made: one JSON file, section by section, case by case.

Keeps what was not run again, so that a part can be repeated. Says what machine and versions a section was
run on, and nothing that tells where or when.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from suite.section import Cases
    from suite.settings import Settings

__all__ = ["about", "load", "merge", "save"]


def load(path: Path) -> dict[str, Any]:
    """The stored results; none where there is no file yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def merge(stored: dict[str, Any], section: str, *, cases: Cases, about: dict[str, Any]) -> dict[str, Any]:
    """Results in which the cases that were run replace those of the same name."""
    kept = stored.get(section, {}).get("cases", {})
    return {**stored, section: {"about": about, "cases": {**kept, **cases}}}


def save(path: Path, results: dict[str, Any]) -> None:
    """Write the file, figures rounded to what they are good for."""
    text = json.dumps(_rounded(results), indent=1, ensure_ascii=False)
    path.write_text(_short_lists(text) + "\n", encoding="utf-8")


def about(settings: Settings) -> dict[str, Any]:
    """The machine, the threads and the versions."""
    packages = ("onnxruntime", "torch", "onnx", "numpy")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "threads": settings.threads,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _short_lists(text: str) -> str:
    """Lists of figures on one line each: a difference between two runs is readable then."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        stripped = line.strip()
        if inside:
            lines[-1] += stripped if stripped.startswith("]") else stripped.replace(",", ", ")
            inside = not stripped.startswith("]")
        else:
            lines.append(line)
            inside = stripped.endswith("[")
    return "\n".join(line.rstrip() for line in lines)
