"""RNN, GRU and LSTM with every attribute, against torch autograd through a plain reading of the standard.

ONNX's evaluator lacks most attributes and onnxruntime's operators have no float64, so finite differences
(`cases_recurrent.py`) reach the plain forms only.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from onward.autodiff.gradient import vector_jacobian

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
STEPS, BATCH, INPUT, HIDDEN = 4, 3, 2, 3
WITH_ALPHA = {"Affine", "LeakyRelu", "ThresholdedRelu", "ScaledTanh", "HardSigmoid", "Elu"}
WITH_BETA = {"Affine", "ScaledTanh", "HardSigmoid"}

OPTIONS = {
    "plain": {},
    "reverse": {"direction": "reverse"},
    "bidirectional": {"direction": "bidirectional", "bias": True, "initial": True},
    "bias and initial state": {"bias": True, "initial": True},
    "lengths": {"lengths": [4, 2, 1], "bias": True, "initial": True},
    "lengths, reverse": {"lengths": [4, 2, 3], "direction": "reverse", "initial": True},
    "lengths, bidirectional": {"lengths": [1, 4, 2], "direction": "bidirectional", "initial": True},
    "batch first": {"layout": 1, "bias": True, "initial": True},
    "batch first, bidirectional": {"layout": 1, "direction": "bidirectional", "initial": True},
    "clip": {"clip": 0.4, "bias": True},
    "last state only": {"of": ["Y_h"]},
    "sequence only": {"of": ["Y"], "direction": "bidirectional"},
    "symbolic": {"symbolic": True, "bias": True, "direction": "bidirectional"},
    "symbolic, lengths": {"symbolic": True, "lengths": [4, 2, 1], "layout": 0},
}
ONLY = {
    "LSTM": {
        "peepholes": {"peepholes": True, "bias": True, "initial": True},
        "peepholes, lengths": {"peepholes": True, "lengths": [2, 4, 1], "direction": "bidirectional"},
        "input_forget": {"input_forget": 1, "bias": True, "initial": True},
        "input_forget, peepholes": {"input_forget": 1, "peepholes": True},
        "cell state only": {"of": ["Y_c"]},
    },
    "GRU": {
        "linear": {"linear_before_reset": 1, "bias": True, "initial": True},
        "linear, lengths": {
            "linear_before_reset": 1,
            "bias": True,
            "lengths": [2, 4, 1],
            "direction": "bidirectional",
        },
        "linear, no bias, clip": {"linear_before_reset": 1, "clip": 0.4},
        "linear, batch first": {"linear_before_reset": 1, "layout": 1, "direction": "reverse"},
    },
    "RNN": {
        name: {"activations": [name], "activation_alpha": [0.6], "activation_beta": [0.4], "bias": True}
        for name in [
            "Relu", "Affine", "LeakyRelu", "ThresholdedRelu", "ScaledTanh", "HardSigmoid", "Elu", "Softsign",
            "Softplus",
        ]
    },
}  # fmt: skip
ONLY["GRU"]["activations"] = {
    "activations": ["HardSigmoid", "ScaledTanh", "Sigmoid", "LeakyRelu"],
    "activation_alpha": [0.3, 0.9, 0.2],
    "activation_beta": [0.4, 0.8],
    "direction": "bidirectional",
}
ONLY["LSTM"]["activations"] = {
    "activations": ["HardSigmoid", "Elu", "Softsign"],
    "activation_alpha": [0.3, 0.9],
    "peepholes": True,
}
CASES = [
    pytest.param(op, options, id=f"{op}-{name}")
    for op in GATES
    for name, options in (OPTIONS | ONLY[op]).items()
]


@pytest.mark.parametrize("op, options", CASES)
def test_gradients_equal_autograd(op, options):
    model, feeds = _model(op, options)
    outputs = [value.name for value in model.graph.output]
    tensors = {
        name: torch.tensor(array.astype(np.float64), requires_grad=True)
        for name, array in feeds.items()
        if array.dtype == np.float32
    }
    expected = _oracle(op, options, tensors)
    if not options.get("layout"):
        ran = _session(model).run(None, feeds)
        for name, array in zip(outputs, ran):
            np.testing.assert_allclose(array, expected[name].detach().numpy(), rtol=1e-4, atol=1e-6)
    rng = np.random.default_rng(1)
    weights = {name: rng.uniform(0.5, 1.5, tuple(expected[name].shape)) for name in outputs}
    total = sum((expected[name] * torch.tensor(weight)).sum() for name, weight in weights.items())
    wanted = torch.autograd.grad(total, list(tensors.values()), allow_unused=True)

    derived, _, _ = vector_jacobian(model, wrt=list(tensors))
    onnx.checker.check_model(derived, full_check=True)
    cotangents = {f"{name}_cotangent": weight.astype(np.float32) for name, weight in weights.items()}
    known = {value.name for value in derived.graph.input}
    ran = _session(derived).run(None, {k: v for k, v in (feeds | cotangents).items() if k in known})
    for output, array, gradient in zip(derived.graph.output, ran, wanted):
        gradient = np.zeros(array.shape) if gradient is None else gradient.numpy()
        np.testing.assert_allclose(array, gradient, rtol=1e-4, atol=2e-6, err_msg=output.name)


def _session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _model(op: str, options: dict) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    directions = 2 if options.get("direction") == "bidirectional" else 1
    first = options.get("layout", 0) == 1
    width = GATES[op] * HIDDEN
    state = (BATCH, directions, HIDDEN) if first else (directions, BATCH, HIDDEN)
    shapes = {
        "X": (BATCH, STEPS, INPUT) if first else (STEPS, BATCH, INPUT),
        "W": (directions, width, INPUT),
        "R": (directions, width, HIDDEN),
        "B": (directions, 2 * width) if options.get("bias") else None,
        "lengths": None,
        "h": state if options.get("initial") else None,
        "c": state if options.get("initial") and op == "LSTM" else None,
        "P": (directions, 3 * HIDDEN) if options.get("peepholes") else None,
    }
    feeds = {
        k: rng.uniform(-1, 1, shape).astype(np.float32) for k, shape in shapes.items() if shape is not None
    }
    if "lengths" in options:
        feeds["lengths"] = np.asarray(options["lengths"], np.int32)
    names = [name if name in feeds else "" for name in shapes]
    every = ["Y", "Y_h", "Y_c"] if op == "LSTM" else ["Y", "Y_h"]
    outputs = options.get("of", every)
    attributes = {
        k: v
        for k, v in options.items()
        if k not in ("bias", "initial", "lengths", "peepholes", "of", "symbolic")
    }
    while names[-1] == "":
        names.pop()
    if attributes.get("activations"):
        used = attributes["activations"]
        for key, having in [("activation_alpha", WITH_ALPHA), ("activation_beta", WITH_BETA)]:
            if not any(name in having for name in used):
                attributes.pop(key, None)
    node = helper.make_node(
        op,
        names,
        [n if n in outputs else "" for n in every],
        name="cell",
        hidden_size=HIDDEN,
        **attributes,
    )

    def info(name: str) -> onnx.ValueInfoProto:
        array = feeds[name]
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        dims = ["S", "B", None] if options.get("symbolic") and name == "X" else list(array.shape)
        if options.get("symbolic") and name == "lengths":
            dims = ["B"]
        return helper.make_tensor_value_info(name, kind, dims)

    ranks = {"Y": 4, "Y_h": 3, "Y_c": 3}
    graph = helper.make_graph(
        [node],
        "recurrent",
        [info(name) for name in feeds],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * ranks[n]) for n in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return model, feeds


def _oracle(op: str, options: dict, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The standard's equations, one step, sequence and direction at a time."""
    first = options.get("layout", 0) == 1
    x = tensors["X"].transpose(0, 1) if first else tensors["X"]
    steps, batch, _ = x.shape
    kind = options.get("direction", "forward")
    reversals = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[kind]
    lengths = options.get("lengths", [steps] * batch)
    functions = _functions(options.get("activations", DEFAULTS[op] * len(reversals)), options)
    each = len(DEFAULTS[op])
    zero = torch.zeros(HIDDEN, dtype=torch.float64)
    ys, hs, cs = [], [], []
    for d, reverse in enumerate(reversals):
        cell = _Cell(op, options, tensors, d, functions[d * each : (d + 1) * each])
        columns, lasts, cells = [], [], []
        for b in range(batch):
            h, c = (_initial(tensors, name, d, b, first, zero) for name in ("h", "c"))
            column = [zero] * steps
            order = range(lengths[b])
            for t in reversed(order) if reverse else order:
                h, c = cell(x[t, b], h, c)
                column[t] = h
            columns.append(torch.stack(column))
            lasts.append(h)
            cells.append(c)
        ys.append(torch.stack(columns, dim=1))
        hs.append(torch.stack(lasts))
        cs.append(torch.stack(cells))
    y, h, c = torch.stack(ys, dim=1), torch.stack(hs), torch.stack(cs)
    if first:
        y, h, c = y.permute(2, 0, 1, 3), h.transpose(0, 1), c.transpose(0, 1)
    return {"Y": y, "Y_h": h, "Y_c": c}


