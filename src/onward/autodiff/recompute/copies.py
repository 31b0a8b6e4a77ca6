"""Activation recomputation: drop values of the forward pass, and recompute them for the backward pass.

Works on a graph that has its gradients already, and changes only what the backward nodes read. A segment is a
set of forward nodes. Values that stay inside it are dropped: where a backward node reads one, it reads a copy
instead, which repeats the segment's nodes from what is kept (the segment's inputs and outputs).

The copies must run late, and must not be merged with the originals by a runtime that looks for common
subexpressions. So whatever the backward nodes of a segment and its copies read of the forward pass goes through
a gate: a Reshape to its own shape, whose target depends on a gradient that arrives at the segment.
It moves no data, and no optimizer can compute it before the run.

A runtime that schedules by walking back from each output would compute what only an output needs (the gradient of
a bias) at the end of the run, and keep its inputs until then. So gates also wait for the results that can be
computed by then. `segments` decides which nodes make segments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.graph.nodes import RANDOM, SMALL, is_differentiable, subgraphs_of

if TYPE_CHECKING:
    from onward.autodiff.engine import DifferentiableBuilder


class Tape:
    """The forward nodes of a graph, its backward nodes, and the order in which nodes were differentiated.

    `results` are outputs that hold the gradients of parameters.
    """

    def __init__(
        self, op: DifferentiableBuilder, forward: Iterable[ir.Node], results: Sequence[ir.Value] = ()
    ) -> None:
        self.op = op
        self.nodes = list(op.graph)
        self.position = {node: index for index, node in enumerate(self.nodes)}
        # a rule may have put other nodes in the place of a forward node
        last = max((self.position[node] for node in forward if node in self.position), default=-1)
        self.forward = self.nodes[: last + 1]
        self._is_forward = set(self.forward)
        self._starts = {
            visit.node: (self.position[visit.before] + 1, arriving)
            for visit in op.visits
            if visit.before in self.position and (arriving := self._computed(visit.arriving))
        }
        # where the nodes that rules made end
        self._end = len(self.nodes)
        self._results = [result for value in results if (result := self._result(value)) is not None]

    def start(self, segment: Iterable[ir.Node]) -> tuple[int, list[ir.Value]] | None:
        """The place where the backward pass comes to a segment, and the gradients that are there then."""
        starts = [self._starts[node] for node in segment if node in self._starts]
        position, arriving = min(starts, key=lambda start: start[0]) if starts else (0, [])
        return (position, arriving) if arriving and position < self._end else None

    def backward(self, begin: int, end: int) -> list[ir.Node]:
        """The backward nodes between two places."""
        return [node for node in self.nodes[begin:end] if node not in self._is_forward]

    def is_forward(self, value: ir.Value) -> bool:
        """Whether a value is computed in the forward pass."""
        return value.producer() in self._is_forward

    def readers(self, value: ir.Value) -> list[ir.Node] | None:
        """The backward nodes that read a value; None where one is in a body."""
        users = [node for node, _ in value.uses()]
        return (
            None
            if any(n not in self.position for n in users)
            else [n for n in users if n not in self._is_forward]
        )

    def read_forward(self, value: ir.Value) -> list[ir.Node]:
        """The forward nodes that read a value."""
        return [node for node, _ in value.uses() if node in self._is_forward]

    def read_backward(self, value: ir.Value) -> bool:
        """Whether anything but the forward nodes reads a value."""
        return any(node not in self._is_forward for node, _ in value.uses())

    def take_results(self, before: ir.Node) -> list[ir.Value]:
        """Results that can be had before a node, each told once; what makes them is moved there."""
        graph = self.op.graph
        ready = [result for result in self._results if result.ready < self.position[before]]
        self._results = [result for result in self._results if result.ready >= self.position[before]]
        for result in ready:
            graph.remove(result.nodes)
            graph.insert_before(before, result.nodes)
        return [result.value for result in ready]

    def _computed(self, gradients: Iterable[ir.Value]) -> list[ir.Value]:
        """Gradients that are known only at run time, as tensors."""
        return [
            value
            for value in gradients
            if isinstance(value.type, ir.TensorType)
            and is_differentiable(value)
            and value.producer() in self.position
            and not self.is_forward(value)
        ]

    def _result(self, value: ir.Value) -> _Result | None:
        """None where a result is no more than a value of the forward pass."""
        last = value.producer()
        if last is None:
            return None
        producers = {
            last,
            *(node for v in last.inputs if v is not None and (node := v.producer()) is not None),
        }
        # the last steps, which nothing else reads, can be moved
        ending = {node for node in producers if node is last or _only_for(node, last)}
        self._end = min(self._end, *(self.position[node] for node in ending))
        sources = {v.producer() for node in ending for v in node.inputs if v is not None} - ending - {None}
        if not sources or any(node in self._is_forward or node not in self.position for node in sources):
            return None
        nodes = sorted(ending, key=self.position.__getitem__)
        return _Result(value, nodes, max(self.position[node] for node in sources if node is not None))


@dataclasses.dataclass(frozen=True)
class _Result:
    """An output, the nodes that end its computation, and the place of the last node that they read from."""

    value: ir.Value
    nodes: list[ir.Node]
    ready: int


def _only_for(node: ir.Node, last: ir.Node) -> bool:
    return all(user is last for value in node.outputs for user, _ in value.uses())


@dataclasses.dataclass(frozen=True)
class Plan:
    """The nodes and values that recomputing a segment needs.

    `needed` are the values that backward nodes will read copies of, `nodes` are repeated for them (in forward
    order), and `inputs` are what these read from outside: values that are kept until then.
    """

    segment: Sequence[ir.Node]
    needed: list[ir.Value] = dataclasses.field(default_factory=list)
    nodes: list[ir.Node] = dataclasses.field(default_factory=list)
    inputs: list[ir.Value] = dataclasses.field(default_factory=list)


def plan_segment(tape: Tape, segment: Sequence[ir.Node]) -> Plan:
    """Which values of a segment can be dropped, and how to recompute them."""
    inside = set(segment)
    start = tape.start(segment)
    if start is None:
        return Plan(segment)
    inner: dict[ir.Value, list[ir.Node]] = {}
    for value in (value for node in segment if _repeats(node) for value in node.outputs):
        # Small values are not worth a second run, and outputs are there until the end in any case.
        if not _is_large(value) or value.is_graph_output():
            continue
        readers = tape.readers(value)
        if (
            readers is not None
            # Something reads it before the backward pass comes to this segment: it is there, and a copy would be
            # late.
            and all(tape.position[node] >= start[0] for node in readers)
            and all(node in inside for node in tape.read_forward(value))
        ):
            inner[value] = readers
    needed = [value for value, readers in inner.items() if readers]
    repeated: set[ir.Node] = set()
    inputs: dict[ir.Value, None] = {}
    waiting = [value.producer() for value in needed]
    while waiting:
        node = waiting.pop()
        if node is None or node in repeated:
            continue
        repeated.add(node)
        for value in _sources(node):
            if value in inner:
                waiting.append(value.producer())
            else:
                inputs.setdefault(value)
    return Plan(segment, needed, [node for node in segment if node in repeated], list(inputs))


def recompute_segments(tape: Tape, plans: Iterable[Plan], *, rest_waits: bool = True) -> None:
    """Make backward nodes read copies of the dropped values, and the rest of the forward pass through gates.

    Segments of few nodes do without gates for the rest (`rest_waits`): what it would read is kept as ever.
    """
    starts = [(start, plan) for plan in plans if (start := tape.start(plan.segment)) is not None]
    # In the order of the backward pass, the last segment first.
    starts.sort(key=lambda item: item[0][0])
    ends = [start[0] for start, _ in starts[1:]] + [len(tape.nodes)]
    copies: dict[ir.Value, ir.Value] = {}
    for ((begin, arriving), plan), end in zip(starts, ends):
        first = tape.nodes[begin]
        with tape.op.inserting(first):
            gate = _Gates(tape.op, [*arriving, *tape.take_results(first)])
            copies.update(_repeat(tape.op, plan, first, gate))
            for node in tape.backward(begin, end):
                for index, value in enumerate(node.inputs):
                    if value in copies:
                        node.replace_input_with(index, copies[value])
                    elif rest_waits and value is not None and tape.is_forward(value) and _waits(value):
                        node.replace_input_with(index, gate(value))
        tape.op.scope = ""


def _repeat(
    op: DifferentiableBuilder, plan: Plan, first: ir.Node, gate: Callable[[ir.Value], ir.Value]
) -> dict[ir.Value, ir.Value]:
    """Copies of a segment's nodes before another node; the values that are needed, with their copies."""
    copies: dict[ir.Value, ir.Value] = {}
    for node in plan.nodes:
        op.scope = f"{node.name or node.op_type}/recompute"
        copy = _copy(op, node, copies, gate)
        op.graph.insert_before(first, copy)
        for old, new in zip(node.outputs, copy.outputs):
            if old.name:
                new.name = op.namer(f"{old.name}/recomputed")
                new.type, new.shape = old.type, old.shape
                copies[old] = new
    return {value: copies[value] for value in plan.needed}


