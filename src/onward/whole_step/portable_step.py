"""The portable step: a training step, its update and the check for non-finite values in one standard graph.

The state is an input and the next state an output, so a loop in any language is: run, keep the outputs, feed
them back. Built from the training and the optimizer model. docs/portable-format.md specifies names, order and metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward import contract
from onward.checkpoint.portable import StateLayout, table_line
from onward.contract import BUFFER, OUT, RESET, SEED
from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused, share_subexpressions
from onward.graph.nodes import ancestors
from onward.graph.passes.finish import finish
from onward.whole_step.boundary import (
    add_problem,
    input_table,
    label_ranges,
    lift_scalars,
    problems,
    reject_labels,
)
from onward.whole_step.inline_update import InlineOptimizer
from onward.whole_step.row_rule import over_rows
from onward.whole_step.state_inputs import (
    StateInputs,
    added_rows,
    clip_scale,
    copy_state_metadata,
    joined_gradient,
    read_weights,
    take_results,
)
from onward.whole_step.update_units import Unit, add_output, sum_of

if TYPE_CHECKING:
    from onward.checkpoint.content import CheckpointData

VERSION = "2"
# Gradients beyond this are an overflow: some rules clamp infinities to the largest float32.
_OVERFLOW = 1e30

Values = Mapping[str, ir.Value]


def portable_step(
    training: ir.Model, optimizer: ir.Model, checkpoint: CheckpointData
) -> tuple[ir.Model, StateLayout]:
    """One graph that trains: batch, learning rate and state in; loss, outputs and next state out."""
    for name, array in checkpoint.trainable.items():
        if (dtype := np.asarray(array).dtype) != np.float32:
            # bindings make float32 tensors of rates and sums: another type would be another program in each language
            raise ModelError(
                f"'{name}' is {dtype}: portable steps train float32",
                hint="convert the model to float32, or train it with Module and Optimizer",
            )
    parts = _StepParts(training, optimizer, checkpoint)
    op, state, rule = parts.op, parts.state, parts.rule
    # Packed gradients are judged as one: a reduction for each parameter would be as many nodes as the update.
    good, scale = _judge(
        op, parts.results[0], parts.gradients(), list(parts.statistics.values()), rule.clip_norm
    )
    later = [value for value in parts.results[1:] if value not in ancestors([good])]
    branch = op.subgraph("update")
    updates = _update(branch, rule, state, scale)
    pairs = [(value, parts.statistics[name]) for name, value in state.statistics.items()]
    pairs += [*updates, (state.train_step, branch.Add(state.train_step, np.int64(1)))]
    following = _choose(op, good, branch, pairs, later)
    add_problem(op, parts.wrong, good=good, batches=state.train_step)
    _add_next_state(op, [*(before for before, _ in pairs), state.seed], [*following, op.Identity(state.seed)])
    return parts.finish("train_step", in_place=rule.elementwise)


def accumulate_step(training: ir.Model, optimizer: ir.Model, checkpoint: CheckpointData) -> ir.Model:
    """The portable step with sums of gradients, which updates where the second number of its rate is not 0."""
    parts = _StepParts(training, optimizer, checkpoint, accumulate=True)
    op, state, rule = parts.op, parts.state, parts.rule
    sums = [op.input(f"{unit.parameter.name}.sum", ir.DataType.FLOAT, unit.shape) for unit in state.units]
    totals = [op.Add(before, gradient) for before, gradient in zip(sums, parts.gradients(), strict=True)]
    assert parts.update is not None
    updates = op.Not(op.Equal(parts.update, np.float32(0)))
    # a factor of 0 would hide an overflow from the check below
    factor = op.Where(updates, parts.update, np.float32(1))
    for unit, total in zip(state.units, totals):
        unit.gradient = op.Mul(total, factor)
    statistics = list(parts.statistics.values())
    good, scale = _judge(op, parts.results[0], parts.gradients(), statistics, rule.clip_norm)
    branch = op.subgraph("update")
    pairs = _update(branch, rule, state, scale)
    updated = _choose(op, op.And(good, op.Squeeze(updates)), branch, pairs, [])
    add_problem(op, parts.wrong, good=good, batches=state.train_step)
    # Statistics and random numbers go on with every batch, as they do in `Module`.
    before = [*state.statistics.values(), *(value for value, _ in pairs), state.train_step, state.seed, *sums]
    after = [op.Where(good, parts.statistics[name], value) for name, value in state.statistics.items()]
    after += [*updated, op.Where(good, op.Add(state.train_step, np.int64(1)), state.train_step)]
    after.append(op.Identity(state.seed))
    after += [
        op.Where(good, op.Where(updates, np.float32(0), total), sum_) for sum_, total in zip(sums, totals)
    ]
    _add_next_state(op, before, after)
    model, _ = parts.finish("accumulate_step", in_place=False)
    return model


def eval_step(evaluation: ir.Model, step: ir.Model, layout: StateLayout) -> ir.Model:
    """The evaluation model over the state's own tensors: batch and weights in; loss and additional outputs out."""
    model = evaluation.clone()
    graph = model.graph
    inputs = {value.name or "": value for value in graph.inputs}
    op = Builder(graph)
    graph.outputs[0], wrong = reject_labels(op, graph.outputs[0], inputs, model.metadata_props)
    add_problem(op, wrong)
    batch = read_weights(model, layout)
    copy_state_metadata(model, step, "eval_step")
    model.metadata_props[contract.BATCH_INPUTS] = str(batch)
    model.metadata_props[contract.RESULTS] = str(len(graph.outputs))
    return lift_scalars(finish(model))


