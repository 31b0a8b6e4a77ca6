"""Losses of language models: of the cross entropy of each next token, over the vocabulary in slices.

With a vocabulary of 50 000 to 150 000 words the scores of a batch are larger than everything else in a step. Here
they never exist whole: each slice of the output layer is multiplied, reduced to a maximum, a sum of exponentials and
its part of the gradient of the hidden states, and forgotten. At the end the parts are scaled to the highest maximum
and added up; the engine takes that gradient as it is. The output layer itself gets none: it must be frozen, but may
have an adapter beside it. An objective makes one number of the tokens' losses: their mean here, what prefers one
answer to another in `preferences`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward import contract
from onward.errors import ModelError
from onward.graph.save import external_part

if TYPE_CHECKING:
    from onward.graph.builder import Builder

IGNORED = -100
_SURROGATE = "onward.surrogate"
_ORDER = "onward.order"
# a slice up to here goes to the end
_END = np.iinfo(np.int64).max


def next_token_loss(op: Builder, logits: ir.Value, labels: ir.Value, *, slices: int = 8) -> ir.Value:
    """−log p(next token), the mean over the labels that are not -100

    `logits` [batch, sequence, vocabulary] must come from a product with the output layer's weight, with or without an
    adapter beside it; `labels` [batch, sequence] are the input's own ids, which are shifted here. Only positions
    whose label counts are multiplied with the output layer.
    """

    def mean(losses: ir.Value, tokens: Tokens) -> tuple[ir.Value, ir.Value]:
        count = op.Cast(op.node("Size", [tokens.ids])[0], to=ir.DataType.FLOAT)
        # A batch without any label has a loss of 0, not 0/0.
        number = op.Max(count, np.float32(1.0))
        return op.Div(op.ReduceSum(losses, keepdims=0), number), op.Div(np.float32(1.0), number)

    return token_loss(op, logits, labels, mean, slices=slices)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens whose label counts: their ids [tokens], where they are in the shifted labels, and the row of each."""

    ids: ir.Value
    places: ir.Value
    rows: ir.Value


# the loss of a batch, and its gradient by the tokens' losses, which are [tokens, 1]
Objective = Callable[[ir.Value, Tokens], tuple[ir.Value, ir.Value]]


def token_loss(
    op: Builder, logits: ir.Value, labels: ir.Value, objective: Objective, *, slices: int = 8
) -> ir.Value:
    """What an objective makes of −log p(next token) of the labels that are not -100; arguments as above"""
    layer = _output_layer(logits)
    vocabulary = op.static_dim(logits, 2)
    width = op.static_dim(layer.hidden, 2)
    if vocabulary is None or width is None:
        raise ModelError("the loss of a language model needs an output layer of known size")
    following = op.Slice(labels, [1], [_END], [1])
    every = op.Reshape(following, [-1])
    # Prompts are often longer than answers: rows without a label are dropped before the product with the
    # vocabulary.
    places = op.Squeeze(op.NonZero(op.Not(op.Equal(every, np.int64(IGNORED)))), [0])
    rows = op.Div(places, op.Squeeze(op.Shape(following, start=1, end=2), [0]))
    tokens = Tokens(op.Gather(every, places, axis=0), places, rows)
    states = _select_rows(op, layer.hidden, places, width)
    # one slice's scores exist at a time: with eight slices, an eighth of what the whole vocabulary takes
    edges = [round(vocabulary * index / slices) for index in range(slices + 1)]
    parts = [(low, high) for low, high in itertools.pairwise(edges) if high > low]
    build = _frozen if layer.adapter is None else _adapted
    value, products = build(op, layer, states, _Targets(tokens, parts, objective))
    # A number whose value is zero and whose gradients are those that were computed.
    product = _sum(op, products)
    loss = op.Add(op.stop_gradient(value), op.Sub(product, op.stop_gradient(product)))
    node = loss.producer()
    assert node is not None
    node.metadata_props[_SURROGATE] = json.dumps(True)
    loss.name = op.namer("loss")
    loss.shape = ir.Shape([])
    return loss


def _select_rows(op: Builder, hidden: ir.Value, places: ir.Value, width: int) -> ir.Value:
    """The rows of hidden states whose next token counts, [rows, width]"""
    states = op.Reshape(op.Slice(hidden, [0], [-1], [1]), [-1, width])
    rows = op.Gather(states, places, axis=0)
    rows.shape = ir.Shape([None, width])
    return rows


