"""The models that browser and Python train side by side, and one batch after another for them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx.parser

from onward import artifacts
from onward.graph import save
from onward.lora import LoRA
from onward.onnxblock import optim as onblock_optim

_HEAD = '<ir_version: 10, opset_import: ["": 18]>'
_MLP = """
mlp (float[batch, 64] x) => (float[batch, 10] logits)
<float rate = {0.1}, bool training = {1}> {
    a = Gemm <transB = 1> (x, w1, b1)
    b = Relu (a)
    c = Dropout (b, rate, training)
    logits = Gemm <transB = 1> (c, w2, b2)
}"""
_CNN = """
cnn (float[batch, 1, 8, 8] x) => (float[batch, 10] logits)
<int64[2] flat = {0, -1}> {
    a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, conv1)
    b, mean_next, var_next = BatchNormalization <training_mode = 1> (a, scale, bias, mean, var)
    c = Relu (b)
    d = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (c)
    e = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (d, conv2, conv2_bias)
    f = Relu (e)
    g = Reshape (f, flat)
    logits = Gemm <transB = 1> (g, fc, fc_bias)
}"""
_ENCODER = """
encoder (int64[batch, length] x) => (float[batch, 4] logits)
<int64[4] split = {0, 0, 2, 8}, int64[3] merge = {0, 0, 16}, float root = {0.3535534}, int64[1] one = {1}> {
    e = Gather (tokens, x)
    q0 = MatMul (e, wq)  k0 = MatMul (e, wk)  v0 = MatMul (e, wv)
    q1 = Reshape (q0, split)  k1 = Reshape (k0, split)  v1 = Reshape (v0, split)
    q = Transpose <perm = [0, 2, 1, 3]> (q1)
    k = Transpose <perm = [0, 2, 3, 1]> (k1)
    v = Transpose <perm = [0, 2, 1, 3]> (v1)
    s0 = MatMul (q, k)  s1 = Mul (s0, root)  s = Softmax <axis = -1> (s1)
    h0 = MatMul (s, v)
    h1 = Transpose <perm = [0, 2, 1, 3]> (h0)
    h2 = Reshape (h1, merge)
    h3 = MatMul (h2, wo)
    h4 = Add (h3, e)
    n1 = LayerNormalization <axis = -1> (h4, ln1_scale, ln1_bias)
    f0 = MatMul (n1, up)  f1 = Add (f0, up_bias)
    t0 = Mul (f1, root)  t1 = Erf (t0)  f2 = Mul (f1, t1)
    f3 = MatMul (f2, down)
    f4 = Add (f3, n1)
    n2 = LayerNormalization <axis = -1> (f4, ln2_scale, ln2_bias)
    pooled = ReduceMean <keepdims = 0> (n2, one)
    logits = Gemm <transB = 1> (pooled, head, head_bias)
}"""
_LSTM = """
lstm (float[batch, length, 8] x) => (float[batch, 10] logits)
<int64[1] way = {0}> {
    steps = Transpose <perm = [1, 0, 2]> (x)
    all, last = LSTM <hidden_size = 16> (steps, weights, recurrent, lstm_bias)
    h = Squeeze (last, way)
    logits = Gemm <transB = 1> (h, head, head_bias)
}"""
_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "mlp": {"w1": (32, 64), "b1": (32,), "w2": (10, 32), "b2": (10,)},
    # with a base that is a constant, in a file beside the models
    "based": {"w1": (32, 64), "b1": (32,), "w2": (10, 32), "b2": (10,)},
    # more parameters than one run of the optimizer takes
    "wide": {"w1": (4400, 64), "b1": (4400,), "w2": (10, 4400), "b2": (10,)},
    "cnn": {"conv1": (8, 1, 3, 3), "scale": (8,), "bias": (8,), "mean": (8,), "var": (8,),
            "conv2": (16, 8, 3, 3), "conv2_bias": (16,), "fc": (10, 64), "fc_bias": (10,)},
    "encoder": {"tokens": (30, 16), "wq": (16, 16), "wk": (16, 16), "wv": (16, 16), "wo": (16, 16),
                "ln1_scale": (16,), "ln1_bias": (16,), "up": (16, 32), "up_bias": (32,), "down": (32, 16),
                "ln2_scale": (16,), "ln2_bias": (16,), "head": (4, 16), "head_bias": (4,)},
    "lstm": {"weights": (1, 64, 8), "recurrent": (1, 64, 16), "lstm_bias": (1, 128), "head": (10, 16),
             "head_bias": (10,)},
    # adapters beside an MLP that does not change
    "lora": {"w1": (32, 64), "b1": (32,), "w2": (10, 32), "b2": (10,)},
}  # fmt: skip
_TEXTS = {
    "mlp": _MLP, "based": _MLP, "wide": _MLP, "cnn": _CNN, "encoder": _ENCODER, "lstm": _LSTM, "lora": _MLP,
}  # fmt: skip
_CLASSES = dict.fromkeys(_TEXTS, 10) | {"encoder": 4}
_SAMPLES = {"cnn": (1, 8, 8), "lstm": (8, 8)}
MODELS = tuple(_TEXTS)
# files of the MLP besides its own optimizer model: rules that see whole parameters, momentum, clipping
OPTIMIZERS: dict[str, Any] = {
    "lamb_": onblock_optim.Lamb(),
    "adafactor_": onblock_optim.Adafactor(),
    "sgd_": onblock_optim.SGD(onblock_optim.ClipGradNorm(0.5), momentum=0.9),
}


@dataclasses.dataclass(frozen=True)
class Data:
    """All batches of a run, one after another."""

    x: np.ndarray
    labels: np.ndarray


def forward_model(name: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(_HEAD + _TEXTS[name])
    rng = np.random.default_rng(1)
    for parameter, shape in _SHAPES[name].items():
        if "scale" in parameter or parameter == "var":
            array = np.ones(shape)
        elif len(shape) == 1:
            array = np.zeros(shape)
        else:
            array = rng.normal(0, 1 / np.sqrt(np.prod(shape[1:])), shape)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), parameter))
    return model


def write_artifacts(
    name: str, folder: Path, *, optimizer: Any = artifacts.OptimType.AdamW, prefix: str = ""
) -> Path:
    frozen = [parameter for parameter in _SHAPES[name] if parameter in ("mean", "var")]
    constant = ["w1"] if name == "based" else []
    lora = LoRA(rank=4) if name == "lora" else None
    trained = [p for p in _SHAPES[name] if p not in frozen + constant]
    shared = 0 if constant else save._SHARED  # as if the constants took 128 MiB
    with mock.patch.object(save, "_SHARED", shared):
        artifacts.generate_artifacts(
            forward_model(name),
            requires_grad=[] if lora else trained,
            frozen_params=frozen,
            lora=lora,
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=optimizer,
            artifact_directory=folder,
            prefix=prefix,
        )
    assert bool(list(folder.glob(f"{prefix}constants.*.data"))) == bool(constant)
    return folder


def make_data(name: str, *, batches: int = 100, batch: int = 16, seed: int = 0) -> Data:
    """Samples whose label can be learned from them."""
    rng = np.random.default_rng(seed)
    classes, count = _CLASSES[name], batches * batch
    labels = rng.integers(0, classes, count)
    if name == "encoder":
        x = rng.integers(0, 30, (count, 6))
        x[:, 0] = labels
        return Data(x.astype(np.int64), labels)
    centres = np.random.default_rng(99).normal(size=(classes, 64))
    x = centres[labels] + rng.normal(0, 0.7, (count, 64))
    return Data(x.astype(np.float32).reshape(count, *_SAMPLES.get(name, (64,))), labels)
