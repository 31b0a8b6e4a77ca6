"""Operators in the forms that onnxruntime's CUDA provider has, or has fast kernels for.

Each form gives the same numbers, up to the order of sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx

from onward.graph.proto.replacements import Inserter, Types, has_rank, rewrite_nodes
from onward.graph.protobuf import attribute_of, copy_of, opset_of, set_nodes

# Scores at or below this vanish in a softmax beside any that a network computes.
_NOTHING = -1e30
# How many values one kernel of Sum adds.
_TERMS = 8
_AXES_AS_INPUT = {"ReduceSum": 13, "ReduceMean": 18}


def prefer_device_forms(model: onnx.ModelProto) -> None:
    """Rewrite Col2Im, sums over axes that do not lie together, pads of transposed images, sums and constant masks."""
    # Only these need sizes, and inference copies the model.
    if any(node.op_type in ("Col2Im", "ReduceMean") for node in model.graph.node):
        model.graph.CopyFrom(onnx.shape_inference.infer_shapes(model).graph)
    _add_masks(model.graph)
    _join_sums(model.graph)
    rewriting = _Rewriting(model)
    nodes = [new_node for node in model.graph.node for new_node in rewriting.forms(node)]
    used = {name for node in nodes for name in node.input} | {value.name for value in model.graph.output}
    # a transposition that its only pad now comes before
    set_nodes(model.graph, [n for n in nodes if n.op_type != "Transpose" or used.intersection(n.output)])


def _add_masks(graph: onnx.GraphProto) -> None:
    """Scores under a constant mask as scores plus a constant, which the provider adds inside of the softmax."""
    makers = {name: node for node in graph.node for name in node.output}
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(value.name for value in graph.output)
    constants = {tensor.name: tensor for tensor in graph.initializer}

    def array_of(name: str) -> np.ndarray | None:
        return onnx.numpy_helper.to_array(constants[name]) if name in constants else None

    for softmax in graph.node:
        where = makers.get(softmax.input[0]) if softmax.op_type == "Softmax" and not softmax.domain else None
        if where is None or uses[where.output[0]] != 1 or attribute_of(softmax, "axis", -1) != -1:
            continue
        mask = masked_by_constant(where, array_of)
        if mask is None or mask.low.dtype != np.float32:
            continue
        name = f"{where.output[0]}/mask"
        bias = np.where(mask.masked, mask.low, 0).astype(np.float32)
        graph.initializer.append(onnx.numpy_helper.from_array(bias, name))
        # Where reads three tensors of the scores' size, and a kernel of its own; the softmax adds a bias for
        # nothing.
        where.op_type = "Add"
        where.input[:] = [mask.scores, name]


def _join_sums(graph: onnx.GraphProto) -> None:
    """½·erf + (r + ½) as one kernel and a sum, and sums of sums as one Sum: fewer passes over large values."""
    makers = {name: node for node in graph.node for name in node.output}
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(value.name for value in graph.output)
    stored = {value.name for value in [*graph.input, *graph.initializer]}
    halves = {t.name for t in graph.initializer if _is_half(t)}
    removed: set[str] = set()

    def part(name: str, kind: str) -> onnx.NodeProto | None:
        """What makes a value, if it is of this kind and nothing else reads it."""
        node = makers.get(name)
        fits = node is not None and uses[name] == 1 and node.op_type == kind and not node.domain
        return node if fits and name not in removed else None

    def is_product(name: str) -> bool:
        """Whether a matrix product makes a value, which is then no integer: of those Sum has none."""
        node = makers.get(name)
        if node is not None and node.op_type in ("Reshape", "Transpose"):
            return is_product(node.input[0])
        return node is not None and node.op_type in ("Gemm", "MatMul")

    for node in graph.node:
        if node.op_type != "Add" or node.domain:
            continue
        scaled, shifted = part(node.input[0], "Mul"), part(node.input[1], "Add")
        if scaled is not None and shifted is not None:
            erf = makers.get(scaled.input[0])
            if {scaled.input[1], shifted.input[1]} <= halves and erf is not None and erf.op_type == "Erf":
                other, half = shifted.input[0], scaled.output[0]
                sigmoid = onnx.helper.make_node(
                    "HardSigmoid", [erf.output[0]], [half], name=scaled.name, alpha=0.5, beta=0.5
                )
                scaled.CopyFrom(sigmoid)  # ½·erf + ½ is between 0 and 1
                removed.add(shifted.output[0])
                node.input[:] = [half, other]
    for node in reversed(graph.node):
        if node.op_type != "Add" or node.domain or node.output[0] in removed:
            continue
        terms, inner, joined = list(node.input), part(node.input[0], "Add"), []
        # a bias belongs to its product, and what a step adds to may be what it writes
        while inner is not None and len(terms) < _TERMS and stored.isdisjoint([*terms, *inner.input]):
            joined.append(inner.output[0])
            terms[:1] = inner.input
            inner = part(terms[0], "Add")
        if joined and any(is_product(name) for name in terms):
            removed.update(joined)
            node.op_type = "Sum"
            node.input[:] = terms
    remaining = [node for node in graph.node if not removed.intersection(node.output)]
    set_nodes(graph, remaining)


def _is_half(tensor: onnx.TensorProto) -> bool:
    if tensor.data_type != onnx.TensorProto.FLOAT or np.prod(tensor.dims) != 1:
        return False
    return float(onnx.numpy_helper.to_array(tensor).reshape(-1)[0]) == 0.5


class _Rewriting:
    def __init__(self, model: onnx.ModelProto) -> None:
        self._graph = model.graph
        self._opset = opset_of(model)
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._producers = {name: node for node in model.graph.node for name in node.output}
        types = {
            value.name: value.type.tensor_type for value in [*model.graph.value_info, *model.graph.input]
        }
        self._shapes = {name: [dim.dim_value for dim in kind.shape.dim] for name, kind in types.items()}
        self._singles = {n for n, kind in types.items() if kind.elem_type == onnx.TensorProto.FLOAT}

    def forms(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """What is to stand in a node's place."""
        if node.domain:
            return [node]
        if node.op_type in _AXES_AS_INPUT:
            return self._reduction(node)
        if node.op_type == "Pad":
            return self._pad(node)
        return self._columns(node) if node.op_type == "Col2Im" else [node]

    def _reduction(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """One axis after the other where they do not lie together: each of those has a kernel of its own."""
        as_input = self._opset >= _AXES_AS_INPUT[node.op_type]
        listed = self._numbers([*node.input, ""][1]) if as_input else attribute_of(node, "axes")
        axes = sorted(int(axis) for axis in listed) if listed is not None else []
        breaks = [i for i in range(1, len(axes)) if axes[i] != axes[i - 1] + 1]
        if not breaks or axes[0] < 0:
            return [node]
        runs = [run.tolist() for run in np.split(np.array(axes), breaks)]
        nodes, value, kind, last = [], node.input[0], node.op_type, node.output[0]
        shape = self._shapes.get(value, []) if value in self._singles else []
        summed = [shape[axis] for axis in axes] if len(shape) > axes[-1] else [0]
        if kind == "ReduceMean" and self._opset >= _AXES_AS_INPUT["ReduceSum"] and all(summed):
            # every mean is a sum and a division: divide once
            kind, as_input, last = "ReduceSum", True, f"{last}/sum"
        # from behind, so that the axes before stay where they are
        for index, run in enumerate(reversed(runs)):
            result = last if index == len(runs) - 1 else f"{node.output[0]}/part{index}"
            inputs, attributes = [value], {"keepdims": attribute_of(node, "keepdims", 1)}
            if as_input:
                inputs.append(self._constant(f"{result}/axes", np.array(run, np.int64)))
            else:
                attributes["axes"] = run
            nodes.append(onnx.helper.make_node(kind, inputs, [result], name=result, **attributes))
            value = result
        if last != node.output[0]:
            count = self._constant(f"{last}/share", np.array(1 / np.prod(summed), np.float32))
            nodes.append(onnx.helper.make_node("Mul", [last, count], [node.output[0]], name=node.output[0]))
        return nodes

    def _pad(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Pad images as they are and transpose then: the provider has a kernel for channels before rows."""
        before, pads = self._producers.get(node.input[0]), self._numbers([*node.input, ""][1])
        if before is None or before.op_type != "Transpose" or pads is None or len(pads) != 8:
            return [node]
        order = attribute_of(before, "perm")
        if order is None or (len(node.input) > 3 and node.input[3]):
            return [node]
        moved = np.zeros(8, np.int64)
        for axis, source in enumerate(order):
            moved[source], moved[source + 4] = pads[axis], pads[axis + 4]
        # The provider's kernel pads rows and columns alone.
        if moved[[0, 1, 4, 5]].any():
            return [node]
        padded = copy_of(node)
        padded.input[0] = before.input[0]
        padded.input[1] = self._constant(f"{node.output[0]}/pads", moved)
        padded.output[0] = f"{node.output[0]}/padded"
        turned = onnx.helper.make_node(
            "Transpose", [padded.output[0]], [node.output[0]], name=f"{node.output[0]}/turned", perm=order
        )
        return [padded, turned]

    def _columns(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Col2Im, which the provider lacks, is a transposed convolution of each channel with unit kernels."""
        size, kernel = self._numbers(node.input[1]), self._numbers(node.input[2])
        shape = self._shapes.get(node.input[0], [])
        if size is None or kernel is None or len(size) != 2 or len(shape) != 3 or not shape[1]:
            return [node]
        strides = np.array(attribute_of(node, "strides", [1, 1]))
        dilations = np.array(attribute_of(node, "dilations", [1, 1]))
        pads = np.array(attribute_of(node, "pads", [0, 0, 0, 0]))
        reach = dilations * (kernel - 1) + 1
        counts = (size + pads[:2] + pads[2:] - reach) // strides + 1
        # What no window reaches is zero in the image, and ConvTranspose's output padding.
        remainder = (size + pads[:2] + pads[2:] - reach) % strides
        window = int(np.prod(kernel))
        channels = shape[1] // window
        unit = np.eye(window, dtype=np.float32).reshape(window, 1, *kernel)
        name = node.output[0]
        images = self._constant(f"{name}/shape", np.array([0, shape[1], *counts], np.int64))
        kernels = self._constant(f"{name}/kernels", np.tile(unit, (channels, 1, 1, 1)))
        return [
            onnx.helper.make_node("Reshape", [node.input[0], images], [f"{name}/columns"], name=f"{name}/columns"),
            onnx.helper.make_node(
                "ConvTranspose", [f"{name}/columns", kernels], [name], name=name, group=channels,
                kernel_shape=[int(k) for k in kernel], strides=strides.tolist(), dilations=dilations.tolist(),
                pads=pads.tolist(), output_padding=remainder.tolist(),
            ),
        ]  # fmt: skip

    def _numbers(self, name: str) -> np.ndarray | None:
        tensor = self._constants.get(name)
        return None if tensor is None else onnx.numpy_helper.to_array(tensor).reshape(-1)

    def _constant(self, name: str, array: np.ndarray) -> str:
        self._graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        return name


def expand_batch_norm(model: onnx.ModelProto) -> None:
    """Replace each training-mode BatchNormalization by its statistics and inference mode; in place.

    Mean and variance of the batch over all axes but 1, y by inference mode with them, and the running
    statistics momentum·input + (1 − momentum)·batch.
    """

    def rewrite(node: onnx.NodeProto, add: Inserter, types: Types) -> bool:
        if not _trains(node) or not has_rank(types, node.input[0]):
            return False
        x, scale, bias, *before = node.input
        y, *running = [*node.output, "", ""][:3]
        momentum = attribute_of(node, "momentum", 0.9)
        kind = types[before[0]].elem_type if before[0] in types else onnx.TensorProto.FLOAT
        axes = [axis for axis in range(len(types[x].shape.dim)) if axis != 1]
        channels = add.constant("channels", np.array([-1], np.int64))
        # with momentum 0 the running statistics are the batch's own
        names = zip(running, (f"{y}/mean", f"{y}/var"))
        own = [name if name and momentum == 0.0 else other for name, other in names]
        mean = add.over_axes("ReduceMean", x, axes, f"{y}/mean_of_batch", keepdims=1)
        centred = add.node("Sub", [x, mean], f"{y}/centred")
        square = add.node("Mul", [centred, centred], f"{y}/square")
        variance = add.over_axes("ReduceMean", square, axes, f"{y}/var_of_batch", keepdims=1)
        for statistic, name in zip((mean, variance), own):
            if kind == types[x].elem_type:
                add.node("Reshape", [statistic, channels], name)
            else:
                add.node(
                    "Cast", [add.node("Reshape", [statistic, channels], f"{name}/narrow")], name, to=kind
                )
        add.node("BatchNormalization", [x, scale, bias, *own], y, epsilon=attribute_of(node, "epsilon", 1e-5))
        for old, batch, name in zip(before, own, running):
            if name and momentum != 0.0:
                parts = []
                for value, share in ((old, momentum), (batch, 1 - momentum)):
                    number = np.array(share, onnx.helper.tensor_dtype_to_np_dtype(kind))
                    factor = add.constant(f"{name}/share{len(parts)}", number)
                    parts.append(add.node("Mul", [value, factor], f"{name}/part{len(parts)}"))
                add.node("Add", parts, name)
        return True

    if any(_trains(node) for node in model.graph.node):  # inference of shapes takes a while
        rewrite_nodes(model, rewrite)


def _trains(node: onnx.NodeProto) -> bool:
    return node.op_type == "BatchNormalization" and attribute_of(node, "training_mode", 0) == 1


class ConstantMask(NamedTuple):
    """Scores that a Where masks by a constant: where, by which low number, and the scores' name."""

    masked: np.ndarray
    low: np.ndarray
    scores: str


def masked_by_constant(
    where: onnx.NodeProto, array_of: Callable[[str], np.ndarray | None]
) -> ConstantMask | None:
    """How a node masks scores; None unless it does by a constant that leaves something of every row."""
    if where.op_type != "Where" or where.domain:
        return None
    condition, *choices = (array_of(name) for name in where.input)
    if condition is None or condition.ndim < 2 or (choices[0] is None) == (choices[1] is None):
        return None
    index = 0 if choices[0] is not None else 1
    masked, low = (condition if index == 0 else ~condition), choices[index]
    if low is None or low.size != 1 or not low.item() <= _NOTHING or masked.all(axis=-1).any():
        return None
    return ConstantMask(masked, low, where.input[2 - index])
