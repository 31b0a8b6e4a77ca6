"""Time of a training step in headless Chromium against Python, both with one thread, in one run.

    python benchmarks/web_step.py

The models are those of the browser tests, with batches of 64. A step is forward, backward and update. Needs
Chromium, Node.js and `npm ci` in web/.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from onward.api import CheckpointState, Module, Optimizer  # noqa: E402
from onward.web import write_site  # noqa: E402
from web.browser import MODULES, Browser, why_not  # noqa: E402
from web.conftest import serving  # noqa: E402
from web.models import MODELS, Data, make_data, write_artifacts  # noqa: E402

BATCH, STEPS, WARM = 64, 300, 50


def python_times(folder: Path, data: Data) -> list[float]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, session_options=options)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    taken = []
    for i in range(STEPS):
        part = slice((i % 10) * BATCH, (i % 10 + 1) * BATCH)
        x, labels = np.ascontiguousarray(data.x[part]), data.labels[part]
        started = time.perf_counter()
        module(x, labels)
        optimizer.step()
        module.lazy_reset_grad()
        taken.append(1000 * (time.perf_counter() - started))
    return taken


def main() -> None:
    if (missing := why_not()) is not None:
        sys.exit(f"web_step {missing}")
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        files: dict[str, bytes] = {}
        datasets = {name: make_data(name) for name in MODELS}
        for name, data in datasets.items():
            write_artifacts(name, folder / name)
            files |= {f"{name}/{path.name}": path.read_bytes() for path in (folder / name).iterdir()}
            files |= {f"{name}/x.bin": data.x.tobytes(), f"{name}/labels.bin": data.labels.tobytes()}
        page = ROOT / "tests" / "web" / "page"
        write_site(folder / "mlp", folder / "site", page=page, files=files, packages=MODULES)
        browser = Browser()
        print(f"median ms a step, batch {BATCH}, one thread, {STEPS - WARM} steps after {WARM}\n")
        print(f"{'model':10}{'Python':>10}{'Chromium':>10}{'ratio':>8}")
        try:
            with serving(folder / "site") as address:
                browser("goto", url=address)
                browser.wait("window.ready")
                for name, data in datasets.items():
                    there = browser.evaluate("harness.timing", {"name": name, "count": STEPS, "batch": BATCH})
                    here = python_times(folder / name, data)
                    py, js = (statistics.median(times[WARM:]) for times in (here, there))
                    print(f"{name:10}{py:10.2f}{js:10.2f}{js / py:8.1f}")
        finally:
            browser.close()


if __name__ == "__main__":
    main()
