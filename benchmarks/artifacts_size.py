"""Time and memory of generate_artifacts: a transformer of 100 M parameters, and chains of many nodes.

    python benchmarks/artifacts_size.py

Each case runs in a process of its own, so that its peak is its own. Prints seconds, peak memory and how
many times the model's size that is, and the seconds per node of the chains.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def transformer(layers: int = 12, width: int = 768, words: int = 20_000) -> onnx.ModelProto:
    """An encoder of the shape of BERT-base: 12 layers of 7 M parameters and a table of 15 M."""
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> str:
        weights[name] = rng.standard_normal(shape, np.float32) * np.float32(0.02)
        return name

    def add(kind: str, inputs: list[str], **attributes: object) -> str:
        name = f"{kind}_{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        return name

    def linear(x: str, name: str, inputs: int, outputs: int) -> str:
        product = add("MatMul", [x, weight(f"{name}.weight", inputs, outputs)])
        return add("Add", [product, weight(f"{name}.bias", outputs)])

    def norm(x: str, name: str) -> str:
        return add(
            "LayerNormalization", [x, weight(f"{name}.weight", width), weight(f"{name}.bias", width)], axis=-1
        )

    x = add("Gather", [weight("embedding", words, width), "ids"])
    for layer in range(layers):
        prefix = f"layer.{layer}"
        q, k, v = (linear(x, f"{prefix}.{part}", width, width) for part in ("query", "key", "value"))
        scores = add("MatMul", [q, add("Transpose", [k], perm=[0, 2, 1])])
        mixed = add("MatMul", [add("Softmax", [scores], axis=-1), v])
        x = norm(add("Add", [x, linear(mixed, f"{prefix}.out", width, width)]), f"{prefix}.norm1")
        hidden = add("Gelu", [linear(x, f"{prefix}.up", width, 4 * width)])
        x = norm(add("Add", [x, linear(hidden, f"{prefix}.down", 4 * width, width)]), f"{prefix}.norm2")
    logits = linear(add("ReduceMean", [x, "one"], keepdims=0), "head", width, 2)
    nodes.append(helper.make_node("Identity", [logits], ["logits"]))
    weights["one"] = np.asarray([1])
    return _model(nodes, weights, "ids", TensorProto.INT64, ["batch", "length"], "logits", ["batch", 2])


def chain(count: int) -> onnx.ModelProto:
    """`count` nodes in a row, every other one with a parameter."""
    nodes, weights = [], {}
    for index in range(count):
        if index % 2:
            nodes.append(helper.make_node("Tanh", [f"v{index}"], [f"v{index + 1}"], f"n{index}"))
        else:
            weights[f"w{index}"] = np.full((4, 4), 0.1, np.float32)
            inputs = [f"v{index}", f"w{index}"]
            nodes.append(helper.make_node("MatMul", inputs, [f"v{index + 1}"], f"n{index}"))
    return _model(nodes, weights, "v0", TensorProto.FLOAT, ["batch", 4], f"v{count}", ["batch", 4])


def _model(nodes, weights, source, kind, dims, result, shape) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(source, kind, dims)],
        [helper.make_tensor_value_info(result, TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def peak_bytes() -> int:
    """The most memory that this process has had."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the parent of a new process, too
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(model: Path, folder: Path) -> dict[str, float]:
    """In this process: imports first, so that they are not counted."""
    from onward.artifacts import LossType, OptimType, generate_artifacts

    names = [name for name in json.loads((model.parent / "names.json").read_text()) if name != "one"]
    before = peak_bytes()
    start, used = time.perf_counter(), time.process_time()
    generate_artifacts(
        str(model),
        requires_grad=names,
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        artifact_directory=folder,
    )
    seconds, processor = time.perf_counter() - start, time.process_time() - used
    return {"seconds": seconds, "processor": processor, "peak": peak_bytes(), "before": before}


def run(model: onnx.ModelProto) -> dict[str, float]:
    """Measure one model in a new process; `size` is of its file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path)
        names = [tensor.name for tensor in model.graph.initializer]
        (Path(folder) / "names.json").write_text(json.dumps(names))
        command = [sys.executable, __file__, "--measure", str(path), str(Path(folder) / "out")]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return {**found, "size": path.stat().st_size}


def case(name: str, model: onnx.ModelProto) -> None:
    """Run one case and print a line about it."""
    found = run(model)
    nodes, size = len(model.graph.node), found["size"]
    line = f"{name:<20} {nodes:>6} nodes {size / 2**20:>6.1f} MiB {found['seconds']:>6.1f} s"
    line += f" {found['seconds'] / nodes * 1e3:>6.2f} ms/node  peak {found['peak'] / 2**20:>5.0f} MiB"
    if size > 2**26:  # imports and the like do not hide it
        line += f" = {found['peak'] / size:.2f} x the model ({found['before'] / 2**20:.0f} MiB are imports)"
    print(line)


def main() -> None:
    """Run all cases, or the one that this process was started for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--chains", action=argparse.BooleanOptionalAction, default=True, help="also long chains"
    )
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(Path(arguments.measure[0]), Path(arguments.measure[1]))))
        return
    case("transformer, 100 M", transformer())
    for count in (1_000, 5_000, 10_000) if arguments.chains else ():
        case(f"chain of {count}", chain(count))


if __name__ == "__main__":
    main()