class _Gates:
    """Passes on existing values, but only after some others have been computed."""

    def __init__(self, op: DifferentiableBuilder, awaited: Sequence[ir.Value]) -> None:
        self._op = op
        op.scope = "recompute"
        samples = op.Sum(*(self._sample(value) for value in awaited))
        # the sum exists also where a value has no element
        total = op.ReduceSum(samples, keepdims=0)
        # 0 or 1, also for non-finite values, so that times 0 it is 0
        self._flag = op.Cast(op.IsNaN(total), to=ir.DataType.INT64)
        self._targets: dict[int | None, ir.Value] = {}
        self._passed: dict[ir.Value, ir.Value] = {}

    def _sample(self, value: ir.Value) -> ir.Value:
        """One element, which stands for all."""
        op = self._op
        if value.shape is None:
            value = op.Reshape(value, [-1])
        rank = op.rank(value)
        # To wait for one element is to wait for all, and costs nothing.
        first = op.Slice(value, [0] * rank, [1] * rank, list(range(rank))) if rank else value
        return first if first.dtype == ir.DataType.FLOAT else op.Cast(first, to=ir.DataType.FLOAT)

    def __call__(self, value: ir.Value) -> ir.Value:
        if value not in self._passed:
            op, scope = self._op, self._op.scope
            op.scope = f"{value.name}/recompute/gate"
            passed = op.Reshape(value, self._target(value))
            passed.type, passed.shape = value.type, value.shape
            self._passed[value] = passed
            op.scope = scope
        return self._passed[value]

    def _target(self, value: ir.Value) -> ir.Value:
        """Zeros, one for each axis: a Reshape reads them as the sizes that its input has."""
        rank = None if value.shape is None else value.shape.rank()
        op = self._op
        if rank is None:
            return op.Add(op.Shape(value), op.Mul(self._flag, np.int64(0)))
        if rank not in self._targets:
            self._targets[rank] = op.Mul(self._flag, np.zeros(rank, np.int64))
        return self._targets[rank]


