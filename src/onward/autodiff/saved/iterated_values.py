"""What the gradients of If, Loop and Scan read: values of a body in every iteration, as further outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onward.autodiff import subgraphs
from onward.autodiff.forms.iterations import Iterations, read_loop
from onward.autodiff.saved.optional_outputs import add_output
from onward.autodiff.sequences import append_all, is_sequence, part_of
from onward.autodiff.subgraphs import Drawn
from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.shapes.bodies import describe, keeps_its_shape

# A value of a body: an input of it, or what a random node gives.
Key = ir.Value | Drawn


@dataclasses.dataclass(frozen=True)
class Record:
    """A value of the body in every iteration: stacked, as a sequence, or as concatenated sequences."""

    values: ir.Value
    lengths: ir.Value | None = None

    def at(self, op, iteration: ir.Value) -> ir.Value:
        """The value in one iteration."""
        if self.lengths is not None:
            ends = op.CumSum(self.lengths, 0, exclusive=1)
            return part_of(op, self.values, op.Gather(ends, iteration), op.Gather(self.lengths, iteration))
        return (
            op.SequenceAt(self.values, iteration)
            if is_sequence(self.values)
            else op.Gather(self.values, iteration, axis=0)
        )


# ---- If ------------------------------------------------------------------------------------------------


def saved_from_branch(op, node: ir.Node, name: str, key: Drawn) -> ir.Value:
    """A value of one branch as an additional output of If; the other branch outputs an empty one."""
    like = key.like
    shape = None if like.shape is None else ir.Shape([None] * like.shape.rank())

    def compute() -> list[ir.Value]:
        for attribute in ("then_branch", "else_branch"):
            inside = Builder(node.attributes[attribute].as_graph(), parent=op)
            if attribute == name:
                inside.add_output(_value(op, key))
            else:
                # Both branches must have as many outputs of the same types; only one of them runs.
                empty = np.zeros([0] * op.rank(like), op.dtype(like).numpy())
                inside.add_output(op.constant(empty, name="empty"))
        return [_new_output(op, node, like.type, shape)]

    (value,) = op.save(node, [ir.Value(type=like.type, shape=shape)], compute)
    return value


# ---- Scan ----------------------------------------------------------------------------------------------


def saved_from_scan(op, scan: Iterations, keys: Sequence[Key]) -> dict[Key, ir.Value]:
    """Values of the body, stacked over the iterations."""

    def compute() -> list[ir.Value]:
        return [_stack_in_scan(op, scan, _value(op, key)) for key in keys]

    likes = [_stacked(_like(key)) for key in keys]
    return dict(zip(keys, op.save(scan.node, likes, compute)))


def _stack_in_scan(op, scan: Iterations, value: ir.Value) -> ir.Value:
    node, count = scan.node, len(scan.node.outputs) - len(scan.leaving)
    for what in ("axes", "directions"):
        if (old := node.attributes.get_ints(f"scan_output_{what}", None)) is not None:
            node.attributes[f"scan_output_{what}"] = ir.AttrInt64s(
                f"scan_output_{what}", [*(old or [0] * count), 0]
            )
    Builder(scan.body, parent=op).add_output(value)
    like = _stacked(value)
    return _new_output(op, node, like.type, like.shape)


# ---- Loop ----------------------------------------------------------------------------------------------


def saved_from_loop(op, loop: Iterations, keys: Sequence[Key]) -> tuple[ir.Value, dict[Key, Record]]:
    """The number of iterations, and values of the body in each."""
    likes = [_like(key) for key in keys]
    again = bool(loop.emitted) and not all(keeps_its_shape(like) for like in likes)
    for key in keys:
        if again and isinstance(key, Drawn):
            raise ModelError(
                f"random operator {key.node.op_type} in the body of Loop '{loop.node.name}', "
                "whose state changes its shape: its numbers cannot be kept for the backward pass"
            )

    def compute() -> list[ir.Value]:
        # Sequences must be states, and states come before scan outputs: add a second loop.
        values = {key: _value(op, key) for key in keys}
        read = loop
        if again:
            read, places = _without_scan_outputs(op, loop)
            values = {key: places[value] for key, value in values.items()}
        trips, records = _record(op, read, list(values.values()))
        return [trips, *(part for record in records for part in _parts(record))]

    expected = [_expected(op, like) for like in likes]
    count = ir.Value(type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    trips, *values = op.save(loop.node, [count, *(part for r in expected for part in _parts(r))], compute)
    parts = iter(values)
    records = [Record(next(parts), None if r.lengths is None else next(parts)) for r in expected]
    return trips, dict(zip(keys, records))


def _parts(record: Record) -> list[ir.Value]:
    return [record.values] if record.lengths is None else [record.values, record.lengths]


def _expected(op, like: ir.Value) -> Record:
    """The types and shapes of what `_record` makes of a value."""
    if keeps_its_shape(like):
        return Record(_stacked(like))
    kind = ir.SequenceType(ir.TensorType(op.dtype(like)))
    lengths = ir.Value(type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([None]))
    return Record(ir.Value(type=kind, shape=like.shape), lengths if is_sequence(like) else None)


def _record(op, loop: Iterations, values: list[ir.Value]) -> tuple[ir.Value, list[Record]]:
    """The number of iterations, and values of the body in each, as outputs of the loop."""
    body, node = loop.body, loop.node
    changing = [value for value in values if not keeps_its_shape(value)]
    inside = Builder(body, parent=op)
    inside.scope = op.scope
    sequences = {value: _carry_sequence(op, inside, node, value) for value in changing}
    stacks: dict[ir.Value, ir.Value] = {}
    for value in [
        *(value for value in values if value not in sequences),
        *(value for value in changing if is_sequence(value)),
    ]:
        element = inside.add_output(inside.SequenceLength(value) if is_sequence(value) else value)
        stacks[value] = _new_output(op, node, element.type, _stacked(element).shape)
    records = [
        Record(sequences[value], stacks.get(value)) if value in sequences else Record(stacks[value])
        for value in values
    ]
    countable = [*stacks.values(), *node.outputs[len(loop.leaving) + len(changing) :]]
    with op.inserting(before=_next(node)):
        # As many elements as there were iterations.
        if not countable and changing:
            return op.SequenceLength(sequences[changing[0]]), records
        if not countable:
            inside.add_output(body.inputs[0])
            countable = [_new_output(op, node, ir.TensorType(ir.DataType.INT64), ir.Shape([None]))]
        return op.Squeeze(op.Shape(countable[0], start=0, end=1), [0]), records


def _carry_sequence(op, inside: Builder, node: ir.Node, value: ir.Value) -> ir.Value:
    """Collect a value of the body over the iterations, in one more state of a loop without scan outputs."""
    kind = ir.SequenceType(ir.TensorType(op.dtype(value)))
    with op.inserting(before=node):
        empty = op.SequenceEmpty(dtype=int(op.dtype(value)))
    # States are inputs, and stand before scan outputs among the outputs: the position is the end of both here.
    node.resize_inputs(len(node.inputs) + 1)
    node.replace_input_with(len(node.inputs) - 1, empty)
    sequence = ir.Value(name=op.namer(f"{op.scope}/saved"), type=kind)
    inside.graph.inputs.append(sequence)
    longer = (
        append_all(inside, sequence, value) if is_sequence(value) else inside.SequenceInsert(sequence, value)
    )
    inside.graph.outputs.append(longer)
    return _new_output(op, node, kind, value.shape)


def _without_scan_outputs(op, loop: Iterations) -> tuple[Iterations, dict[ir.Value, ir.Value]]:
    """A copy of the loop without its scan outputs; and where the states of the body are in it."""
    inner = subgraphs.body_builder(op, "again")
    inputs = [subgraphs.body_input(inner, value, "in") for value in loop.body.inputs]
    results = subgraphs.inline(inner, loop.body, inputs)
    count = 1 + len(loop.leaving)
    subgraphs.close(inner, results[:count], loop.body.outputs[:count])
    finals = loop.node.outputs[: len(loop.leaving)]
    first, *_ = subgraphs.emit(op, "Loop", list(loop.node.inputs), {"body": inner}, likes=finals)
    node = first.producer()
    assert node is not None
    again = read_loop(node)
    return again, dict(zip(loop.entering, again.entering))


# ---- shared --------------------------------------------------------------------------------------------


def _like(key: Key) -> ir.Value:
    return key.like if isinstance(key, Drawn) else key


def _value(op, key: Key) -> ir.Value:
    return add_output(op, key.node, key.index, key.like) if isinstance(key, Drawn) else key


def _stacked(value: ir.Value) -> ir.Value:
    shape = None if value.shape is None else ir.Shape([None, *value.shape])
    return ir.Value(type=value.type, shape=shape)


def _new_output(op, node: ir.Node, kind: ir.TypeProtocol | None, shape: ir.Shape | None) -> ir.Value:
    """A further output of a node."""
    node.resize_outputs(len(node.outputs) + 1)
    value = node.outputs[-1]
    value.name = op.namer(f"{op.scope}/saved")
    describe(value, kind, shape)
    return value


def _next(node: ir.Node) -> ir.Node:
    """The node after another, which has one: what asks for its values comes later."""
    assert node.graph is not None
    nodes = iter(node.graph)
    next(other for other in nodes if other is node)
    return next(nodes)