def _initial(tensors, name, d, b, first, zero):
    if name not in tensors:
        return zero
    return tensors[name][b, d] if first else tensors[name][d, b]


def _functions(names, options):
    alphas, betas = iter(options.get("activation_alpha", [])), iter(options.get("activation_beta", []))
    made = []
    for name in names:
        alpha = next(alphas, None) if name in WITH_ALPHA else None
        beta = next(betas, None) if name in WITH_BETA else None
        alpha = {"HardSigmoid": 0.2}.get(name, 1.0) if alpha is None else alpha
        beta = {"HardSigmoid": 0.5}.get(name, 1.0) if beta is None else beta
        made.append(_function(name, alpha, beta))
    return made


def _function(name, alpha, beta):
    return {
        "Relu": torch.relu,
        "Tanh": torch.tanh,
        "Sigmoid": torch.sigmoid,
        "Affine": lambda z: alpha * z + beta,
        "LeakyRelu": lambda z: torch.where(z >= 0, z, alpha * z),
        "ThresholdedRelu": lambda z: torch.where(z > alpha, z, 0 * z),
        "ScaledTanh": lambda z: alpha * torch.tanh(beta * z),
        "HardSigmoid": lambda z: torch.clamp(alpha * z + beta, 0, 1),
        "Elu": lambda z: torch.where(z >= 0, z, alpha * (torch.exp(z) - 1)),
        "Softsign": lambda z: z / (1 + z.abs()),
        "Softplus": lambda z: torch.log(1 + torch.exp(z)),
    }[name]


