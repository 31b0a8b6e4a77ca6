"""Shared by the rules of If, Loop, Scan and SequenceMap: subgraphs that are recomputed and differentiated.

Copies a subgraph into a builder's graph, finds which of its values carry a gradient, removes dead code, and emits
nodes with subgraphs. Independent of the operator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import onnx_ir as ir

from onward.autodiff.engine import DifferentiableBuilder, add_cotangent, backward, find_path
from onward.autodiff.sequences import add, zeros
from onward.errors import ModelError
from onward.graph.nodes import RANDOM, is_differentiable, optional_input, subgraphs_of
from onward.graph.shapes.bodies import describe, infer_node

_Key = TypeVar("_Key")


def body_builder(op: DifferentiableBuilder, name: str) -> DifferentiableBuilder:
    """A builder of a new body inside the builder's graph."""
    opsets = dict(op.root.graph.opset_imports)
    graph = ir.Graph([], [], nodes=[], opset_imports=opsets, name=op.namer(f"{op.scope}/{name}"))
    inner = DifferentiableBuilder(graph, parent=op)
    inner.scope = op.scope
    return inner


def body_input(op: DifferentiableBuilder, like: ir.Value, name: str) -> ir.Value:
    """Add an input of another value's type and shape to the builder's graph."""
    value = argument(op, like, name)
    op.graph.inputs.append(value)
    return value


def argument(op: DifferentiableBuilder, like: ir.Value, name: str) -> ir.Value:
    """A value of another one's type and shape that nothing computes yet."""
    value = ir.Value(name=op.namer(f"{op.scope}/{name}"))
    describe(value, like.type, like.shape)
    return value


