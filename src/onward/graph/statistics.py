"""Batch-norm statistics as state of the training step: each running value gets a `.next` output."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onward.graph.builder import Builder

__all__ = ["Statistic", "next_statistics"]


@dataclasses.dataclass(frozen=True)
class Statistic:
    """A running mean or variance, and its value after the step."""

    current: ir.Value
    following: ir.Value


def next_statistics(op: Builder) -> list[Statistic]:
    """Add to the graph what each training-mode BatchNormalization makes of its running statistics.

    ONNX moves the running variance towards the batch's population variance, torch towards the unbiased one:
    the part that comes from the batch is scaled by n/(n−1), so that trained models agree with torch's.
    """
    found: dict[ir.Value, Statistic] = {}
    for node in list(op.graph):
        if node.op_type != "BatchNormalization" or not node.attributes.get_int("training_mode", 0):
            continue
        x, mean, variance = node.inputs[0], node.inputs[3], node.inputs[4]
        assert x is not None and mean is not None and variance is not None
        if not (_is_state(mean) and _is_state(variance)):
            continue
        _want_outputs(op, node)
        op.scope = node.name or "BatchNormalization"
        momentum = node.attributes.get_float("momentum", 0.9)
        kept = op.Mul(variance, momentum)
        batch = op.Sub(node.outputs[2], kept)
        count = op.Div(op.Size(x), op.Squeeze(op.dim(variance, 0), [0]))
        n = op.Cast(count, to=op.dtype(variance))
        unbiased = op.Div(n, op.Max(op.Sub(n, 1.0), 1.0))
        corrected = op.Add(kept, op.Mul(batch, unbiased))
        # a layer that is applied twice moves its statistics twice; the second application counts here
        found[mean] = Statistic(mean, node.outputs[1])
        found[variance] = Statistic(variance, corrected)
    op.scope = ""
    return list(found.values())


def _is_state(value: ir.Value) -> bool:
    return value.is_initializer() or value.is_graph_input()


def _want_outputs(op: Builder, node: ir.Node) -> None:
    if len(node.outputs) < 3:
        node.resize_outputs(3)
    for output, like in zip(node.outputs[1:], node.inputs[3:]):
        assert like is not None
        output.name = output.name or op.namer(f"{like.name}.moved")
        output.type, output.shape = like.type, like.shape
