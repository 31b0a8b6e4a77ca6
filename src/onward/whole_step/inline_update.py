"""Inlines an optimizer model into another graph, over existing tensors.

Handles the three forms of optimizer models: elementwise, by parameter, and custom ones over sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward import contract
from onward.model_metadata import read_table
from onward.whole_step.row_rule import over_rows
from onward.whole_step.update_blocks import rests, update_blocks, update_pieces
from onward.whole_step.update_units import Unit, graft

if TYPE_CHECKING:
    from onward.graph.builder import Builder

__all__ = ["InlineOptimizer"]

_MOMENTS = ("first_order_moments", "second_order_moments", "third_order_moments")
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
        self._optimizer = over_rows(optimizer, scaled=scaled) if self.elementwise else optimizer
        given = {value.name for value in optimizer.graph.inputs}
        moments = [name for name in _MOMENTS if name in given]
        # as checkpoints name the state, and as the graph does
        self.slots: dict[str, str] = (
            {f"momentum{index}": name for index, name in enumerate(moments)}
            if self.sequences
            else {slot: slot for slot in self._options["slots"]}
        )
        self._groups = {
            name: i for i, group in enumerate(self._options.get("groups", ())) for name in group["parameters"]
        }

    def together(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
        """The parameters by those that are updated together, small ones with the same settings; these come first.

        What is computed of the learning rate for them is there, then, for the bodies of Scan after them.
        """
        small: dict[int | None, list[str]] = {}
        large: list[list[str]] = []
        for name, shape in shapes.items():
            if self.elementwise and 0 < prod(shape) < _SMALL:
                small.setdefault(self._groups.get(name), []).append(name)
            else:
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
            scalars["learning_rate"] = op.Mul(self._rate, rate_scale)
        assert unit.gradient is not None
        tensors = {"parameter": unit.parameter, "gradient": unit.gradient, **unit.slots}
        kept = ["parameter", *unit.slots]
        if unit.table is not None:
            return update_blocks(self._root, op, self._optimizer.graph, unit, scalars)
        if not unit.in_pieces:
            made = graft(self._root, op, self._optimizer.graph, {**tensors, **scalars})
            return [made[f"{name}{contract.NEXT}"] for name in kept]
        return update_pieces(self._root, op, self._optimizer.graph, tensors, scalars, unit.shape[1:])

    def _by_name(
        self, op: Builder, units: Sequence[Unit], scalars: dict[str, ir.Value]
    ) -> list[list[ir.Value]]:
        given: dict[str, ir.Value] = {"weight_decay": self._decay(self._options["weight_decay"])}
        for unit in units:
            assert unit.gradient is not None
            (name,) = unit.names
            given |= {name: unit.parameter, f"{name}_grad": unit.gradient}
            given |= {f"{name}.{slot}": value for slot, value in unit.slots.items()}
        made = graft(self._root, op, self._optimizer.graph, {**given, **scalars})
        return [
            [made[f"{name}{contract.NEXT}"], *(made[f"{name}.{slot}{contract.NEXT}"] for slot in unit.slots)]
            for unit in units
            for name in unit.names
        ]

    def _over_sequences(
        self, op: Builder, units: Sequence[Unit], scalars: dict[str, ir.Value]
    ) -> list[list[ir.Value]]:
        lists = {"params": [unit.parameter for unit in units], "gradients": [unit.gradient for unit in units]}
        lists |= {source: [unit.slots[slot] for unit in units] for slot, source in self.slots.items()}
        given = {name: op.SequenceConstruct(*values) for name, values in lists.items()}
        made = graft(self._root, op, self._optimizer.graph, {**given, **scalars})
        sources = ["params", *self.slots.values()]
        return [
            [op.SequenceAt(made[f"updated_{source}"], np.int64(index)) for source in sources]
            for index in range(len(units))
        ]

    def _decay(self, number: float) -> ir.Value:
        return self._root.constant(np.asarray([number], np.float32), name="weight_decay")
