"""Batch-norm statistics as state of the training step.

The runtime's training-mode BatchNormalization writes its running statistics into the memory of its own
inputs, and is replaced by its inference form where those are constants. Here it is given scratch memory and
a momentum of 0, so that it yields the batch's own mean and variance: what the gradient needs, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onward.graph.builder import Builder

__all__ = ["Statistic", "count_per_channel", "make_statistics_explicit"]


@dataclasses.dataclass(frozen=True)
class Statistic:
    """A running mean or variance, and its value after the step."""

    current: ir.Value
    following: ir.Value


def make_statistics_explicit(op: Builder) -> list[Statistic]:
    """Let each training-mode BatchNormalization give its batch's statistics; returns the next running ones.

    ONNX moves the running variance towards the batch's population variance, torch towards the unbiased one:
    here the part that comes from the batch is scaled by n/(n−1), so that trained models agree with torch's.
    A layer that is applied twice in a step moves its statistics once, by its last application.
    """
    found: dict[ir.Value, Statistic] = {}
    nodes = list(op.graph)
    for node, after in zip(nodes, [*nodes[1:], None]):
        if node.op_type != "BatchNormalization" or not node.attributes.get_int("training_mode", 0):
            continue
        x, mean, variance = node.inputs[0], node.inputs[3], node.inputs[4]
        assert x is not None and mean is not None and variance is not None
        momentum = node.attributes.get_float("momentum", 0.9)
        op.scope = node.name or "BatchNormalization"
        op.before = node
        # two expressions, so that they never share the memory that the operator writes into
        node.replace_input_with(3, _scratch(op, op.IsNaN, x, mean))
        node.replace_input_with(4, _scratch(op, op.IsInf, x, variance))
        node.attributes["momentum"] = ir.AttrFloat32("momentum", 0.0)
        op.before = after
        batch_mean, batch_variance = _batch_outputs(op, node, mean, variance, momentum)
        op.before = None
        count = op.Cast(count_per_channel(op, x), to=op.dtype(variance))
        unbiased = op.Div(count, op.Max(op.Sub(count, 1.0), 1.0))
        if _is_state(mean) and _is_state(variance):
            found[mean] = Statistic(mean, _move(op, mean, batch_mean, momentum))
            found[variance] = Statistic(variance, _move(op, variance, batch_variance, momentum, unbiased))
    op.scope = ""
    return list(found.values())


def _scratch(op: Builder, test: Callable[..., ir.Value], x: ir.Value, like: ir.Value) -> ir.Value:
    """Finite numbers, one for each channel, that no optimizer folds into a constant: they depend on x."""
    others = [axis for axis in range(op.rank(x)) if axis != 1]
    sample = op.Slice(x, [0] * len(others), [1] * len(others), others)
    return op.Reshape(op.Cast(test(sample), to=op.dtype(like)), [-1])


def count_per_channel(op: Builder, x: ir.Value) -> ir.Value:
    """How many numbers of x each channel (axis 1) has, as an int64 scalar.

    By the sizes of the model's inputs where names of dimensions tell: the runtime may come to this at the end of
    the step, and would keep x until then; and layers of the same size share it.
    """
    axes = {
        dim.value: (value, axis)
        for value in reversed(op.graph.inputs)
        for axis, dim in enumerate(value.shape or ())
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None
    }
    dims = [dim for axis, dim in enumerate(x.shape or ()) if axis != 1]
    parts = [p for d in dims for p in ([d] if isinstance(d, int) else (d.value or "?").split("*"))]
    if x.shape is None or not all(isinstance(p, int) or p.isdigit() or p in axes for p in parts):
        return op.Div(op.Size(x), op.Squeeze(op.dim(x, 1), [0]))
    count = op.constant(np.int64(math.prod(int(p) for p in parts if isinstance(p, int) or p.isdigit())))
    for value, axis in (axes[p] for p in parts if isinstance(p, str) and p in axes):
        count = op.Mul(op.Squeeze(op.dim(value, axis), [0]), count)
    return count


def _batch_outputs(
    op: Builder, node: ir.Node, mean: ir.Value, variance: ir.Value, momentum: float
) -> tuple[ir.Value, ir.Value]:
    """Outputs 1 and 2 are the batch's now; whoever read the running ones gets those computed."""
    if len(node.outputs) < 3:
        node.resize_outputs(3)
    made = []
    for output, like in zip(node.outputs[1:], (mean, variance)):
        output.name = output.name or op.namer(f"{like.name}.batch")
        output.type, output.shape = like.type, like.shape
        uses, is_result = list(output.uses()), output.is_graph_output()
        if uses or is_result:
            running = _move(op, like, output, momentum)
            if is_result:
                running.name, output.name = output.name, op.namer(f"{output.name}.batch")
                graph = op.graph
                graph.outputs[graph.outputs.index(output)] = running
            for user, index in uses:
                user.replace_input_with(index, running)
        made.append(output)
    return made[0], made[1]


def _move(
    op: Builder, running: ir.Value, batch: ir.Value, momentum: float, correction: ir.Value | None = None
) -> ir.Value:
    """momentum·running + (1 − momentum)·correction·batch"""
    share: ir.Value | float = 1.0 - momentum
    share = share if correction is None else op.Mul(correction, share)
    return op.Add(op.Mul(running, momentum), op.Mul(batch, share))


def _is_state(value: ir.Value) -> bool:
    return value.is_initializer() or value.is_graph_input()
