"""The portable step in two halves: gradients of a batch, and an update from gradients.

For programs that add up the gradients of several batches before an update, or that update in place. docs/portable.md
specifies both; the state's layout is that of the whole step.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward import contract
from onward.checkpoint.portable import StateLayout, table_line
from onward.contract import BUFFER, OUT, RESET
from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused
from onward.graph.passes.finish import finish
from onward.whole_step.inline_update import InlineOptimizer
from onward.whole_step.row_rule import over_rows
from onward.whole_step.state_inputs import added_rows, take_results
from onward.whole_step.update_units import Unit

if TYPE_CHECKING:
    from onward.checkpoint.content import CheckpointData

__all__ = ["gradient_step", "update_step"]

# Numbers of a table from which on its gradient is scattered into memory that is there, not into zeros.
_LARGE = 1 << 16


def gradient_step(training: ir.Model, step: ir.Model, checkpoint: CheckpointData) -> ir.Model:
    """The training model without accumulation: batch and parameters in; loss, gradients, next statistics out.

    The gradient of a large table is added to an input of the same shape; `onward.rows` names the output that has the
    numbers of the rows that were changed. `step` is the whole portable step, whose metadata say the rest.
    """
    model = training.clone()
    graph = model.graph
    gradients, following = take_results(graph, checkpoint.trainable, checkpoint.frozen)
    op = Builder(graph)
    inputs = {value.name or "": value for value in graph.inputs}
    graph.inputs.clear()
    graph.inputs.extend(v for name, v in inputs.items() if name != RESET and not name.endswith(BUFFER))
    made = {name: _as_output(op, gradients[name], f"{name}{OUT}") for name in checkpoint.trainable}
    for statistic, value in following.items():
        _as_output(op, value, f"{statistic}{contract.NEXT}")
    finish(model)  # before looking at what reads a gradient
    rows: dict[str, ir.Value] = {}
    for name, gradient in made.items():
        large = np.size(np.asarray(checkpoint.trainable[name])) >= _LARGE
        found = added_rows(op, gradient) if large and not gradient.uses() else None
        node = gradient.producer()
        if found is None or node is None:
            continue
        changed, _ = found
        buffer = inputs[f"{name}{BUFFER}"]
        graph.inputs.append(buffer)
        node.replace_input_with(0, buffer)
        rows[name] = changed
        if not changed.is_graph_output():
            graph.outputs.append(changed)
    remove_unused(model)
    lines = [table_line(name, value.name or "") for name, value in rows.items()]
    model.metadata_props[contract.ROWS] = "".join(lines)
    _describe(model, step, "gradient_step")
    return model


def _as_output(op: Builder, value: ir.Value, name: str) -> ir.Value:
    """The value as an output of this name; a copy of it where it is an input, a constant or another output."""
    if value.producer() is None or value.is_graph_output():
        made = op.Identity(value)
        made.type, made.shape = value.type, value.shape
        value = made
    value.name = name
    op.graph.outputs.append(value)
    return value


def update_step(optimizer: ir.Model, step: ir.Model, layout: StateLayout) -> ir.Model:
    """The optimizer's rule: over rows of any length where it is elementwise, else over all tensors at once."""
    graph = ir.Graph([], [], nodes=[], opset_imports=dict(optimizer.opset_imports), name="update_step")
    op = Builder(graph)
    rate = op.input("learning_rate", ir.DataType.FLOAT, [1])
    rule = InlineOptimizer(op, optimizer, rate=rate)
    lines: list[tuple[str, ...]] = [("form", "elementwise" if rule.elementwise else "whole")]
    if rule.clip_norm is not None:
        lines.append(("clip_norm", repr(float(rule.clip_norm))))
    if rule.elementwise:
        model = over_rows(optimizer, scaled=rule.clip_norm is not None)
        for name in [part.name for part, _, _ in layout.parts() if part.role == "trainable"]:
            decay, scale = rule.setting(name)
            lines.append(("parameter", name, repr(float(scale)), repr(float(decay))))
    else:
        number = op.input("step", ir.DataType.INT64, [1])
        limit = op.input("gradient_scale", ir.DataType.FLOAT, [1]) if rule.clip_norm is not None else None
        _add_whole(op, rule, layout, number, limit)
        model = ir.Model(graph, ir_version=optimizer.ir_version)
        model.producer_name, model.producer_version = optimizer.producer_name, optimizer.producer_version
        for key in (contract.VERSION, contract.ARTIFACTS):
            model.metadata_props[key] = optimizer.metadata_props[key]
    finish(model)
    model.metadata_props[contract.UPDATE] = "".join(table_line(*line) for line in lines)
    _describe(model, step, "update_step")
    return model


def _describe(model: ir.Model, step: ir.Model, role: str) -> None:
    keys = (
        contract.PORTABLE,
        contract.STATE,
        contract.STATE_DIGEST,
        contract.WEIGHTS_SIZE,
        contract.LABEL_RANGES,
    )
    model.metadata_props.update({key: step.metadata_props[key] for key in keys})
    model.metadata_props[contract.ROLE] = role


def _add_whole(
    op: Builder, rule: InlineOptimizer, layout: StateLayout, step: ir.Value, limit: ir.Value | None
) -> None:
    tensors = {
        role: [tensor for tensor in layout.tensors if tensor.parts[0].role == role]
        for role in ("trainable", "slot")
    }

    def inputs(role: str, suffix: str = "") -> list[ir.Value]:
        return [op.input(f"{t.name}{suffix}", ir.DataType.FLOAT, t.shape) for t in tensors[role]]

    gradients, parameters, slots = inputs("trainable", "_grad"), inputs("trainable"), inputs("slot")
    units = [
        Unit({t.parts[0].name: prod(t.shape)}, t.shape, parameter, gradient=gradient)
        for t, parameter, gradient in zip(tensors["trainable"], parameters, gradients)
    ]
    by_name = {unit.names[0]: unit for unit in units}
    for tensor, value in zip(tensors["slot"], slots):
        by_name[tensor.parts[0].name].slots[tensor.parts[0].slot] = value
    made = rule.build(op, units, step, limit)
    for index in range(1 + len(rule.slots)):
        for unit, results in zip(units, made):
            before = [unit.parameter, *unit.slots.values()][index]
            after = results[index]
            if before.shape is not None and before.shape.rank() == 0:
                after = op.Reshape(after, np.zeros(0, np.int64))
            made_output = _as_output(op, after, op.namer(f"{before.name}{contract.NEXT}"))
            made_output.type, made_output.shape = before.type, before.shape
