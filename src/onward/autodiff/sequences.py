"""Sequences as gradients: the gradient of a sequence is a sequence of the same length.

The gradient of an optional is that of what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onward.graph.builder import Builder

__all__ = ["add", "add_sequences", "element_like", "map_sequence", "zeros"]


def add_sequences(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The sequence of sums of two sequences of one length; of two tensors where they stand for optionals."""
    if not isinstance(a.type, ir.SequenceType):
        return op.Add(a, b)
    return map_sequence(op, [a, b], lambda inner, x, y: inner.Add(x, y))


def add(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The sum of two gradients of one value, whatever its type."""
    return add_sequences(op, a, b) if isinstance(a.type, ir.SequenceType) else op.Add(a, b)


def zeros(op: Builder, like: ir.Value) -> ir.Value:
    """A zero gradient for a value of any type."""
    if isinstance(like.type, ir.OptionalType):
        like = op.OptionalGetElement(like)
    if not isinstance(like.type, ir.SequenceType):
        return op.zeros_like(like)
    return map_sequence(op, [like], lambda inner, x: inner.zeros_like(x))


def map_sequence(op: Builder, sequences: Sequence[ir.Value], function) -> ir.Value:
    """The sequence of what a function builds from the elements of one or more sequences."""
    inner = op.subgraph("element")
    elements = [element_like(inner, sequence) for sequence in sequences]
    result = function(inner, *elements)
    producer = result.producer()
    if producer is None or producer.graph is not inner.graph:  # shared with a graph around
        copy = ir.Node("", "Identity", [result], num_outputs=1, name=op.namer("Identity"))
        copy.outputs[0].name = op.namer("Identity.out")
        copy.outputs[0].type, copy.outputs[0].shape = result.type, result.shape
        inner.graph.append(copy)
        result = copy.outputs[0]
    inner.graph.outputs.append(result)
    node = ir.Node(
        "",
        "SequenceMap",
        sequences,
        [ir.AttrGraph("body", inner.graph)],
        num_outputs=1,
        name=op.namer(f"{op.scope}/SequenceMap" if op.scope else "SequenceMap"),
    )
    (mapped,) = node.outputs
    mapped.name = op.namer(f"{node.name}.out")
    mapped.type = ir.SequenceType(ir.TensorType(op.dtype(result)))
    mapped.shape = result.shape
    op.graph.append(node)
    return mapped


def element_like(inner: Builder, sequence: ir.Value) -> ir.Value:
    """An input of a body for the elements of a sequence."""
    kind = sequence.type
    if not isinstance(kind, ir.SequenceType):
        raise TypeError(f"'{sequence.name}' is not a sequence")
    return inner.input("element", kind.elem_type.dtype, sequence.shape)
