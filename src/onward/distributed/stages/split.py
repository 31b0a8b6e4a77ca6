"""Assigns the nodes of a forward graph to pipeline stages, and finds the values that cross the cuts.

By a list of cuts, by a map from names, or balanced by cost. A cut carries every live value: skip connections, integers,
values for later stages. What depends on parameters alone is computed wherever it is needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from onward.distributed.errors import DistributedError
from onward.graph.nodes import captured_values
from onward.graph.prune import find_value, values_of


@dataclasses.dataclass(frozen=True)
class Split:
    """Nodes by stage, and for each stage what it receives from the one before and sends to the next."""

    stage_of: dict[str, int]
    received: list[list[str]]
    sent: list[list[str]]
    stages: int


def split_graph(
    graph: ir.Graph,
    loss: str,
    *,
    stages: int,
    inputs: Iterable[str],
    cuts: Sequence[str | Sequence[str]] | None = None,
    by_name: Mapping[str, int] | None = None,
) -> Split:
    """Assign every node that depends on the inputs of a call to a stage."""
    flow = _Flow(graph, set(inputs))
    main = flow.ancestors([find_value(graph, loss)])
    if cuts is not None:
        chosen = _by_cuts(flow, graph, cuts, main)
    elif by_name is not None:
        chosen = _by_map(flow, by_name, main, stages)
    else:
        chosen = balance(flow, [node for node in flow.nodes if node in main], stages)
    for stage in range(stages):
        if stage not in chosen.values():
            raise DistributedError(f"Stage {stage} was not assigned to any node.")
    for node in flow.nodes:  # what the loss does not need (statistics) stays where its inputs are
        if node not in main:
            chosen[node] = flow.latest(node, chosen)
    return _with_crossings(flow, chosen, stages)


def follow(graph: ir.Graph, split: Split, *, inputs: Iterable[str]) -> Split:
    """Split a related graph (the evaluation model) the same way: values of the same name, the same stage."""
    flow = _Flow(graph, set(inputs))
    chosen: dict[ir.Node, int] = {}
    for node in flow.nodes:
        same_names = [split.stage_of[v.name] for v in node.outputs if v.name in split.stage_of]
        chosen[node] = max([flow.latest(node, chosen), *same_names])
    return _with_crossings(flow, chosen, split.stages)


class _Flow:
    """The nodes of a graph that depend on the inputs of a call, in order, and what they read."""

    def __init__(self, graph: ir.Graph, inputs: set[str]) -> None:
        self.reads: dict[ir.Node, list[ir.Value]] = {}
        depends = {value for value in graph.inputs if value.name in inputs}
        for node in graph:
            read = [value for value in node.inputs if value is not None] + captured_values(node)
            moving = [value for value in read if value in depends]
            if moving:
                self.reads[node] = moving
                depends.update(node.outputs)
        self.nodes = list(self.reads)

    def ancestors(self, values: Iterable[ir.Value]) -> set[ir.Node]:
        """The nodes that some values need."""
        nodes: set[ir.Node] = set()
        waiting = list(values)
        while waiting:
            node = waiting.pop().producer()
            if node is not None and node in self.reads and node not in nodes:
                nodes.add(node)
                waiting += self.reads[node]
        return nodes

    def latest(self, node: ir.Node, chosen: Mapping[ir.Node, int]) -> int:
        """The latest stage that a node reads from."""
        producers = [value.producer() for value in self.reads[node]]
        return max((chosen[node] for node in producers if node is not None and node in chosen), default=0)


def _by_cuts(
    flow: _Flow, graph: ir.Graph, cuts: Sequence[str | Sequence[str]], main: set[ir.Node]
) -> dict[ir.Node, int]:
    values = values_of(graph)
    before: list[set[ir.Node]] = []
    for cut in cuts:
        names = [cut] if isinstance(cut, str) else list(cut)
        for name in names:
            if name not in values or values[name].producer() not in main:
                why = "no value has that name" if name not in values else "the loss does not depend on it"
                raise DistributedError(f"Invalid cut point. '{name}': {why}")
        before.append(flow.ancestors([values[name] for name in names]))
    return {
        node: next((stage for stage, nodes in enumerate(before) if node in nodes), len(cuts))
        for node in flow.nodes
        if node in main
    }


def _by_map(flow: _Flow, by_name: Mapping[str, int], main: set[ir.Node], stages: int) -> dict[ir.Node, int]:
    chosen: dict[ir.Node, int] = {}
    unused = set(by_name)
    for node in flow.nodes:
        if node not in main:
            continue
        names = [name for name in [node.name, *(v.name for v in node.outputs)] if name in by_name]
        unused.difference_update(name for name in names if name is not None)
        least = flow.latest(node, chosen)
        stage = by_name[names[0]] if names and names[0] is not None else least
        if not 0 <= stage < stages:
            raise DistributedError(f"'{names[0]}' is assigned to stage {stage}: stages are 0 to {stages - 1}")
        if stage < least:
            raise DistributedError(
                f"Invalid cut point. '{names[0]}' is assigned to stage {stage} but reads a value of stage {least}"
            )
        chosen[node] = stage
    if unused:
        raise DistributedError(f"Invalid cut point. '{min(unused)}': no node or value has that name")
    return chosen


# How far a balanced cut may move from its ideal place, as a share of a stage, to carry less.
_SLACK = 0.15


def balance(flow: _Flow, nodes: Sequence[ir.Node], stages: int) -> dict[ir.Node, int]:
    """Cut the order of the nodes into stages of about equal cost, each cut where little is alive."""
    if len(nodes) < stages:
        raise DistributedError(
            f"Stage {len(nodes)} was not assigned to any node: the model has {len(nodes)} nodes"
        )
    costs = [cost_of(node) for node in nodes]
    total, reached, prefix = sum(costs), 0.0, []
    for cost in costs:
        reached += cost
        prefix.append(reached)
    alive = _alive_after(flow, nodes)
    ends: list[int] = []
    for cut in range(1, stages):
        first = ends[-1] + 1 if ends else 0
        possible = range(first, len(nodes) - (stages - cut))
        ideal = total * cut / stages
        near = [k for k in possible if abs(prefix[k] - ideal) <= _SLACK * total / stages]
        # close to equal costs, where the least crosses; where no cut is close, cost alone decides
        best = min(near or possible, key=lambda k: (alive[k] if near else 0, abs(prefix[k] - ideal)))
        ends.append(best)
    return {node: sum(position > end for end in ends) for position, node in enumerate(nodes)}


def cost_of(node: ir.Node) -> float:
    """About how many operations a node does; dimensions that are not known count once."""
    size = max((_size(value) for value in node.outputs), default=1.0)
    if node.op_type in ("MatMul", "Gemm") and node.inputs[0] is not None:
        shape = node.inputs[0].shape
        across = 0 if node.op_type == "Gemm" and node.attributes.get_int("transA", 0) else -1
        return size * 2 * _dim(shape[across]) if shape is not None and len(shape) else size
    if node.op_type in ("Conv", "ConvTranspose") and node.inputs[1] is not None:
        kernel = node.inputs[1].shape
        return size * 2 * math.prod(_dim(d) for d in kernel[1:]) if kernel is not None else size
    return size


def _alive_after(flow: _Flow, nodes: Sequence[ir.Node]) -> list[float]:
    """The size of what is made up to each node and read after it."""
    position = {node: index for index, node in enumerate(nodes)}
    last: dict[ir.Value, int] = {}
    for node in nodes:
        for value in flow.reads[node]:
            last[value] = position[node]
    change = [0.0] * (len(nodes) + 1)
    for value, end in last.items():
        producer = value.producer()
        if producer in position:
            change[position[producer]] += _size(value)
            change[end] -= _size(value)
    alive, now = [], 0.0
    for step in change[:-1]:
        now += step
        alive.append(now)
    return alive


def _with_crossings(flow: _Flow, chosen: dict[ir.Node, int], stages: int) -> Split:
    until: dict[ir.Value, int] = {}
    for node in flow.nodes:
        for value in flow.reads[node]:
            until[value] = max(until.get(value, 0), chosen[node])
    sent: list[list[str]] = [[] for _ in range(stages)]
    for node in flow.nodes:
        for value in node.outputs:
            # through all stages between: each knows its neighbours only
            for stage in range(chosen[node], until.get(value, -1)):
                if not isinstance(value.type, ir.TensorType):
                    raise DistributedError(
                        f"Invalid cut point. '{value.name}' crosses it and is {value.type}"
                    )
                sent[stage].append(value.name or "")
    return Split(
        stage_of={v.name or "": stage for node, stage in chosen.items() for v in node.outputs if v.name},
        received=[[], *sent[:-1]],
        sent=sent,
        stages=stages,
    )


def _size(value: ir.Value) -> float:
    return math.prod(_dim(d) for d in value.shape) if value.shape is not None else 1.0


def _dim(dim: object) -> float:
    return float(dim) if isinstance(dim, int) and dim > 0 else 1.0
