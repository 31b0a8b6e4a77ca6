"""The parts of a Loop or Scan, and what of its body varies and matters. Registers no rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from onward.autodiff import subgraphs
from onward.graph.nodes import captured_values


@dataclasses.dataclass(frozen=True)
class Iterations:
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
        """Pairs of a state at the start and at the end of an iteration."""
        return list(zip(self.entering, self.leaving))

    def activity(self, varying, mattering) -> tuple[set[ir.Value], set[ir.Value]]:
        """The body's inputs and captured values that vary, and its outputs that matter."""
        sources = {inner for outer, inner in zip(self.initial, self.entering) if outer in varying}
        sources |= {inner for outer, inner in zip(self.scanned, self.slices) if outer in varying}
        sources |= {value for value in captured_values(self.node) if value in varying}
        results = zip(self.node.outputs, [*self.leaving, *self.emitted])
        targets = {inner for outer, inner in results if outer in mattering}
        return subgraphs.active_values(self.body, self.states, sources=sources, targets=targets)


def read_loop(node: ir.Node) -> Iterations:
    """The parts of a Loop."""
    body = node.attributes["body"].as_graph()
    # The first two are how often and whether to go on.
    count = len(node.inputs) - 2
    return Iterations(
        node,
        body,
        _present(node.inputs[2:]),
        body.inputs[2:],
        body.outputs[1 : 1 + count],
        body.outputs[1 + count :],
    )


def read_scan(node: ir.Node) -> Iterations:
    """The parts of a Scan."""
    body = node.attributes["body"].as_graph()
    count = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    return Iterations(
        node,
        body,
        _present(node.inputs[:count]),
        body.inputs[:count],
        body.outputs[:count],
        body.outputs[count:],
        _present(node.inputs[count:]),
        body.inputs[count:],
    )


def layout(node: ir.Node, side: str, count: int) -> tuple[list[int], list[int]]:
    """The axes and directions of a Scan's inputs or outputs."""
    # Absent and empty both mean the first axis, forwards.
    axes = node.attributes.get_ints(f"scan_{side}_axes", None) or [0] * count
    ways = node.attributes.get_ints(f"scan_{side}_directions", None) or [0] * count
    return list(axes), list(ways)


def _present(values: Sequence[ir.Value | None]) -> list[ir.Value]:
    """Inputs that the standard requires."""
    return [value for value in values if value is not None]
