"""The optimizer model: an update rule as an ONNX file.

An elementwise rule becomes one small graph over a vector of any length, which the runtime applies to flat
buffers. Any other rule is written out for each parameter. Gradients are first multiplied by
`gradient_scale`, with which the runtime clips by norm and averages accumulated steps.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onward import contract
from onward.contract import OPSET
from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.passes.finish import finish
from onward.optim.update_rules import Optimizer, Scalars

__all__ = ["Clipping", "ParameterGroup", "optimizer_model"]


@dataclasses.dataclass(frozen=True)
class Clipping:
    """Gradient clipping before an update; None disables it."""

    norm: float | None = None
    value: float | None = None


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Parameters with a weight decay or a learning rate of their own (a multiple of the optimizer's)."""

    parameters: tuple[str, ...]
    weight_decay: float | None = None
    learning_rate_scale: float = 1.0


def optimizer_model(
    rule: Optimizer,
    parameters: Mapping[str, Sequence[int]],
    *,
    clipping: Clipping | None = None,
    groups: Sequence[ParameterGroup] = (),
    dtype: ir.DataType = ir.DataType.FLOAT,
) -> ir.Model:
    """Build the optimizer model of a rule for parameters of these names and shapes, all of one type.

    State and scalars are of that type too: an update of float64 parameters is one of float64 throughout.

    >>> from onward.optim import adamw
    >>> [value.name for value in optimizer_model(adamw(), {"w": (3, 4)}).graph.inputs][:4]
    ['parameter', 'gradient', 'momentum0', 'momentum1']
    """
    clipping = clipping or Clipping()
    if dtype != ir.DataType.FLOAT and not rule.elementwise:
        raise ModelError(
            f"{rule.name} updates float32 parameters only, and these are {dtype}",
            hint="choose an elementwise rule, such as AdamW or SGD, or call model.float() before the export",
        )
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=f"{rule.name} optimizer")
    op = Builder(graph)
    if rule.elementwise:
        # A vector of any length: one session updates parameters of all shapes, and the file does not grow with
        # the model.
        tensors = {"": _Tensor("parameter", "gradient", "", ["N"])}
    else:
        tensors = {
            name: _Tensor(name, f"{name}_grad", f"{name}.", list(shape)) for name, shape in parameters.items()
        }
    values = {name: _inputs(op, rule, tensor, dtype) for name, tensor in tensors.items()}
    rate = op.input("learning_rate", dtype, [1])
    step = op.input("step", ir.DataType.INT64, [1])
    scale = op.input("gradient_scale", dtype, [1])
    decay = op.input("weight_decay", dtype, [1])
    count = op.Cast(step, to=dtype)
    of_parameter = {name: group for group in groups for name in group.parameters}
    # Without decay anywhere the graph has no node for it: an update reads all parameters once less.
    decays = bool(rule.weight_decay) or any(group.weight_decay for group in groups)
    for name, tensor in tensors.items():
        scalars = Scalars(rate, count, decay if decays else None)
        # Of an elementwise rule the runtime gives each stretch of the vector the scalars of its group.
        if not rule.elementwise and (group := of_parameter.get(name)) is not None:
            scalars = _scalars_of(op, scalars, group)
        parameter, gradient, state = values[name]
        # One product does three things: clipping by norm, averaging accumulated steps, and undoing a loss
        # scale.
        gradient = op.Mul(gradient, scale)
        if clipping.value is not None:
            gradient = op.Clip(gradient, -clipping.value, clipping.value)
        updated, following = rule.update(op, parameter, gradient, state, scalars)
        _output(op, updated, f"{tensor.parameter}{contract.NEXT}", parameter)
        for slot in rule.slots:
            _output(op, following[slot], f"{tensor.prefix}{slot}{contract.NEXT}", state[slot])
    model = ir.Model(graph, ir_version=10, producer_name="onward")
    model.metadata_props[contract.ROLE] = "optimizer"
    # all that the runtime has to know: it never looks at the rule's nodes
    model.metadata_props[contract.OPTIMIZER] = json.dumps(
        {
            "name": rule.name,
            "elementwise": rule.elementwise,
            "slots": list(rule.slots),
            "hyperparameters": dict(rule.hyperparameters),
            "weight_decay": rule.weight_decay,
            "clip_norm": clipping.norm,
            "clip_value": clipping.value,
            "groups": [dataclasses.asdict(group) for group in groups],
        }
    )
    return finish(model)


@dataclasses.dataclass(frozen=True)
class _Tensor:
    parameter: str
    gradient: str
    prefix: str
    dims: list[int | str]


def _inputs(
    op: Builder, rule: Optimizer, tensor: _Tensor, dtype: ir.DataType
) -> tuple[ir.Value, ir.Value, dict[str, ir.Value]]:
    parameter = op.input(tensor.parameter, dtype, tensor.dims)
    gradient = op.input(tensor.gradient, dtype, tensor.dims)
    state = {}
    for slot in rule.slots:
        dims: list[int | str] = tensor.dims
        if rule.slot_shapes is not None:
            dims = list(rule.slot_shapes(slot, tuple(int(dim) for dim in tensor.dims)))
        state[slot] = op.input(f"{tensor.prefix}{slot}", dtype, dims)
    return parameter, gradient, state


def _scalars_of(op: Builder, scalars: Scalars, group: ParameterGroup) -> Scalars:
    rate, decay = scalars.learning_rate, scalars.weight_decay
    if group.learning_rate_scale != 1.0:
        rate = op.Mul(rate, group.learning_rate_scale)
    if group.weight_decay is not None:
        decay = op.constant(np.asarray([group.weight_decay], op.dtype(rate).numpy()), name="weight_decay")
    return Scalars(rate, scalars.step, decay)


def _output(op: Builder, value: ir.Value, name: str, like: ir.Value) -> None:
    if value is like:  # a slot that the rule left alone
        value = op.Identity(value)
    elif (
        like.shape is not None and like.shape.rank() == 0
    ):  # scalars like the learning rate have one dimension
        value = op.Reshape(value, np.zeros(0, np.int64))
    value.name = op.namer(name)
    # what is written over a tensor must have its shape, which inference may have lost
    value.shape = like.shape
    op.graph.outputs.append(value)
