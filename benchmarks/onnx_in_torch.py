"""An ONNX model as a torch module: the other side of a comparison, with the same architecture and weights.

Every node runs as the torch function of the same meaning, and torch's autograd differentiates it. Knows the operators
that published classifiers have; another one is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch.nn import functional

__all__ = ["OnnxInTorch"]

Values = list[Any]
_TYPES = {1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool, 11: torch.float64}


class OnnxInTorch(torch.nn.Module):
    """The first output of a model, as a function of its first input; `trainable` names become parameters."""

    def __init__(self, model: onnx.ModelProto, trainable: Sequence[str]) -> None:
        super().__init__()
        tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        self.nodes = []
        for node in model.graph.node:
            if node.op_type == "Constant":
                tensors[node.output[0]] = np.asarray(_attributes(node).popitem()[1])
            else:
                self.nodes.append((node, _attributes(node)))
        missing = [name for name in trainable if name not in tensors]
        if missing:
            raise ValueError(f"the model has no weight '{missing[0]}'")
        self.weights = {name: torch.from_numpy(np.array(array)) for name, array in tensors.items()}
        self.parameters_by_name = {name: torch.nn.Parameter(self.weights[name].clone()) for name in trainable}
        self.weights |= self.parameters_by_name
        self.input, self.output = model.graph.input[0].name, model.graph.output[0].name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values: dict[str, Any] = {**self.weights, self.input: x, "": None}
        for node, attributes in self.nodes:
            if node.op_type not in _OPERATORS:
                raise NotImplementedError(f"{node.op_type} '{node.name}' is not known here")
            values[node.output[0]] = _OPERATORS[node.op_type](
                [values[name] for name in node.input], attributes
            )
        return values[self.output]


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    found = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
    return {
        key: numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value
        for key, value in found.items()
    }


def _ints(inputs: Values, attributes: dict[str, Any], index: int, name: str) -> list[int] | None:
    """What newer opsets give as an input, and older ones as an attribute."""
    if len(inputs) > index and inputs[index] is not None:
        return [int(item) for item in inputs[index].reshape(-1)]
    found = attributes.get(name)
    return None if found is None else list(found)


def _pads(attributes: dict[str, Any], rank: int) -> list[int]:
    kind = attributes.get("auto_pad", b"NOTSET")
    if kind == b"SAME_UPPER" and all(stride == 1 for stride in attributes.get("strides", ())):
        spread = attributes.get("dilations", [1] * rank)
        totals = [(size - 1) * step for size, step in zip(attributes["kernel_shape"], spread)]
        return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    if kind not in (b"NOTSET", b"VALID"):
        raise NotImplementedError(f"auto_pad {kind!r} is not known here")
    pads = attributes.get("pads", [0] * 2 * rank)
    return [side for axis in reversed(range(rank)) for side in (pads[axis], pads[axis + rank])]


def _conv(inputs: Values, attributes: dict[str, Any]) -> torch.Tensor:
    x, weight, *bias = inputs
    rank = weight.ndim - 2
    function = {1: functional.conv1d, 2: functional.conv2d}[rank]
    return function(
        functional.pad(x, _pads(attributes, rank)), weight, bias[0] if bias else None,
        stride=attributes.get("strides", [1] * rank), dilation=attributes.get("dilations", [1] * rank),
        groups=attributes.get("group", 1),
    )  # fmt: skip


def _conv_transpose(inputs: Values, attributes: dict[str, Any]) -> torch.Tensor:
    x, weight, *bias = inputs
    if any(_pads(attributes, 2)) or "output_shape" in attributes or "output_padding" in attributes:
        raise NotImplementedError("a ConvTranspose with padding is not known here")
    return functional.conv_transpose2d(
        x, weight, bias[0] if bias else None, stride=attributes.get("strides", [1, 1]),
        dilation=attributes.get("dilations", [1, 1]), groups=attributes.get("group", 1),
    )  # fmt: skip


def _resize(inputs: Values, attributes: dict[str, Any]) -> torch.Tensor:
    """Each pixel as often as the scale says: the one form in which whole scales agree with torch."""
    x, _, scales = inputs[:3]
    form = (
        attributes.get("mode"),
        attributes.get("coordinate_transformation_mode"),
        attributes.get("nearest_mode"),
    )
    if form != (b"nearest", b"asymmetric", b"floor") or (scales != scales.round()).any():
        raise NotImplementedError(f"Resize {form} is not known here")
    for axis, scale in enumerate(scales.int().tolist()):
        x = x.repeat_interleave(scale, axis)
    return x


def _pool(kind: str) -> Callable[[Values, dict[str, Any]], torch.Tensor]:
    def run(inputs: Values, attributes: dict[str, Any]) -> torch.Tensor:
        size, pads = attributes["kernel_shape"], _pads(attributes, 2)
        stride, ceil = attributes.get("strides", [1, 1]), bool(attributes.get("ceil_mode", 0))
        if kind == "max":
            x = functional.pad(inputs[0], pads, value=float("-inf"))
            return functional.max_pool2d(x, size, stride, ceil_mode=ceil)
        if any(pads) and not attributes.get("count_include_pad", 0):
            raise NotImplementedError("AveragePool that leaves padding out is not known here")
        return functional.avg_pool2d(functional.pad(inputs[0], pads), size, stride, ceil_mode=ceil)

    return run


def _reduce(function: Callable[..., torch.Tensor]) -> Callable[[Values, dict[str, Any]], torch.Tensor]:
    def run(inputs: Values, attributes: dict[str, Any]) -> torch.Tensor:
        axes = _ints(inputs, attributes, 1, "axes") or list(range(inputs[0].ndim))
        return function(inputs[0], dim=axes, keepdim=bool(attributes.get("keepdims", 1)))

    return run


def _slice(inputs: Values, attributes: dict[str, Any]) -> torch.Tensor:
    x = inputs[0]
    starts, ends = (_ints(inputs, attributes, i, n) or [] for i, n in ((1, "starts"), (2, "ends")))
    axes = _ints(inputs, attributes, 3, "axes") or list(range(len(starts)))
    steps = _ints(inputs, attributes, 4, "steps") or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps):
        rows = torch.arange(x.shape[axis])[slice(start, end)] if step > 0 else None
        if rows is None or step < 0:
            rows = torch.tensor(range(x.shape[axis])[start : end if end >= -x.shape[axis] else None : step])
        x = x.index_select(axis, rows[::step] if step > 0 else rows)
    return x


def _reshape(inputs: Values, attributes: dict[str, Any]) -> torch.Tensor:
    wanted = [int(size) for size in inputs[1]]
    return inputs[0].reshape([inputs[0].shape[i] if size == 0 else size for i, size in enumerate(wanted)])


def _squeeze(inputs: Values, attributes: dict[str, Any]) -> torch.Tensor:
    axes = _ints(inputs, attributes, 1, "axes")
    return inputs[0].squeeze() if axes is None else inputs[0].squeeze(tuple(axes))


def _unsqueeze(inputs: Values, attributes: dict[str, Any]) -> torch.Tensor:
    x, axes = inputs[0], _ints(inputs, attributes, 1, "axes") or []
    for axis in sorted(axis % (x.ndim + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _pad(inputs: Values, attributes: dict[str, Any]) -> torch.Tensor:
    pads, rank = _ints(inputs, attributes, 1, "pads") or [], inputs[0].ndim
    sides = [side for axis in reversed(range(rank)) for side in (pads[axis], pads[axis + rank])]
    mode = attributes.get("mode", b"constant").decode()
    if mode == "constant":
        return functional.pad(inputs[0], sides, value=float(inputs[2]) if len(inputs) > 2 else 0.0)
    while len(sides) > 2 and sides[-2:] == [0, 0]:
        sides = sides[:-2]
    return functional.pad(inputs[0], sides, mode=mode)


def _gemm(inputs: Values, attributes: dict[str, Any]) -> torch.Tensor:
    a, b, *c = inputs
    a, b = a.T if attributes.get("transA", 0) else a, b.T if attributes.get("transB", 0) else b
    product = attributes.get("alpha", 1.0) * (a @ b)
    return product + attributes.get("beta", 1.0) * c[0] if c else product


def _clip(inputs: Values, attributes: dict[str, Any]) -> torch.Tensor:
    low, high = (
        attributes.get(name) if len(inputs) <= index else inputs[index]
        for index, name in ((1, "min"), (2, "max"))
    )
    return torch.clamp(inputs[0], *(None if side is None else float(side) for side in (low, high)))


def _batch_norm(inputs: Values, attributes: dict[str, Any]) -> torch.Tensor:
    x, scale, bias, mean, variance = inputs
    return functional.batch_norm(x, mean, variance, scale, bias, eps=attributes.get("epsilon", 1e-5))


_ELEMENTWISE: dict[str, Callable[..., torch.Tensor]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div, "Neg": torch.neg, "Exp": torch.exp,
    "Log": torch.log, "Sqrt": torch.sqrt, "Erf": torch.erf, "Tanh": torch.tanh, "Relu": torch.relu,
    "Sigmoid": torch.sigmoid, "Reciprocal": torch.reciprocal, "MatMul": torch.matmul, "Equal": torch.eq,
    "Where": torch.where, "Max": torch.maximum, "Min": torch.minimum, "HardSwish": functional.hardswish,
}  # fmt: skip
_OPERATORS: dict[str, Callable[[Values, dict[str, Any]], Any]] = {
    **{name: lambda i, a, run=run: run(*i) for name, run in _ELEMENTWISE.items()},
    "Identity": lambda i, a: i[0],
    "Cast": lambda i, a: i[0].to(_TYPES[a["to"]]),
    "HardSigmoid": lambda i, a: torch.clamp(a.get("alpha", 0.2) * i[0] + a.get("beta", 0.5), 0, 1),
    "Shape": lambda i, a: torch.tensor(i[0].shape),
    "Concat": lambda i, a: torch.cat(i, a["axis"]),
    "Transpose": lambda i, a: i[0].permute(a.get("perm", list(reversed(range(i[0].ndim))))),
    "Expand": lambda i, a: i[0] * torch.ones([int(n) for n in i[1]], dtype=i[0].dtype),
    "GlobalAveragePool": lambda i, a: i[0].mean(list(range(2, i[0].ndim)), keepdim=True),
    "GlobalMaxPool": lambda i, a: i[0].amax(list(range(2, i[0].ndim)), keepdim=True),
    "ReduceMean": _reduce(torch.mean), "ReduceSum": _reduce(torch.sum), "ReduceMax": _reduce(torch.amax),
    "ReduceMin": _reduce(torch.amin), "Softmax": lambda i, a: torch.softmax(i[0], a.get("axis", -1)),
    "Conv": _conv, "MaxPool": _pool("max"), "AveragePool": _pool("mean"), "Slice": _slice, "Reshape": _reshape,
    "Squeeze": _squeeze, "Unsqueeze": _unsqueeze, "Pad": _pad, "Gemm": _gemm, "Clip": _clip,
    "BatchNormalization": _batch_norm, "ConvTranspose": _conv_transpose, "Resize": _resize,
}  # fmt: skip
