"""Gradients of Loop and Scan: their bodies are differentiated.

Each iteration of a backward node recomputes the forward body from the saved state of that iteration, then runs the
body's gradient. The state at the start of each iteration is saved in additional outputs of the forward node: stacked
where its shape is the same in every iteration, else as a sequence. Random numbers are saved too, never drawn again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onward.autodiff import subgraphs
from onward.autodiff.registry import gradient_rule
from onward.autodiff.sequences import add, append_all, is_sequence, part_of, zeros
from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.nodes import captured_values
from onward.graph.shapes.bodies import describe, keeps_its_shape

# ---- Loop --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Turns:
    """The parts of a Loop or Scan, by what each is to the body."""

    node: ir.Node
    body: ir.Graph
    initial: Sequence[ir.Value]
    entering: Sequence[ir.Value]
    leaving: Sequence[ir.Value]
    emitted: Sequence[ir.Value]
    scanned: Sequence[ir.Value] = ()
    slices: Sequence[ir.Value] = ()

    @property
    def states(self) -> list[tuple[ir.Value, ir.Value]]:
        return list(zip(self.entering, self.leaving))

    def activity(self, varying, mattering) -> tuple[set[ir.Value], set[ir.Value]]:
        """The body's inputs and captured values that vary, and its outputs that matter."""
        sources = {inner for outer, inner in zip(self.initial, self.entering) if outer in varying}
        sources |= {inner for outer, inner in zip(self.scanned, self.slices) if outer in varying}
        sources |= {value for value in captured_values(self.node) if value in varying}
        results = zip(self.node.outputs, [*self.leaving, *self.emitted])
        targets = {inner for outer, inner in results if outer in mattering}
        return subgraphs.turning_values(self.body, self.states, sources=sources, targets=targets)


def _loop(node: ir.Node) -> _Turns:
    body = node.attributes["body"].as_graph()
    count = len(node.inputs) - 2
    return _Turns(
        node,
        body,
        _present(node.inputs[2:]),
        body.inputs[2:],
        body.outputs[1 : 1 + count],
        body.outputs[1 + count :],
    )


def _loop_bodies(node, varying, mattering):
    turns = _loop(node)
    return [(turns.body, *turns.activity(varying, mattering))]


@gradient_rule("Loop", bodies=_loop_bodies)
def loop(op, node, *dys):
    """sₜ₊₁, eₜ = f(t, sₜ, c)   ⇒   from the last iteration to the first:
    dsₜ, δc = f'ᵀ(t, sₜ, c)·(dsₜ₊₁, deₜ),   dc = Σ δc
    """
    turns = _loop(node)
    arriving = {value for value, dy in zip(node.outputs, dys) if dy is not None}
    sources, targets = turns.activity(op.active, arriving)
    live = [i for i, (a, b) in enumerate(turns.states) if a in sources and b in targets]
    captured = [value for value in captured_values(node) if value in sources]

    inner = subgraphs.body_builder(op, "body")
    number = inner.input(f"{op.scope}/number", ir.DataType.INT64, [])
    going = inner.input(f"{op.scope}/going", ir.DataType.BOOL, [])
    ds = {i: subgraphs.body_input(inner, turns.entering[i], "ds") for i in live}
    sums = [subgraphs.body_input(inner, value, "sum") for value in captured]

    turn = subgraphs.argument(inner, turns.body.inputs[0], "turn")
    begins = {value: subgraphs.argument(inner, value, "begin") for value in turns.entering}
    kept = {
        value: subgraphs.argument(inner, value, "kept") for value in subgraphs.random_values(op, turns.body)
    }
    true = op.constant(np.asarray(True), name="true")
    results = subgraphs.inline(inner, turns.body, [turn, true, *begins.values()], given=kept)
    outcome = results[1 : 1 + len(turns.leaving)]
    arrived = {i: dy for i, dy in enumerate(dys[len(turns.leaving) :]) if dy is not None}
    de = {i: subgraphs.argument(inner, turns.emitted[i], "de") for i in arrived}
    found = subgraphs.differentiate_body(
        inner,
        [(outcome[i], ds[i]) for i in live]
        + [(results[1 + len(turns.leaving) + i], dy) for i, dy in de.items()],
        [*(begins[turns.entering[i]] for i in live), *captured],
    )
    likes = [turns.entering[i] for i in live] + captured
    before = [found[begins[turns.entering[i]]] for i in live]
    added = [_added(inner, total, found[value]) for value, total in zip(captured, sums)]
    subgraphs.close(inner, [going, *before, *added], [going, *likes])

    keep = {v: a for v, a in [*begins.items(), *kept.items()] if a.uses()}
    trips, record = _record_loop(op, turns, list(keep))
    inner.before = next(iter(inner.graph), None)
    if keep or turn.uses() or any(placeholder.uses() for placeholder in de.values()):
        now = inner.Sub(op.Sub(trips, 1), number)
        ir.convenience.replace_all_uses_with(turn, now)
        for value, placeholder in keep.items():
            piece = record[value].at(inner, now)
            describe(piece, value.type, value.shape)
            ir.convenience.replace_all_uses_with(placeholder, piece)
        for i, placeholder in de.items():
            if placeholder.uses():
                piece = inner.Gather(arrived[i], now, axis=0)
                describe(piece, turns.emitted[i].type, turns.emitted[i].shape)
                ir.convenience.replace_all_uses_with(placeholder, piece)
    first = [zeros(op, node.outputs[i]) if dys[i] is None else dys[i] for i in live]
    first += [zeros(op, value) for value in captured]
    outer = [turns.initial[i] for i in live] + captured
    gradients = subgraphs.emit(op, "Loop", [trips, None, *first], {"body": inner.graph}, likes=outer)
    return subgraphs.by_value(op, outer, gradients)


