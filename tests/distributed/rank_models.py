"""Small models with their artifacts and data, for the tests of training on several ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from onward import artifacts, onnxblock
from onward.runtime.devices import Device, why_not

__all__ = ["EMULATED", "MODELS", "NEEDS_CUDA", "build", "classifier", "points"]

# The device's way over the CPU provider: collectives work on the device's own memory.
EMULATED = Device("cpu", memory="device")
NEEDS_CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(why_not("cuda") is not None, reason="needs onnxruntime-gpu and a GPU that it can use"),
]

_CLASSIFIER = """
<ir_version: 10, opset_import: ["": 21]>
net (float[N, 4] x) => (float[N, 3] logits) {
    h = Gemm(x, w1, b1)
    a = Tanh(h)
    logits = Gemm(a, w2, b2)
}
"""


def classifier(folder: Path, *, ignore_index: int | None = None) -> Path:
    """Artifacts of a perceptron with 4 inputs and 3 classes."""
    generator = np.random.default_rng(0)
    model = onnx.parser.parse_model(_CLASSIFIER)
    for name, shape in {"w1": (4, 8), "b1": (8,), "w2": (8, 3), "b2": (3,)}.items():
        array = generator.normal(size=shape).astype(np.float32) * 0.5
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    artifacts.generate_artifacts(
        model,
        requires_grad=["w1", "b1", "w2", "b2"],
        loss=onnxblock.loss.CrossEntropyLoss(ignore_index=ignore_index),
        optimizer=onnxblock.optim.AdamW(clip_grad=onnxblock.optim.ClipGradNorm(0.5)),
        artifact_directory=folder,
        additional_output_names=["logits"],
    )
    return folder


def points(count: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points in four dimensions and their classes."""
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return x, np.argmax(x[:, :3] + 0.3 * x[:, 1:], axis=1).astype(np.int64)


_RESIDUAL = """
<ir_version: 10, opset_import: ["": 21]>
net (float[N, 3, 6, 6] x) => (float[N, 4] logits) {
    c0 = Conv<pads=[1, 1, 1, 1]>(x, conv0)
    n0, m0n, v0n = BatchNormalization<training_mode=1>(c0, scale0, bias0, mean0, var0)
    r0 = Relu(n0)
    c1 = Conv<pads=[1, 1, 1, 1]>(r0, conv1)
    n1, m1n, v1n = BatchNormalization<training_mode=1>(c1, scale1, bias1, mean1, var1)
    r1 = Relu(n1)
    c2 = Conv<pads=[1, 1, 1, 1]>(r1, conv2)
    n2, m2n, v2n = BatchNormalization<training_mode=1>(c2, scale2, bias2, mean2, var2)
    s2 = Add(n2, r0)
    r2 = Relu(s2)
    pooled = GlobalAveragePool(r2)
    flat = Flatten(pooled)
    logits = Gemm(flat, head, head_bias)
}
"""

_ENCODER = """
<ir_version: 10, opset_import: ["": 21]>
net (int64[N, 5] ids) => (float[N, 12, 5] scores) {
    zero = Constant<value = int64 {0}>()
    padding = Equal(ids, zero)
    e = Gather(embedding, ids)
    h0 = Add(e, position)
    q = MatMul(h0, wq)
    k = MatMul(h0, wk)
    v = MatMul(h0, wv)
    kt = Transpose<perm=[0, 2, 1]>(k)
    qk = MatMul(q, kt)
    axis = Constant<value = int64[1] {1}>()
    hidden = Unsqueeze(padding, axis)
    low = Constant<value = float {-10000.0}>()
    masked = Where(hidden, low, qk)
    p = Softmax<axis=-1>(masked)
    a = MatMul(p, v)
    h1 = Add(a, h0)
    n1 = LayerNormalization<axis=-1>(h1, gain1, shift1)
    f1 = MatMul(n1, up)
    f2 = Tanh(f1)
    f3 = MatMul(f2, down)
    h2 = Add(f3, n1)
    n2 = LayerNormalization<axis=-1>(h2, gain2, shift2)
    tied = Transpose<perm=[1, 0]>(embedding)
    words = MatMul(n2, tied)
    factor = Constant<value = float {0.0}>()
    visible = Where(hidden_last, factor, words)
    scores = Transpose<perm=[0, 2, 1]>(visible)
}
"""


def _residual() -> tuple[str, dict[str, tuple[int, ...]], list[str]]:
    shapes: dict[str, tuple[int, ...]] = {"head": (4, 4), "head_bias": (4,)}
    for layer, inside in enumerate((3, 4, 4)):
        shapes |= {f"conv{layer}": (4, inside, 3, 3), f"scale{layer}": (4,), f"bias{layer}": (4,)}
    moving = [f"{kind}{layer}" for layer in range(3) for kind in ("mean", "var")]
    return _RESIDUAL, {**shapes, **dict.fromkeys(moving, (4,))}, moving


def _encoder() -> tuple[str, dict[str, tuple[int, ...]], list[str]]:
    shapes = {"embedding": (12, 8), "position": (5, 8), "up": (8, 16), "down": (16, 8)}
    shapes |= dict.fromkeys(["wq", "wk", "wv"], (8, 8)) | dict.fromkeys(
        ["gain1", "shift1", "gain2", "shift2"], (8,)
    )
    last = "last = Constant<value = int64[1] {2}>() hidden_last = Unsqueeze(padding, last) factor ="
    return _ENCODER.replace("factor =", last, 1), shapes, []


MODELS = {"residual network": _residual, "encoder with tied embeddings": _encoder}


def build(name: str, folder: Path, *, samples: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Write a model's artifacts; returns inputs and labels."""
    generator = np.random.default_rng(1)
    text, shapes, moving = MODELS[name]()
    model = onnx.parser.parse_model(text)
    for parameter, shape in shapes.items():
        array = generator.normal(size=shape).astype(np.float32) * 0.4
        if parameter.startswith(("scale", "gain", "var")):
            array = np.abs(array) + 0.5
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), parameter))
    artifacts.generate_artifacts(
        model,
        requires_grad=[parameter for parameter in shapes if parameter not in moving],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=onnxblock.optim.SGD(clip_grad=onnxblock.optim.ClipGradNorm(1.0)),
        artifact_directory=folder,
        additional_output_names=[model.graph.output[0].name],
    )
    if name == "residual network":
        x = generator.normal(size=(samples, 3, 6, 6)).astype(np.float32)
        return x, generator.integers(0, 4, samples)
    ids = generator.integers(0, 12, (samples, 5))
    return ids, generator.integers(0, 12, (samples, 5))
