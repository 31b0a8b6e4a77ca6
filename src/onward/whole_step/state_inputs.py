"""The state as inputs of a step that updates it too: which tensors there are, and their gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward import contract
from onward.checkpoint.portable import StatePart, StateTensor, aligned
from onward.contract import OUT, RESET
from onward.errors import ModelError
from onward.whole_step.update_units import Table, Unit

if TYPE_CHECKING:
    from onward.checkpoint.content import CheckpointData
    from onward.graph.builder import Builder
    from onward.whole_step.inline_update import InlineOptimizer

__all__ = ["StateInputs", "added_rows", "clip_scale", "joined_gradient", "take_results"]

# Parameters with more numbers are updated in pieces of about so many, which stay in the processor's caches.
_LARGE, _PIECE = 1 << 19, 1 << 17
# What of a table is updated, or left alone, together.
_BLOCK = 1 << 12

Values = Mapping[str, ir.Value]


def take_results(
    graph: ir.Graph, trainable: Collection[str], frozen: Collection[str]
) -> tuple[dict[str, ir.Value], dict[str, ir.Value]]:
    """The gradient of each trainable and the next value of each statistic; they are outputs no longer."""
    gradients: dict[str, ir.Value] = {}
    following: dict[str, ir.Value] = {}
    for node in graph:  # vectors that are accumulated as one
        flag, gradient, *_ = (*node.inputs, None, None)
        chooses = node.op_type == "Where" and flag is not None and flag.name == RESET
        if chooses and gradient is not None and not node.outputs[0].is_graph_output():
            ir.convenience.replace_all_uses_with(node.outputs[0], gradient)
    for output in list(graph.outputs):
        name = output.name or ""
        statistic, parameter = name.removesuffix(contract.NEXT), name.removesuffix(OUT)
        if name.endswith(contract.NEXT) and statistic in frozen:
            graph.outputs.remove(output)
            output.name = f"{name}.computed"
            following[statistic] = output
        elif name.endswith(OUT):
            graph.outputs.remove(output)
            node = output.producer()
            gradient = node.inputs[1] if node is not None and node.op_type == "Where" else None
            if node is not None and node.op_type == "Split":
                gradient = output
            if gradient is None:
                raise ModelError(f"the training model computes '{name}' in a way that is not known")
            # what is computed again may wait for it
            ir.convenience.replace_all_uses_with(output, gradient)
            if parameter in trainable:
                gradients[parameter] = gradient
    return gradients, following


def added_rows(op: Builder, gradient: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """The numbers and the values of the rows of a table's gradient, where it is rows added to zeros."""
    node = gradient.producer()
    if node is None or node.op_type != "ScatterElements":
        return None
    if node.attributes.get_int("axis", 0) != 0 or node.attributes.get_string("reduction", "") != "add":
        return None
    base, places = (None if value is None else value.producer() for value in node.inputs[:2])
    if base is None or places is None or base.op_type != "Expand" or places.op_type != "Expand":
        return None
    zero = op.const_value(base.inputs[0]) if base.inputs[0] is not None else None
    column = places.inputs[0].producer() if places.inputs[0] is not None else None
    if zero is None or zero.any() or column is None or column.op_type != "Reshape":
        return None
    shape = op.const_value(column.inputs[1]) if column.inputs[1] is not None else None
    numbers, rows = column.inputs[0], node.inputs[2]
    if shape is None or shape[0] != -1 or (shape[1:] != 1).any() or numbers is None or rows is None:
        return None
    return (numbers, rows) if numbers.dtype in (ir.DataType.INT64, ir.DataType.INT32) else None


