"""Many steps in one run: a Scan whose body is a training step and its update.

The state is carried from step to step; batches, seeds and the optimizer's scalars come as stacks, one entry for each
step. Nothing in it decides whether a step may count: it outputs what tells non-finite values, and the caller, which
still has the state from before, decides.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

from onward import contract
from onward.contract import BUFFER, RESET
from onward.graph.builder import Builder
from onward.graph.cleanup import remove_identities, remove_unused, share_subexpressions
from onward.graph.proto.known_shapes import resolve_symbols, specialize_shapes
from onward.graph.proto.small_images import batch_convolutions
from onward.whole_step.state_inputs import StateInputs, clip_scale, joined_gradient, take_results
from onward.whole_step.update_units import Unit, add_output, graft, sum_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What follows a name: the state before and after all steps, and the entries of all steps.
FIRST, LAST, STACK = ".first", ".last", ".stack"


@dataclasses.dataclass(frozen=True)
class JoinedStep:
    """A step and its update as one model.

    `carried` are the inputs of the state, whose next values are outputs named `.next`, by name of the input. `scalars`
    are inputs of the optimizer by setting and name. Inputs that are neither of those, the batch nor the seed are the
    same in every step. Two outputs tell non-finite values: Σg² of all gradients, and Σ|s| of all statistics.
    """

    model: onnx.ModelProto
    carried: list[str]
    scalars: dict[tuple[int, str], str]
    gradient_squares: str
    statistics_sum: str | None


def join_step(
    training: ir.Model,
    optimizer: ir.Model,
    *,
    runs: Sequence[tuple[int, Sequence[str]]],
    slots: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    statistics: Sequence[str],
    clip_norm: float | None,
) -> JoinedStep:
    """Join a training model and an elementwise optimizer over rows.

    `runs` are trainable parameters that lie together and have the same setting, with its number. The state is a row
    for each run and slot (`packed0`, `packed0.momentum0`), and one for its last gradient (`packed0.gradient`).
    """
    model = training.clone()
    graph = model.graph
    gradients, following = take_results(graph, shapes, statistics)
    inputs = {value.name or "": value for value in graph.inputs}
    graph.inputs.clear()
    internal = {RESET, *shapes, *(name for name in inputs if name.endswith(BUFFER))}
    graph.inputs.extend(value for name, value in inputs.items() if name not in internal)
    op = Builder(graph)
    state = StateInputs(op, inputs)
    for _, names in runs:
        state.pack(names, shapes, as_row=True)
    for unit in state.units:
        unit.gradient = joined_gradient(op, unit, gradients)
        unit.slots = {slot: _row(op, unit, slot) for slot in slots}
    squares = [op.ReduceSumSquare(unit.gradient, keepdims=0) for unit in state.units]
    total = sum_of(op, squares)
    statistics_sum = None
    if following:
        parts = [op.Reshape(op.Cast(value, to=ir.DataType.FLOAT), [-1]) for value in following.values()]
        statistics_sum = op.ReduceL1(op.Concat(*parts, axis=0), keepdims=0)
    scale = None
    if clip_norm is not None:
        # in doubles, as `Optimizer` does: the same bits as steps one by one
        scale = clip_scale(op, op.Sqrt(op.Cast(total, to=ir.DataType.DOUBLE)), clip_norm)
    scalars: dict[tuple[int, str], ir.Value] = {}
    pairs: list[tuple[ir.Value, ir.Value]] = []
    for (setting, _), unit in zip(runs, state.units):
        assert unit.gradient is not None
        rule_inputs = {"parameter": unit.parameter, "gradient": unit.gradient, **unit.slots}
        if scale is not None:
            rule_inputs["gradient_scale"] = scale
        for value in optimizer.graph.inputs:
            name = value.name or ""
            if name not in rule_inputs and (setting, name) not in scalars:
                scalars[setting, name] = op.input(f"{name}/{setting}", op.dtype(value), [1, 1])
        rule_inputs |= {name: value for (own, name), value in scalars.items() if own == setting}
        rule_outputs = graft(op, op, optimizer.graph, rule_inputs)
        pairs += [(unit.parameter, rule_outputs["parameter.next"])]
        pairs += [(value, rule_outputs[f"{slot}{contract.NEXT}"]) for slot, value in unit.slots.items()]
        pairs += [(_row(op, unit, "gradient"), unit.gradient)]
    pairs += [(inputs[name], value) for name, value in following.items()]
    # The rule is grafted once for each run of parameters, with the same scalars.
    share_subexpressions(model)
    remove_identities(model)
    for before, after in pairs:
        add_output(op, after, f"{before.name}{contract.NEXT}", like=before)
    squares_name, sum_name = op.namer("gradient_squares"), op.namer("statistics_sum")
    add_output(op, total, squares_name)
    if statistics_sum is not None:
        add_output(op, statistics_sum, sum_name)
    return JoinedStep(
        ir.to_proto(remove_unused(model)),
        [before.name or "" for before, _ in pairs],
        {key: value.name or "" for key, value in scalars.items()},
        squares_name,
        None if statistics_sum is None else sum_name,
    )


def _row(op: Builder, unit: Unit, what: str) -> ir.Value:
    return op.input(f"{unit.parameter.name}.{what}", ir.DataType.FLOAT, unit.shape)


def scan_steps(
    step: JoinedStep, stacked: Sequence[str], shapes: Mapping[str, Sequence[int]]
) -> onnx.ModelProto:
    """The model that runs a step for each entry of its stacks; `shapes` are those of one step's inputs.

    `stacked` are the inputs that have an entry for each step, the scalars of the optimizer among them. The model's
    inputs are the state (`.first`), stacks (`.stack`), and what all steps share; its outputs the state (`.last`) and
    a stack for each other output of the step, in its order.
    """
    body = copy.deepcopy(step.model)
    # Sizes are known here; inside of the loop the runtime would not look.
    batch_convolutions(body, resolve_symbols(body.graph, shapes))
    specialize_shapes(body, shapes)
    graph = body.graph
    carried, following = list(step.carried), [f"{name}{contract.NEXT}" for name in step.carried]
    step_inputs = {value.name: value for value in graph.input}
    step_outputs = {value.name: value for value in graph.output}
    results = [name for name in step_outputs if name not in following]
    inner = onnx.GraphProto(name="step")
    inner.node.extend(graph.node)
    inner.initializer.extend(graph.initializer)  # the runtime folds constants of the body's own only
    inner.input.extend(step_inputs[name] for name in [*carried, *stacked])
    inner.output.extend(step_outputs[name] for name in [*following, *results])
    node = onnx.helper.make_node(
        "Scan",
        [f"{name}{FIRST}" for name in carried] + [f"{name}{STACK}" for name in stacked],
        [f"{name}{LAST}" for name in carried] + [f"{name}{STACK}" for name in results],
        body=inner,
        num_scan_inputs=len(stacked),
    )
    first = [_renamed(step_inputs[name], f"{name}{FIRST}") for name in carried]
    stacks = [_renamed(step_inputs[name], f"{name}{STACK}", stacked=True) for name in stacked]
    shared = [value for name, value in step_inputs.items() if name not in {*carried, *stacked}]
    outputs = [_renamed(step_inputs[name], f"{name}{LAST}") for name in carried]
    outputs += [_renamed(step_outputs[name], f"{name}{STACK}", stacked=True) for name in results]
    whole = onnx.helper.make_graph([node], "steps", [*first, *stacks, *shared], outputs)
    return onnx.helper.make_model(whole, opset_imports=list(body.opset_import), ir_version=body.ir_version)


def _renamed(value: onnx.ValueInfoProto, name: str, *, stacked: bool = False) -> onnx.ValueInfoProto:
    renamed = copy.deepcopy(value)
    renamed.name = name
    tensor = renamed.type.tensor_type
    if stacked and tensor.HasField("shape"):
        # a symbol, so that one session takes any number of steps
        tensor.shape.dim.insert(0, onnx.TensorShapeProto.Dimension(dim_param="steps"))
    return renamed
