"""Small networks to quantize: convolutions with batch norms, and an encoder with an embedding table."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

PIXELS = (3, 16, 16)
WORDS, WIDTH, TOKENS = 300, 64, 8


class Network:
    """Collects nodes and weights."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, name: str, value: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
        return name

    def add(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
        return output

    def convolution(
        self, x: str, name: str, ins: int, outs: int, size: int, *, group: int = 1, stride: int = 1,
        spread: float = 1.0,
    ) -> str:  # fmt: skip
        """A convolution and its batch norm; channels differ in scale by up to `spread`."""
        shape = (outs, ins // group, size, size)
        scale = np.sqrt(2 / np.prod(shape[1:])) * np.geomspace(1, spread, outs).reshape(-1, 1, 1, 1)
        weight = self.weight(f"{name}.weight", self.random.normal(size=shape) * scale)
        pads = [size // 2] * 4
        y = self.add("Conv", [x, weight], f"{name}.conv", group=group, pads=pads, strides=[stride] * 2)
        statistics = {
            "scale": self.random.uniform(0.5, 1.5, outs), "bias": self.random.normal(size=outs) * 0.1,
            "mean": self.random.normal(size=outs) * 0.1, "var": self.random.uniform(0.5, 1.5, outs),
        }  # fmt: skip
        names = [self.weight(f"{name}.{key}", value) for key, value in statistics.items()]
        return self.add("BatchNormalization", [y, *names], f"{name}.norm")

    def model(self, inputs: list[Any], outputs: list[Any]) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "net", inputs, outputs, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def residual(seed: int = 0) -> onnx.ModelProto:
    """A residual block with a depthwise convolution and a bounded activation, pooled into ten scores."""
    net = Network(seed)
    for name, bound in (("low", 0), ("high", 6)):
        net.weights.append(numpy_helper.from_array(np.float32(bound), name))
    first = net.add("Relu", [net.convolution("x", "first", 3, 8, 3, stride=2)], "a")
    second = net.add("Clip", [net.convolution(first, "second", 8, 8, 3, group=8), "low", "high"], "b")
    third = net.convolution(second, "third", 8, 8, 1)
    net.add("Add", [first, third], "sum")
    fourth = net.add("Relu", [net.convolution("sum", "fourth", 8, 64, 3)], "d")
    net.add("GlobalAveragePool", [fourth], "pooled")
    net.add("Flatten", ["pooled"], "flat")
    net.weight("fc.weight", net.random.normal(size=(10, 64)) * 0.3)
    net.weight("fc.bias", net.random.normal(size=10) * 0.1)
    net.add("Gemm", ["flat", "fc.weight", "fc.bias"], "y", transB=1)
    return net.model(
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *PIXELS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 10])],
    )


def encoder(seed: int = 0) -> onnx.ModelProto:
    """Looked up words through two layers, the mean of them as a vector."""
    net = Network(seed)
    net.weight("table", net.random.normal(size=(WORDS, WIDTH)))
    net.weight("w1", net.random.normal(size=(WIDTH, 96)) * 0.15)
    net.weight("b1", net.random.normal(size=96) * 0.1)
    net.weight("w2", net.random.normal(size=(32, 96)) * 0.1)
    net.weight("b2", net.random.normal(size=32) * 0.1)
    net.add("Gather", ["table", "ids"], "words")
    net.add("MatMul", ["words", "w1"], "product")
    net.add("Add", ["product", "b1"], "inner")
    net.add("Tanh", ["inner"], "hidden")
    net.nodes.append(helper.make_node("ReduceMean", ["hidden"], ["mean"], name="mean", axes=[1], keepdims=0))
    net.add("Gemm", ["mean", "w2", "b2"], "y", transB=1)
    return net.model(
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", TOKENS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 32])],
    )


def pixels(count: int, seed: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(size=(count, *PIXELS)).astype(np.float32)}


def words(count: int, seed: int = 1) -> dict[str, np.ndarray]:
    return {"ids": np.random.default_rng(seed).integers(0, WORDS, (count, TOKENS))}