@dataclasses.dataclass(frozen=True)
class _Targets:
    """The tokens that count, the slices of the vocabulary, and what is made of the tokens' losses."""

    tokens: Tokens
    parts: Sequence[tuple[int, int]]
    objective: Objective


def _frozen(
    op: Builder, layer: _Layer, states: ir.Value, targets: _Targets
) -> tuple[ir.Value, list[ir.Value]]:
    """The loss, and what has its gradient: each slice is multiplied once"""
    quiet = rows_now = op.stop_gradient(states)
    # Of each slice with scores s: m = max s, Σ exp(s − m), Σ exp(s − m)·w; the target's score and w if it has them
    maxima, sums, pulls, right, rows = [], [], [], [], []
    for low, high in targets.parts:
        words = _words(op, layer.weight, low, high, by_rows=layer.by_rows)
        scores = _add_bias(op, _times(op, rows_now, words, turned=layer.by_rows), layer, low, high)
        # Exponentials relative to the slice's own maximum never overflow; slices are brought to a common scale
        # at the end.
        top = op.ReduceMax(scores, [1], keepdims=1)
        shares = op.Exp(op.Sub(scores, top))
        maxima.append(top)
        sums.append(op.ReduceSum(shares, [1], keepdims=1))
        pulls.append(_times(op, shares, words, turned=not layer.by_rows))
        inside, index = _inside(op, targets.tokens.ids, low, high)
        right.append(_own_score(op, scores, inside, index))
        own = op.Gather(words, index, axis=0 if layer.by_rows else 1)
        own = own if layer.by_rows else op.Transpose(own, perm=[1, 0])
        rows.append(op.Where(op.Unsqueeze(inside, [1]), own, np.float32(0.0)))
        rows_now = _delay_until(op, quiet, [sums[-1], right[-1]], [rows[-1], pulls[-1]])
    factors, total, logs = _log_sum_exp(op, maxima, sums)
    value, slopes = targets.objective(op.Sub(logs, _sum(op, right)), targets.tokens)
    # The gradient of the hidden states: (Σ softmax·w − w of the target) · slope of the token's loss
    mean = op.Div(_sum(op, [op.Mul(part, factor) for part, factor in zip(pulls, factors)]), total)
    gradient = op.Mul(op.Sub(mean, _sum(op, rows)), slopes)
    return value, [_with_gradient(op, states, gradient)]


def _adapted(
    op: Builder, layer: _Layer, states: ir.Value, targets: _Targets
) -> tuple[ir.Value, list[ir.Value]]:
    """The same with an adapter beside the output layer: scores are h·wᵀ + u·bᵀ, and b has a gradient too

    That needs the sums of all slices first, so that each slice is multiplied twice; the scores are still never whole.
    """
    assert layer.adapter is not None
    scaled, b = layer.adapter
    rank = op.static_dim(b, 1)
    assert rank is not None
    low_states = _select_rows(op, scaled, targets.tokens.places, rank)
    quiet, small, still = (op.stop_gradient(value) for value in (states, low_states, b))

    def scores_of(rows: ir.Value, low: int, high: int) -> tuple[ir.Value, ir.Value, ir.Value]:
        words = _words(op, layer.weight, low, high, by_rows=layer.by_rows)
        own = op.Slice(still, [low], [high], [0])
        added = _times(op, small, own, turned=True)
        scores = op.Add(_times(op, rows, words, turned=layer.by_rows), added)
        return _add_bias(op, scores, layer, low, high), words, own

    maxima, sums, right = [], [], []
    for low, high in targets.parts:
        scores, _, _ = scores_of(quiet, low, high)
        maxima.append(op.ReduceMax(scores, [1], keepdims=1))
        sums.append(op.ReduceSum(op.Exp(op.Sub(scores, maxima[-1])), [1], keepdims=1))
        right.append(_own_score(op, scores, *_inside(op, targets.tokens.ids, low, high)))
    _, _, logs = _log_sum_exp(op, maxima, sums)
    value, slopes = targets.objective(op.Sub(logs, _sum(op, right)), targets.tokens)
    # the second time waits for the sums, and is not merged with the first
    again = op.Add(quiet, op.Mul(logs, np.float32(0.0)))
    pulls, low_pulls, changes = [], [], []
    for low, high in targets.parts:
        scores, words, own = scores_of(again, low, high)
        inside, index = _inside(op, targets.tokens.ids, low, high)
        hit = op.Unsqueeze(op.Where(inside, np.float32(-1.0), np.float32(0.0)), [1])
        shares = op.Exp(op.Sub(scores, logs))
        # softmax − 1 at the target, times the slope of the token's loss
        errors = op.ScatterElements(shares, op.Unsqueeze(index, [1]), hit, axis=1, reduction="add")
        errors = op.Mul(errors, slopes)
        pulls.append(_times(op, errors, words, turned=not layer.by_rows))
        low_pulls.append(op.MatMul(errors, own))
        changes.append(op.MatMul(op.Transpose(errors, perm=[1, 0]), small))
    change = changes[0] if len(changes) == 1 else op.Concat(*changes, axis=0)
    change.shape = b.shape
    gradients = [(states, _sum(op, pulls)), (low_states, _sum(op, low_pulls)), (b, change)]
    return value, [_with_gradient(op, value, gradient) for value, gradient in gradients]


