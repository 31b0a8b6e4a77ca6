"""Connectionist temporal classification: the loss of speech and handwriting models, in standard operators.

The forward recursion in log space is a Scan over time; its gradient is that of the Scan. Probabilities of
zero are a very small finite number inside, so that nothing becomes NaN on the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from onward.graph.builder import Builder

__all__ = ["ctc"]

_NEVER = -1e30


def ctc(
    op: Builder,
    log_probabilities: ir.Value,
    targets: ir.Value,
    input_lengths: ir.Value,
    target_lengths: ir.Value,
    *,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> ir.Value:
    """−log Σ p(alignment) over all alignments of the target, as torch.nn.functional.ctc_loss

    `log_probabilities` are [time, batch, classes], `targets` [batch, longest target] class numbers of which
    the first `target_lengths` count. 'mean' divides each loss by its target's length first. A target that
    no alignment fits costs infinity (0 with `zero_infinity`) and has no gradient.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is '{reduction}': choose one of mean, sum, none")
    lengths = op.Cast(target_lengths, to=ir.DataType.INT64)
    states = _states(op, targets, lengths, blank)
    last = _scan(op, log_probabilities, states, input_lengths, blank)
    each = op.Neg(_readout(op, last, lengths))
    possible = op.Less(each, -_NEVER / 10)
    each = op.Where(possible, each, 0.0 if zero_infinity else float("inf"))
    if reduction == "none":
        return each
    if reduction == "sum":
        return op.ReduceSum(each, keepdims=0)
    share = op.Cast(op.Max(lengths, np.int64(1)), to=op.dtype(log_probabilities))
    return op.ReduceMean(op.Div(each, share), keepdims=0)


def _states(op: Builder, targets: ir.Value, lengths: ir.Value, blank: int) -> ir.Value:
    """[batch, 2·longest + 1]: the target's classes with blanks around each."""
    targets = op.Cast(targets, to=ir.DataType.INT64)
    longest = op.Squeeze(op.dim(targets, 1), [0])
    counts = op.Less(op.Range(np.int64(0), longest, np.int64(1)), op.Unsqueeze(lengths, [1]))
    safe = op.Where(counts, targets, np.int64(blank))  # what stands behind a target's end may be anything
    pairs = op.Concat(
        op.Expand(np.int64(blank), op.shape(op.Unsqueeze(safe, [2]))), op.Unsqueeze(safe, [2]), axis=2
    )
    flat = op.Reshape(pairs, op.Concat(op.dim(targets, 0), op.Mul(op.dim(targets, 1), np.int64(2)), axis=0))
    ends = op.Expand(np.int64(blank), op.Concat(op.dim(targets, 0), np.asarray([1], np.int64), axis=0))
    return op.Concat(flat, ends, axis=1)


def _scan(op: Builder, logs: ir.Value, states: ir.Value, input_lengths: ir.Value, blank: int) -> ir.Value:
    """[batch, states]: the log probability of being in each state when a sequence ends."""
    dtype = op.dtype(logs)
    time = op.dim(logs, 0)
    indices = op.Expand(op.Unsqueeze(states, [0]), op.Concat(time, op.Shape(states), axis=0))
    emitted = op.GatherElements(logs, indices, axis=2)
    steps = op.Range(np.int64(0), op.Squeeze(time, [0]), np.int64(1))
    running = op.Less(
        op.Unsqueeze(steps, [1, 2]), op.Unsqueeze(op.Cast(input_lengths, to=ir.DataType.INT64), [0, 2])
    )
    never = op.constant_like(_NEVER, logs)
    before = op.Pad(states, np.asarray([0, 2, 0, 0], np.int64), np.int64(blank))
    two_back = op.Slice(before, [0], [-2], [1])
    # a blank may be skipped between two different classes
    skips = op.And(op.Not(op.Equal(states, np.int64(blank))), op.Not(op.Equal(states, two_back)))
    penalty = op.Where(skips, op.constant_like(0.0, logs), never)
    width = op.Squeeze(op.dim(states, 1), [0])
    first = op.Equal(op.Range(np.int64(0), width, np.int64(1)), np.int64(0))
    start = op.Expand(op.Where(first, op.constant_like(0.0, logs), never), op.Shape(states))

    body = op.subgraph("ctc_step")
    dims = [None, None]
    alpha = body.input("alpha", dtype, dims)
    emission = body.input("emission", dtype, dims)
    going = body.input("running", ir.DataType.BOOL, [None, 1])
    padded = body.Pad(alpha, np.asarray([0, 2, 0, 0], np.int64), never)
    one = body.Slice(padded, [1], [-1], [1])
    two = body.Add(body.Slice(padded, [0], [-2], [1]), penalty)
    ways = body.Concat(*(body.Unsqueeze(way, [2]) for way in (alpha, one, two)), axis=2)
    moved = body.Add(body.ReduceLogSumExp(ways, [2], keepdims=0), emission)
    body.graph.outputs.append(body.Where(going, moved, alpha))
    last = op.Scan(start, emitted, running, body=body.graph, num_scan_inputs=2)
    last.type, last.shape = ir.TensorType(dtype), states.shape
    return last


def _readout(op: Builder, last: ir.Value, lengths: ir.Value) -> ir.Value:
    """[batch]: an alignment ends in the last class or in the blank behind it."""
    end = op.Unsqueeze(op.Mul(lengths, np.int64(2)), [1])
    class_state = op.Max(op.Sub(end, np.int64(1)), np.int64(0))
    chosen = op.GatherElements(last, op.Concat(end, class_state, axis=1), axis=1)
    # without a target there is no last class
    empty = op.Equal(end, np.int64(0))
    missing = op.Concat(op.Expand(False, op.Shape(empty)), empty, axis=1)
    chosen = op.Where(missing, op.constant_like(_NEVER, last), chosen)
    return op.ReduceLogSumExp(chosen, [1], keepdims=0)
