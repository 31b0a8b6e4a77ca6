"""Sequences as gradients: the gradient of a sequence is a sequence of the same length.

The gradient of an optional is that of what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

if TYPE_CHECKING:
    from onward.graph.builder import Builder


def is_sequence(value: ir.Value) -> bool:
    """Whether a value is a sequence of tensors."""
    return isinstance(value.type, ir.SequenceType)


def add(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The sum of two gradients of one value: of tensors, or of each element of two sequences of one length."""
    if not isinstance(a.type, ir.SequenceType):
        return op.Add(a, b)
    return map_sequence(op, [a, b], lambda inner, x, y: inner.Add(x, y))


def zeros(op: Builder, like: ir.Value) -> ir.Value:
    """A zero gradient for a value of any type."""
    if isinstance(like.type, ir.OptionalType):
        like = op.OptionalGetElement(like)
    # A tensor's zeros are one Expand.
    if not isinstance(like.type, ir.SequenceType):
        return op.zeros_like(like)
    return map_sequence(op, [like], lambda inner, x: inner.zeros_like(x))


def map_sequence(op: Builder, sequences: Sequence[ir.Value], function: Callable) -> ir.Value:
    """The sequence of what a function builds from the elements of one or more sequences."""
    inner = op.subgraph("element")
    elements = [element_like(inner, sequence) for sequence in sequences]
    result = function(inner, *elements)
    inner.add_output(result)
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
    op.insert(node)
    return mapped


def append_all(op: Builder, front: ir.Value, back: ir.Value) -> ir.Value:
    """One sequence behind another."""
    return _collect(op, front, op.SequenceLength(back), lambda inner, index: inner.SequenceAt(back, index))


def part_of(op: Builder, sequence: ir.Value, start: ir.Value, length: ir.Value) -> ir.Value:
    """So many elements of a sequence, from a position on."""
    empty = op.SequenceEmpty(dtype=int(op.dtype(sequence)))
    return _collect(
        op, empty, length, lambda inner, index: inner.SequenceAt(sequence, inner.Add(index, start))
    )


def _collect(op: Builder, first: ir.Value, count: ir.Value, element: Callable) -> ir.Value:
    """A sequence with `count` more elements, each built from its number."""
    # A Loop with the sequence as its state: ONNX has no operator that joins two sequences.
    inner = op.subgraph("collect")
    number = inner.input("number", ir.DataType.INT64, [])
    going = inner.input("going", ir.DataType.BOOL, [])
    state = ir.Value(name=op.namer("collected"), type=first.type, shape=first.shape)
    inner.graph.inputs.append(state)
    inner.graph.outputs.extend([inner.Identity(going), inner.SequenceInsert(state, element(inner, number))])
    name = op.namer(f"{op.scope}/Loop" if op.scope else "Loop")
    node = ir.Node(
        "", "Loop", [count, None, first], [ir.AttrGraph("body", inner.graph)], num_outputs=1, name=name
    )
    (collected,) = node.outputs
    collected.name = op.namer(f"{name}.out")
    collected.type = first.type
    op.insert(node)
    return collected


def element_like(inner: Builder, sequence: ir.Value) -> ir.Value:
    """An input of a body for the elements of a sequence."""
    kind = sequence.type
    if not isinstance(kind, ir.SequenceType):
        raise TypeError(f"'{sequence.name}' is not a sequence")
    return inner.input("element", kind.elem_type.dtype, sequence.shape)