class _StepParts:
    """What both steps are made of: the training graph with the state as inputs, and its gradients."""

    def __init__(
        self, training: ir.Model, optimizer: ir.Model, checkpoint: CheckpointData, *, accumulate: bool = False
    ) -> None:
        self.model = training.clone()
        graph = self.model.graph
        gradients, self.statistics = take_results(graph, checkpoint.trainable, checkpoint.frozen)
        inputs = {value.name or "": value for value in graph.inputs}
        graph.inputs.clear()
        # The batch comes first: a program feeds it by position, whatever state there is.
        graph.inputs.extend(value for name, value in inputs.items() if _is_batch(name, checkpoint))
        self.batch = len(graph.inputs)
        self.op = op = Builder(graph)
        graph.outputs[0], self.wrong = reject_labels(op, graph.outputs[0], inputs, self.model.metadata_props)
        self.results = list(graph.outputs)
        numbers = op.input("learning_rate", ir.DataType.FLOAT, [1 + accumulate])
        # One input for both, so that a program fills it alike whichever step it runs.
        rate, self.update = (
            op.Split(numbers, np.ones(2, np.int64), outputs=2) if accumulate else (numbers, None)
        )
        self.rule = InlineOptimizer(op, optimizer, rate=rate)
        # sums of gradients are whole tensors: no table of some rows
        self.state = StateInputs(op, inputs, tables=not accumulate)
        self.state.add_weights(checkpoint, self.rule, statistics=self.statistics, gradients=gradients)
        self.state.add_slots(self.rule)
        self.state.add_counters()
        # The program keeps a seed and a count; the mixing is in the graph, so that no language has to repeat it.
        if SEED in inputs:
            _mix_seed(op, inputs[SEED], self.state.seed, self.state.train_step)
        for unit in self.state.units:
            unit.gradient = joined_gradient(op, unit, gradients)

    def gradients(self) -> list[ir.Value]:
        return [unit.gradient for unit in self.state.units if unit.gradient is not None]

    def finish(self, role: str, *, in_place: bool) -> tuple[ir.Model, StateLayout]:
        """The model with its metadata, and the layout of its state."""
        # as `lift_scalars` makes the inputs; the parts keep the shapes of their parameters
        layout = StateLayout([replace(tensor, shape=tensor.shape or (1,)) for tensor in self.state.tensors])
        model = lift_scalars(finish(self.model))
        model.metadata_props.update(
            {
                contract.ROLE: role,
                contract.PORTABLE: VERSION,
                contract.BATCH_INPUTS: str(self.batch),
                contract.RESULTS: str(len(self.results) + 1),  # and `problem`
                contract.IN_PLACE: str(int(in_place)),
                contract.STATE: layout.text(),
                contract.STATE_DIGEST: layout.digest.hex(),
                contract.WEIGHTS_SIZE: str(layout.weights_size),
                contract.LABEL_RANGES: label_ranges(model.metadata_props),
                contract.PROBLEMS: problems(model.metadata_props, self.wrong),
                contract.INPUTS: input_table(model.graph, layout, self.batch),
            }
        )
        return model, layout