@dataclasses.dataclass(frozen=True)
class _Record:
    """A value of the body in every iteration: stacked, as a sequence, or as concatenated sequences."""

    kept: ir.Value
    lengths: ir.Value | None = None

    def at(self, op, turn: ir.Value) -> ir.Value:
        """The value in one iteration."""
        if self.lengths is not None:
            ends = op.CumSum(self.lengths, np.asarray(0, np.int64), exclusive=1)
            return part_of(op, self.kept, op.Gather(ends, turn), op.Gather(self.lengths, turn))
        return (
            op.SequenceAt(self.kept, turn) if is_sequence(self.kept) else op.Gather(self.kept, turn, axis=0)
        )


def _record_loop(op, turns: _Turns, values: list[ir.Value]) -> tuple[ir.Value, dict[ir.Value, _Record]]:
    """The number of iterations, and values of the body in each."""
    steady = [value for value in values if keeps_its_shape(value)]
    changing = [value for value in values if value not in steady]
    place = {value: value for value in values}
    if changing and turns.emitted:
        # Sequences must be states, and states come before scan outputs: add a second loop.
        turns, place = _repeat(op, turns, values)
    body, node = turns.body, turns.node
    inside = Builder(body, parent=op)
    sequences = {value: _carry_sequence(op, inside, node, place[value]) for value in changing}
    stacks: dict[ir.Value, ir.Value] = {}
    for value in [*steady, *(value for value in changing if is_sequence(value))]:
        element = inside.SequenceLength(place[value]) if is_sequence(value) else place[value]
        body.outputs.append(subgraphs.copy_into(op, body, element))
        stacks[value] = subgraphs.new_output(op, node, element.type, [None, *(element.shape or ())])
    record = {value: _Record(stacks[value]) for value in steady}
    record |= {value: _Record(sequences[value], stacks.get(value)) for value in changing}
    countable = [*stacks.values(), *node.outputs[len(turns.leaving) + len(changing) :]]
    if not countable and changing:
        return op.SequenceLength(sequences[changing[0]]), record
    if not countable:
        body.outputs.append(subgraphs.copy_into(op, body, body.inputs[0]))
        countable = [subgraphs.new_output(op, node, ir.TensorType(ir.DataType.INT64), [None])]
    return op.Squeeze(op.Shape(countable[0], start=0, end=1), [0]), record


