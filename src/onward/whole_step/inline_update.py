"""Inlines an optimizer model into another graph, over existing tensors.

Handles the three forms of optimizer models: elementwise, by parameter, and custom ones over sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from onward import contract
from onward.graph.proto.optimizer_models import leaves_alone
from onward.model_metadata import read_table
from onward.whole_step.row_rule import over_rows
from onward.whole_step.update_units import Unit, graft

if TYPE_CHECKING:
    from onward.graph.builder import Builder

# Parameters with fewer numbers are updated as one vector: a node costs more time than so many numbers.
_SMALL = 1 << 16

Values = Mapping[str, ir.Value]


class InlineOptimizer:
    """The optimizer model, to be written out over the tensors of the state."""

    def __init__(self, op: Builder, optimizer: ir.Model, *, rate: ir.Value) -> None:
        self._root, self._rate = op, rate
        self._options = read_table(optimizer.metadata_props, contract.OPTIMIZER)
        self.sequences = bool(self._options.get("sequences"))
        self.elementwise = not self.sequences and bool(self._options["elementwise"])
        self._rests: bool | None = None
        self.clip_norm: float | None = self._options.get("clip_norm")
        scaled = self.clip_norm is not None
        # A row makes x ± s·t one Gemm, and elementwise operators do not care.
        self._optimizer = over_rows(optimizer, scaled=scaled) if self.elementwise else optimizer
        input_names = {value.name for value in optimizer.graph.inputs}
        moments = [name for name in contract.MOMENTS if name in input_names]
        # as checkpoints name the state, and as the graph does
        self.slots: dict[str, str] = (
            {f"momentum{index}": name for index, name in enumerate(moments)}
            if self.sequences
            else {slot: slot for slot in self._options["slots"]}
        )
        self._groups = {
            name: i for i, group in enumerate(self._options.get("groups", ())) for name in group["parameters"]
        }

    def groups(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
        """The parameters by those that are updated together, small ones with the same settings; these come first.

        What is computed of the learning rate for them is there, then, for the bodies of Scan after them.
        """
        small: dict[int | None, list[str]] = {}
        large: list[list[str]] = []
        for name, shape in shapes.items():
            if self.elementwise and 0 < prod(shape) < _SMALL:
                small.setdefault(self._groups.get(name), []).append(name)
            else:
                # what is large gains nothing by being copied into a common vector
                large.append([name])
        yield from [*small.values(), *large]

    def slot_shape(self, slot: str, unit: Unit) -> tuple[int, ...]:
        """The shape of a unit's state."""
        if self.elementwise or self.sequences:
            return unit.shape
        value = next(v for v in self._optimizer.graph.inputs if v.name == f"{unit.names[0]}.{slot}")
        assert value.shape is not None
        return tuple(value.shape.numpy())

    def build(
        self, op: Builder, units: Sequence[Unit], step: ir.Value, scale: ir.Value | None
    ) -> list[list[ir.Value]]:
        """For each unit the next value of its parameter and of its slots."""
        scalars = {"step": step, "learning_rate": self._rate}
        if scale is not None:
            scalars["gradient_scale"] = scale
        if self.sequences:
            return self._over_sequences(op, units, scalars)
        if not self.elementwise:
            return self._by_name(op, units, scalars)
        return [self._elementwise(op, unit, scalars) for unit in units]

    def may_rest(self, name: str) -> bool:
        """Whether the rule leaves alone what of a parameter has neither a gradient nor state."""
        if self.clip_norm is not None or self.setting(name)[0] != 0.0:
            return False
        # evaluated once, and only where a table asks
        if self._rests is None:
            self._rests = rests(self._optimizer)
        return self._rests

    def setting(self, name: str) -> tuple[float, float]:
        """The weight decay of a parameter, and what the learning rate is multiplied by for it."""
        index = self._groups.get(name)
        group = {} if index is None else self._options["groups"][index]
        decay = group.get("weight_decay")
        scale = group.get("learning_rate_scale", 1.0)
        return self._options["weight_decay"] if decay is None else decay, scale

    def _elementwise(self, op: Builder, unit: Unit, scalars: dict[str, ir.Value]) -> list[ir.Value]:
        decay, rate_scale = self.setting(unit.names[0])
        scalars = {**scalars, "weight_decay": self._decay(decay)}
        if rate_scale != 1.0:
            # in the branch: the group's rate is needed only where it updates
            scalars["learning_rate"] = op.Mul(self._rate, rate_scale)
        assert unit.gradient is not None
        tensors = {"parameter": unit.parameter, "gradient": unit.gradient, **unit.slots}
        state_names = ["parameter", *unit.slots]
        if unit.table is not None:
            return update_blocks(self._root, op, self._optimizer.graph, unit, scalars)
        if not unit.in_pieces:
            outputs = graft(self._root, op, self._optimizer.graph, {**tensors, **scalars})
            return [outputs[f"{name}{contract.NEXT}"] for name in state_names]
        return update_pieces(self._root, op, self._optimizer.graph, tensors, scalars, unit.shape[1:])

    def _by_name(
        self, op: Builder, units: Sequence[Unit], scalars: dict[str, ir.Value]
    ) -> list[list[ir.Value]]:
        inputs: dict[str, ir.Value] = {"weight_decay": self._decay(self._options["weight_decay"])}
        for unit in units:
            assert unit.gradient is not None
            (name,) = unit.names
            inputs |= {name: unit.parameter, f"{name}_grad": unit.gradient}
            inputs |= {f"{name}.{slot}": value for slot, value in unit.slots.items()}
        outputs = graft(self._root, op, self._optimizer.graph, {**inputs, **scalars})
        return [
            [
                outputs[f"{name}{contract.NEXT}"],
                *(outputs[f"{name}.{slot}{contract.NEXT}"] for slot in unit.slots),
            ]
            for unit in units
            for name in unit.names
        ]

    def _over_sequences(
        self, op: Builder, units: Sequence[Unit], scalars: dict[str, ir.Value]
    ) -> list[list[ir.Value]]:
        lists = {"params": [unit.parameter for unit in units], "gradients": [unit.gradient for unit in units]}
        lists |= {source: [unit.slots[slot] for unit in units] for slot, source in self.slots.items()}
        inputs = {name: op.SequenceConstruct(*values) for name, values in lists.items()}
        outputs = graft(self._root, op, self._optimizer.graph, {**inputs, **scalars})
        sources = ["params", *self.slots.values()]
        return [
            [op.SequenceAt(outputs[f"updated_{source}"], np.int64(index)) for source in sources]
            for index in range(len(units))
        ]

    def _decay(self, number: float) -> ir.Value:
        return self._root.constant(np.asarray([number], np.float32), name="weight_decay")


