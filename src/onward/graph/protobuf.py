"""Attributes, bodies and node lists of protobuf messages, for those who work on them directly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import onnx
from google.protobuf.message import Message

_Message = TypeVar("_Message", bound=Message)


def attribute_of(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    """The value of an attribute, or `default` where the node has none."""
    return next((onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """All attributes of a node, by name."""
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def inner_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The bodies in a node's attributes: of If, Loop and Scan."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def opset_of(model: onnx.ModelProto) -> int:
    """The opset of the standard operators in a model."""
    return next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))


def copy_of(message: _Message) -> _Message:
    """A message of its own with the same content."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def set_nodes(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> None:
    """Replace a graph's nodes by others, which may be some of its own."""
    del graph.node[:]
    graph.node.extend(nodes)


def remove_unread(graph: onnx.GraphProto) -> None:
    """Take away nodes and constants that no output of a graph needs."""
    needed = {value.name for value in graph.output}
    live = []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            live.append(node)
            needed.update(values_read_by(node))
    if len(live) < len(graph.node):
        set_nodes(graph, live[::-1])
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in needed:
            del graph.initializer[index]


def values_read_by(node: onnx.NodeProto) -> Iterator[str]:
    """All names that a node or a body in it reads, a body's own among them."""
    yield from node.input
    for body in inner_graphs(node):
        for inner in body.node:
            yield from values_read_by(inner)
        yield from (value.name for value in body.output)