def _carry_sequence(op, inside: Builder, node: ir.Node, value: ir.Value) -> ir.Value:
    """Collect a value of the body over the iterations, in one more state of a loop without scan outputs."""
    kind = ir.SequenceType(ir.TensorType(op.dtype(value)))
    empty = ir.Node("", "SequenceEmpty", [], [ir.AttrInt64("dtype", int(op.dtype(value)))], num_outputs=1)
    empty.name = op.namer("SequenceEmpty")
    empty.outputs[0].name = op.namer("SequenceEmpty.out")
    empty.outputs[0].type = kind
    op.graph.insert_before(node, empty)
    node.resize_inputs(len(node.inputs) + 1)
    node.replace_input_with(len(node.inputs) - 1, empty.outputs[0])
    sequence = ir.Value(name=op.namer(f"{op.scope}/kept"), type=kind)
    inside.graph.inputs.append(sequence)
    longer = (
        append_all(inside, sequence, value) if is_sequence(value) else inside.SequenceInsert(sequence, value)
    )
    inside.graph.outputs.append(longer)
    return subgraphs.new_output(op, node, kind, value.shape)


def _repeat(op, turns: _Turns, values: list[ir.Value]) -> tuple[_Turns, dict[ir.Value, ir.Value]]:
    """A copy of the loop without its scan outputs; and where the body's values are in it."""
    if any(value not in turns.entering for value in values):
        source = next(v for v in values if v not in turns.entering).producer()
        raise ModelError(
            f"random operator {source.op_type if source else '?'} in the body of Loop '{turns.node.name}', "
            "whose state changes its shape: its numbers cannot be kept for the backward pass"
        )
    inner = subgraphs.body_builder(op, "again")
    inputs = [subgraphs.body_input(inner, value, "in") for value in turns.body.inputs]
    results = subgraphs.inline(inner, turns.body, inputs)
    count = 1 + len(turns.leaving)
    subgraphs.close(inner, results[:count], turns.body.outputs[:count])
    finals = turns.node.outputs[: len(turns.leaving)]
    subgraphs.emit(op, "Loop", list(turns.node.inputs), {"body": inner.graph}, likes=finals)
    again = _loop(op.graph[-1])
    return again, dict(zip(turns.entering, again.entering))


# ---- Scan --------------------------------------------------------------------------------------------


def _scan(node: ir.Node) -> _Turns:
    body = node.attributes["body"].as_graph()
    count = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    return _Turns(
        node,
        body,
        _present(node.inputs[:count]),
        body.inputs[:count],
        body.outputs[:count],
        body.outputs[count:],
        _present(node.inputs[count:]),
        body.inputs[count:],
    )


def _scan_bodies(node, varying, mattering):
    turns = _scan(node)
    return [(turns.body, *turns.activity(varying, mattering))]