def inline(
    op: DifferentiableBuilder,
    body: ir.Graph,
    arguments: Sequence[ir.Value],
    *,
    drawn_values: Mapping[Drawn, ir.Value] | None = None,
) -> list[ir.Value]:
    """Write the nodes of a body into the builder's graph; returns what stands for the body's outputs.

    Nodes whose random results are all in `drawn_values` are left out. Nothing is shared with the graphs around, so
    that the walk through this graph sees every node between its results and captured values.
    """
    copies = dict(zip(body.inputs, arguments))
    masks: dict[ir.Node, ir.Value] = {}
    for drawn, value in (drawn_values or {}).items():
        if drawn.node.op_type == "Dropout":
            masks[drawn.node] = value
        else:
            copies[drawn.node.outputs[drawn.index]] = value
    # Initializers of a body become the outermost graph's: a copy of the body must not hold them twice.
    copies.update(_copy_constants(op, body))
    for node in body:
        # All its results are saved: a random node must not draw again.
        if node.outputs and all(value in copies or not value.name for value in node.outputs):
            continue
        if node in masks:
            copies[node.outputs[0]] = _apply_mask(op, node, masks[node], copies)
            for mask in node.outputs[1:]:
                copies[mask] = masks[node]
            continue
        # Through `adopt`, not the builder: that would merge a copy with an equal node of the graph around.
        copy = _copy_node(op, node, copies)
        op.adopt(copy)
        infer_node(op, copy)
    return [copies.get(value, value) for value in body.outputs]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A random value of a body, which recomputing the body would draw again: an output of a node.

    Of Dropout that is the mask, which the node may not output yet.
    """

    node: ir.Node
    index: int

    @property
    def like(self) -> ir.Value:
        """A value of its type and shape."""
        # Of Dropout it is the mask that is random; the result would also save x, and stop the gradient.
        if self.node.op_type != "Dropout":
            return self.node.outputs[self.index]
        return ir.Value(type=ir.TensorType(ir.DataType.BOOL), shape=self.node.outputs[0].shape)


def random_values(body: ir.Graph) -> list[Drawn]:
    """The random values of a body."""
    values: list[Drawn] = []
    for node in body:
        # What two iterations deep draws has one value for each pair of iterations, which no output can hold.
        for inner in subgraphs_of(node):
            for drawn in random_values(inner):
                raise ModelError(
                    f"random operator {drawn.node.op_type} '{drawn.node.name}' stands two bodies deep: its numbers "
                    "cannot be kept for the backward pass; move it out of the inner body"
                )
        if node.domain not in ("", "ai.onnx") or node.op_type not in RANDOM or _is_idle(node):
            continue
        if node.op_type == "Dropout":
            values.append(Drawn(node, 1))
        else:
            values.extend(Drawn(node, index) for index, value in enumerate(node.outputs) if value.name)
    return values


def _apply_mask(
    op: DifferentiableBuilder, node: ir.Node, mask: ir.Value, copies: Mapping[ir.Value, ir.Value]
) -> ir.Value:
    """Dropout by a mask that is known: x·mask/(1 − ratio), or x where it is not training."""
    x, ratio, training = (None if v is None else copies.get(v, v) for v in (*node.inputs, None, None)[:3])
    assert x is not None
    dtype = op.dtype(x)
    keep_rate = 0.5 if ratio is None else op.Sub(1.0, op.Cast(ratio, to=int(dtype)))
    dropped = op.Div(op.Mul(x, op.Cast(mask, to=int(dtype))), keep_rate)
    return dropped if training is None or training.const_value is not None else op.Where(training, dropped, x)


def _is_idle(node: ir.Node) -> bool:
    """Dropout that is not training."""
    mode = optional_input(node, 2)
    constant = None if mode is None else mode.const_value
    return node.op_type == "Dropout" and (
        mode is None or (constant is not None and not constant.numpy().any())
    )


def refuse_random(body: ir.Graph, node: ir.Node) -> None:
    """Raise if a recomputed body draws random numbers that are not saved."""
    for drawn in random_values(body):
        raise ModelError(
            f"random operator {drawn.node.op_type} '{drawn.node.name}' in the body of {node.op_type} '{node.name}': "
            "its numbers cannot be kept for the backward pass; draw them outside"
        )


def differentiate_body(
    op: DifferentiableBuilder, results: Sequence[tuple[ir.Value, ir.Value | None]], wrt: Sequence[ir.Value]
) -> dict[ir.Value, ir.Value | None]:
    """Gradients in a body from pairs of result and the gradient that arrives for it."""
    cotangents: dict[ir.Value, ir.Value] = {}
    for value, dy in results:
        if dy is not None:
            add_cotangent(op, cotangents, value, dy)
    # `backward` names nodes after those that it differentiates; what follows belongs to the outer node again.
    scope = op.scope
    gradients = backward(op, cotangents, wrt)
    op.scope = scope
    return gradients


def active_values(
    body: ir.Graph,
    states: Sequence[tuple[ir.Value, ir.Value]],
    *,
    sources: set[ir.Value],
    targets: set[ir.Value],
) -> tuple[set[ir.Value], set[ir.Value]]:
    """The body's values that depend on a source and those that a target depends on, over any number of iterations.

    `states` pairs the state inputs of an iteration with its state outputs. Returns the sources and targets with
    the states that they reach.
    """
    sources, targets = set(sources), set(targets)
    grown = True
    while grown:
        reached = find_path(body, set(body.outputs), sources).active
        # A state that leaves an iteration enters the next one: what it depends on grows until nothing is added.
        new = {a for a, b in states if b in reached and a not in sources and is_differentiable(a)}
        sources |= new
        grown = bool(new)
    grown = True
    while grown:
        needed = find_path(body, targets, sources).active
        new = {b for a, b in states if a in needed and b not in targets}
        targets |= new
        grown = bool(new)
    return sources, targets


def close(op: DifferentiableBuilder, outputs: Sequence[ir.Value | None], likes: Sequence[ir.Value]) -> None:
    """Make values (zeros for None) a body's outputs, each once and computed in it; drop dead code."""
    for value, like in zip(outputs, likes):
        if value is None:
            value = zeros(op, like)
        # One value may be wanted as two outputs of a body, which ONNX does not allow.
        value = op.add_output(value)
        if value.shape is None or (like.shape is not None and value.shape.rank() == like.shape.rank()):
            value.shape = None if like.shape is None else ir.Shape(like.shape)
    # At once: dead code in a body runs in every iteration.
    for node in reversed(op.graph):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            op.graph.remove(node, safe=True)