def _copy(
    op: DifferentiableBuilder,
    node: ir.Node,
    copies: dict[ir.Value, ir.Value],
    gate: Callable[[ir.Value], ir.Value],
) -> ir.Node:
    inputs: list[ir.Value | None] = list(node.inputs)
    attributes = dict(node.attributes)
    outputs = len(node.outputs)
    if _normalizes_batch(node):
        # by the statistics that the batch had, which are kept: the running ones must move once only
        inputs[3:5] = node.outputs[1:3]
        attributes = {name: attributes[name] for name in ("epsilon",) if name in attributes}
        outputs = 1
    read = [
        value
        if value is None
        else copies[value]
        if value in copies
        else gate(value)
        if _waits(value)
        else value
        for value in inputs
    ]
    # equal to the original to the last input, a runtime would merge the two
    if all(old is new for old, new in zip(inputs, read)):
        index = next(i for i, value in enumerate(read) if value is not None)
        read[index] = gate(inputs[index])  # type: ignore[arg-type]
    return ir.Node(
        node.domain,
        node.op_type,
        read,
        list(attributes.values()),
        num_outputs=outputs,
        name=op.namer(f"{node.name or node.op_type}/recomputed"),
    )


def _waits(value: ir.Value) -> bool:
    """Whether a value needs a gate. Parameters are stored anyway, and sizes are small."""
    return value.producer() is not None and _is_large(value) and isinstance(value.type, ir.TensorType)


def _sources(node: ir.Node) -> list[ir.Value]:
    values = [value for value in node.inputs if value is not None]
    if _normalizes_batch(node):
        values = [*values[:3], *node.outputs[1:3]]
    return values


def _normalizes_batch(node: ir.Node) -> bool:
    return node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode", 0) == 1


def _repeats(node: ir.Node) -> bool:
    """Whether recomputing a node gives the same result, and its outputs are tensors.

    A Dropout that is left in a training graph drops nothing: the others were written as hashes of a seed.
    """
    return (
        node.domain in ("", "ai.onnx")
        and (node.op_type == "Dropout" or node.op_type not in RANDOM)
        and not subgraphs_of(node)
        and any(value is not None for value in node.inputs)
        and all(isinstance(value.type, ir.TensorType) for value in node.outputs if value.name)
    )


def _is_large(value: ir.Value) -> bool:
    """Whether dropping a value could save anything: shapes, scalars and statistics are kept."""
    size = 1
    for dim in () if value.shape is None else value.shape:
        size *= dim if isinstance(dim, int) else SMALL + 1
    return value.shape is None or size > SMALL