def _delay_until(
    op: Builder, states: ir.Value, done: Sequence[ir.Value], for_gradients: Sequence[ir.Value]
) -> ir.Value:
    """The same rows, once values of as many rows have been computed, some of them for gradients alone.

    The runtime chooses an order of its own: without this it multiplies all slices first, and has all scores at once.
    """
    count = op.Max(*(op.Shape(value, start=0, end=1) for value in (*done, *for_gradients)))
    node = count.producer()
    assert node is not None
    node.metadata_props[_ORDER] = json.dumps(len(for_gradients))
    # as a sum: the runtime would simplify a shape that is joined of sizes, and with it the order
    same = np.asarray([-1, op.static_dim(states, 1)], np.int64)
    rows = op.Reshape(states, op.Add(op.Mul(count, [0]), same))
    rows.shape = states.shape
    return rows


def _log_sum_exp(
    op: Builder, maxima: Sequence[ir.Value], sums: Sequence[ir.Value]
) -> tuple[list[ir.Value], ir.Value, ir.Value]:
    """What scales each slice to the highest maximum, the sum of all exponentials, and the log of it with no scale"""
    highest = maxima[0] if len(maxima) == 1 else op.Max(*maxima)
    factors = [op.Exp(op.Sub(top, highest)) for top in maxima]
    total = _sum(op, [op.Mul(part, factor) for part, factor in zip(sums, factors)])
    return factors, total, op.Add(op.Log(total), highest)


def _times(op: Builder, rows: ir.Value, words: ir.Value, *, turned: bool) -> ir.Value:
    return op.MatMul(rows, op.Transpose(words, perm=[1, 0]) if turned else words)


def _add_bias(op: Builder, scores: ir.Value, layer: _Layer, low: int, high: int) -> ir.Value:
    if layer.bias is None:
        return scores
    return op.Add(scores, op.Slice(op.Reshape(layer.bias, [-1]), [low], [high], [0]))


def _inside(op: Builder, targets: ir.Value, low: int, high: int) -> tuple[ir.Value, ir.Value]:
    """Whether each target is one of a slice's words, and which"""
    inside = op.And(op.GreaterOrEqual(targets, np.int64(low)), op.Less(targets, np.int64(high)))
    return inside, op.Where(inside, op.Sub(targets, np.int64(low)), np.int64(0))


def _own_score(op: Builder, scores: ir.Value, inside: ir.Value, index: ir.Value) -> ir.Value:
    score = op.GatherElements(scores, op.Unsqueeze(index, [1]), axis=1)
    return op.Where(op.Unsqueeze(inside, [1]), score, np.float32(0.0))


def _with_gradient(op: Builder, value: ir.Value, gradient: ir.Value) -> ir.Value:
    """A number whose gradient by `value` is `gradient`"""
    return op.ReduceSum(op.Mul(value, op.stop_gradient(gradient)), keepdims=0)


