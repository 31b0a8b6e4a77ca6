"""Time of a training step in a browser against Python, both with one thread, and the bytes that a step copies.

    python benchmarks/web_step.py [--webgpu] [--serve]

Runs the page of `benchmarks/web_page` in headless Chromium, in turns with Python; `--serve` serves it instead, for any
browser. The models are those of the browser tests, with batches of 64. A step is forward, backward and update.
`--webgpu` measures WebGPU too, in software where there is no other. Bytes are those between page and WebAssembly, or
to the GPU and back, without what kernels are called with. Needs Node.js and `npm ci` in web/, and Chromium unless the
page is only served.
"""

from __future__ import annotations

import argparse
import json
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
from web.conftest import for_webgpu, serving  # noqa: E402
from web.models import MODELS, Data, make_data, write_artifacts  # noqa: E402

BATCH, STEPS = 64, 300
# the share of the steps that is not counted
WARM = 1 / 6
PAGE = Path(__file__).parent / "web_page"


def python_time(folder: Path, data: Data, steps: int) -> float:
    """The median of the steps in milliseconds."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, session_options=options)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    taken, count = [], len(data.labels) // BATCH
    for i in range(steps):
        part = slice((i % count) * BATCH, (i % count + 1) * BATCH)
        x, labels = np.ascontiguousarray(data.x[part]), data.labels[part]
        started = time.perf_counter()
        module(x, labels)
        optimizer.step()
        module.lazy_reset_grad()
        taken.append(1000 * (time.perf_counter() - started))
    return statistics.median(taken[int(WARM * steps) :])


def write(folder: Path, steps: int) -> dict[str, Data]:
    """Write the site with the artifacts and the data of every model; the data by model."""
    files: dict[str, bytes] = {}
    datasets = {name: make_data(name) for name in MODELS}
    listed = []
    for name, data in datasets.items():
        write_artifacts(name, folder / name)
        files |= {f"{name}/{path.name}": path.read_bytes() for path in (folder / name).iterdir()}
        files |= {f"{name}-webgpu/{path.name}": for_webgpu(path) for path in (folder / name).iterdir()}
        files |= {f"{name}/x.bin": data.x.tobytes(), f"{name}/labels.bin": data.labels.tobytes()}
        listed.append(
            {
                "name": name, "dims": data.x.shape[1:], "integers": data.x.dtype.kind == "i", "batch": BATCH,
                "steps": steps, "warm": int(WARM * steps), "python": python_time(folder / name, data, steps),
            }
        )  # fmt: skip
    files["models.json"] = json.dumps(listed).encode()
    files["copies.js"] = (ROOT / "tests" / "web" / "page" / "copies.js").read_bytes()
    write_site(folder / "mlp", folder / "site", page=PAGE, files=files, webgpu=True, packages=MODULES)
    return datasets


def compare(
    folder: Path, datasets: dict[str, Data], address: str, *, providers: list[str], steps: int
) -> None:
    browser = Browser()
    print(f"median ms a step, batch {BATCH}, one thread, of {steps} steps but the first sixth\n")
    print("| model | on | Python, ms | browser, ms | ratio | parameters, kB | there, kB | back, kB |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    try:
        for provider in providers:
            browser("goto", url=address)
            browser.wait("window.ready")
            for name, data in datasets.items():
                there = browser.evaluate("window.measure", {"name": name, "provider": provider})[name]
                here = python_time(folder / name, data, steps)  # again, at the same time as the browser
                state = CheckpointState.load_checkpoint(folder / name / "checkpoint")
                size = sum(p.data.nbytes for _, p in state.parameters)
                print(
                    f"| {name} | {provider} | {here:.2f} | {there['time']:.2f} | {there['time'] / here:.1f} "
                    f"| {size / 1e3:.1f} | {there['up'] / 1e3:.1f} | {there['down'] / 1e3:.1f} |",
                    flush=True,
                )
    finally:
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--webgpu", action="store_true", help="measure WebGPU too")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="how many, of which the first sixth does not count"
    )
    parser.add_argument("--serve", action="store_true", help="serve the page for a browser of your own")
    settings = parser.parse_args()
    if not settings.serve and (missing := why_not()) is not None:
        sys.exit(f"web_step {missing}")
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        datasets = write(folder, settings.steps)
        with serving(folder / "site") as address:
            if not settings.serve:
                providers = ["wasm", *(["webgpu"] if settings.webgpu else [])]
                compare(folder, datasets, address, providers=providers, steps=settings.steps)
                return
            print(f"open {address} and press Start; Ctrl-C ends it")
            try:
                while True:
                    time.sleep(3600)
            except KeyboardInterrupt:
                return


if __name__ == "__main__":
    main()