def _is_batch(name: str, checkpoint: CheckpointData) -> bool:
    internal = name.endswith(BUFFER) or name in (RESET, SEED)
    return not internal and name not in checkpoint.trainable and name not in checkpoint.frozen


# ---- the state ---------------------------------------------------------------------------------------


def _mix_seed(op: Builder, old: ir.Value, seed: ir.Value, step: ir.Value) -> None:
    """The seed of this step, as `Module` computes it."""
    with op.inserting(next(iter(op.graph))):
        number = op.Add(step, np.int64(1))
        # int64 wraps as the 64 bits of `step_seed` do
        factors = (np.int64(factor - 2**64) for factor in (contract.SEED_FACTOR, contract.STEP_FACTOR))
        mixed = op.Add(*(op.Mul(value, factor) for value, factor in zip((seed, number), factors)))
    ir.convenience.replace_all_uses_with(old, mixed)


# ---- is it finite? -----------------------------------------------------------------------------------


def _judge(
    op: Builder,
    loss: ir.Value,
    gradients: Sequence[ir.Value],
    statistics: Sequence[ir.Value],
    limit: float | None,
) -> tuple[ir.Value, ir.Value | None]:
    """Whether this step may change the state, and the factor that limits the gradients' norm."""
    kind = ir.DataType.DOUBLE if op.dtype(loss) == ir.DataType.DOUBLE else ir.DataType.FLOAT
    good = _is_finite(op, loss if op.dtype(loss) == kind else op.Cast(loss, to=kind))
    if statistics:
        # a variance can overflow while the normalized values, and so the loss, stay finite
        parts = [_as_float(op, op.Reshape(value, [-1])) for value in statistics]
        good = op.And(good, _is_finite(op, op.ReduceL1(op.Concat(*parts, axis=0), keepdims=0)))
    if not gradients:
        return good, None
    if limit is None:
        # A sum is finite only if each number is; cheaper than IsInf and IsNaN of all.
        parts = [op.ReduceL1(_summands(op, value), keepdims=0) for value in gradients]
        total = sum_of(op, parts)
        return op.And(good, op.Less(total, _OVERFLOW)), None
    total = _squared_norm(op, gradients)
    norm = op.Sqrt(total)
    return op.And(good, op.Less(norm, _OVERFLOW)), clip_scale(op, norm, limit)


def _summands(op: Builder, gradient: ir.Value) -> ir.Value:
    """The rows that were added to zeros, where a gradient is a table of these: finite if and only if it is."""
    node = gradient.producer()
    if node is not None and node.op_type == "Reshape" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if (
        node is None
        or node.op_type != "ScatterElements"
        or node.attributes.get_string("reduction", "") != "add"
    ):
        return gradient
    zeros, rows = node.inputs[0], node.inputs[2]
    expand = None if zeros is None else zeros.producer()
    zero = op.const_value(expand.inputs[0]) if expand is not None and expand.op_type == "Expand" else None
    return gradient if rows is None or zero is None or zero.any() else rows


def _as_float(op: Builder, value: ir.Value) -> ir.Value:
    return value if op.dtype(value) == ir.DataType.FLOAT else op.Cast(value, to=ir.DataType.FLOAT)


