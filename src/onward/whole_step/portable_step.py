"""The portable step: a training step, its update and the check for non-finite values in one standard graph.

The state is an input and the next state an output, so a loop in any language is: run, keep the outputs, feed
them back. Built from the training and the optimizer model. docs/portable.md specifies names, order and metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward import contract
from onward.checkpoint.portable import StateLayout
from onward.contract import BUFFER, RESET, SEED
from onward.graph.builder import Builder
from onward.graph.cleanup import share_subexpressions
from onward.graph.nodes import captured_values
from onward.graph.passes.finish import finish
from onward.model_metadata import read_labels
from onward.whole_step.inline_update import InlineOptimizer
from onward.whole_step.state_inputs import StateInputs, clip_scale, joined_gradient, take_results

if TYPE_CHECKING:
    from onward.checkpoint.content import CheckpointData

__all__ = ["portable_step"]

VERSION = "1"
# How `Module` makes the seed of a step: odd multipliers spread neighbouring seeds and steps over all 64 bits.
_SEED_FACTOR = np.int64(0x9E3779B97F4A7C15 - 2**64)
_STEP_FACTOR = np.int64(0xD1B54A32D192ED03 - 2**64)
# Gradients beyond this are an overflow: some rules clamp infinities to the largest float32.
_OVERFLOW = 1e30

Values = Mapping[str, ir.Value]


def portable_step(
    training: ir.Model, optimizer: ir.Model, checkpoint: CheckpointData
) -> tuple[ir.Model, StateLayout]:
    """One graph that trains: batch, learning rate and state in; loss, outputs and next state out."""
    model = training.clone()
    graph = model.graph
    gradients, following = take_results(graph, checkpoint.trainable, checkpoint.frozen)
    inputs = {value.name or "": value for value in graph.inputs}
    graph.inputs.clear()
    graph.inputs.extend(value for name, value in inputs.items() if _is_batch(name, checkpoint))
    batch = len(graph.inputs)
    results = list(graph.outputs)
    op = Builder(graph)
    rule = InlineOptimizer(op, optimizer, rate=op.input("learning_rate", ir.DataType.FLOAT, [1]))
    state = StateInputs(op, inputs)
    state.add_weights(checkpoint, rule, statistics=following, gradients=gradients)
    state.add_slots(rule)
    state.add_counters()
    if SEED in inputs:
        _mix_seed(op, inputs[SEED], state.seed, state.train_step)
    for unit in state.units:
        unit.gradient = joined_gradient(op, unit, gradients)
    judged = [unit.gradient for unit in state.units if unit.gradient is not None]
    good, scale = _judge(op, results[0], judged, list(following.values()), rule.clip_norm)
    later = [value for value in results[1:] if value not in _before(good)]
    _add_update(op, good, rule, state, scale, following, later)
    layout = StateLayout(state.tensors)
    model.metadata_props.update(
        {
            contract.ROLE: "train_step",
            contract.PORTABLE: VERSION,
            contract.BATCH_INPUTS: str(batch),
            contract.RESULTS: str(len(results)),
            contract.IN_PLACE: str(int(rule.elementwise)),
            contract.STATE: layout.text(),
            contract.STATE_DIGEST: layout.digest.hex(),
            contract.WEIGHTS_SIZE: str(layout.weights_size),
            contract.LABEL_RANGES: _label_ranges(model),
        }
    )
    return finish(model), layout


def _label_ranges(model: ir.Model) -> str:
    ranges = read_labels(model.metadata_props)
    lines = [
        (name, str(count), "" if ignored is None else str(ignored))
        for name, (count, ignored) in ranges.items()
    ]
    return "".join("\t".join(fields) + "\n" for fields in lines)


def _is_batch(name: str, checkpoint: CheckpointData) -> bool:
    internal = name.endswith(BUFFER) or name in (RESET, SEED)
    return not internal and name not in checkpoint.trainable and name not in checkpoint.frozen


# ---- the state ---------------------------------------------------------------------------------------


def _mix_seed(op: Builder, old: ir.Value, seed: ir.Value, step: ir.Value) -> None:
    """The seed of this step, as `Module` computes it."""
    with op.inserting(next(iter(op.graph))):
        number = op.Add(step, np.int64(1))
        mixed = op.Add(op.Mul(seed, _SEED_FACTOR), op.Mul(number, _STEP_FACTOR))
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
        parts = [op.ReduceL1(_summands(op, value), keepdims=0) for value in gradients]
        total = parts[0] if len(parts) == 1 else op.Sum(*parts)
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
    made = None if zeros is None else zeros.producer()
    zero = op.const_value(made.inputs[0]) if made is not None and made.op_type == "Expand" else None
    return gradient if rows is None or zero is None or zero.any() else rows


def _as_float(op: Builder, value: ir.Value) -> ir.Value:
    return value if op.dtype(value) == ir.DataType.FLOAT else op.Cast(value, to=ir.DataType.FLOAT)


def _is_finite(op: Builder, number: ir.Value) -> ir.Value:
    most = np.finfo(op.dtype(number).numpy()).max
    return op.LessOrEqual(op.Abs(number), most)


def _squared_norm(op: Builder, gradients: Sequence[ir.Value]) -> ir.Value:
    """Σg² as a double; computed in doubles only where float32 overflows, which clipping is there for."""
    squares = [op.ReduceSumSquare(value, keepdims=0) for value in gradients]
    total = squares[0] if len(squares) == 1 else op.Sum(*squares)
    single, double = op.subgraph("single"), op.subgraph("double")
    single.graph.outputs.append(single.Cast(total, to=ir.DataType.DOUBLE))
    wide = [
        double.ReduceSumSquare(double.Cast(value, to=ir.DataType.DOUBLE), keepdims=0) for value in gradients
    ]
    double.graph.outputs.append(wide[0] if len(wide) == 1 else double.Sum(*wide))
    (norm,) = _if(op, _is_finite(op, total), single.graph, double.graph)
    norm.dtype, norm.shape = ir.DataType.DOUBLE, ir.Shape([])
    return norm


def _if(op: Builder, condition: ir.Value, then: ir.Graph, otherwise: ir.Graph) -> tuple[ir.Value, ...]:
    branches = {
        "then_branch": ir.AttrGraph("then_branch", then),
        "else_branch": ir.AttrGraph("else_branch", otherwise),
    }
    return op.node("If", [condition], branches, outputs=len(then.outputs))


def _before(value: ir.Value) -> set[ir.Value]:
    """All that a value is computed from."""
    found, waiting = {value}, [value]
    while waiting:
        node = waiting.pop().producer()
        reads = [] if node is None else [*node.inputs, *captured_values(node)]
        new = {read for read in reads if read is not None} - found
        found |= new
        waiting += new
    return found


# ---- the update --------------------------------------------------------------------------------------


def _add_update(
    op: Builder,
    good: ir.Value,
    rule: InlineOptimizer,
    state: StateInputs,
    scale: ir.Value | None,
    following: Values,
    later: Sequence[ir.Value],
) -> None:
    """Outputs for the next state: updated where the step is good, else as it was.

    The next state may lie in the memory of the state, so all that reads that comes before: what the update does not
    need itself (`later`) is passed through.
    """
    branch, keep = op.subgraph("update"), op.subgraph("keep")
    step = branch.Add(state.optimizer_step, np.int64(1))
    updated = rule.build(branch, state.units, step, scale)
    pairs = [(value, following[name]) for name, value in state.statistics.items()]
    for index in range(1 + len(rule.slots)):
        for unit, results in zip(state.units, updated):
            pairs.append(([unit.parameter, *unit.slots.values()][index], results[index]))
    pairs += [(state.optimizer_step, step), (state.train_step, branch.Add(state.train_step, np.int64(1)))]
    for before, after in pairs:
        if before.shape is not None and before.shape.rank() == 0:
            after = branch.Reshape(after, np.zeros(0, np.int64))
        if after.graph is not branch.graph or after.is_graph_output():
            after = branch.Identity(after)
        same = keep.Identity(before)
        for value in (after, same):
            value.type, value.shape = before.type, before.shape
        branch.graph.outputs.append(after)
        keep.graph.outputs.append(same)
    for value in later:
        for inner in (branch, keep):
            inner.graph.outputs.append(inner.Identity(value))
    share_subexpressions(ir.Model(branch.graph, ir_version=10))
    made = _if(op, good, branch.graph, keep.graph)
    for before, after in zip(later, made[len(pairs) :]):
        index = next(i for i, value in enumerate(op.graph.outputs) if value is before)
        after.name, before.name = before.name, op.namer(f"{before.name}.computed")
        after.type, after.shape = before.type, before.shape
        op.graph.outputs[index] = after
    results = [*made[: len(pairs)], op.Identity(state.seed)]
    for before, after in zip([*(before for before, _ in pairs), state.seed], results):
        after.name = op.namer(f"{before.name}{contract.NEXT}")
        after.type, after.shape = before.type, before.shape
        op.graph.outputs.append(after)
