"""Properties of a node without its graph: subgraphs, captured values, types, and equality; and names for new ones."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onward.errors import ModelError

# Operators that give other results each time they run.
# Dropout is among them even where it drops nothing: whether it does may be decided by an input, at run time.
RANDOM = frozenset(
    {
        *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
        *("Bernoulli", "Multinomial", "Dropout"),
    }
)
# Tensors up to this many elements are compared by content, and told to shape inference.
SMALL = 256
# Tensors up to this many elements can be shapes, axes or pads; larger ones are only a type to inference.
_LARGEST_SHAPE = 1024
# No float8: it has no arithmetic in ONNX, and is only cast to and from.
_FLOATING = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def is_differentiable(value: ir.Value | None) -> bool:
    """Whether a value holds real numbers: a floating tensor, or a sequence or optional of them."""
    if value is None:
        return False
    # Optional(Sequence(Tensor)) is a legal type, and its gradient is that of the tensors inside.
    kind = value.type
    while isinstance(kind, ir.SequenceType | ir.OptionalType):
        kind = kind.elem_type
    return isinstance(kind, ir.TensorType) and kind.dtype in _FLOATING


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """The value of an attribute, or `default` where the node has none."""
    attr = node.attributes.get(name)
    return default if attr is None else attr.value


def optional_input(node: ir.Node, index: int) -> ir.Value | None:
    """An input, or None where the node leaves it out."""
    return node.inputs[index] if index < len(node.inputs) else None


def required_input(node: ir.Node, index: int = 0) -> ir.Value:
    """An input of a node; an error where the node leaves it out."""
    value = optional_input(node, index)
    if value is None:
        raise ModelError(f"input {index} is missing")
    return value


def producer_of(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node that computes a value; None where nothing does, or where it is none of these operators."""
    node = None if value is None else value.producer()
    return node if node is not None and (not op_types or node.op_type in op_types) else None


def new_initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """An initializer that is added to a graph, under a name that must be free."""
    tensor.name = name
    value = ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def single_number(value: ir.Value | None) -> float | None:
    """The number that a constant of one element holds."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return float(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size == 1 else None


def only_user(value: ir.Value, *op_types: str) -> ir.Node | None:
    """The one node that reads a value, if it is one of these operators, and nothing else does."""
    # A node that reads the value twice is listed twice, and is rightly not the only use then.
    users = [use.node for use in value.uses()]
    fits = len(users) == 1 and not value.is_graph_output() and (not op_types or users[0].op_type in op_types)
    return users[0] if fits else None


def is_used(node: ir.Node, index: int) -> bool:
    """Whether anything uses an output."""
    # An optional output at the end may be missing altogether, and not only be without a name.
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
        # Before the node is handed out: whoever iterates may replace it, and its bodies are still to be
        # visited.
        bodies = subgraphs_of(node)
        yield node
        for inner in bodies:
            yield from nodes_within(inner)


def ancestors(values: Iterable[ir.Value], stop: Collection[ir.Node] = ()) -> set[ir.Value]:
    """These values and all that they are computed from; not what lies before the nodes to stop at."""
    waiting = list(values)
    reached = set(waiting)
    while waiting:
        node = waiting.pop().producer()
        if node is None or node in stop:
            continue
        captured = captured_values(node) if subgraphs_of(node) else []
        sources = {value for value in [*node.inputs, *captured] if value is not None} - reached
        reached |= sources
        waiting += sources
    return reached


def captured_values(node: ir.Node) -> list[ir.Value]:
    """Values of the graphs around a node that the bodies in its attributes read, each once, in order."""
    captured: dict[ir.Value, None] = {}

    def visit(graph: ir.Graph, inside: set[ir.Value]) -> None:
        # ONNX forbids shadowing, but a body may read what an outer body defines: that is captured by the
        # inner node only.
        own = inside | set(graph.inputs) | set(graph.initializers.values())
        for inner in graph:
            for value in inner.inputs:
                if value is not None and value not in own:
                    captured.setdefault(value)
            for nested in subgraphs_of(inner):
                visit(nested, own)
            own.update(inner.outputs)
        # An initializer that a branch returned belongs to the outermost graph once it is lifted there.
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
    # By identity, and not by name: values of two bodies may share a name.
    return None if attrs is None else (op_type, domain, tuple(id(v) for v in inputs), attrs, outputs)


def attributes_key(attributes: Any) -> tuple | None:
    """Attributes as something to compare; None where they hold graphs or much data."""
    attrs = []
    for name, attr in attributes.items():
        # Whether two bodies compute the same would have to be shown node by node.
        if attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) or attr.is_ref():
            return None
        value = attr.value
        if attr.type == ir.AttributeType.TENSOR:
            # Comparing a large table costs more than a node that is computed twice.
            if value.size > SMALL:
                return None
            value = (value.dtype, tuple(value.shape), value.tobytes())
        elif attr.type == ir.AttributeType.TYPE_PROTO:
            value = str(value)
        elif isinstance(value, list):
            value = tuple(value)
        attrs.append((name, value))
    try:
        # Sorted: files list attributes in any order.
        key = tuple(sorted(attrs))
        hash(key)
    except TypeError:
        return None
    return key


def without_large_tensors(model: ir.Model) -> onnx.ModelProto:
    """A proto of the model in which large initializers are inputs; the model itself is as before."""
    graph = model.graph
    large = [
        value
        for value in graph.initializers.values()
        if value.const_value is None or value.const_value.size > _LARGEST_SHAPE
    ]
    held = {value: value.const_value for value in large}
    added = [value for value in large if not value.is_graph_input()]
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None:
            value.dtype = value.dtype or tensor.dtype
            value.shape = value.shape or ir.Shape(tensor.shape.numpy())
    order = list(graph.initializers)
    try:
        for value in large:
            graph.initializers.pop(value.name or "")
            value.const_value = None
        # Not dropped: a name that nothing defines makes inference fail for the whole graph.
        graph.inputs.extend(added)
        return ir.to_proto(model)
    finally:
        for value in added:
            graph.inputs.remove(value)
        for value, tensor in held.items():
            value.const_value = tensor
            graph.initializers.add(value)
        # Back into their order: it decides the order of parameters in files.
        values = {name: graph.initializers[name] for name in order}
        for name in order:
            graph.initializers.pop(name)
        for name in order:
            graph.initializers.add(values[name])


# --- Unique names for new values and nodes, deterministic between runs.


class Namer:
    """Gives names that are unique in a model, and the same in every run."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._next: dict[str, int] = {}

    @functools.cached_property
    def _taken(self) -> set[str]:
        """The names in the graph, looked up when the first new one is asked for: many passes add nothing."""
        taken: set[str] = set()
        _collect(self._graph, taken)
        return taken

    def take(self, name: str) -> None:
        """Mark a name as used."""
        self._taken.add(name)

    def is_free(self, name: str) -> bool:
        """Whether nothing has this name."""
        return name not in self._taken

    def __call__(self, wish: str) -> str:
        """A free name: `wish` itself, or `wish` with a number behind it."""
        name = wish
        # An empty name means "left out" in a file, so no value may have it.
        while name in self._taken or not name:
            count = self._next.get(wish, 0) + 1
            self._next[wish] = count
            name = f"{wish}_{count}"
        self._taken.add(name)
        return name


def _collect(graph: ir.Graph, names: set[str]) -> None:
    for value in [*graph.inputs, *graph.initializers.values()]:
        names.add(value.name or "")
    for node in graph:
        names.add(node.name or "")
        for value in node.outputs:
            names.add(value.name or "")
        for inner in subgraphs_of(node):
            _collect(inner, names)