def _is_finite(op: Builder, number: ir.Value) -> ir.Value:
    most = np.finfo(op.dtype(number).numpy()).max
    return op.LessOrEqual(op.Abs(number), most)


def _squared_norm(op: Builder, gradients: Sequence[ir.Value]) -> ir.Value:
    """Σg² as a double; computed in doubles only where float32 overflows, which clipping is there for."""
    squares = [op.ReduceSumSquare(value, keepdims=0) for value in gradients]
    total = sum_of(op, squares)
    # a branch is computed only where it is taken: doubles take twice the memory
    single, double = op.subgraph("single"), op.subgraph("double")
    single.graph.outputs.append(single.Cast(total, to=ir.DataType.DOUBLE))
    wide = [
        double.ReduceSumSquare(double.Cast(value, to=ir.DataType.DOUBLE), keepdims=0) for value in gradients
    ]
    double.graph.outputs.append(sum_of(double, wide))
    norm = op.If(_is_finite(op, total), then_branch=single, else_branch=double)
    norm.dtype, norm.shape = ir.DataType.DOUBLE, ir.Shape([])
    return norm


# ---- the update --------------------------------------------------------------------------------------


def _update(
    branch: Builder, rule: InlineOptimizer, state: StateInputs, scale: ir.Value | None
) -> list[tuple[ir.Value, ir.Value]]:
    """Parameters, slots and the count of updates, each with what it becomes, in the order of the state."""
    step = branch.Add(state.optimizer_step, np.int64(1))
    updated = rule.build(branch, state.units, step, scale)
    pairs = [
        ([unit.parameter, *unit.slots.values()][index], results[index])
        for index in range(1 + len(rule.slots))
        for unit, results in zip(state.units, updated)
    ]
    return [*pairs, (state.optimizer_step, step)]


def _choose(
    op: Builder,
    condition: ir.Value,
    branch: Builder,
    pairs: Sequence[tuple[ir.Value, ir.Value]],
    later: Sequence[ir.Value],
) -> list[ir.Value]:
    """For each pair the second, which `branch` computes, where the condition holds, else the first.

    The next state may lie in the memory of the state, so all that reads that comes before: outputs of the model that
    the update does not need itself (`later`) are passed through.
    """
    keep = op.subgraph("keep")
    for before, after in pairs:
        if before.shape is not None and before.shape.rank() == 0:
            after = branch.Reshape(after, np.zeros(0, np.int64))
        if after.graph is not branch.graph or after.is_graph_output():
            # an output of a branch must be computed in it
            after = branch.Identity(after)
        same = keep.Identity(before)
        for value in (after, same):
            value.type, value.shape = before.type, before.shape
        branch.graph.outputs.append(after)
        keep.graph.outputs.append(same)
    for value in later:
        for inner in (branch, keep):
            inner.graph.outputs.append(inner.Identity(value))
    # Units repeat the scalars of the rule, each in nodes of its own.
    share_subexpressions(ir.Model(branch.graph, ir_version=10))
    outputs = op.If(condition, then_branch=branch, else_branch=keep, outputs=len(branch.graph.outputs))
    for before, after in zip(later, outputs[len(pairs) :]):
        index = next(i for i, value in enumerate(op.graph.outputs) if value is before)
        after.name, before.name = before.name, op.namer(f"{before.name}.computed")
        after.type, after.shape = before.type, before.shape
        op.graph.outputs[index] = after
    return list(outputs[: len(pairs)])


def _add_next_state(op: Builder, before: Sequence[ir.Value], after: Sequence[ir.Value]) -> None:
    """An output for each changing tensor. The seed is one, too: a program can feed everything back blindly."""
    for old, new in zip(before, after, strict=True):
        new.name = op.namer(f"{old.name}{contract.NEXT}")
        new.type, new.shape = old.type, old.shape
        op.graph.outputs.append(new)


