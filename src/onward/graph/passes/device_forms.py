"""Operators in the forms that onnxruntime's CUDA provider has, or has fast kernels for.

Works on protobuf alone, in place, since it is on the way of every start of training. Each form gives the same
numbers, up to the order of sums.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx

__all__ = ["prefer_device_forms"]

# How many values one kernel of Sum adds.
_TERMS = 8
# Scores at or below this vanish in a softmax beside any that a network computes.
_NOTHING = -1e30
_AXES_AS_INPUT = {"ReduceSum": 13, "ReduceMean": 18}


def prefer_device_forms(model: onnx.ModelProto) -> None:
    """Rewrite Col2Im, sums over axes that do not lie together, pads of transposed images, sums and constant masks."""
    if any(node.op_type in ("Col2Im", "ReduceMean") for node in model.graph.node):
        model.graph.CopyFrom(onnx.shape_inference.infer_shapes(model).graph)
    _add_masks(model.graph)
    _join_sums(model.graph)
    rewriting = _Rewriting(model)
    nodes = [made for node in model.graph.node for made in rewriting.forms(node)]
    used = {name for node in nodes for name in node.input} | {value.name for value in model.graph.output}
    del model.graph.node[:]
    # a transposition that its only pad now comes before
    model.graph.node.extend(n for n in nodes if n.op_type != "Transpose" or used.intersection(n.output))


def _add_masks(graph: onnx.GraphProto) -> None:
    """Scores under a constant mask as scores plus a constant, which the provider adds inside of the softmax."""
    makers = {name: node for node in graph.node for name in node.output}
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(value.name for value in graph.output)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for softmax in graph.node:
        where = makers.get(softmax.input[0]) if softmax.op_type == "Softmax" and not softmax.domain else None
        if where is None or where.op_type != "Where" or uses[where.output[0]] != 1:
            continue
        if _attribute(softmax, "axis", -1) != -1:
            continue
        arrays = [
            onnx.numpy_helper.to_array(constants[name]) if name in constants else None for name in where.input
        ]
        mask, *both = arrays
        low = both[0] if both[1] is None else both[1]
        if mask is None or (both[0] is None) == (both[1] is None) or low is None:
            continue
        masked = mask if both[1] is None else ~mask
        if (
            low.size != 1
            or low.dtype != np.float32
            or low > _NOTHING
            or mask.ndim < 2
            or masked.all(-1).any()
        ):
            continue
        name = f"{where.output[0]}/mask"
        graph.initializer.append(
            onnx.numpy_helper.from_array(np.where(masked, low, 0).astype(np.float32), name)
        )
        scores = where.input[2 if both[1] is None else 1]
        where.op_type = "Add"
        where.input[:] = [scores, name]


def _join_sums(graph: onnx.GraphProto) -> None:
    """½·erf + (r + ½) as one kernel and a sum, and sums of sums as one Sum: fewer passes over large values."""
    makers = {name: node for node in graph.node for name in node.output}
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(value.name for value in graph.output)
    given = {value.name for value in [*graph.input, *graph.initializer]}
    halves = {t.name for t in graph.initializer if _is_half(t)}
    gone: set[str] = set()

    def part(name: str, kind: str) -> onnx.NodeProto | None:
        """What makes a value, if it is of this kind and nothing else reads it."""
        node = makers.get(name)
        fits = node is not None and uses[name] == 1 and node.op_type == kind and not node.domain
        return node if fits and name not in gone else None

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
                rest, half = shifted.input[0], scaled.output[0]
                made = onnx.helper.make_node(
                    "HardSigmoid", [erf.output[0]], [half], name=scaled.name, alpha=0.5, beta=0.5
                )
                scaled.CopyFrom(made)  # ½·erf + ½ is between 0 and 1
                gone.add(shifted.output[0])
                node.input[:] = [half, rest]
    for node in reversed(graph.node):
        if node.op_type != "Add" or node.domain or node.output[0] in gone:
            continue
        terms, inner, joined = list(node.input), part(node.input[0], "Add"), []
        # a bias belongs to its product, and what a step adds to may be what it writes
        while inner is not None and len(terms) < _TERMS and given.isdisjoint([*terms, *inner.input]):
            joined.append(inner.output[0])
            terms[:1] = inner.input
            inner = part(terms[0], "Add")
        if joined and any(is_product(name) for name in terms):
            gone.update(joined)
            node.op_type = "Sum"
            node.input[:] = terms
    kept = [node for node in graph.node if not gone.intersection(node.output)]
    del graph.node[:]
    graph.node.extend(kept)


def _is_half(tensor: onnx.TensorProto) -> bool:
    if tensor.data_type != onnx.TensorProto.FLOAT or np.prod(tensor.dims) != 1:
        return False
    return float(onnx.numpy_helper.to_array(tensor).reshape(-1)[0]) == 0.5


class _Rewriting:
    def __init__(self, model: onnx.ModelProto) -> None:
        self._graph = model.graph
        self._opset = next(entry.version for entry in model.opset_import if not entry.domain)
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._producers = {name: node for node in model.graph.node for name in node.output}
        known = {
            value.name: value.type.tensor_type for value in [*model.graph.value_info, *model.graph.input]
        }
        self._shapes = {name: [dim.dim_value for dim in kind.shape.dim] for name, kind in known.items()}
        self._singles = {n for n, kind in known.items() if kind.elem_type == onnx.TensorProto.FLOAT}

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
        given = _attribute(node, "axes", None)
        if as_input:
            given = self._numbers(node.input[1]) if len(node.input) > 1 else None
        axes = sorted(int(axis) for axis in given) if given is not None else []
        breaks = [i for i in range(1, len(axes)) if axes[i] != axes[i - 1] + 1]
        if not breaks or axes[0] < 0:
            return [node]
        runs = [run.tolist() for run in np.split(np.array(axes), breaks)]
        made, value, kind, last = [], node.input[0], node.op_type, node.output[0]
        shape = self._shapes.get(value, []) if value in self._singles else []
        summed = [shape[axis] for axis in axes] if len(shape) > axes[-1] else [0]
        if kind == "ReduceMean" and self._opset >= _AXES_AS_INPUT["ReduceSum"] and all(summed):
            # every mean is a sum and a division: divide once
            kind, as_input, last = "ReduceSum", True, f"{last}/sum"
        for index, run in enumerate(
            reversed(runs)
        ):  # from behind, so that the axes before stay where they are
            result = last if index == len(runs) - 1 else f"{node.output[0]}/part{index}"
            inputs, attributes = [value], {"keepdims": _attribute(node, "keepdims", 1)}
            if as_input:
                inputs.append(self._constant(f"{result}/axes", np.array(run, np.int64)))
            else:
                attributes["axes"] = run
            made.append(onnx.helper.make_node(kind, inputs, [result], name=result, **attributes))
            value = result
        if last != node.output[0]:
            count = self._constant(f"{last}/share", np.array(1 / np.prod(summed), np.float32))
            made.append(onnx.helper.make_node("Mul", [last, count], [node.output[0]], name=node.output[0]))
        return made

    def _pad(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Pad images as they are and transpose then: the provider has a kernel for channels before rows."""
        before = self._producers.get(node.input[0])
        pads = self._numbers(node.input[1]) if len(node.input) > 1 else None
        if before is None or before.op_type != "Transpose" or pads is None or len(pads) != 8:
            return [node]
        order = _attribute(before, "perm", None)
        if order is None or (len(node.input) > 3 and node.input[3]):
            return [node]
        moved = np.zeros(8, np.int64)
        for axis, source in enumerate(order):
            moved[source], moved[source + 4] = pads[axis], pads[axis + 4]
        if moved[[0, 1, 4, 5]].any():
            return [node]
        padded = onnx.NodeProto()
        padded.CopyFrom(node)
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
        strides = np.array(_attribute(node, "strides", [1, 1]))
        dilations = np.array(_attribute(node, "dilations", [1, 1]))
        pads = np.array(_attribute(node, "pads", [0, 0, 0, 0]))
        reach = dilations * (kernel - 1) + 1
        counts = (size + pads[:2] + pads[2:] - reach) // strides + 1
        rest = (size + pads[:2] + pads[2:] - reach) % strides
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
                pads=pads.tolist(), output_padding=rest.tolist(),
            ),
        ]  # fmt: skip

    def _numbers(self, name: str) -> np.ndarray | None:
        tensor = self._constants.get(name)
        return None if tensor is None else onnx.numpy_helper.to_array(tensor).reshape(-1)

    def _constant(self, name: str, array: np.ndarray) -> str:
        self._graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        return name


def _attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    found = next((a for a in node.attribute if a.name == name), None)
    return default if found is None else onnx.helper.get_attribute_value(found)
