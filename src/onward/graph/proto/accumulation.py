"""Settles how a training model accumulates gradients: added to buffers or not, and rows of tables in place.

`specialize_reset` takes away the choice of `lazy_reset_grad`: no `Where`, and one pass over memory less.

`scatter_in_place` is for embedding tables. The gradient of a Gather scatters rows into zeros as large as the whole
table, which a large vocabulary makes the slowest operator of a step. It becomes a scatter into the buffer of the
gradient itself; the caller clears the rows that the last step wrote.
"""

from __future__ import annotations

import math

import numpy as np
import onnx

from onward.contract import BUFFER, OUT, RESET
from onward.errors import MAKE_ARTIFACTS, ModelError
from onward.graph.protobuf import attributes_of, copy_of, inner_graphs, set_nodes

# What is made of buffers before the choice: their sum with gradients, and one vector of several of them.
_SUMS = frozenset({"Add", "Concat"})


def specialize_reset(model: onnx.ModelProto, *, reset: bool, keep_shapes: bool = False) -> onnx.ModelProto:
    """A copy in which gradients overwrite their buffers (`reset`) or are always accumulated.

    What the file says of values inside goes, unless `keep_shapes`: `specialize_shapes` is the faster with it.
    """
    special = copy_of(model)
    graph = special.graph
    renamed: dict[str, str] = {}
    drop: set[int] = set()
    sum_index = {node.output[0]: index for index, node in enumerate(graph.node) if node.op_type in _SUMS}
    for index, node in enumerate(graph.node):
        if node.op_type != "Where" or node.input[0] != RESET:
            continue
        _, gradient, accumulated = node.input
        if accumulated not in sum_index:
            raise ModelError(
                f"the training model does not add up '{accumulated}', as one of generate_artifacts does: make it again",
                hint=MAKE_ARTIFACTS,
            )
        drop.add(index)
        if reset:
            drop.add(sum_index[accumulated])
            # buffers of several vectors are joined before they are added
            drop.update(
                sum_index[n]
                for n in graph.node[sum_index[accumulated]].input
                if n in sum_index and n != gradient
            )
            renamed[gradient] = node.output[0] if gradient not in renamed else renamed[gradient]
            if renamed[gradient] != node.output[0]:  # two parameters share one gradient
                graph.node.append(onnx.helper.make_node("Identity", [renamed[gradient]], [node.output[0]]))
        else:
            renamed[accumulated] = node.output[0]
    remaining = [node for index, node in enumerate(graph.node) if index not in drop]
    produced = {name for node in remaining for name in node.output}
    for name in [name for name in renamed if name not in produced]:
        # a gradient that is a constant or an input of the graph cannot be renamed
        remaining.append(onnx.helper.make_node("Identity", [name], [renamed.pop(name)]))
    for node in remaining:
        _rename(node, renamed)
    set_nodes(graph, remaining)
    unused = {RESET} | ({v.name for v in graph.input if v.name.endswith(BUFFER)} if reset else set())
    for value in [value for value in graph.input if value.name in unused]:
        graph.input.remove(value)
    # Shapes of values that are renamed or gone would contradict the graph.
    if not keep_shapes:
        del graph.value_info[:]
    return special


def _rename(node: onnx.NodeProto, names: dict[str, str]) -> None:
    for field in (node.input, node.output):
        for index, name in enumerate(field):
            if name in names:
                field[index] = names[name]
    for body in inner_graphs(node):
        for inner in body.node:
            _rename(inner, names)


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
            graph.output.add(name=name)  # of the integer type that the model has there
    return rows


def _scatters_rows(
    node: onnx.NodeProto, producers: dict[str, onnx.NodeProto], constants: dict[str, onnx.TensorProto]
) -> bool:
    """Whether a node adds whole rows, named by a column of numbers that is computed, to zeros."""
    # ScatterND's threads lose updates, so that gradients of tables are never written with it.
    if node.op_type != "ScatterElements" or node.domain:
        return False
    options = attributes_of(node)
    if options.get("axis", 0) != 0 or options.get("reduction") != b"add":
        return False
    base, indices = producers.get(node.input[0]), producers.get(node.input[1])
    if base is None or base.op_type != "Expand" or base.input[0] not in constants:
        return False
    if indices is None or indices.op_type != "Expand" or indices.input[0] not in producers:
        return False
    column = producers[indices.input[0]]
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
