"""Store matrices that a graph only ever reads transposed as it reads them.

A transposition of a constant costs time at every load, and hides the matrix from quantizers. Knows ONNX
protobufs alone.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import NodeProto, helper, numpy_helper

__all__ = ["common_transposition", "drop", "fold_transposes", "readers"]


def fold_transposes(model: onnx.ModelProto) -> None:
    """Transpose every initializer that all of its readers transpose alike, in place."""
    graph = model.graph
    found = readers(graph, [tensor.name for tensor in graph.initializer])
    outputs = {value.name for value in (*graph.output, *graph.input)}
    renamed: dict[str, str] = {}
    for tensor in graph.initializer:
        nodes = found[tensor.name]
        perm = common_transposition(nodes)
        if perm is None or tensor.name in outputs or outputs & {node.output[0] for node in nodes}:
            continue
        stored = f"{tensor.name}.transposed"
        renamed |= {node.output[0]: stored for node in nodes}
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).transpose(perm), stored))
    if renamed:
        drop(graph, renamed)


def readers(graph: onnx.GraphProto, names: Collection[str]) -> dict[str, list[NodeProto]]:
    """Every node that reads one of the names, in bodies too."""
    found: dict[str, list[NodeProto]] = {name: [] for name in names}
    for node in graph.node:
        for name in node.input:
            if name in found:
                found[name].append(node)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                for name, nodes in readers(attribute.g, names).items():
                    # Twice, so that what a body reads is never taken for something to fold.
                    found[name] += [node, *nodes]
    return found


def common_transposition(nodes: list[NodeProto]) -> list[int] | None:
    """The permutation that every reader applies; None where there is none or they differ."""
    perms = set()
    for node in nodes:
        perm = next((helper.get_attribute_value(a) for a in node.attribute if a.name == "perm"), None)
        if node.op_type != "Transpose" or perm is None:
            return None
        perms.add(tuple(perm))
    return list(perms.pop()) if len(perms) == 1 else None


def drop(graph: onnx.GraphProto, renamed: dict[str, str]) -> None:
    """Remove the nodes that made the renamed values; their readers, in bodies too, read the stored ones."""
    nodes = []
    for node in graph.node:
        if node.output and node.output[0] in renamed:
            continue
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                drop(attribute.g, renamed)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
