"""Float, quantized afterwards and trained for int8: accuracy, size and time of small classifiers and an encoder.

    python benchmarks/quantization.py [--threads 1]

Needs no files: the images are ten faint patterns in noise, the sentences random words whose mean decides. The
MobileNet-style network has narrow depthwise layers, and a few channels whose range is 40 times the others': one range
for all of them leaves most channels a few levels. Times are medians in plain onnxruntime, of interleaved rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from onward import artifacts
from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts.teacher import Distillation
from onward.export import for_inference
from onward.export.quantize import quantize

CLASSES, SIZE = 10, 16
WORDS, TOKENS = 300, 16
Arrays = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Row:
    """One file: how often it is right, its bytes, and the time of a batch of 32."""

    network: str
    form: str
    accuracy: float
    size: int
    milliseconds: float


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

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
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

    def model(self, name: str, kind: int, dims: list[Any]) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes, name, [helper.make_tensor_value_info("x", kind, ["n", *dims])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", CLASSES])],
            [numpy_helper.from_array(value, key) for key, value in self.weights.items()],
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def mobilenet() -> onnx.ModelProto:
    """Depthwise blocks of 16 channels, whose two halves are joined: few channels, each of them needed."""
    net = Network()
    x = net.add("Relu", [net.convolution("x", "stem", 3, 16, stride=2)], "stem")
    for index, outs in enumerate((16, 32, 64)):
        ins = 16 if index == 0 else (16, 32, 64)[index - 1]
        x = net.add("Relu", [net.convolution(x, f"wise{index}", ins, ins, group=ins)], f"wise{index}")
        x = net.add("Relu", [net.convolution(x, f"point{index}", ins, outs, 1)], f"point{index}")
    return _scores(net, x, 64 * (SIZE // 2) ** 2)


def resnet() -> onnx.ModelProto:
    """Three residual blocks of 32 channels."""
    net = Network()
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


def encoder() -> onnx.ModelProto:
    """Looked up words, two layers, and the mean of them."""
    net = Network()
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


def spread_channels(model: onnx.ModelProto, factor: float) -> onnx.ModelProto:
    """Multiply an eighth of the channels before each depthwise layer, and divide that layer by it: the same answers."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}

    def scale(name: str, by: np.ndarray) -> None:
        value = numpy_helper.to_array(tensors[name])
        new = value * by.reshape(-1, *[1] * (value.ndim - 1))
        tensors[name].CopyFrom(numpy_helper.from_array(new.astype(np.float32), name))

    for index, before in enumerate(("stem", "point0", "point1")):
        channels = len(numpy_helper.to_array(tensors[f"{before}.bias"]))
        by = np.ones(channels)
        by[::8] = factor
        for kind in ("weight", "bias"):
            scale(f"{before}.{kind}", by)
        scale(f"wise{index}.weight", 1 / by)
    return model


# ---- training and measuring ------------------------------------------------------------------------------


def train(
    model: onnx.ModelProto, data: Arrays, path: Path, *, epochs: int, rate: float, **options: Any
) -> Path:
    """Train a model, for int8 where the options say so, and write it for inference."""
    x, y = data
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifacts.generate_artifacts(
            model, loss="cross-entropy", optimizer="adamw", artifact_directory=folder, **options
        )
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
        optimizer = Optimizer(folder / "optimizer_model.onnx", module)
        random, batch = np.random.default_rng(0), 64
        steps = epochs * (len(x) // batch)
        module.train()
        for step in range(steps):
            optimizer.set_learning_rate(rate * (1 - step / steps))
            rows = random.integers(0, len(x), batch)
            module(x[rows], y[rows])
            optimizer.step()
            module.lazy_reset_grad()
        for_inference(folder / "eval_model.onnx", state, ["y"], path, inputs={"x": x[:32]})
    return path


def measure(network: str, files: dict[str, Path], data: Arrays, threads: int) -> list[Row]:
    """Accuracy, size and time of each file."""
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
    return [
        Row(
            network, form, float(np.mean(session.run(None, {"x": x})[0].argmax(1) == y)),
            files[form].stat().st_size, 1e3 * float(np.median(times[form])),
        )
        for form, session in sessions.items()
    ]  # fmt: skip


Case = tuple[Callable[[], onnx.ModelProto], Callable[[int, int], Arrays], float]
CASES: dict[str, Case] = {
    "MobileNet-style, outlier channels": (mobilenet, images, 40.0),
    "ResNet-style": (resnet, images, 1.0),
    "encoder": (encoder, sentences, 1.0),
}


def compare(name: str, folder: Path, *, samples: int = 4096, threads: int = 1) -> list[Row]:
    """Float, quantized afterwards, and trained for int8 from the same float model."""
    make, data_of, outliers = CASES[name]
    data, held_out = data_of(samples, 1), data_of(2000, 2)
    files = {"float": train(make(), data, folder / "float.onnx", epochs=6, rate=2e-3)}
    model = onnx.load(files["float"])
    if outliers > 1:
        onnx.save(spread_channels(model, outliers), files["float"])
    scheme = "int8-static" if data_of is images else "int8"
    calibration = {"x": data[0][:256]}
    for form, options in {"int8 afterwards": {}, "int8 afterwards, balanced": {"equalize": True}}.items():
        if options and data_of is not images:
            continue
        path = folder / f"{form}.onnx"
        quantize(files["float"], scheme, path=path, calibration=calibration, **options)
        files[form] = path
    files["trained for int8"] = train(
        model, data, folder / "trained.onnx", epochs=3, rate=1e-3, quantize=scheme,
        calibration=calibration, teacher=Distillation("self", weight=0.5),
    )  # fmt: skip
    return measure(name, files, held_out, threads)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    print("| network | form | accuracy | size | batch of 32 |\n|---|---|---|---|---|")
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            for row in compare(name, Path(folder), threads=arguments.threads):
                cells = f"{row.accuracy:.1%} | {row.size / 1e3:.0f} kB | {row.milliseconds:.2f} ms"
                print(f"| {row.network} | {row.form} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
