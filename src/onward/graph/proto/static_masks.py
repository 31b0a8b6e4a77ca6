"""Attention under a mask that is known: what guards against rows without any key, and repeats the mask, goes away.

Exporters write softmax(where(mask, −large, scores)), some of them zeros over it once more, and its gradient is masked
twice again. Once shapes are known a causal mask is a constant; where each of its rows leaves a key, the softmax is
exactly zero under the mask, and so is all that is multiplied by it.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import onnx

from onward.graph.proto.device_forms import masked_by_constant
from onward.graph.protobuf import attribute_of, remove_unread


def simplify_static_masks(model: onnx.ModelProto) -> int:
    """Rewrite every softmax under a constant mask, with its gradient; returns how many there were."""
    graph = _Graph(model.graph)
    count = 0
    for node in list(model.graph.node):
        masked = graph.masked_input(node) if node.op_type == "Softmax" and not node.domain else None
        if masked is not None:
            _simplify(graph, node.output[0], masked)
            count += 1
    if count:  # readers of other values read earlier ones, so the order holds
        remove_unread(model.graph)
    return count


def _simplify(graph: _Graph, softmax: str, masked: np.ndarray) -> None:
    for node in graph.readers(softmax):
        # The softmax is zero there by itself.
        if node.op_type == "Where" and graph.zeroes(node, softmax, masked):
            graph.replace(node.output[0], softmax)
    products = {node.output[0] for node in graph.readers(softmax) if node.op_type == "Mul"}
    for name in list(products):
        # products that are not gradients of the softmax may have other readers; the value under the mask is zero
        for end in graph.readers(name):
            if end.op_type == "Where" and end.input[2] == name and graph.guards_rows(end, softmax):
                graph.replace(end.output[0], name)
        for end in graph.readers(name):
            if end.op_type == "Clip" and graph.is_everything(end):
                for last in graph.readers(end.output[0]):
                    if last.op_type == "Mul" and graph.is_mask(_other(last, end.output[0]), masked):
                        graph.replace(last.output[0], name)
            elif end.op_type == "Mul" and graph.is_mask(_other(end, name), masked):
                graph.replace(end.output[0], name)
    for name in products:
        source = _other(graph.producer[name], softmax)
        behind = graph.producer.get(source)
        if behind is not None and behind.op_type == "Sub":  # (dp − Σ dp·p)·p
            source = behind.input[0]
            behind = graph.producer.get(source)
        if behind is None or behind.op_type != "Mul":
            continue
        mask = next((value for value in behind.input if graph.is_mask(value, masked)), None)
        if mask is not None and graph.vanishes(source, softmax):
            graph.replace(source, _other(behind, mask))
    _sum_through_product(graph, softmax)


def _sum_through_product(graph: _Graph, softmax: str) -> None:
    """Σ dp·p over keys is Σ do·o over the width of a head, where o = p·v and dp = do·vᵀ."""
    for product in graph.readers(softmax):
        sums = [node for node in graph.readers(product.output[0]) if graph.sums_last(node)]
        if product.op_type != "Mul" or len(sums) != 1 or len(graph.readers(product.output[0])) != 1:
            continue
        arriving = graph.producer.get(_other(product, softmax))
        turned = graph.producer.get(arriving.input[1]) if arriving and arriving.op_type == "MatMul" else None
        if arriving is None or turned is None or not _swaps_last(turned):
            continue
        outputs = [
            node
            for node in graph.readers(softmax)
            if node.op_type == "MatMul" and list(node.input) == [softmax, turned.input[0]]
        ]
        if len(outputs) == 1:
            graph.set_input(product, 0, arriving.input[0])
            graph.set_input(product, 1, outputs[0].output[0])


class _Graph:
    """The graph with who makes and who reads each value."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._arrays: dict[str, np.ndarray] = {}
        self._outputs = {value.name for value in graph.output}
        self.producer = {name: node for node in graph.node for name in node.output}
        self._readers: defaultdict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in graph.node:
            for name in dict.fromkeys(node.input):
                self._readers[name].append(node)

    def readers(self, name: str) -> list[onnx.NodeProto]:
        return list(self._readers[name])

    def array(self, name: str) -> np.ndarray | None:
        if name not in self._arrays and name in self._constants:
            self._arrays[name] = onnx.numpy_helper.to_array(self._constants[name])
        return self._arrays.get(name)

    def masked_input(self, softmax: onnx.NodeProto) -> np.ndarray | None:
        """Where the softmax's input is masked; None unless by a constant that leaves something of every row."""
        where = self.producer.get(softmax.input[0])
        if where is None or attribute_of(softmax, "axis", -1) != -1:
            return None
        mask = masked_by_constant(where, self.array)
        return None if mask is None else mask.masked

    def zeroes(self, where: onnx.NodeProto, softmax: str, masked: np.ndarray) -> bool:
        """Whether it writes zeros where the softmax is masked, and nothing else."""
        condition = self.array(where.input[0])
        zero_index = 1 if where.input[2] == softmax else 2
        zero = self.array(where.input[zero_index])
        if condition is None or zero is None or zero.size != 1 or zero.item() != 0:
            return False
        written = condition if zero_index == 1 else ~condition
        return written.shape == masked.shape and not (written & ~masked).any()

    def is_mask(self, name: str, masked: np.ndarray) -> bool:
        """Whether a constant is one, and zero only where the softmax is."""
        array = self.array(name)
        if array is None or array.shape != masked.shape or array.dtype.kind != "f":
            return False
        return bool(((array == 1) | ((array == 0) & masked)).all())

    def is_everything(self, clip: onnx.NodeProto) -> bool:
        """Whether a Clip changes infinities only."""
        bounds = [self.array(name) for name in clip.input[1:]]
        most = np.finfo(np.float32).max
        return len(bounds) == 2 and all(b is not None and abs(b.item()) >= most for b in bounds)

    def guards_rows(self, where: onnx.NodeProto, softmax: str) -> bool:
        """Whether it writes zeros into rows of which the softmax is not a number."""
        test = self.producer.get(where.input[0])
        zero = self.array(where.input[1])
        if test is None or test.op_type != "IsNaN" or zero is None or zero.size != 1 or zero.item() != 0:
            return False
        part = self.producer.get(test.input[0])
        return test.input[0] == softmax or (
            part is not None and part.op_type == "Slice" and part.input[0] == softmax
        )

    def vanishes(self, name: str, softmax: str) -> bool:
        """Whether a value counts only in products with the softmax."""
        if name in self._outputs:
            return False
        for node in self.readers(name):
            if node.op_type == "Mul" and softmax in node.input:
                continue
            if node.op_type == "Sub" and node.input[0] == name and self.vanishes(node.output[0], softmax):
                continue
            return False
        return True

    def sums_last(self, node: onnx.NodeProto) -> bool:
        if node.op_type != "ReduceSum" or len(node.input) != 2 or not attribute_of(node, "keepdims", 1):
            return False
        axes = self.array(node.input[1])
        return axes is not None and axes.tolist() == [-1]

    def replace(self, old: str, new: str) -> None:
        """Let all readers of a value read another."""
        if old in self._outputs:
            return
        for node in self.readers(old):
            for index, name in enumerate(node.input):
                if name == old:
                    self.set_input(node, index, new)

    def set_input(self, node: onnx.NodeProto, index: int, name: str) -> None:
        old = node.input[index]
        node.input[index] = name
        if old not in node.input:
            self._readers[old] = [other for other in self._readers[old] if other is not node]
        if all(other is not node for other in self._readers[name]):
            self._readers[name].append(node)


def _other(node: onnx.NodeProto, name: str) -> str:
    return node.input[1] if node.input[0] == name else node.input[0]


def _swaps_last(node: onnx.NodeProto) -> bool:
    order = attribute_of(node, "perm")
    return (
        node.op_type == "Transpose"
        and order is not None
        and list(order) == [*range(len(order) - 2), len(order) - 1, len(order) - 2]
    )
