"""What Onward adds to the runtime: a step over the bare run of its session, an update, imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from suite.figures import paragraph, table
from suite.section import Cases, Section

if TYPE_CHECKING:
    from suite.settings import Settings

__all__ = ["SECTION"]

SIZES = ((8, 4), (256, 32))
IMPORTS = ("import onward", "import onward.api", "import onnxruntime, onnx", "import torch")


def measure(settings: Settings) -> Cases:
    """Small networks on one thread, where all overhead shows; and new processes that import."""
    from overhead import import_seconds, steps

    cases: Cases = {f"{width}x{batch}": steps(width, batch) for width, batch in SIZES}
    return {**cases, "imports": {code: import_seconds(code) for code in IMPORTS}}


def render(cases: Cases) -> list[str]:
    """Microseconds of steps, seconds of imports."""
    rows = []
    for width, batch in SIZES:
        case = cases[f"{width}x{batch}"]
        bare, step, update = (case[kind] for kind in ("bare run", "module step", "optimizer step"))
        cells = (bare, step, step - bare, update)
        rows.append([f"width {width}, batch {batch}", *(f"{value:.1f}" for value in cells)])
    imports = [[f"`{code}`", f"{seconds:.3f}"] for code, seconds in cases["imports"].items()]
    return [
        paragraph(
            "Networks of two layers on one thread, in µs: the bare run of the session with everything bound, the "
            "step of `Module` around it, and the step of `Optimizer`. Imports are in seconds, less the start of "
            "Python."
        ),
        "",
        *table(["network", "bare run", "module step", "added", "optimizer step"], rows),
        "",
        *table(["import", "s"], imports),
    ]


SECTION = Section("overhead", "What Onward adds to the runtime", measure, render)
