"""Parameters that are updated together, and an optimizer's nodes over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

if TYPE_CHECKING:
    from onward.graph.builder import Builder

Values = Mapping[str, ir.Value]


@dataclasses.dataclass(frozen=True)
class Table:
    """A gradient that is rows added to zeros: their numbers, the rows [count, width], and how many there could be."""

    numbers: ir.Value
    rows: ir.Value
    height: int
    width: int


@dataclasses.dataclass
class Unit:
    """Parameters that are updated together: the state's inputs, and the gradient in the same shape.

    `packed` are several in one vector or row, with a gap after each that ends before a multiple of 64 bytes.
    `in_pieces` is a large one, of shape [pieces, 1, size]. With a `table`, it has the shape [pieces, blocks, size].
    """

    sizes: dict[str, int]
    shape: tuple[int, ...]
    parameter: ir.Value
    slots: dict[str, ir.Value] = dataclasses.field(default_factory=dict)
    gradient: ir.Value | None = None
    in_pieces: bool = False
    packed: bool = False
    table: Table | None = None

    @property
    def names(self) -> list[str]:
        return list(self.sizes)


def graft(root: Builder, op: Builder, optimizer: ir.Graph, inputs: Values) -> dict[str, ir.Value]:
    """Copy an optimizer's nodes to the end of a graph, reading `inputs`; its outputs by name.

    `root` takes its constants: the same builder, or that of the graph around a branch.
    """
    copy = optimizer.clone()
    for value in list(copy.inputs):
        if value.name == "gradient_scale" and value.name not in inputs:
            drop_scaling(value)
        elif value.uses():
            ir.convenience.replace_all_uses_with(value, inputs[value.name or ""])
    for value in list(copy.initializers.values()):
        assert value.const_value is not None
        # in the outer graph: the runtime folds and shares those, of a branch it would not
        constant = root.constant(value.const_value.numpy(), name=value.name or "constant")
        ir.convenience.replace_all_uses_with(value, constant)
    outputs = {value.name or "": value for value in copy.outputs}
    copy.outputs.clear()
    nodes = list(copy)
    copy.remove(nodes)
    for node in nodes:
        node.name = op.namer(f"update/{node.op_type}")
        for value in node.outputs:
            # sizes are those of this parameter now
            value.name, value.shape = op.namer(f"{node.name}.out"), None
    op.graph.extend(nodes)
    return outputs


def drop_scaling(scale: ir.Value) -> None:
    """Let what reads gradient·scale read the gradient: nothing limits it."""
    for node, index in list(scale.uses()):
        assert node.op_type == "Mul"
        gradient = node.inputs[1 - index]
        assert gradient is not None
        ir.convenience.replace_all_uses_with(node.outputs[0], gradient)
        assert node.graph is not None
        node.graph.remove(node, safe=True)


def sum_of(op: Builder, values: Sequence[ir.Value]) -> ir.Value:
    """The sum of one value or several."""
    return values[0] if len(values) == 1 else op.Sum(*values)


def add_output(op: Builder, value: ir.Value, name: str, *, like: ir.Value | None = None) -> ir.Value:
    """Make a value an output of this name; a copy of it where it is an input, a constant or an output already."""
    node = value.producer()
    if node is None or node.graph is not op.graph or value.is_graph_output():
        original, value = value, op.Identity(value)
        value.type, value.shape = original.type, original.shape
    value.name = name
    if like is not None:
        value.type, value.shape = like.type, like.shape
    op.graph.outputs.append(value)
    return value