class _Cell:
    def __init__(self, op, options, tensors, d, functions):
        self.op, self.options, self.functions = op, options, functions
        self.w, self.r = tensors["W"][d], tensors["R"][d]
        width = self.w.shape[0]
        bias = tensors["B"][d] if "B" in tensors else torch.zeros(2 * width, dtype=torch.float64)
        self.bias_w, self.bias_r = bias[:width], bias[width:]
        self.p = (tensors["P"][d] if "P" in tensors else torch.zeros(3 * HIDDEN, dtype=torch.float64)).chunk(
            3
        )

    def clip(self, z):
        limit = self.options.get("clip")
        return z if limit is None else torch.clamp(z, -limit, limit)

    def __call__(self, x, h, c):
        wx = (self.w @ x + self.bias_w).chunk(GATES[self.op])
        rh = (self.r @ h + self.bias_r).chunk(GATES[self.op])
        f, *others = self.functions
        if self.op == "RNN":
            return f(self.clip(wx[0] + rh[0])), c
        if self.op == "GRU":
            z, r = f(self.clip(wx[0] + rh[0])), f(self.clip(wx[1] + rh[1]))
            if self.options.get("linear_before_reset"):
                n = others[0](self.clip(wx[2] + r * rh[2]))
            else:
                rows = self.r[2 * HIDDEN :]
                n = others[0](self.clip(wx[2] + rows @ (r * h) + self.bias_r[2 * HIDDEN :]))
            return (1 - z) * n + z * h, c
        g, squash = others
        i = f(self.clip(wx[0] + rh[0] + self.p[0] * c))
        forget = f(self.clip(wx[2] + rh[2] + self.p[2] * c))
        if self.options.get("input_forget"):
            forget = 1 - i
        c = forget * c + i * g(self.clip(wx[3] + rh[3]))
        o = f(self.clip(wx[1] + rh[1] + self.p[1] * c))
        return o * squash(c), c  # not clipped: as onnxruntime does, whatever "the input of activations" says
