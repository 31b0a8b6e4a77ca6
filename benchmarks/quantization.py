"""Float, quantized afterwards and trained for int8: accuracy, size and time of small classifiers and an encoder.

    python benchmarks/quantization.py [--threads 1] [--seeds 3]
    python benchmarks/quantization.py --generator [--steps 400]

Needs no files: the images are ten faint patterns in noise, the sentences random words whose mean decides. The
MobileNet-style network has narrow depthwise layers. Outliers are an eighth of the channels between two layers, whose
range is so many times the others': one range for all of them leaves most channels a few levels. Times are medians in
plain onnxruntime, of interleaved rounds. For the trained files a second table says how they agree with the training
graph on 1,000 inputs: node by node, and as the runtime fuses both, where integer sums round some ties to the other
side. `--generator` trains a small decoder of bytes in the shape of Llama on the source of Python's library, and
quantizes it to 4 bits.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from onward import artifacts
from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts.teacher import Distillation
from onward.export.inference import InferenceExport, for_inference
from onward.export.quantize import quantize
from onward.graph.load import load_model
from onward.graph.prune import prune

CLASSES, SIZE = 10, 16
WORDS, TOKENS = 300, 16
# the generator: its alphabet, context, width, width of a head, and layers
LETTERS, LENGTH, WIDTH, HEAD, LAYERS = 128, 128, 192, 32, 4
COMPARED = 1000  # inputs on which the trained file is compared with the training graph
Arrays = tuple[np.ndarray, np.ndarray]


# ---- data ------------------------------------------------------------------------------------------------


def images(count: int, seed: int) -> Arrays:
    """Faint patterns, one for each class, in noise."""
    random, fixed = np.random.default_rng(seed), np.random.default_rng(0)
    patterns = fixed.normal(size=(CLASSES, 3, SIZE, SIZE)).astype(np.float32)
    labels = random.integers(0, CLASSES, count)
    noise = random.normal(size=(count, 3, SIZE, SIZE)).astype(np.float32)
    return (0.35 * patterns[labels] + noise).astype(np.float32), labels


def sentences(count: int, seed: int) -> Arrays:
    """Words with a vector each; the label is the class that the mean of their vectors is nearest to."""
    random, fixed = np.random.default_rng(seed), np.random.default_rng(0)
    vectors, centers = fixed.normal(size=(WORDS, 16)), fixed.normal(size=(CLASSES, 16))
    ids = random.integers(0, WORDS, (count, TOKENS))
    return ids, (vectors[ids].mean(1) @ centers.T).argmax(1)


# ---- networks --------------------------------------------------------------------------------------------


class Network:
    """Collects nodes and weights."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}

    def add(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
        return output

    def weight(self, name: str, *shape: int) -> str:
        fan = int(np.prod(shape[1:])) if len(shape) > 1 else 0
        value = self.random.normal(size=shape) * np.sqrt(2 / fan) if fan else np.zeros(shape)
        self.weights[name] = value.astype(np.float32)
        return name

    def convolution(self, x: str, name: str, ins: int, outs: int, size: int = 3, **attributes: Any) -> str:
        group = attributes.pop("group", 1)
        stride = attributes.pop("stride", 1)
        weight, bias = (
            self.weight(f"{name}.weight", outs, ins // group, size, size),
            self.weight(f"{name}.bias", outs),
        )
        return self.add(
            "Conv", [x, weight, bias], f"{name}.conv", group=group, pads=[size // 2] * 4, strides=[stride] * 2
        )

    def model(
        self, name: str, kind: int, dims: list[Any], outputs: Sequence[int] = (CLASSES,)
    ) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes, name, [helper.make_tensor_value_info("x", kind, ["n", *dims])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", *outputs])],
            [numpy_helper.from_array(value, key) for key, value in self.weights.items()],
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def mobilenet(seed: int) -> onnx.ModelProto:
    """Depthwise blocks of 16 channels, whose two halves are joined: few channels, each of them needed."""
    net = Network(seed)
    x = net.add("Relu", [net.convolution("x", "stem", 3, 16, stride=2)], "stem")
    for index, outs in enumerate((16, 32, 64)):
        ins = 16 if index == 0 else (16, 32, 64)[index - 1]
        x = net.add("Relu", [net.convolution(x, f"wise{index}", ins, ins, group=ins)], f"wise{index}")
        x = net.add("Relu", [net.convolution(x, f"point{index}", ins, outs, 1)], f"point{index}")
    return _scores(net, x, 64 * (SIZE // 2) ** 2)


def resnet(seed: int) -> onnx.ModelProto:
    """Three residual blocks of 32 channels."""
    net = Network(seed)
    x = net.add("Relu", [net.convolution("x", "stem", 3, 32, stride=2)], "stem")
    for index in range(3):
        inner = net.add("Relu", [net.convolution(x, f"first{index}", 32, 32)], f"first{index}")
        total = net.add("Add", [x, net.convolution(inner, f"second{index}", 32, 32)], f"sum{index}")
        x = net.add("Relu", [total], f"block{index}")
    return _scores(net, x, 32 * (SIZE // 2) ** 2)


def _scores(net: Network, x: str, width: int) -> onnx.ModelProto:
    net.add("Flatten", [x], "flat")
    net.add(
        "Gemm",
        ["flat", net.weight("fc.weight", CLASSES, width), net.weight("fc.bias", CLASSES)],
        "y",
        transB=1,
    )
    return net.model("classifier", TensorProto.FLOAT, [3, SIZE, SIZE])


def encoder(seed: int) -> onnx.ModelProto:
    """Looked up words, two layers, and the mean of them."""
    net = Network(seed)
    net.weight("table", WORDS, 64)
    net.weights["table"] *= 8
    net.add("Gather", ["table", "x"], "words")
    net.add("MatMul", ["words", net.weight("w1", 64, 256)], "product")
    net.add("Relu", ["product"], "inner")
    net.add("MatMul", ["inner", net.weight("w2", 256, 64)], "outer")
    net.nodes.append(helper.make_node("ReduceMean", ["outer"], ["mean"], name="mean", axes=[1], keepdims=0))
    net.add(
        "Gemm", ["mean", net.weight("fc.weight", CLASSES, 64), net.weight("fc.bias", CLASSES)], "y", transB=1
    )
    return net.model("encoder", TensorProto.INT64, [TOKENS])


# Layers between which nothing but a Relu lies, and the axes of their weights that count the channels between them.
PAIRS = [
    *(("stem.weight", 0, "wise0.weight", 0), ("point0.weight", 0, "wise1.weight", 0)),
    *(("point1.weight", 0, "wise2.weight", 0), ("first0.weight", 0, "second0.weight", 1)),
    *(("first1.weight", 0, "second1.weight", 1), ("first2.weight", 0, "second2.weight", 1)),
    ("w1", 1, "w2", 0),
]


def spread_channels(model: onnx.ModelProto, factor: float) -> onnx.ModelProto:
    """Multiply an eighth of the channels between layers, and divide the layer behind them by it: the same answers."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}

    def scale(name: str, axis: int, by: np.ndarray) -> None:
        value = numpy_helper.to_array(tensors[name])
        shape = [1] * value.ndim
        shape[axis] = -1
        tensors[name].CopyFrom(numpy_helper.from_array((value * by.reshape(shape)).astype(np.float32), name))

    for first, outs, second, ins in PAIRS:
        if first in tensors and second in tensors:
            by = np.ones(tensors[first].dims[outs])
            by[::8] = factor
            scale(first, outs, by)
            bias = first.replace(".weight", ".bias")
            if bias != first:
                scale(bias, 0, by)
            scale(second, ins, 1 / by)
    return model


# ---- a generator -----------------------------------------------------------------------------------------


def library_text(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows of bytes of the source of Python's library: of most modules to train on, of the others to judge."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        content = path.read_bytes()
        parts[number % 10 == 0].append(bytes(byte for byte in content if byte < LETTERS))
    windows = []
    for part in parts:
        letters = np.frombuffer(b"".join(part), np.uint8).astype(np.int64)
        windows.append(letters[: len(letters) // length * length].reshape(-1, length))
    return windows[0], windows[1]


def generator(seed: int) -> onnx.ModelProto:
    """A decoder of bytes in the shape of Llama: rotary positions, RMS norms, gated layers."""
    net, heads, inner = Network(seed), WIDTH // HEAD, 3 * WIDTH // 128 * 128

    def constant(name: str, value: Any) -> str:
        array = np.asarray(value)
        net.weights[name] = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
        return name

    def product(x: str, name: str, ins: int, outs: int) -> str:
        constant(f"{name}.weight", net.random.normal(size=(ins, outs)) / np.sqrt(ins))
        return net.add("MatMul", [x, f"{name}.weight"], name)

    def norm(x: str, name: str) -> str:
        square = net.add("ReduceMean", [net.add("Mul", [x, x], f"{name}.square")], f"{name}.mean", axes=[-1])
        size = net.add("Sqrt", [net.add("Add", [square, "epsilon"], f"{name}.shifted")], f"{name}.size")
        unit = net.add("Div", [x, size], f"{name}.unit")
        return net.add("Mul", [unit, constant(f"{name}.weight", np.ones(WIDTH))], name)

    def turn(x: str, name: str) -> str:
        halves = [
            net.add("Slice", [x, *ends, "last"], f"{name}.{ends[0]}")
            for ends in (("zero", "half"), ("half", "whole"))
        ]
        other = net.add(
            "Concat", [net.add("Neg", [halves[1]], f"{name}.neg"), halves[0]], f"{name}.other", axis=-1
        )
        parts = [net.add("Mul", pair, f"{name}.{pair[1]}") for pair in ([x, "cos"], [other, "sin"])]
        return net.add("Add", parts, name)

    angles = np.outer(np.arange(LENGTH), 10000.0 ** (-np.arange(0, HEAD, 2) / HEAD))
    constant("cos", np.cos(np.tile(angles, 2)))
    constant("sin", np.sin(np.tile(angles, 2)))
    constant("mask", np.triu(np.full((LENGTH, LENGTH), -1e9), 1))
    constant("epsilon", np.asarray(1e-5))
    constant("scale", np.asarray(HEAD**-0.5))
    for name, value in {"zero": [0], "half": [HEAD // 2], "whole": [HEAD], "last": [-1]}.items():
        constant(name, value)
    constant("split", [0, LENGTH, heads, HEAD])
    constant("join", [0, LENGTH, WIDTH])
    x = net.add("Gather", [constant("table", net.random.normal(size=(LETTERS, WIDTH))), "x"], "embedded")
    for layer in range(LAYERS):
        at = f"layer{layer}"
        h = norm(x, f"{at}.norm1")
        q, k, v = (
            net.add("Transpose", [net.add("Reshape", [product(h, f"{at}.{n}", WIDTH, WIDTH), "split"], f"{at}.{n}.s")],
                    f"{at}.{n}.heads", perm=[0, 2, 1, 3])
            for n in "qkv"
        )  # fmt: skip
        k = net.add("Transpose", [turn(k, f"{at}.k.turned")], f"{at}.k.columns", perm=[0, 1, 3, 2])
        scores = net.add(
            "Mul", [net.add("MatMul", [turn(q, f"{at}.q.turned"), k], f"{at}.qk"), "scale"], f"{at}.scaled"
        )
        weights = net.add(
            "Softmax", [net.add("Add", [scores, "mask"], f"{at}.masked")], f"{at}.softmax", axis=-1
        )
        mixed = net.add(
            "Transpose", [net.add("MatMul", [weights, v], f"{at}.mixed")], f"{at}.rows", perm=[0, 2, 1, 3]
        )
        out = product(net.add("Reshape", [mixed, "join"], f"{at}.joined"), f"{at}.o", WIDTH, WIDTH)
        x = net.add("Add", [x, out], f"{at}.attended")
        h = norm(x, f"{at}.norm2")
        gate, up = product(h, f"{at}.gate", WIDTH, inner), product(h, f"{at}.up", WIDTH, inner)
        swish = net.add("Mul", [gate, net.add("Sigmoid", [gate], f"{at}.sigmoid")], f"{at}.swish")
        down = product(net.add("Mul", [swish, up], f"{at}.gated"), f"{at}.down", inner, WIDTH)
        x = net.add("Add", [x, down], f"{at}.out")
    # classes are on axis 1, as cross-entropy has them
    net.add("Transpose", [product(norm(x, "norm"), "head", WIDTH, LETTERS)], "y", perm=[0, 2, 1])
    return net.model("generator", TensorProto.INT64, [LENGTH], [LETTERS, LENGTH])


def compare_generator(folder: Path, *, seed: int, steps: int) -> dict[str, tuple[float, int]]:
    """Perplexity a byte and size: float, quantized afterwards, and after distillation on its own answers alone."""
    windows, held_out = library_text(LENGTH + 1)
    data = windows[:, :-1], windows[:, 1:]
    rate, files = 2e-3, {"float": folder / "float.onnx"}
    frozen = ["cos", "sin", "mask", "epsilon", "scale"]
    options: dict[str, Any] = {"seed": seed, "batch": 16, "compared": 4, "frozen_params": frozen}
    train(generator(seed), data, files["float"], steps=steps, rate=rate, **options)
    for scheme in ("int8-weights", "int4"):
        files[f"{scheme} afterwards"] = folder / f"{scheme}.onnx"
        quantize(files["float"], scheme, path=files[f"{scheme} afterwards"])
    files["int4 distilled"] = folder / "trained.onnx"
    train(
        onnx.load(files["float"]), data, files["int4 distilled"], steps=steps // 4, rate=rate / 10, quantize="int4",
        teacher=Distillation("self", weight=1, temperature=1, kind="scores"), **options,
    )  # fmt: skip
    chosen = held_out[np.random.default_rng(seed).permutation(len(held_out))[:128]]
    return {form: (perplexity(path, chosen), path.stat().st_size) for form, path in files.items()}


def perplexity(path: Path, windows: np.ndarray) -> float:
    """exp of the mean −log p of each byte after the first."""
    session, total = onnxruntime.InferenceSession(path), 0.0
    for start in range(0, len(windows), 16):
        part = windows[start : start + 16]
        scores = np.asarray(session.run(None, {"x": part[:, :-1]})[0], np.float64)
        logs = (
            scores
            - np.log(np.exp(scores - scores.max(1, keepdims=True)).sum(1, keepdims=True))
            - scores.max(1, keepdims=True)
        )
        total -= np.take_along_axis(logs, part[:, None, 1:], 1).sum()
    return float(np.exp(total / (len(windows) * (windows.shape[1] - 1))))


# ---- training and measuring ------------------------------------------------------------------------------


def train(
    model: onnx.ModelProto,
    data: Arrays,
    path: Path,
    *,
    steps: int,
    rate: float,
    seed: int,
    batch: int = 64,
    compared: int = COMPARED,
    **options: Any,
) -> None:
    """Train a model, for fewer bits where the options say so, and write it for inference."""
    x, y = data
    distilled = getattr(options.get("teacher"), "weight", 0) == 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifacts.generate_artifacts(
            model,
            loss=None if distilled else "cross-entropy",
            optimizer="adamw",
            artifact_directory=folder,
            **options,
        )
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
        optimizer = Optimizer(folder / "optimizer_model.onnx", module)
        random = np.random.default_rng(seed)
        module.train()
        for step in range(steps):
            optimizer.set_learning_rate(rate * (1 - step / steps))
            rows = random.integers(0, len(x), batch)
            module(x[rows], *([] if distilled else [y[rows]]))
            optimizer.step()
            module.lazy_reset_grad()
        written = for_inference(folder / "eval_model.onnx", state, ["y"], path, inputs={"x": x[:compared]})
        if written.integers is not None:
            write_agreement(path, folder / "eval_model.onnx", state, x[:compared], written)


def write_agreement(
    path: Path, eval_model: Path, state: CheckpointState, x: np.ndarray, written: InferenceExport
) -> None:
    """Compare the training graph's answers with the file's, node by node and as the runtime fuses it."""
    data = state.to_data()
    graph = prune(load_model(eval_model), ["y"])
    reads = {value.name for value in graph.graph.inputs}
    values = {name: array for name, array in {**data.trainable, **data.frozen}.items() if name in reads}
    plain = onnxruntime.SessionOptions()
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    trained = onnxruntime.InferenceSession(ir.to_proto(graph).SerializeToString(), plain)
    expected = np.asarray(trained.run(["y"], {"x": x, **values})[0])
    literal = np.asarray(onnxruntime.InferenceSession(path, plain).run(["y"], {"x": x})[0])
    peak, integers = np.abs(expected).max(), written.integers
    assert integers is not None
    apart = np.abs(literal - expected).reshape(len(x), -1).max(axis=1) / peak
    alike = f"{np.sum(apart <= 1e-4)} ({apart.max():.0e})"
    line = f"| {alike} | {integers.equal} ({integers.largest / peak:.0e}) |"
    path.with_suffix(".txt").write_text(line)


def measure(files: dict[str, Path], data: Arrays, threads: int) -> dict[str, tuple[float, int, float]]:
    """Accuracy, size and milliseconds of each file, for a batch of 32."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    sessions = {form: onnxruntime.InferenceSession(path, options) for form, path in files.items()}
    x, y = data
    times: dict[str, list[float]] = {form: [] for form in files}
    for _ in range(41):  # interleaved: another process slows all of them
        for form, session in sessions.items():
            start = time.perf_counter()
            session.run(None, {"x": x[:32]})
            times[form].append(time.perf_counter() - start)
    return {
        form: (
            float(np.mean(np.asarray(session.run(None, {"x": x})[0]).argmax(1) == y)),
            files[form].stat().st_size, 1e3 * float(np.median(times[form])),
        )
        for form, session in sessions.items()
    }  # fmt: skip


Case = tuple[Callable[[int], onnx.ModelProto], Callable[[int, int], Arrays], float]
CASES: dict[str, Case] = {
    **{f"MobileNet-style, outliers ×{factor}": (mobilenet, images, factor) for factor in (40, 44, 64)},
    **{f"ResNet-style, outliers ×{factor}": (resnet, images, factor) for factor in (1, 64)},
    **{f"encoder, outliers ×{factor}": (encoder, sentences, factor) for factor in (1, 64)},
}


def compare(
    name: str, folder: Path, *, seed: int, samples: int, threads: int
) -> dict[str, tuple[float, int, float]]:
    """Float, quantized afterwards, and trained for int8 from the same float model."""
    make, data_of, outliers = CASES[name]
    data, held_out = data_of(samples, 1 + 2 * seed), data_of(2000, 2 + 2 * seed)
    files = {"float": folder / "float.onnx"}
    train(make(seed), data, files["float"], steps=6 * samples // 64, rate=2e-3, seed=seed)
    model = onnx.load(files["float"])
    if outliers > 1:
        onnx.save(spread_channels(model, outliers), files["float"])
    scheme = "int8-static" if data_of is images else "int8"
    calibration = {"x": data[0][:256]}
    for form, options in {"afterwards, not balanced": {"equalize": False}, "afterwards": {}}.items():
        files[form] = folder / f"{form}.onnx"
        quantize(files["float"], scheme, path=files[form], calibration=calibration, **options)
    files["trained"] = folder / "trained.onnx"
    train(
        model, data, files["trained"], steps=3 * samples // 64, rate=1e-3, seed=seed, quantize=scheme,
        calibration=calibration, teacher=Distillation("self", weight=0.5),
    )  # fmt: skip
    return measure(files, held_out, threads)


def print_generator(seeds: int, steps: int) -> None:
    """The table of the generator."""
    print("| form | perplexity a byte, by seed | size |\n|---|---|---:|")
    rows: dict[str, list[tuple[float, int]]] = {}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            for form, row in compare_generator(Path(folder), seed=seed, steps=steps).items():
                rows.setdefault(form, []).append(row)
                print(seed, form, row, file=sys.stderr, flush=True)
    for form, measured in rows.items():
        shown = " / ".join(f"{value:.3f}" for value, _ in measured)
        print(f"| {form} | {shown} | {measured[0][1] / 1e6:.2f} MB |")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--generator", action="store_true", help="the generator alone")
    parser.add_argument("--steps", type=int, default=400, help="of the generator")
    arguments = parser.parse_args()
    if arguments.generator:
        print_generator(arguments.seeds, arguments.steps)
        return
    print("| network | form | accuracy by seed | size | batch of 32 |\n|---|---|---|---:|---:|")
    agreements = []
    for name in CASES:
        rows: dict[str, list[tuple[float, int, float]]] = {}
        for seed in range(arguments.seeds):
            with tempfile.TemporaryDirectory() as folder:
                options = {"samples": arguments.samples, "threads": arguments.threads}
                for form, row in compare(name, Path(folder), seed=seed, **options).items():
                    rows.setdefault(form, []).append(row)
                agreements.append(f"| {name}, seed {seed} {Path(folder, 'trained.txt').read_text()}")
        for form, measured in rows.items():
            accuracies, sizes, times = zip(*measured)
            shown = " / ".join(f"{100 * accuracy:.1f}" for accuracy in accuracies)
            size, milliseconds = sizes[0] / 1e3, float(np.median(times))
            print(f"| {name} | {form} | {shown} | {size:.0f} kB | {milliseconds:.2f} ms |", flush=True)
    title = f"rows of {COMPARED} that are equal (largest difference / largest answer)"
    print(f"\n| network | {title}, node by node | as the runtime fuses both |\n|---|---:|---:|")
    print("\n".join(agreements))


if __name__ == "__main__":
    main()