# --- Updates of large parameters: in pieces that fit the caches, and of tables only where there is something
# to do.


# A table is updated as a whole where more than this share of its blocks has to be: to collect blocks takes time, too.
_MANY = 4


def rests(optimizer: ir.Model) -> bool:
    """Whether a rule leaves a parameter with zero gradient, state and weight decay exactly as it is."""
    # not a session: this package knows files and graphs, not the runtime
    evaluator: Any = ReferenceEvaluator(ir.to_proto(optimizer))
    inputs = {value.name or "" for value in optimizer.graph.inputs}
    state = [(value.name or "").removesuffix(contract.NEXT) for value in optimizer.graph.outputs]
    return leaves_alone(lambda feeds: evaluator.run(None, feeds), inputs, state, (1, 9), np.dtype(np.float32))


def update_pieces(
    root: Builder, op: Builder, rule: ir.Graph, tensors: Values, scalars: Values, shape: tuple[int, ...]
) -> list[ir.Value]:
    """Update a parameter piece by piece; a piece has this shape, which the rule sees as a row."""
    body = op.subgraph("piece")
    pieces = {name: body.input(name, ir.DataType.FLOAT, shape) for name in tensors}
    # a Reshape in the body would run for every piece
    is_row = len(shape) == 2 and shape[0] == 1
    rows = pieces if is_row else {name: body.Reshape(value, [1, -1]) for name, value in pieces.items()}
    updated = graft(root, body, rule, {**rows, **scalars})
    state_names = [name for name in tensors if name != "gradient"]
    for name in state_names:
        result = updated[f"{name}{contract.NEXT}"]
        if not is_row:
            result = body.Reshape(result, np.asarray(shape, np.int64))
        result.dtype, result.shape = ir.DataType.FLOAT, ir.Shape(shape)
        body.graph.outputs.append(result)
    return list(op.Scan(*tensors.values(), body=body, num_scan_inputs=len(tensors), outputs=len(state_names)))


