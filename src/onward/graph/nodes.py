"""Properties of a node without its graph: subgraphs, captured values, types, and equality."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import onnx
import onnx_ir as ir

__all__ = [
    "ACTIVE",
    "DROPOUT",
    "GRADIENT",
    "MASKED",
    "RANDOM",
    "SMALL",
    "STOP",
    "attribute",
    "attributes_key",
    "captured_values",
    "computation_key",
    "given",
    "is_differentiable",
    "key_of",
    "nodes_within",
    "stops_gradient",
    "subgraphs_of",
    "type_proto",
    "wanted",
]

# Operators that give other results each time they run.
RANDOM = frozenset(
    {
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Bernoulli",
        "Multinomial",
        "Dropout",
    }
)
# Tensors up to this many elements are compared by content, and told to shape inference.
SMALL = 256


_FLOATING = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def is_differentiable(value: ir.Value | None) -> bool:
    """Whether a value holds real numbers: a floating tensor, or a sequence or optional of them."""
    if value is None:
        return False
    kind = value.type
    while isinstance(kind, ir.SequenceType | ir.OptionalType):
        kind = kind.elem_type
    return isinstance(kind, ir.TensorType) and kind.dtype in _FLOATING


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """The value of an attribute, or `default` where the node has none."""
    attr = node.attributes.get(name)
    return default if attr is None else attr.value


def given(node: ir.Node, index: int) -> ir.Value | None:
    """An input, or None where the node leaves it out."""
    return node.inputs[index] if index < len(node.inputs) else None


def wanted(node: ir.Node, index: int) -> bool:
    """Whether anything uses an output."""
    if index >= len(node.outputs):
        return False
    value = node.outputs[index]
    return bool(value.uses()) or value.is_graph_output()


# A node's metadata in a model that is to be differentiated: an Identity marked so passes no gradient on, and rows of a
# Softmax marked so may be NaN, in whose place the model puts something else.
GRADIENT, STOP, MASKED = "onward.gradient", "stop", "masked rows"
# The same of a Dropout before opset 12, which has no input that says so: it drops when the model trains.
DROPOUT, ACTIVE = "onward.dropout", "active"


def stops_gradient(node: ir.Node) -> bool:
    """Whether a node is marked as stopping the gradient (`detach` in the exported module)."""
    return node.op_type == "Identity" and node.metadata_props.get(GRADIENT) == STOP


def subgraphs_of(node: ir.Node) -> list[ir.Graph]:
    """The subgraphs in a node's attributes: bodies of If, Loop and Scan."""
    graphs: list[ir.Graph] = []
    for attr in node.attributes.data.values():  # the plain dictionary: every pass asks this of every node
        kind = attr.type
        if kind == ir.AttributeType.GRAPH:
            graphs.append(attr.as_graph())
        elif kind == ir.AttributeType.GRAPHS:
            graphs.extend(attr.as_graphs())
    return graphs


def nodes_within(graph: ir.Graph) -> Iterator[ir.Node]:
    """The nodes of a graph and of the bodies inside it; the one that has just come may be removed."""
    for node in graph:
        bodies = subgraphs_of(node)
        yield node
        for inner in bodies:
            yield from nodes_within(inner)


def captured_values(node: ir.Node) -> list[ir.Value]:
    """Values of the graphs around a node that the bodies in its attributes read, each once, in order."""
    captured: dict[ir.Value, None] = {}

    def visit(graph: ir.Graph, inside: set[ir.Value]) -> None:
        own = inside | set(graph.inputs) | set(graph.initializers.values())
        for inner in graph:
            for value in inner.inputs:
                if value is not None and value not in own:
                    captured.setdefault(value)
            for nested in subgraphs_of(inner):
                visit(nested, own)
            own.update(inner.outputs)
        for value in graph.outputs:
            if value not in own:
                captured.setdefault(value)

    for graph in subgraphs_of(node):
        visit(graph, set())
    return list(captured)


def type_proto(value: ir.Value) -> onnx.TypeProto:
    """The type of a value, with its shape, as ONNX writes it."""
    proto = onnx.TypeProto()
    if value.type is not None:
        ir.serde.serialize_type_into(proto, value.type)
    if value.shape is not None:
        ir.serde.serialize_shape_into(proto, value.shape)
    return proto


def computation_key(node: ir.Node) -> tuple | None:
    """Equal for two nodes that compute the same thing; None where that cannot be said."""
    if stops_gradient(node):  # an Identity like others, but not to the differentiator
        return None
    return key_of(node.op_type, node.domain, node.inputs, node.attributes, len(node.outputs))


def key_of(
    op_type: str, domain: str, inputs: Sequence[ir.Value | None], attributes: Any, outputs: int
) -> tuple | None:
    """What makes two nodes compute the same thing; None where that cannot be said."""
    if op_type in RANDOM:
        return None
    attrs = attributes_key(attributes)
    return None if attrs is None else (op_type, domain, tuple(id(v) for v in inputs), attrs, outputs)


def attributes_key(attributes: Any) -> tuple | None:
    """Attributes as something to compare; None where they hold graphs or much data."""
    attrs = []
    for name, attr in attributes.items():
        if attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) or attr.is_ref():
            return None
        value = attr.value
        if attr.type == ir.AttributeType.TENSOR:
            if value.size > SMALL:
                return None
            value = (value.dtype, tuple(value.shape), value.tobytes())
        elif attr.type == ir.AttributeType.TYPE_PROTO:
            value = str(value)
        elif isinstance(value, list):
            value = tuple(value)
        attrs.append((name, value))
    try:
        key = tuple(sorted(attrs))
        hash(key)
    except TypeError:
        return None
    return key
