"""Gradients of operators on sequences and optionals.

The gradient of a sequence is a sequence of the same length; that of an optional is that of what it holds.
"""

from __future__ import annotations

import numpy as np

from onward.autodiff import subgraphs
from onward.autodiff.registry import gradient_rule, no_gradient
from onward.autodiff.sequences import is_sequence, map_sequence, zeros
from onward.graph.nodes import captured_values

no_gradient("SequenceEmpty", because="it has no inputs")
no_gradient("SequenceLength", "OptionalHasElement", because="its result is not real")


@gradient_rule("SequenceConstruct")
def sequence_construct(op, node, ds):
    """s = [x₀, x₁, …]   ⇒   dxᵢ = dsᵢ"""
    return [op.SequenceAt(ds, index) if op.needs_gradient(x) else None for index, x in enumerate(node.inputs)]


@gradient_rule("SequenceAt")
def sequence_at(op, node, dy):
    """y = s[i]   ⇒   ds = zeros, but dy at i"""
    sequence, position = node.inputs
    index = _from_start(op, position, sequence)
    # ONNX cannot replace an element: one out, one in.
    return op.SequenceInsert(op.SequenceErase(zeros(op, sequence), index), dy, index)


@gradient_rule("SequenceInsert")
def sequence_insert(op, node, dz):
    """z = s with x put in at i   ⇒   ds = dz without its i-th,  dx = dz[i]"""
    sequence, _, position = (*node.inputs, None)[:3]
    index = np.asarray(-1, np.int64) if position is None else _from_start(op, position, sequence)
    return op.SequenceErase(dz, index), op.SequenceAt(dz, index)


@gradient_rule("SequenceErase")
def sequence_erase(op, node, dz):
    """z = s without its i-th   ⇒   ds = dz with zeros put in at i"""
    sequence, position = (*node.inputs, None)[:2]
    # ONNX: without a position the last one goes.
    erased = op.SequenceAt(sequence, -1 if position is None else position)
    index = None if position is None else _from_start(op, position, sequence)
    return op.SequenceInsert(dz, op.zeros_like(erased), index)


@gradient_rule("SplitToSequence")
def split_to_sequence(op, node, ds):
    """s = x cut along an axis   ⇒   dx = ds joined along it"""
    split = (*node.inputs, None)[1]
    # keepdims=0 took the axis away, but only where no sizes are given: ONNX ignores it otherwise.
    new_axis = 0 if split is not None or node.attributes.get_int("keepdims", 1) else 1
    return op.ConcatFromSequence(ds, axis=node.attributes.get_int("axis", 0), new_axis=new_axis)


@gradient_rule("ConcatFromSequence")
def concat_from_sequence(op, node, dy):
    """y = the elements of s joined along an axis   ⇒   ds = dy cut where they met"""
    axis = node.attributes.get_int("axis")
    if node.attributes.get_int("new_axis", 0):
        return op.SplitToSequence(dy, axis=axis, keepdims=0)
    return op.SplitToSequence(dy, _sizes(op, node.inputs[0], axis), axis=axis)


@gradient_rule("Optional", "OptionalGetElement")
def optional(op, node, dy):
    """y = x, packed or unpacked   ⇒   dx = dy"""
    return dy


def _map_bodies(node, varying, mattering):
    body = node.attributes["body"].as_graph()
    sources = {inner for outer, inner in zip(node.inputs, body.inputs) if outer in varying}
    sources |= {value for value in captured_values(node) if value in varying}
    return [
        (body, sources, {inner for outer, inner in zip(node.outputs, body.outputs) if outer in mattering})
    ]


@gradient_rule("SequenceMap", bodies=_map_bodies)
def sequence_map(op, node, *dys):
    """yᵢ = f(sᵢ, x, c)   ⇒   dsᵢ, δxᵢ, δcᵢ = f'ᵀ(sᵢ, x, c)·dyᵢ,   dx = Σ δxᵢ,   dc = Σ δcᵢ"""
    body = node.attributes["body"].as_graph()
    subgraphs.refuse_random(body, node)
    inner = subgraphs.body_builder(op, "element")
    arguments = [subgraphs.body_input(inner, value, "x") for value in body.inputs]
    results = subgraphs.inline(inner, body, arguments)
    arriving = [(i, dy) for i, dy in enumerate(dys) if dy is not None]
    pieces = [(results[i], subgraphs.body_input(inner, body.outputs[i], "dy")) for i, _ in arriving]
    sources = [(outer, a) for outer, a in zip(node.inputs, arguments) if op.needs_gradient(outer)]
    sources += [(value, value) for value in captured_values(node) if op.needs_gradient(value)]
    inner_gradients = subgraphs.differentiate_body(inner, pieces, [a for _, a in sources])
    live = [(outer, a) for outer, a in sources if inner_gradients[a] is not None]
    if not live:
        return {}
    subgraphs.close(inner, [inner_gradients[a] for _, a in live], [a for _, a in live])
    parts = subgraphs.emit(
        op,
        "SequenceMap",
        [*node.inputs, *(dy for _, dy in arriving)],
        {"body": inner},
        likes=[subgraphs.sequence_like(op, a) for _, a in live],
    )
    gradients = [
        part if is_sequence(outer) else _sum_over(op, part, outer) for (outer, _), part in zip(live, parts)
    ]
    return subgraphs.by_value(op, [outer for outer, _ in live], gradients)


def _sum_over(op, parts, like):
    """The sum of a sequence's elements, also of none: zeros go along."""
    # An empty sequence cannot be joined; with zeros in it, it can.
    stacked = op.ConcatFromSequence(op.SequenceInsert(parts, zeros(op, like)), axis=0, new_axis=1)
    return op.ReduceSum(stacked, [0], keepdims=0)


def _from_start(op, position, sequence):
    """A position counted from the front, since the lengths before and after differ."""
    value = op.const_value(position)
    if value is not None and value.item() >= 0:
        return position
    index = op.Cast(position, to=7)
    length = op.SequenceLength(sequence)
    if value is not None:
        return op.Add(index, length)
    return op.Where(op.Less(index, 0), op.Add(index, length), index)


def _sizes(op, sequence, axis):
    """The size of each element along an axis, as a vector."""
    rank = None if sequence.shape is None else sequence.shape.rank()

    def size(inner, element):
        if rank is None:
            return inner.Gather(inner.Shape(element), [axis])
        return inner.Shape(element, start=axis % rank, end=axis % rank + 1)

    return op.ConcatFromSequence(map_sequence(op, [sequence], size), axis=0)
