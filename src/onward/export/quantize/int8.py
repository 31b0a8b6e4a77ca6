"""Dynamic int8 for matrix products and embedding tables, with a scale for each channel and for each row.

Knows how ONNX spells it: DynamicQuantizeLinear, MatMulInteger, Cast, Mul, which onnxruntime runs as one kernel.
Pure graph editing in standard operators, over whole arrays: the stock quantizer goes channel by channel.

A product x·W becomes (q(x) · q(W)) · (scale of x · scale of each column of W), and a lookup T[i] becomes
q(T)[i] · scale[i].
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

__all__ = ["quantize_lookups", "quantize_products"]


def quantize_products(
    model: onnx.ModelProto, *, reduce_range: bool = True, exclude: Collection[str] = ()
) -> None:
    """Replace every MatMul and plain Gemm by a constant float32 matrix, in place.

    With `reduce_range`, no two weights that a CPU multiplies in one instruction are more than 128 together.
    """
    graph = model.graph
    weights = _Weights(graph)
    quantized: dict[str, tuple[str, str, str]] = {}
    nodes: list[NodeProto] = []
    for node in graph.node:
        matrix = None if node.name in exclude else _matrix(node, weights)
        if matrix is None:
            nodes.append(node)
            continue
        x, y, name = node.input[0], node.output[0], node.input[1]
        if x not in quantized:
            quantized[x] = (f"{x}_dynamic", f"{x}_dynamic_scale", f"{x}_dynamic_zero")
            nodes.append(
                helper.make_node("DynamicQuantizeLinear", [x], quantized[x], name=f"{x}_QuantizeLinear")
            )
        q, scale, zero = quantized[x]
        # A matrix may be used twice, once as it is and once transposed: those are different constants.
        stem = f"{name}_transposed" if node.op_type == "Gemm" and _attribute(node, "transB", 0) else name
        scales = np.maximum(_largest(matrix, pairs=reduce_range), np.finfo(np.float32).tiny) / 127
        weights.add(f"{stem}_quantized", np.rint(matrix / scales).astype(np.int8))
        weights.add(f"{stem}_scale", scales.astype(np.float32))
        bias = node.input[2] if len(node.input) > 2 else ""
        product = f"{y}_product" if bias else y
        nodes += [
            helper.make_node(
                "MatMulInteger", [q, f"{stem}_quantized", zero], [f"{y}_integer"], name=f"{node.name}_quant"
            ),
            helper.make_node(
                "Cast", [f"{y}_integer"], [f"{y}_cast"], name=f"{node.name}_cast", to=TensorProto.FLOAT
            ),
            helper.make_node("Mul", [scale, f"{stem}_scale"], [f"{y}_scales"], name=f"{node.name}_scales"),
            helper.make_node("Mul", [f"{y}_cast", f"{y}_scales"], [product], name=f"{node.name}_scaled"),
        ]
        if bias:
            nodes.append(helper.make_node("Add", [product, bias], [y], name=f"{node.name}_bias"))
    _finish(graph, nodes, weights)


def _largest(matrix: np.ndarray, *, pairs: bool) -> np.ndarray:
    """What becomes 127 in each column: its largest weight or, with `pairs`, its largest two neighbours together.

    The rows 0 and 1, 2 and 3, … are the pairs (see `graph.dialect.saturation`). Rounding adds at most 1 to a pair.
    """
    sizes = np.abs(matrix)
    if pairs:
        sizes = np.concatenate([sizes, np.zeros_like(sizes[: len(sizes) % 2])])
        sizes = sizes[0::2] + sizes[1::2]
    return sizes.max(axis=0)


def quantize_lookups(model: onnx.ModelProto, *, exclude: Collection[str] = (), rows: int = 64) -> None:
    """Replace every Gather along the rows of a constant float32 table, in place; `rows` is the smallest table."""
    graph = model.graph
    weights = _Weights(graph)
    nodes: list[NodeProto] = []
    for node in graph.node:
        table = (
            None if node.name in exclude or node.op_type != "Gather" else weights.float_matrix(node.input[0])
        )
        if table is None or _attribute(node, "axis", 0) != 0 or len(table) < rows:
            nodes.append(node)
            continue
        name, y = node.input[0], node.output[0]
        scales = np.maximum(np.abs(table).max(axis=1, keepdims=True), np.finfo(np.float32).tiny) / 127
        weights.add(f"{name}_rows", np.rint(table / scales).astype(np.int8))
        weights.add(f"{name}_row_scales", scales.astype(np.float32))
        ids = node.input[1]
        nodes += [
            helper.make_node("Gather", [f"{name}_rows", ids], [f"{y}_integer"], name=f"{node.name}_quant"),
            helper.make_node(
                "Gather", [f"{name}_row_scales", ids], [f"{y}_scale"], name=f"{node.name}_scale"
            ),
            helper.make_node(
                "Cast", [f"{y}_integer"], [f"{y}_cast"], name=f"{node.name}_cast", to=TensorProto.FLOAT
            ),
            helper.make_node("Mul", [f"{y}_cast", f"{y}_scale"], [y], name=f"{node.name}_scaled"),
        ]
    _finish(graph, nodes, weights)


class _Weights:
    """A graph's constant tensors by name, and those to add to it."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.tensors = {tensor.name: tensor for tensor in graph.initializer}
        inputs = {value.name for value in graph.input}
        # An initializer that is also an input is a default value, not a constant.
        self.constant = {name for name in self.tensors if name not in inputs}
        self.added: dict[str, np.ndarray] = {}

    def float_matrix(self, name: str) -> np.ndarray | None:
        tensor = self.tensors.get(name)
        if tensor is None or name not in self.constant or tensor.data_type != TensorProto.FLOAT:
            return None
        return numpy_helper.to_array(tensor) if len(tensor.dims) == 2 and 0 not in tensor.dims else None

    def add(self, name: str, value: np.ndarray) -> None:
        self.added.setdefault(name, value)


def _matrix(node: NodeProto, weights: _Weights) -> np.ndarray | None:
    """The constant right-hand matrix of a product, as [in, out]; None for every other node."""
    if node.op_type == "MatMul" and node.domain in ("", "ai.onnx"):
        return weights.float_matrix(node.input[1])
    plain = _attribute(node, "alpha", 1.0) == 1.0 and _attribute(node, "beta", 1.0) == 1.0
    if node.op_type != "Gemm" or not plain or _attribute(node, "transA", 0):
        return None
    matrix = weights.float_matrix(node.input[1])
    return matrix.T if matrix is not None and _attribute(node, "transB", 0) else matrix


def _attribute(node: NodeProto, name: str, default: float) -> float:
    found = next((a for a in node.attribute if a.name == name), None)
    return default if found is None else helper.get_attribute_value(found)


def _finish(graph: onnx.GraphProto, nodes: list[NodeProto], weights: _Weights) -> None:
    """Put the new nodes in, add the new constants, and drop the float ones that nothing reads any more."""
    del graph.node[:]
    graph.node.extend(nodes)
    read = {name for node in _all_nodes(graph) for name in node.input} | {
        value.name for value in graph.output
    }
    kept = [
        tensor for tensor in graph.initializer if tensor.name in read or tensor.name not in weights.constant
    ]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    graph.initializer.extend(
        numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in weights.added.items()
    )


def _all_nodes(graph: onnx.GraphProto) -> list[NodeProto]:
    """The graph's nodes and those of bodies inside it, which may read its values."""
    nodes = list(graph.node)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                nodes += _all_nodes(attribute.g)
    return nodes
