"""Time of single operators in WebAssembly against Python, both with one thread: what a step in a browser can reach.

    python benchmarks/web_operators.py

Each model is a chain of one operator, so that what a run costs by itself counts little. onnxruntime-web runs in
Node.js, whose engine is Chromium's. Needs Node.js and `npm ci` in web/.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

ROOT = Path(__file__).parents[1]
LENGTH, RUNS, ROUNDS = 20, 15, 3
_HEAD = '<ir_version: 10, opset_import: ["": 18]>'
# operator with its inputs, their shapes (the first is the chain's), and attributes
CASES: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "MatMul 64×64×64": ("MatMul (x, w)", {"x": (64, 64), "w": (64, 64)}),
    "MatMul 256×512×512": ("MatMul (x, w)", {"x": (256, 512), "w": (512, 512)}),
    "Gemm 64×64×64, transposed": ("Gemm <transB = 1> (x, w)", {"x": (64, 64), "w": (64, 64)}),
    "Conv 64×8×8×8, 3×3": ("Conv <pads = [1, 1, 1, 1]> (x, w)", {"x": (64, 8, 8, 8), "w": (8, 8, 3, 3)}),
    "Conv 8×64×28×28, 3×3": (
        "Conv <pads = [1, 1, 1, 1]> (x, w)",
        {"x": (8, 64, 28, 28), "w": (64, 64, 3, 3)},
    ),
    "Mul, 2,048 numbers": ("Mul (x, w)", {"x": (64, 32), "w": (64, 32)}),
    "Mul, 280,000 numbers": ("Mul (x, w)", {"x": (64, 4400), "w": (64, 4400)}),
    "HardSigmoid, 280,000 numbers": ("HardSigmoid (x)", {"x": (64, 4400)}),
    "Softmax 512×128": ("Softmax (x)", {"x": (512, 128)}),
    "LayerNormalization 512×128": ("LayerNormalization (x, w)", {"x": (512, 128), "w": (128,)}),
    "ReduceMean and Add, 64×32": ("", {"x": (64, 32)}),
}


def chain(call: str, shapes: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    """The operator applied again and again to its own result."""
    inputs = ", ".join(f"float[{', '.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    lines, last = [], "x"
    for i in range(LENGTH):
        if call:
            lines.append(f"y{i} = {call.replace('(x', f'({last}')}")
        else:
            lines += [f"m{i} = ReduceMean <keepdims = 1> ({last}, axis)", f"y{i} = Add ({last}, m{i})"]
        last = f"y{i}"
    shape = ", ".join(map(str, shapes["x"]))
    axis = "" if call else "<int64[1] axis = {1}>"
    return onnx.parser.parse_model(
        f"{_HEAD} g ({inputs}) => (float[{shape}] {last}) {axis} {{ {' '.join(lines)} }}"
    )


def python_times(models: dict[str, Path], feeds: dict[str, dict[str, np.ndarray]]) -> dict[str, float]:
    """The least milliseconds of one operator."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    found = {}
    for name, path in models.items():
        session, least = ort.InferenceSession(path, options), float("inf")
        for _ in range(RUNS):
            started = time.perf_counter()
            session.run(None, feeds[name])
            least = min(least, time.perf_counter() - started)
        found[name] = 1e3 * least / LENGTH
    return found


_SCRIPT = """
const ort = await import("onnxruntime-web/wasm");
const { readFile } = await import("node:fs/promises");
const { cases, runs, length } = JSON.parse(await readFile(process.argv.at(-1), "utf8"));
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "error";
const found = {};
for (const { name, path, shapes } of cases) {
  const bytes = new Uint8Array(await readFile(path));
  const session = await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] });
  const feeds = {};
  for (const [key, dims] of Object.entries(shapes)) {
    const data = Float32Array.from({ length: dims.reduce((a, b) => a * b, 1) }, () => Math.random() - 0.5);
    feeds[key] = new ort.Tensor("float32", data, dims);
  }
  let least = Infinity;
  for (let i = 0; i < runs; i++) {
    const started = performance.now();
    await session.run(feeds);
    least = Math.min(least, performance.now() - started);
  }
  found[name] = least / length;
  await session.release();
}
console.log(JSON.stringify(found));
"""


def web_times(models: dict[str, Path], folder: Path) -> dict[str, float]:
    """The same in WebAssembly."""
    settings = folder / "cases.json"
    cases = [{"name": name, "path": str(path), "shapes": CASES[name][1]} for name, path in models.items()]
    settings.write_text(json.dumps({"cases": cases, "runs": RUNS, "length": LENGTH}))
    command = ["node", "--input-type=module", "--eval", _SCRIPT, "--", str(settings)]
    made = subprocess.run(command, cwd=ROOT / "web", capture_output=True, text=True, check=False)
    if made.returncode:
        sys.exit(
            f"Node.js failed: {made.stderr.strip().splitlines()[-1] if made.stderr else made.returncode}"
        )
    return json.loads(made.stdout.strip().splitlines()[-1])


def main() -> None:
    if shutil.which("node") is None or not (ROOT / "web" / "node_modules" / "onnxruntime-web").exists():
        sys.exit("web_operators needs Node.js and onnxruntime-web: run npm ci in web/")
    rng = np.random.default_rng(0)
    feeds = {
        name: {key: rng.random(shape, np.float32) - 0.5 for key, shape in shapes.items()}
        for name, (_, shapes) in CASES.items()
    }
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        models = {}
        for index, (name, (call, shapes)) in enumerate(CASES.items()):
            models[name] = folder / f"{index}.onnx"
            onnx.save(chain(call, shapes), models[name])
        here: dict[str, float] = {}
        there: dict[str, float] = {}
        for _ in range(ROUNDS):  # in turns; the least of all
            for best, found in ((here, python_times(models, feeds)), (there, web_times(models, folder))):
                for name, least in found.items():
                    best[name] = min(best.get(name, least), least)
    print(f"microseconds of one operator, one thread, least of {ROUNDS} × {RUNS} runs of {LENGTH}\n")
    print("| operator | Python | WebAssembly | ratio |\n|---|---:|---:|---:|")
    for name in CASES:
        print(
            f"| {name} | {1e3 * here[name]:.1f} | {1e3 * there[name]:.1f} | {there[name] / here[name]:.1f} |"
        )


if __name__ == "__main__":
    main()