def emit(
    op: DifferentiableBuilder,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any],
    *,
    likes: Sequence[ir.Value],
) -> list[ir.Value]:
    """Append a node that holds bodies; its outputs have the types and shapes of `likes`."""
    attrs = {
        name: ir.AttrGraph(name, value.graph)
        if isinstance(value, DifferentiableBuilder)
        else ir.convenience.convert_attribute(name, value)
        for name, value in attributes.items()
        if value is not None
    }
    name = op.namer(f"{op.scope}/{op_type}")
    node = ir.Node("", op_type, inputs, attrs, num_outputs=len(likes), name=name)
    for index, (value, like) in enumerate(zip(node.outputs, likes)):
        value.name = op.namer(f"{op.scope}/{op_type}.{index}")
        describe(value, like.type, like.shape)
    op.insert(node)
    return list(node.outputs)


def used(placeholders: Mapping[_Key, ir.Value]) -> dict[_Key, ir.Value]:
    """Those that a new body reads."""
    return {key: value for key, value in placeholders.items() if value.uses() or value.is_graph_output()}


def bind(placeholder: ir.Value, value: ir.Value) -> None:
    """Let a new body read a value where it reads a placeholder."""
    ir.convenience.replace_all_uses_with(placeholder, value)


def sequence_like(op: DifferentiableBuilder, element: ir.Value) -> ir.Value:
    """A description of the sequence of such elements."""
    kind = ir.SequenceType(ir.TensorType(op.dtype(element)))
    return ir.Value(type=kind, shape=None if element.shape is None else ir.Shape(element.shape))


def by_value(
    op: DifferentiableBuilder, values: Sequence[ir.Value], gradients: Sequence[ir.Value]
) -> dict[ir.Value, ir.Value]:
    """Gradients by value; one that is read in several places gets their sum."""
    total: dict[ir.Value, ir.Value] = {}
    for value, dx in zip(values, gradients):
        total[value] = add(op, total[value], dx) if value in total else dx
    return total


def _copy_node(op: DifferentiableBuilder, node: ir.Node, copies: dict[ir.Value, ir.Value]) -> ir.Node:
    inputs = [None if value is None else copies.get(value, value) for value in node.inputs]
    attributes = [_copy_attribute(op, attr, copies) for attr in node.attributes.values()]
    copy = ir.Node(
        node.domain,
        node.op_type,
        inputs,
        attributes,
        num_outputs=len(node.outputs),
        name=op.namer(node.name or node.op_type),
        metadata_props=dict(node.metadata_props),
    )
    for value, original in zip(copy.outputs, node.outputs):
        if original.name:
            value.name = op.namer(original.name)
            describe(value, original.type, original.shape)
        else:
            value.name = ""  # an output that the node leaves out
        copies[original] = value
    return copy


def _copy_attribute(op: DifferentiableBuilder, attr: ir.Attr, copies: dict[ir.Value, ir.Value]) -> ir.Attr:
    if attr.type == ir.AttributeType.GRAPH:
        return ir.AttrGraph(attr.name, _copy_graph(op, attr.as_graph(), copies))
    if attr.type == ir.AttributeType.GRAPHS:
        return ir.AttrGraphs(attr.name, [_copy_graph(op, graph, copies) for graph in attr.as_graphs()])
    return attr


def _copy_constants(op: DifferentiableBuilder, graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    held = [(value, value.const_value) for value in graph.initializers.values()]
    return {v: op.constant(t.numpy(), name=v.name or "const") for v, t in held if t is not None}


def _copy_graph(op: DifferentiableBuilder, graph: ir.Graph, outer: dict[ir.Value, ir.Value]) -> ir.Graph:
    copies = dict(outer)
    inputs = []
    for value in graph.inputs:
        copy = ir.Value(name=op.namer(value.name or "in"))
        describe(copy, value.type, value.shape)
        copies[value] = copy
        inputs.append(copy)
    copies.update(_copy_constants(op, graph))
    nodes = [_copy_node(op, node, copies) for node in graph]
    outputs = []
    for value in graph.outputs:
        result = copies.get(value, value)
        if result.producer() not in nodes:
            # a branch may return its own initializer, which two copies of it would share
            node = ir.Node("", "Identity", [result], num_outputs=1, name=op.namer(f"{value.name}/copy"))
            node.outputs[0].name = op.namer(value.name or "out")
            describe(node.outputs[0], value.type, value.shape)
            nodes.append(node)
            result = node.outputs[0]
        outputs.append(result)
    return ir.Graph(
        inputs,
        outputs,
        nodes=nodes,
        opset_imports=dict(graph.opset_imports),
        name=op.namer(graph.name or "body"),
    )
