"""Sparse gradients of embedding tables: accumulated in place in the gradient buffer, not in a table of zeros.

The gradient of a Gather scatters rows into zeros as large as the whole table, which a large vocabulary makes
the slowest operator of a step. When a training model is loaded, that becomes a scatter into the buffer of the
gradient itself; the caller clears the rows that the last step wrote. Works on protobuf directly, like `specialize`.
"""

from __future__ import annotations

import math

import numpy as np
import onnx

from onward.contract import BUFFER, OUT

__all__ = ["scatter_in_place"]

# Smallest number of elements of a table for which this pays off.
_LARGE = 1 << 16


def scatter_in_place(model: onnx.ModelProto) -> dict[str, str]:
    """Rewrite a specialized training model; returns, by parameter, the output with the row indices that a step wrote.

    Buffers of these parameters are read and written in place: they must hold zeros, or what to add to.
    """
    graph = model.graph
    producers = {name: node for node in graph.node for name in node.output}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    outputs = {value.name: value for value in graph.output}
    inputs = {value.name for value in graph.input}
    rows: dict[str, str] = {}
    for node in [node for node in graph.node if _scatters_rows(node, producers, constants)]:
        users = readers.get(node.output[0], [])
        target = node.output[0]
        if len(users) == 1 and target not in outputs:  # what was there is added: the scatter can do it
            target = _sum_with_buffer(users[0], target)
        elif users:
            continue
        value = outputs.get(target)
        if value is None or not target.endswith(OUT) or _size(value) < _LARGE:
            continue
        parameter = target.removesuffix(OUT)
        buffer = f"{parameter}{BUFFER}"
        if buffer not in inputs:
            graph.input.add(name=buffer).type.CopyFrom(value.type)
        if users:
            graph.node.remove(users[0])
        node.input[0], node.output[0] = buffer, target
        rows[parameter] = producers[node.input[1]].input[0]
    present = set(outputs)
    for name in dict.fromkeys(rows.values()):
        if name not in present:
            graph.output.append(
                onnx.ValueInfoProto(name=name)
            )  # of the integer type that the model has there
    return rows


def _scatters_rows(
    node: onnx.NodeProto, producers: dict[str, onnx.NodeProto], constants: dict[str, onnx.TensorProto]
) -> bool:
    """Whether a node adds whole rows, named by a column of numbers that is computed, to zeros."""
    if node.op_type != "ScatterElements" or node.domain:
        return False
    options = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    if options.get("axis", 0) != 0 or options.get("reduction") != b"add":
        return False
    base, places = producers.get(node.input[0]), producers.get(node.input[1])
    if base is None or base.op_type != "Expand" or base.input[0] not in constants:
        return False
    if places is None or places.op_type != "Expand" or places.input[0] not in producers:
        return False
    column = producers[places.input[0]]
    if column.op_type != "Reshape" or column.input[1] not in constants:
        return False
    shape = onnx.numpy_helper.to_array(constants[column.input[1]])
    zero = onnx.numpy_helper.to_array(constants[base.input[0]])
    return bool(np.all(zero == 0) and shape[0] == -1 and np.all(shape[1:] == 1))


def _sum_with_buffer(node: onnx.NodeProto, gradient: str) -> str:
    """The output of a node that adds a gradient to its own buffer, or nothing."""
    others = [name for name in node.input if name != gradient]
    if node.op_type != "Add" or len(others) != 1 or not others[0].endswith(BUFFER):
        return ""
    same = others[0].removesuffix(BUFFER) == node.output[0].removesuffix(OUT)
    return node.output[0] if same else ""


def _size(value: onnx.ValueInfoProto) -> int:
    return math.prod(dim.dim_value for dim in value.type.tensor_type.shape.dim)
