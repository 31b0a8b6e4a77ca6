"""The loss of language models: cross entropy of the next token, over the vocabulary in slices.

With a vocabulary of 50 000 to 150 000 words the scores of a batch are larger than everything else in a step. Here
they never exist whole: each slice of the output layer is multiplied, reduced to a maximum and a sum, and forgotten.
A second pass computes the slice again for the gradient of the hidden states, which it adds up as it goes; the
engine takes that gradient as it is. The output layer itself gets none: it must be frozen.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes import GRADIENT, STOP

if TYPE_CHECKING:
    from onward.graph.builder import Builder

__all__ = ["IGNORED", "next_token_loss", "without_surrogate"]

IGNORED = -100
_SURROGATE = "onward.surrogate"


def next_token_loss(op: Builder, logits: ir.Value, labels: ir.Value, *, slices: int = 8) -> ir.Value:
    """−log p(next token), the mean over the labels that are not -100

    `logits` [batch, sequence, vocabulary] must come from a product with the output layer's weight; `labels`
    [batch, sequence] are the input's own ids, which are shifted here.
    """
    hidden, weight, by_rows = _output_layer(logits)
    vocabulary = op.static_dim(logits, 2)
    width = op.static_dim(hidden, 2)
    if vocabulary is None or width is None:
        raise ModelError("the loss of a language model needs an output layer of known size")
    last = np.asarray([-1], np.int64)
    one, zero, axis = (np.asarray([n], np.int64) for n in (1, 0, 1))
    states = op.Reshape(op.Slice(hidden, zero, last, axis), np.asarray([-1, width], np.int64))
    following = op.Slice(labels, one, np.asarray([np.iinfo(np.int64).max], np.int64), axis)
    targets = op.Reshape(following, np.asarray([-1], np.int64))
    counts = op.Not(op.Equal(targets, np.int64(IGNORED)))
    counted = op.Cast(counts, to=ir.DataType.FLOAT)
    number = op.Max(op.ReduceSum(counted, keepdims=0), np.float32(1.0))
    safe = op.Where(counts, targets, np.int64(0))
    quiet = _stop(op, states)
    edges = [round(vocabulary * index / slices) for index in range(slices + 1)]
    parts = [(low, high) for low, high in itertools.pairwise(edges) if high > low]

    def rows(low: int, high: int) -> ir.Value:
        """One slice of the weight, [width, high - low]"""
        bounds = (np.asarray([low], np.int64), np.asarray([high], np.int64))
        if by_rows:
            return op.Transpose(op.Slice(weight, *bounds, np.asarray([0], np.int64)), perm=[1, 0])
        return op.Slice(weight, *bounds, axis)

    maxima, sums, right = [], [], []
    for low, high in parts:
        scores = op.MatMul(quiet, rows(low, high))
        top = op.ReduceMax(scores, [1], keepdims=1)
        maxima.append(top)
        sums.append(op.ReduceSum(op.Exp(op.Sub(scores, top)), [1], keepdims=1))
        right.append(_picked(op, scores, safe, low, high))
    highest = maxima[0] if len(parts) == 1 else op.Max(*maxima)
    total = None
    for top, part in zip(maxima, sums):
        share = op.Mul(part, op.Exp(op.Sub(top, highest)))
        total = share if total is None else op.Add(total, share)
    logs = op.Add(op.Log(total), highest)
    score = right[0]
    for found in right[1:]:
        score = op.Add(score, found)
    each = op.Mul(op.Squeeze(op.Sub(logs, score), [1]), counted)
    value = op.Div(op.ReduceSum(each, keepdims=0), number)
    # The gradient of the hidden states: (softmax − 1 at the target)·Wᵀ / number, slice by slice. Rows that do not
    # count are set to zero first, which also keeps the runtime from sharing the products of the first pass.
    kept = op.Mul(quiet, op.Unsqueeze(counted, [1]))
    scale = op.Unsqueeze(op.Div(counted, number), [1])
    gradient = None
    for low, high in parts:
        piece = rows(low, high)
        scores = op.MatMul(kept, piece)
        off = op.Mul(op.Sub(op.Exp(op.Sub(scores, logs)), _hot(op, safe, low, high)), scale)
        back = op.MatMul(off, op.Transpose(piece, perm=[1, 0]))
        gradient = back if gradient is None else op.Add(gradient, back)
    assert gradient is not None
    # A number whose value is zero and whose gradient is the one above.
    product = op.ReduceSum(op.Mul(states, _stop(op, gradient)), keepdims=0)
    loss = op.Add(_stop(op, value), op.Sub(product, _stop(op, product)))
    made = loss.producer()
    assert made is not None
    made.metadata_props[_SURROGATE] = json.dumps(True)
    loss.name = op.namer("loss")
    loss.shape = ir.Shape([])
    return loss


def without_surrogate(model: ir.Model) -> None:
    """Drop what only the gradient needs from a model that is never differentiated: the loss is its value alone."""
    for node in list(model.graph):
        if _SURROGATE in node.metadata_props:
            value, loss = node.inputs[0], node.outputs[0]
            assert value is not None
            name = loss.name
            ir.convenience.replace_all_uses_with(loss, value, replace_graph_outputs=True)
            model.graph.remove(node, safe=True)
            value.name = name


def _stop(op: Builder, value: ir.Value) -> ir.Value:
    (stopped,) = op.node("Identity", [value])
    node = stopped.producer()
    assert node is not None
    node.metadata_props[GRADIENT] = STOP
    return stopped


def _output_layer(logits: ir.Value) -> tuple[ir.Value, ir.Value, bool]:
    """The hidden states, the weight, and whether its rows (not its columns) are the words."""
    node = logits.producer()
    while node is not None and node.op_type in ("Identity", "Cast"):
        before = node.inputs[0]
        node = None if before is None else before.producer()
    if node is None or node.op_type != "MatMul":
        found = "an input" if node is None else node.op_type
        raise ModelError(
            f"'{logits.name}' comes from {found}, not from a MatMul with the output layer: this model's scores are "
            "changed after it, and have no loss in slices"
        )
    hidden, weight = node.inputs
    assert hidden is not None and weight is not None
    made = weight.producer()
    if made is not None and made.op_type == "Transpose" and made.inputs[0] is not None:
        return hidden, made.inputs[0], True
    return hidden, weight, False


def _picked(op: Builder, scores: ir.Value, targets: ir.Value, low: int, high: int) -> ir.Value:
    """[tokens, 1]: the score of each token's target where the slice has it, else 0"""
    place = op.Sub(targets, np.int64(low))
    inside = op.And(op.GreaterOrEqual(targets, np.int64(low)), op.Less(targets, np.int64(high)))
    index = op.Unsqueeze(op.Where(inside, place, np.int64(0)), [1])
    return op.Where(op.Unsqueeze(inside, [1]), op.GatherElements(scores, index, axis=1), np.float32(0.0))


def _hot(op: Builder, targets: ir.Value, low: int, high: int) -> ir.Value:
    """[tokens, words of the slice]: 1 at the target"""
    words = np.arange(low, high, dtype=np.int64)[None]
    return op.Cast(op.Equal(op.Unsqueeze(targets, [1]), words), to=ir.DataType.FLOAT)