def update_blocks(root: Builder, op: Builder, rule: ir.Graph, unit: Unit, scalars: Values) -> list[ir.Value]:
    """Update the blocks of a table that this batch or an earlier one has changed; the others stay as they are.

    The state has the shape [pieces, blocks of a piece, numbers of a block]. A block whose state is all zero and that
    no row of the batch lies in has nothing to do. A row lies in one or two blocks.
    """
    assert unit.table is not None
    pieces, each, size = unit.shape
    table, count = unit.table, pieces * each
    numbers = op.Reshape(op.Cast(table.numbers, to=ir.DataType.INT64), [-1, 1])
    # Gather takes negative numbers, counted from the end.
    numbers = op.Where(op.Less(numbers, np.int64(0)), op.Add(numbers, np.int64(table.height)), numbers)
    starts = op.Mul(numbers, np.int64(table.width))
    ends = op.Div(op.Add(starts, np.array([[0, table.width - 1]], np.int64)), np.int64(size))
    # by axis, the largest and the smallest take a tenth of the time of a norm
    far = [
        op.Abs(reduce(slot, np.array([2], np.int64), keepdims=0))
        for slot in unit.slots.values()
        for reduce in (op.ReduceMax, op.ReduceMin)
    ]
    used = op.Reshape(op.Sum(*far), [-1]) if far else op.Expand(np.float32(0), np.array([count], np.int64))
    ends = op.Reshape(ends, [-1])
    # rows of the batch that are not yet known to the state
    used = op.ScatterElements(used, ends, op.Expand(np.float32(1), op.Shape(ends)), axis=0)
    chosen = op.Reshape(op.NonZero(used), [-1])
    places = op.Reshape(op.Add(starts, np.arange(table.width, dtype=np.int64)[np.newaxis]), [-1])
    rows = op.Reshape(table.rows, [-1])
    tensors = {"parameter": unit.parameter, **unit.slots}

    few = op.subgraph("few")
    number = few.Size(chosen)
    rank = few.ScatterElements(
        few.Expand(np.int64(0), np.array([count], np.int64)),
        chosen,
        few.Range(np.int64(0), number, np.int64(1)),
        axis=0,
    )
    block = few.Div(places, np.int64(size))
    inside = few.Sub(places, few.Mul(block, np.int64(size)))
    target = few.Add(few.Mul(few.Gather(rank, block), np.int64(size)), inside)
    room = few.Expand(np.float32(0), few.Reshape(few.Mul(number, np.int64(size)), [1]))
    gradient = few.Reshape(few.ScatterElements(room, target, rows, axis=0, reduction="add"), [1, -1])
    column = few.Reshape(chosen, [-1, 1])
    where = few.Concat(few.Div(column, np.int64(each)), few.Mod(column, np.int64(each)), axis=1)
    blocks = {name: few.Reshape(few.GatherND(value, where), [1, -1]) for name, value in tensors.items()}
    updated_blocks = graft(root, few, rule, {**blocks, "gradient": gradient, **scalars})
    for name, value in tensors.items():
        updated = few.Reshape(updated_blocks[f"{name}{contract.NEXT}"], np.array([-1, size], np.int64))
        few.graph.outputs.append(few.ScatterND(value, where, updated))

    many = op.subgraph("many")
    room = many.Expand(np.float32(0), np.array([count * size], np.int64))
    gradient = many.ScatterElements(room, places, rows, axis=0, reduction="add")
    tensors["gradient"] = many.Reshape(gradient, np.asarray(unit.shape, np.int64))
    many.graph.outputs.extend(update_pieces(root, many, rule, tensors, scalars, (each, size)))

    for graph in (few.graph, many.graph):
        for value in graph.outputs:
            value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(unit.shape)
    is_few = op.Less(op.Mul(op.Size(chosen), np.int64(_MANY)), np.int64(count))
    results = op.If(is_few, then_branch=few, else_branch=many, outputs=len(few.graph.outputs))
    for value in results:
        value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(unit.shape)
    return list(results)