class StateInputs:
    """The inputs of the step that hold the state, in order, and what they are made of."""

    def __init__(self, op: Builder, inputs: Values) -> None:
        self._op, self._inputs = op, inputs
        self.tensors: list[StateTensor] = []
        self.units: list[Unit] = []
        self.statistics: dict[str, ir.Value] = {}

    def add_weights(
        self, checkpoint: CheckpointData, rule: InlineOptimizer, *, statistics: Values, gradients: Values
    ) -> None:
        """Frozen parameters, batch-norm statistics and trainables; small ones of these in common tensors."""
        for role in ("frozen", "statistic"):
            for name, array in checkpoint.frozen.items():
                if (name in statistics) == (role == "statistic"):
                    array = np.asarray(array)
                    value = self._own(name, role, array.dtype, array.shape)
                    if role == "statistic":
                        self.statistics[name] = value
        shapes = {name: np.asarray(array).shape for name, array in checkpoint.trainable.items()}
        for names in rule.together(shapes):
            if len(names) > 1:
                self.pack(names, shapes, as_row=rule.elementwise)
            else:
                self._add_alone(names[0], shapes[names[0]], rule, gradients.get(names[0]))

    def _add_alone(
        self, name: str, shape: tuple[int, ...], rule: InlineOptimizer, gradient: ir.Value | None
    ) -> None:
        given, table = None, None
        if rule.elementwise:
            found = added_rows(self._op, gradient) if gradient is not None and rule.may_rest(name) else None
            blocks = _in_blocks(shape) if found is not None and len(shape) == 2 else None
            if found is not None and blocks is not None:
                given, table = blocks, Table(*found, height=shape[0], width=shape[1])
            else:
                given = _in_pieces(shape) or (1, prod(shape))
        value = self._own(name, "trainable", np.dtype(np.float32), shape, given)
        in_pieces = given is not None and len(given) == 3 and table is None
        unit = Unit({name: prod(shape)}, given or shape, value, in_pieces=in_pieces, table=table)
        self.units.append(unit)

    def add_slots(self, rule: InlineOptimizer) -> None:
        """A tensor for each slot of the optimizer and each unit, made of the same parts."""
        parts = {part.name: part for tensor in self.tensors for part in tensor.parts}
        for slot in rule.slots:
            for unit in self.units:
                shape = rule.slot_shape(slot, unit)
                made = tuple(
                    dataclasses.replace(
                        parts[name],
                        role="slot",
                        slot=slot,
                        shape=parts[name].shape if rule.elementwise or rule.sequences else shape,
                    )
                    for name in unit.names
                )
                unit.slots[slot] = self._add(f"{unit.parameter.name}.{slot}", np.float32, shape, made)

    def add_counters(self) -> None:
        """How many updates and steps there were, and the seed of random numbers."""
        made = [
            self._add(name, np.int64, (1,), (StatePart(name, name, (1,)),))
            for name in ("optimizer_step", "train_step", "random_seed")
        ]
        self.optimizer_step, self.train_step, self.seed = made

    def _own(
        self,
        name: str,
        role: str,
        dtype: np.dtype,
        shape: tuple[int, ...],
        given: tuple[int, ...] | None = None,
    ) -> ir.Value:
        """An input of its own for a parameter, perhaps in another shape."""
        value = self._inputs[name]
        if given is not None:
            with self._op.inserting(next(iter(self._op.graph))):
                shaped = self._op.Reshape(value, np.asarray(shape, np.int64))
            users = [(node, index) for node, index in value.uses() if node is not shaped.producer()]
            for node, index in users:
                node.replace_input_with(index, shaped)
            value.shape = ir.Shape(given)
        self._op.graph.inputs.append(value)
        self.tensors.append(StateTensor(name, dtype, given or shape, (StatePart(role, name, shape),)))
        return value

    def pack(
        self, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], *, as_row: bool = False
    ) -> None:
        """One vector (or row) for several parameters, each of which begins at a multiple of 64 bytes."""
        parts, sizes, position = [], [], 0
        for name in names:
            parts.append(StatePart("trainable", name, shapes[name], start=position))
            size = prod(shapes[name])
            padded = aligned(4 * size) // 4
            sizes += [size, padded - size] if padded > size else [size]
            position += 4 * padded
        whole = (1, position // 4) if as_row else (position // 4,)
        packed = self._add(f"packed{len(self.units)}", np.float32, whole, tuple(parts))
        with self._op.inserting(next(iter(self._op.graph))):
            pieces = iter(
                self._op.Split(packed, np.asarray(sizes, np.int64), axis=len(whole) - 1, outputs=len(sizes))
            )
            for name in names:
                shaped = next(pieces)
                size = prod(shapes[name])
                if aligned(4 * size) != 4 * size:
                    next(pieces)
                if shapes[name] != (*whole[:-1], size):
                    shaped = self._op.Reshape(shaped, np.asarray(shapes[name], np.int64))
                ir.convenience.replace_all_uses_with(self._inputs[name], shaped)
        self.units.append(Unit({name: prod(shapes[name]) for name in names}, whole, packed, packed=True))

    def _add(self, name: str, dtype: Any, shape: tuple[int, ...], parts: tuple[StatePart, ...]) -> ir.Value:
        kind = np.dtype(dtype)
        value = self._op.input(name, ir.DataType.from_numpy(kind), shape)
        self.tensors.append(StateTensor(value.name or "", kind, shape, parts))
        return value


def _in_pieces(shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """A large tensor as rows of about as many numbers as fit the caches, where its size has such a divisor."""
    size = prod(shape)
    if size < _LARGE:
        return None
    sizes = _divisors(size, _PIECE // 2, 2 * _PIECE)
    best = min(sizes, key=lambda own: abs(own - _PIECE), default=None)
    return None if best is None else (size // best, 1, best)


def _in_blocks(shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """A table as pieces as above, each of blocks that have at least as many numbers as a row has."""
    size = prod(shape)
    if size < _LARGE:
        return None
    found = [
        (size // piece, piece // block, block)
        for block in _divisors(size, max(_BLOCK // 2, shape[1]), 2 * _BLOCK)
        for piece in _divisors(size, _PIECE // 2, 2 * _PIECE)
        if piece % block == 0
    ]
    return min(found, key=lambda s: (abs(s[2] - _BLOCK), abs(s[1] * s[2] - _PIECE)), default=None)


def _divisors(size: int, least: int, most: int) -> list[int]:
    return [own for own in range(least, most + 1) if size % own == 0]


def joined_gradient(op: Builder, unit: Unit, gradients: Values) -> ir.Value | None:
    """The gradient of a unit, in the shape in which it is updated."""
    if not unit.packed:
        gradient = gradients.get(unit.names[0])
        if gradient is None or unit.table is not None or op.static_shape(gradient) == unit.shape:
            return gradient
        return op.Reshape(gradient, np.asarray(unit.shape, np.int64))
    leading = list(unit.shape[:-1])
    parts: list[ir.Value] = []
    for name in unit.names:
        gradient = gradients[name]
        fits = gradient.shape is not None and gradient.shape.rank() == 1 and not leading
        parts.append(gradient if fits else op.Reshape(gradient, [*leading, -1]))
        size = unit.sizes[name]
        if padding := aligned(4 * size) // 4 - size:
            parts.append(op.constant(np.zeros((*leading, padding), np.float32), name="padding"))
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=len(leading))


def clip_scale(op: Builder, norm: ir.Value, limit: float) -> ir.Value:
    """The factor that limits the norm of the gradients, a double, as [1] in float32."""
    scale = op.Min(op.Div(limit, op.Add(norm, 1e-6)), 1.0)
    return op.Reshape(op.Cast(scale, to=ir.DataType.FLOAT), [1])
