"""LoRA on a language model in a browser: time to open, step time, bytes copied and memory.

    python benchmarks/web_language.py bases/135m/int4 [--threads 2] [--length 256] [--webgpu]

Writes the training models of the base (`write_language_artifacts`; `benchmarks/language_model.py` makes bases), serves
them, and trains with batches of 1 x LENGTH tokens in headless Chromium. Memory is the highest resident size of the
page's process that the kernel recorded (VmHWM, Linux). Losses are compared with Python's on the same batches. Needs
Node.js, Chromium and `npm ci` in web/.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from onward.api import CheckpointState, Module, Optimizer  # noqa: E402
from onward.language.finetune import write_language_artifacts  # noqa: E402
from onward.web import write_site  # noqa: E402
from web.browser import MODULES, Browser, why_not  # noqa: E402
from web.conftest import serving  # noqa: E402

PAGE = Path(__file__).parent / "web_page"
TRAIN = """async ({ rows, threads, provider, length, check }) => {
  const { CheckpointState, Module, Optimizer, Runtime } = await import("onward-web");
  const { copied, countOnHost } = await import("./copies.js");
  if (provider === "wasm") countOnHost(await import("onnxruntime-web/wasm"));
  const started = performance.now();
  const runtime = await Runtime.load({ threads, provider, check });
  const state = await CheckpointState.load("artifacts/checkpoint");
  const module = await Module.create("artifacts/training_model.onnx", state, null, { runtime });
  const optimizer = await Optimizer.create("artifacts/optimizer_model.onnx", module);
  optimizer.setLearningRate(2e-4);
  const opened = performance.now() - started;
  const losses = [], taken = [], copies = [];
  for (const row of rows) {
    const { up, down } = copied;
    const ids = { data: BigInt64Array.from(row, BigInt), dims: [1, length] };
    const given = {
      input_ids: ids, labels: ids, attention_mask: { data: new BigInt64Array(length).fill(1n), dims: [1, length] },
      position_ids: { data: BigInt64Array.from(row, (_, index) => BigInt(index)), dims: [1, length] },
    };
    const begun = performance.now();
    losses.push((await module.run(...module.inputNames().map((name) => given[name]))).loss);
    await optimizer.step();
    module.lazyResetGrad();
    taken.push(performance.now() - begun);
    copies.push([copied.up - up, copied.down - down]);
  }
  return {
    opened, losses, taken, copies, provider: runtime.provider, fallback: runtime.fallback ?? null, notes: runtime.notes,
  };
}"""


def python_losses(folder: Path, rows: np.ndarray) -> list[float]:
    """The losses of the same steps here."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(2e-4)
    losses = []
    for row in rows[:, None]:
        given = {
            "input_ids": row, "labels": row, "attention_mask": np.ones_like(row),
            "position_ids": np.arange(row.size)[None],
        }  # fmt: skip
        losses.append(float(np.asarray(module(*(given[name] for name in module.input_names())))))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


def peak_memory() -> float:
    """Megabytes of the largest process of Chromium's."""
    largest = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if "--type=renderer" in (path / "cmdline").read_text() and _is_ours(path):
                lines = (path / "status").read_text().splitlines()
                largest = max(
                    largest, next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
                )
        except (OSError, StopIteration):
            continue
    return largest / 1e3


def _is_ours(path: Path) -> bool:
    """Whether a process descends from this one."""
    while path.name not in ("0", "1"):
        if path.name == str(os.getpid()):
            return True
        lines = (path / "status").read_text().splitlines()
        path = Path("/proc") / next(line.split()[1] for line in lines if line.startswith("PPid"))
    return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument(
        "--unchecked", action="store_true", help="do not compare WebGPU with WebAssembly first"
    )
    parser.add_argument("--webgpu", action="store_true", help="where the browser has it")
    asked = parser.parse_args()
    if (missing := why_not()) is not None:
        sys.exit(f"web_language {missing}")
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        write_language_artifacts(asked.base, folder / "artifacts")
        words = json.loads((asked.base / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
        rows = np.random.default_rng(0).integers(0, len(words), (asked.steps, asked.length))
        files = {"models.json": b"[]", "copies.js": (ROOT / "tests/web/page/copies.js").read_bytes()}
        write_site(
            folder / "artifacts", folder / "site", page=PAGE, files=files, webgpu=True, packages=MODULES
        )
        with serving(folder / "site") as address:
            browser = Browser()
            try:
                browser("goto", url=address)
                browser.wait("window.ready")
                given = {
                    "rows": rows.tolist(), "threads": asked.threads, "length": asked.length,
                    "provider": "webgpu" if asked.webgpu else "wasm", "check": not asked.unchecked,
                }  # fmt: skip
                answer = browser.evaluate(TRAIN, given)
                answer["peak, MB"] = peak_memory()
            finally:
                browser.close()
        answer["Python's losses"] = python_losses(folder / "artifacts", rows)
    for name, value in answer.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