# --- The portable step in two halves: gradients of a batch, and an update from gradients.
#
# For programs that add up the gradients of several batches before an update, or that update in place.
# docs/portable-format.md specifies both; the state's layout is that of the whole step.


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
    outputs = {name: add_output(op, gradients[name], f"{name}{OUT}") for name in checkpoint.trainable}
    for statistic, value in following.items():
        add_output(op, value, f"{statistic}{contract.NEXT}")
    finish(model)  # before looking at what reads a gradient
    rows: dict[str, ir.Value] = {}
    for name, gradient in outputs.items():
        large = np.size(np.asarray(checkpoint.trainable[name])) >= _LARGE
        table = added_rows(op, gradient) if large and not gradient.uses() else None
        node = gradient.producer()
        if table is None or node is None:
            continue
        changed, _ = table
        buffer = inputs[f"{name}{BUFFER}"]
        graph.inputs.append(buffer)
        # Scattering into a buffer saves writing a table of zeros for each batch.
        node.replace_input_with(0, buffer)
        rows[name] = changed
        if not changed.is_graph_output():
            graph.outputs.append(changed)
    remove_unused(model)
    lines = [table_line(name, value.name or "") for name, value in rows.items()]
    model.metadata_props[contract.ROWS] = "".join(lines)
    copy_state_metadata(model, step, "gradient_step")
    return lift_scalars(model)


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
        # of any length: a program may update in blocks that fit its caches
        model = over_rows(optimizer, scaled=rule.clip_norm is not None)
        for name in [part.name for part, _, _ in layout.parts() if part.role == "trainable"]:
            decay, scale = rule.setting(name)
            lines.append(("parameter", name, repr(float(scale)), repr(float(decay))))
    else:
        number = op.input("step", ir.DataType.INT64, [1])
        limit = op.input("gradient_scale", ir.DataType.FLOAT, [1]) if rule.clip_norm is not None else None
        _add_full_update(op, rule, layout, number, limit)
        model = ir.Model(graph, ir_version=optimizer.ir_version)
        model.producer_name, model.producer_version = optimizer.producer_name, optimizer.producer_version
        for key in (contract.VERSION, contract.ARTIFACTS):
            model.metadata_props[key] = optimizer.metadata_props[key]
    finish(model)
    model.metadata_props[contract.UPDATE] = "".join(table_line(*line) for line in lines)
    copy_state_metadata(model, step, "update_step")
    return lift_scalars(model)


def _add_full_update(
    op: Builder, rule: InlineOptimizer, layout: StateLayout, step: ir.Value, limit: ir.Value | None
) -> None:
    tensors = {
        role: [tensor for tensor in layout.tensors if tensor.parts[0].role == role]
        for role in ("trainable", "slot")
    }

    def inputs(role: str, suffix: str = "") -> list[ir.Value]:
        # in the parameter's own shape, which the rule takes: a scalar is [1] in the state, `lift_scalars` makes it so
        return [op.input(f"{t.name}{suffix}", ir.DataType.FLOAT, t.parts[0].shape) for t in tensors[role]]

    gradients, parameters, slots = inputs("trainable", "_grad"), inputs("trainable"), inputs("slot")
    units = [
        Unit({t.parts[0].name: prod(t.shape)}, t.parts[0].shape, parameter, gradient=gradient)
        for t, parameter, gradient in zip(tensors["trainable"], parameters, gradients)
    ]
    by_name = {unit.names[0]: unit for unit in units}
    for tensor, value in zip(tensors["slot"], slots):
        by_name[tensor.parts[0].name].slots[tensor.parts[0].slot] = value
    updated = rule.build(op, units, step, limit)
    for index in range(1 + len(rule.slots)):
        for unit, results in zip(units, updated):
            before = [unit.parameter, *unit.slots.values()][index]
            after = results[index]
            if before.shape is not None and before.shape.rank() == 0:
                after = op.Reshape(after, np.zeros(0, np.int64))
            add_output(op, after, op.namer(f"{before.name}{contract.NEXT}"), like=before)
