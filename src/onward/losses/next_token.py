"""The loss of language models: cross entropy of the next token, over the vocabulary in slices.

With a vocabulary of 50 000 to 150 000 words the scores of a batch are larger than everything else in a step. Here
they never exist whole: each slice of the output layer is multiplied, reduced to a maximum, a sum of exponentials and
its part of the gradient of the hidden states, and forgotten. At the end the parts are scaled to the highest maximum
and added up; the engine takes that gradient as it is. The output layer itself gets none: it must be frozen.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes import GRADIENT, STOP
from onward.graph.save import external_part

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

    # Of each slice with scores s: m = max s, Σ exp(s − m), Σ exp(s − m)·w; the target's score and w if it has them
    maxima, sums, pulls, right, wanted = [], [], [], [], []
    for low, high in parts:
        words = _words(op, weight, low, high, by_rows=by_rows)
        scores = op.MatMul(quiet, op.Transpose(words, perm=[1, 0]) if by_rows else words)
        top = op.ReduceMax(scores, [1], keepdims=1)
        shares = op.Exp(op.Sub(scores, top))
        maxima.append(top)
        sums.append(op.ReduceSum(shares, [1], keepdims=1))
        pulls.append(op.MatMul(shares, words if by_rows else op.Transpose(words, perm=[1, 0])))
        inside = op.And(op.GreaterOrEqual(safe, np.int64(low)), op.Less(safe, np.int64(high)))
        index = op.Where(inside, op.Sub(safe, np.int64(low)), np.int64(0))
        inside = op.Unsqueeze(inside, [1])
        score = op.GatherElements(scores, op.Unsqueeze(index, [1]), axis=1)
        right.append(op.Where(inside, score, np.float32(0.0)))
        own = op.Gather(words, index, axis=0 if by_rows else 1)
        wanted.append(op.Where(inside, own if by_rows else op.Transpose(own, perm=[1, 0]), np.float32(0.0)))
    highest = maxima[0] if len(parts) == 1 else op.Max(*maxima)
    factors = [op.Exp(op.Sub(top, highest)) for top in maxima]
    total = _sum(op, [op.Mul(part, factor) for part, factor in zip(sums, factors)])
    logs = op.Add(op.Log(total), highest)
    each = op.Mul(op.Squeeze(op.Sub(logs, _sum(op, right)), [1]), counted)
    value = op.Div(op.ReduceSum(each, keepdims=0), number)
    # The gradient of the hidden states: (Σ softmax·w − w of the target) / number
    mean = op.Div(_sum(op, [op.Mul(part, factor) for part, factor in zip(pulls, factors)]), total)
    gradient = op.Mul(op.Sub(mean, _sum(op, wanted)), op.Unsqueeze(op.Div(counted, number), [1]))
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


def _words(op: Builder, weight: ir.Value, low: int, high: int, *, by_rows: bool) -> ir.Value:
    """Some of the words of the output layer, as its weight has them: in rows or in columns.

    Rows of a weight in a file are a constant of their own, in the same place; quantized ones are dequantized alone.
    """
    made = weight.producer()
    if by_rows and made is not None and made.op_type == "DequantizeLinear" and _is_by_row(made):
        parts = [None if value is None else _rows(op, value, low, high) for value in made.inputs]
        return op.node("DequantizeLinear", parts, dict(made.attributes))[0]
    if by_rows and made is not None and made.op_type == "Cast" and made.inputs[0] is not None:
        return op.Cast(_rows(op, made.inputs[0], low, high), to=op.dtype(weight))
    return _rows(op, weight, low, high) if by_rows else op.Slice(weight, *_bounds(low, high), [1])


def _is_by_row(node: ir.Node) -> bool:
    """Whether each row of a dequantized matrix has scales of its own."""
    scale = node.inputs[1]
    rank = None if scale is None or scale.shape is None else scale.shape.rank()
    axis, block = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
    return (rank == 2 and block > 0 and axis in (1, -1)) or (rank == 1 and not block and axis in (0, -2))


def _rows(op: Builder, value: ir.Value, low: int, high: int) -> ir.Value:
    tensor = value.const_value
    if tensor is None or not value.is_initializer() or value.is_graph_input():
        return op.Slice(value, *_bounds(low, high), [0])
    rest = tensor.shape.numpy()[1:]
    bits = math.prod(rest) * tensor.dtype.bitwidth
    small = tensor.dtype.bitwidth < 8  # numbers that no operator slices
    if bits % 8 or not (isinstance(tensor, ir.ExternalTensor) or small):
        return op.Slice(value, *_bounds(low, high), [0])
    name = op.namer(f"{value.name}.rows_{low}")
    if isinstance(tensor, ir.ExternalTensor):
        part: ir.TensorProtocol = external_part(tensor, name, [high - low, *rest], skip=low * bits // 8)
    else:
        part = ir.tensor(tensor.numpy()[low:high], dtype=tensor.dtype, name=name)
    made = ir.Value(name=name, type=value.type, shape=part.shape, const_value=part)  # type: ignore[arg-type]
    op.graph.register_initializer(made)
    return made


def _bounds(low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray([low], np.int64), np.asarray([high], np.int64)


def _sum(op: Builder, values: Sequence[ir.Value]) -> ir.Value:
    total = values[0]
    for value in values[1:]:
        total = op.Add(total, value)
    return total
