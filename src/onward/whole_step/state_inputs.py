"""The state as inputs of a step that updates it too: which tensors there are, and their gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward import contract
from onward.checkpoint.portable import WEIGHTS, StateLayout, StatePart, StateTensor, aligned
from onward.contract import OUT, RESET
from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.whole_step.update_units import Table, Unit

if TYPE_CHECKING:
    from onward.checkpoint.content import CheckpointData
    from onward.whole_step.inline_update import InlineOptimizer

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
            # accumulated as one vector: the flag was taken out above
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
    # Only exactly this form is known to be rows added to zeros; anything else is updated whole.
    if zero is None or zero.any() or column is None or column.op_type != "Reshape":
        return None
    shape = op.const_value(column.inputs[1]) if column.inputs[1] is not None else None
    numbers, rows = column.inputs[0], node.inputs[2]
    if shape is None or shape[0] != -1 or (shape[1:] != 1).any() or numbers is None or rows is None:
        return None
    return (numbers, rows) if numbers.dtype in (ir.DataType.INT64, ir.DataType.INT32) else None


class StateInputs:
    """The inputs of the step that hold the state, in order, and what they are made of."""

    def __init__(self, op: Builder, inputs: Values, *, tables: bool = True) -> None:
        """With `tables`, gradients that are some rows of a table are left as rows; the layout is the same."""
        self._op, self._inputs, self._tables = op, inputs, tables
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
        for names in rule.groups(shapes):
            if len(names) > 1:
                # A hundred biases are one tensor, one row of the update, one feed of the program.
                self.pack(names, shapes, as_row=rule.elementwise)
            else:
                self._add_single(names[0], shapes[names[0]], rule, gradients.get(names[0]))

    def _add_single(
        self, name: str, shape: tuple[int, ...], rule: InlineOptimizer, gradient: ir.Value | None
    ) -> None:
        layout, table = None, None
        if rule.elementwise:
            # A vocabulary's table has a gradient in the rows of this batch only: most of it rests.
            rows = added_rows(self._op, gradient) if gradient is not None and rule.may_rest(name) else None
            blocks = _in_blocks(shape) if rows is not None and len(shape) == 2 else None
            if rows is not None and blocks is not None:
                layout = blocks
                if self._tables:
                    table = Table(*rows, height=shape[0], width=shape[1])
            else:
                layout = _in_pieces(shape) or (1, prod(shape))
        value = self._own(name, "trainable", np.dtype(np.float32), shape, layout)
        in_pieces = layout is not None and len(layout) == 3 and table is None
        unit = Unit({name: prod(shape)}, layout or shape, value, in_pieces=in_pieces, table=table)
        self.units.append(unit)

    def add_slots(self, rule: InlineOptimizer) -> None:
        """A tensor for each slot of the optimizer and each unit, made of the same parts."""
        parts = {part.name: part for tensor in self.tensors for part in tensor.parts}
        for slot in rule.slots:
            for unit in self.units:
                shape = rule.slot_shape(slot, unit)
                slot_parts = tuple(
                    dataclasses.replace(
                        parts[name],
                        role="slot",
                        slot=slot,
                        shape=parts[name].shape if rule.elementwise or rule.sequences else shape,
                    )
                    for name in unit.names
                )
                unit.slots[slot] = self._add(f"{unit.parameter.name}.{slot}", np.float32, shape, slot_parts)

    def add_counters(self) -> None:
        """How many updates and steps there were, and the seed of random numbers."""
        counters = [
            self._add(name, np.int64, (1,), (StatePart(name, name, (1,)),))
            for name in ("optimizer_step", "train_step", "random_seed")
        ]
        self.optimizer_step, self.train_step, self.seed = counters

    def _own(
        self,
        name: str,
        role: str,
        dtype: np.dtype,
        shape: tuple[int, ...],
        layout: tuple[int, ...] | None = None,
    ) -> ir.Value:
        """An input of its own for a parameter, perhaps in another shape."""
        value = self._inputs[name]
        if layout is not None:
            with self._op.inserting(next(iter(self._op.graph))):
                shaped = self._op.Reshape(value, np.asarray(shape, np.int64))
            # The state keeps the shape that updates like; what computes with it reads it reshaped, which moves
            # no data.
            users = [(node, index) for node, index in value.uses() if node is not shaped.producer()]
            for node, index in users:
                node.replace_input_with(index, shaped)
            value.shape = ir.Shape(layout)
        self._op.graph.inputs.append(value)
        self.tensors.append(StateTensor(name, dtype, layout or shape, (StatePart(role, name, shape),)))
        return value

    def pack(
        self, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], *, as_row: bool = False
    ) -> None:
        """One vector (or row) for several parameters, each of which begins at a multiple of 64 bytes."""
        parts, sizes, position = [], [], 0
        for name in names:
            parts.append(StatePart("trainable", name, shapes[name], start=position))
            size = prod(shapes[name])
            # 64 bytes are a cache line: no two threads write into one
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


def read_weights(model: ir.Model, layout: StateLayout) -> int:
    """Let a model that takes parameters take the state's tensors of weights in their place, after its other inputs.

    Returns how many other inputs there are. A tensor that the model does not read is an input too: a program feeds the
    first tensors of its state by position, whatever the model needs.
    """
    graph = model.graph
    op = Builder(graph)
    inputs = {value.name or "": value for value in graph.inputs}
    weights = [tensor for tensor in layout.tensors if tensor.parts[0].role in WEIGHTS]
    names = {part.name for tensor in weights for part in tensor.parts}
    batch = [value for name, value in inputs.items() if name not in names]
    graph.inputs.clear()
    graph.inputs.extend(batch)
    for tensor in weights:
        parameters = [inputs.get(part.name) for part in tensor.parts]
        for value in parameters:
            if value is not None and value.name == tensor.name:
                value.name = op.namer(f"{tensor.name}.parameter")
        whole = op.input(tensor.name, ir.DataType.from_numpy(tensor.dtype), tensor.shape)
        if not any(value is not None and value.uses() for value in parameters):
            continue
        with op.inserting(next(iter(graph))):
            for part, value in zip(tensor.parts, parameters):
                if value is not None and value.uses():
                    ir.convenience.replace_all_uses_with(value, _read_part(op, whole, tensor, part))
    return len(batch)


def _read_part(op: Builder, whole: ir.Value, tensor: StateTensor, part: StatePart) -> ir.Value:
    if part.shape == tensor.shape:
        return op.Identity(whole)
    shape = np.asarray(part.shape, np.int64)
    if len(tensor.parts) == 1:
        return op.Reshape(whole, shape)
    first = part.start // tensor.dtype.itemsize
    ends = np.array([first, first + prod(part.shape)], np.int64)
    axis = np.array([len(tensor.shape) - 1], np.int64)
    return op.Reshape(op.Slice(whole, ends[:1], ends[1:], axis), shape)


def copy_state_metadata(model: ir.Model, step: ir.Model, role: str) -> None:
    """Let a model say to which state it belongs, as the whole step does."""
    keys = (
        contract.PORTABLE,
        contract.STATE,
        contract.STATE_DIGEST,
        contract.WEIGHTS_SIZE,
        contract.LABEL_RANGES,
        contract.PROBLEMS,
    )
    model.metadata_props.update({key: step.metadata_props[key] for key in keys})
    model.metadata_props[contract.ROLE] = role


def _in_pieces(shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """A large tensor as rows of about as many numbers as fit the caches, where its size has such a divisor."""
    size = prod(shape)
    if size < _LARGE:
        return None
    # Pieces must be equal: Scan has one shape for all of its slices.
    sizes = _divisors(size, _PIECE // 2, 2 * _PIECE)
    best = min(sizes, key=lambda own: abs(own - _PIECE), default=None)
    return None if best is None else (size // best, 1, best)


def _in_blocks(shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """A table as pieces as above, each of blocks that have at least as many numbers as a row has."""
    size = prod(shape)
    if size < _LARGE:
        return None
    layouts = [
        (size // piece, piece // block, block)
        for block in _divisors(size, max(_BLOCK // 2, shape[1]), 2 * _BLOCK)
        for piece in _divisors(size, _PIECE // 2, 2 * _PIECE)
        if piece % block == 0
    ]
    return min(layouts, key=lambda s: (abs(s[2] - _BLOCK), abs(s[1] * s[2] - _PIECE)), default=None)


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
            # zeros in the gaps: their gradient is zero, and so they stay
            parts.append(op.constant(np.zeros((*leading, padding), np.float32), name="padding"))
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=len(leading))


def clip_scale(op: Builder, norm: ir.Value, limit: float) -> ir.Value:
    """The factor that limits the norm of the gradients, a double, as [1] in float32."""
    scale = op.Min(op.Div(limit, op.Add(norm, 1e-6)), 1.0)
    return op.Reshape(op.Cast(scale, to=ir.DataType.FLOAT), [1])