@gradient_rule("Scan", bodies=_scan_bodies)
def scan(op, node, *dys):
    """sₜ₊₁, eₜ = f(sₜ, xₜ, c)   ⇒   from the last iteration to the first:
    dsₜ, dxₜ, δc = f'ᵀ(sₜ, xₜ, c)·(dsₜ₊₁, deₜ),   dc = Σ δc
    """
    turns = _scan(node)
    arriving = {value for value, dy in zip(node.outputs, dys) if dy is not None}
    sources, targets = turns.activity(op.active, arriving)
    live = [i for i, (a, b) in enumerate(turns.states) if a in sources and b in targets]
    sliced = [i for i, value in enumerate(turns.slices) if value in sources]
    captured = [value for value in captured_values(node) if value in sources]
    count = len(turns.leaving)

    inner = subgraphs.body_builder(op, "body")
    ds = {i: subgraphs.body_input(inner, turns.entering[i], "ds") for i in live}
    sums = [subgraphs.body_input(inner, value, "sum") for value in captured]
    begins = {value: subgraphs.argument(inner, value, "begin") for value in turns.entering}
    pieces = {value: subgraphs.argument(inner, value, "x") for value in turns.slices}
    kept = {
        value: subgraphs.argument(inner, value, "kept") for value in subgraphs.random_values(op, turns.body)
    }
    results = subgraphs.inline(inner, turns.body, [*begins.values(), *pieces.values()], given=kept)
    de = {
        i: subgraphs.argument(inner, value, "de")
        for i, value in enumerate(turns.emitted)
        if dys[count + i] is not None
    }
    found = subgraphs.differentiate_body(
        inner,
        [(results[i], ds[i]) for i in live] + [(results[count + i], dy) for i, dy in de.items()],
        [
            *(begins[turns.entering[i]] for i in live),
            *(pieces[turns.slices[i]] for i in sliced),
            *captured,
        ],
    )
    before = [found[begins[turns.entering[i]]] for i in live]
    added = [_added(inner, total, found[value]) for value, total in zip(captured, sums)]
    dx = {i: found[pieces[turns.slices[i]]] for i in sliced}
    dx = {i: value for i, value in dx.items() if value is not None}
    subgraphs.close(
        inner,
        [*before, *added, *dx.values()],
        [*(turns.entering[i] for i in live), *captured, *(turns.slices[i] for i in dx)],
    )

    # Scan inputs of the backward node: (value, placeholder in the body, axis, direction in the forward node).
    axes_in, ways_in = _layout(node, "input", len(turns.slices))
    axes_out, ways_out = _layout(node, "output", len(turns.emitted))
    walked = [
        (turns.scanned[i], pieces[turns.slices[i]], axes_in[i], ways_in[i]) for i in range(len(turns.slices))
    ]
    walked += [(dys[count + i], dy, axes_out[i], ways_out[i]) for i, dy in de.items()]
    for value, placeholder in [*begins.items(), *kept.items()]:
        if placeholder.uses():
            walked.append((_record_scan(op, turns, value), placeholder, 0, 0))
    used = [row for row in walked if row[1].uses() or row[1].is_graph_output()]
    used = used or walked[:1]  # a Scan needs an input that sets the number of iterations
    inner.graph.inputs.extend(placeholder for _, placeholder, _, _ in used)
    first = [zeros(op, node.outputs[i]) if dys[i] is None else dys[i] for i in live]
    first += [zeros(op, value) for value in captured]
    outer = [turns.initial[i] for i in live] + captured + [turns.scanned[i] for i in dx]
    gradients = subgraphs.emit(
        op,
        "Scan",
        [*first, *(value for value, _, _, _ in used)],
        {
            "body": inner.graph,
            "num_scan_inputs": len(used),
            "scan_input_axes": [axis for _, _, axis, _ in used],
            "scan_input_directions": [1 - way for _, _, _, way in used],
            "scan_output_axes": [axes_in[i] for i in dx] or None,
            "scan_output_directions": [1 - ways_in[i] for i in dx] or None,
        },
        likes=outer,
    )
    return subgraphs.by_value(op, outer, gradients)


def _layout(node: ir.Node, side: str, count: int) -> tuple[list[int], list[int]]:
    """The axes and directions of a Scan's inputs or outputs."""
    axes = node.attributes.get_ints(f"scan_{side}_axes", None) or [0] * count
    ways = node.attributes.get_ints(f"scan_{side}_directions", None) or [0] * count
    return list(axes), list(ways)


def _record_scan(op, turns: _Turns, value: ir.Value) -> ir.Value:
    """Stack a value of the body over the iterations, as an additional output of the forward Scan."""
    node, count = turns.node, len(turns.node.outputs) - len(turns.leaving)
    for what in ("axes", "directions"):
        if (old := node.attributes.get_ints(f"scan_output_{what}", None)) is not None:
            node.attributes[f"scan_output_{what}"] = ir.AttrInt64s(
                f"scan_output_{what}", [*(old or [0] * count), 0]
            )
    turns.body.outputs.append(subgraphs.copy_into(op, turns.body, value))
    shape = None if value.shape is None else [None, *value.shape]
    return subgraphs.new_output(op, node, value.type, shape)


# ---- shared --------------------------------------------------------------------------------------------


def _present(values: Sequence[ir.Value | None]) -> list[ir.Value]:
    """Inputs that the standard requires."""
    return [value for value in values if value is not None]


def _added(op, total: ir.Value, part: ir.Value | None) -> ir.Value:
    return total if part is None else add(op, total, part)