def without_surrogate(model: ir.Model) -> None:
    """Drop what only the gradient needs from a model that is never differentiated: the loss is its value alone."""
    for node in list(model.graph):
        if _ORDER in node.metadata_props:
            node.resize_inputs(len(node.inputs) - int(node.metadata_props[_ORDER]))
        if _SURROGATE in node.metadata_props:
            value, loss = node.inputs[0], node.outputs[0]
            assert value is not None
            name = loss.name
            ir.convenience.replace_all_uses_with(loss, value, replace_graph_outputs=True)
            model.graph.remove(node, safe=True)
            value.name = name


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The hidden states, the weight, whether its rows (not its columns) are the words, its adapter and its bias.

    The adapter is what it multiplies its B with, [batch, sequence, rank], and B [vocabulary, rank]. The bias is a
    constant number for each word.
    """

    hidden: ir.Value
    weight: ir.Value
    by_rows: bool
    adapter: tuple[ir.Value, ir.Value] | None = None
    bias: ir.Value | None = None


def _output_layer(logits: ir.Value) -> _Layer:
    node = logits.producer()
    if node is not None and contract.LORA in node.metadata_props:
        base, added = node.inputs
        assert base is not None and added is not None
        product = added.producer()
        assert product is not None and product.inputs[1] is not None
        turned = product.inputs[1].producer()
        scaled, b = product.inputs[0], None if turned is None else turned.inputs[0]
        assert scaled is not None and b is not None
        return dataclasses.replace(_output_layer(base), adapter=(scaled, b))
    if node is not None and node.op_type == "Add":  # BART's and Marian's: a number for each word
        for base, bias in itertools.permutations(node.inputs):
            if base is not None and bias is not None and _is_by_word(bias):
                return dataclasses.replace(_output_layer(base), bias=bias)
    while node is not None and node.op_type in ("Identity", "Cast"):
        before = node.inputs[0]
        node = None if before is None else before.producer()
    if node is None or node.op_type != "MatMul":
        producer = "an input" if node is None else node.op_type
        raise ModelError(
            f"'{logits.name}' comes from {producer}, not from a MatMul with the output layer: this model's scores are "
            "changed after it, and have no loss in slices"
        )
    hidden, weight = node.inputs
    assert hidden is not None and weight is not None
    transpose = weight.producer()
    if transpose is not None and transpose.op_type == "Transpose" and transpose.inputs[0] is not None:
        return _Layer(hidden, transpose.inputs[0], by_rows=True)
    return _Layer(hidden, weight, by_rows=False)


def _is_by_word(value: ir.Value) -> bool:
    """Whether a value has one number for each word, the same for all tokens."""
    dims = [] if value.shape is None else list(value.shape)
    return bool(dims) and len(dims) < 3 and isinstance(dims[-1], int) and all(dim == 1 for dim in dims[:-1])


def _words(op: Builder, weight: ir.Value, low: int, high: int, *, by_rows: bool) -> ir.Value:
    """Some of the words of the output layer, as its weight has them: in rows or in columns.

    Rows of a weight in a file are a constant of their own, in the same place; quantized ones are dequantized alone.
    """
    producer = weight.producer()
    if by_rows and producer is not None and producer.op_type == "DequantizeLinear" and _is_by_row(producer):
        parts = [None if value is None else _rows(op, value, low, high) for value in producer.inputs]
        return op.node("DequantizeLinear", parts, dict(producer.attributes))[0]
    if by_rows and producer is not None and producer.op_type == "Cast" and producer.inputs[0] is not None:
        return op.Cast(_rows(op, producer.inputs[0], low, high), to=op.dtype(weight))
    return _rows(op, weight, low, high) if by_rows else op.Slice(weight, [low], [high], [1])


def _is_by_row(node: ir.Node) -> bool:
    """Whether each row of a dequantized matrix has scales of its own."""
    scale = node.inputs[1]
    rank = None if scale is None or scale.shape is None else scale.shape.rank()
    axis, block = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
    return (rank == 2 and block > 0 and axis in (1, -1)) or (rank == 1 and not block and axis in (0, -2))


def _rows(op: Builder, value: ir.Value, low: int, high: int) -> ir.Value:
    tensor = value.const_value
    # What the step itself computes, or a caller feeds, can only be sliced when it runs.
    if tensor is None or not value.is_initializer() or value.is_graph_input():
        return op.Slice(value, [low], [high], [0])
    row_shape = tensor.shape.numpy()[1:]
    bits = math.prod(row_shape) * tensor.dtype.bitwidth
    in_file = isinstance(tensor, ir.ExternalTensor) and bits % 8 == 0
    # numbers of less than a byte are sliced here: no operator does
    if not in_file and tensor.dtype.bitwidth >= 8:
        return op.Slice(value, [low], [high], [0])
    name = op.namer(f"{value.name}.rows_{low}")
    if in_file:
        assert isinstance(tensor, ir.ExternalTensor)
        part: ir.TensorProtocol = external_part(tensor, name, [high - low, *row_shape], skip=low * bits // 8)
    else:
        part = ir.tensor(tensor.numpy()[low:high], dtype=tensor.dtype, name=name)
    rows = ir.Value(name=name, type=value.type, shape=part.shape, const_value=part)  # type: ignore[arg-type]
    op.graph.register_initializer(rows)
    return rows


def _sum(op: Builder, values: Sequence[ir.Value]) -> ir.Value:
    total = values[0]
    for value in values[1:]:
        total = op.Add(total, value)
    return total
