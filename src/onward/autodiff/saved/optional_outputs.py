"""Optional outputs of forward nodes: the mask of Dropout, statistics of LayerNormalization, indices of MaxPool."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.graph.nodes import required_input

if TYPE_CHECKING:
    from onward.autodiff.forms.recurrence import Recurrence


def saved_output(
    op, node: ir.Node, index: int, *, dtype: ir.DataType | None, shape: ir.Shape | None
) -> ir.Value:
    """An optional output of a forward node; it is added if the model omits it."""
    like = ir.Value(type=None if dtype is None else ir.TensorType(dtype), shape=shape)
    (value,) = op.save(node, [like], functools.partial(_compute, op, node, index, like))
    return value


def _compute(op, node: ir.Node, index: int, like: ir.Value) -> list[ir.Value]:
    return [add_output(op, node, index, like)]


def add_output(op, node: ir.Node, index: int, like: ir.Value) -> ir.Value:
    """The output of a node at an index, added or described where it is not yet."""
    # Outputs in between stay without a name, which means that they are not computed.
    if len(node.outputs) <= index:
        node.resize_outputs(index + 1)
    value = node.outputs[index]
    value.name = value.name or op.namer(f"{node.name or node.op_type}.saved_{index}")
    value.type = value.type or like.type
    value.shape = value.shape if value.shape is not None else like.shape
    return value


# --- What the gradients of RNN, GRU and LSTM read: the gates and states of every step.


def saved_runs(
    layer: Recurrence,
    functions: Sequence[Any],
    widths: Callable[..., Mapping[str, int]],
    forward: Callable[..., Mapping[str, ir.Value]],
) -> list[dict[str, Any]]:
    """What each direction's forward pass keeps, by name; None where `widths` is 0.

    `widths(layer, direction, functions)` says how many times the hidden size each has.
    `forward(op, layer, direction, functions)` writes the pass as a Scan: it returns these values, and the last states
    "h" and, of an LSTM, "c". The rest of the graph reads the Scan then.
    """
    op, node = layer.op, layer.node
    tables = [widths(layer, d, f) for d, f in zip(layer.directions, functions)]
    names = [(d, name) for d, table in enumerate(tables) for name, width in table.items() if width]

    def compute() -> list[ir.Value]:
        runs = [forward(op, layer, d, f) for d, f in zip(layer.directions, functions)]
        finals = [name for name in ("h", "c") if name in runs[0]]
        _replace_uses(node, layer.outputs(*([run[name] for run in runs] for name in ("hs", *finals))))
        return [runs[d][name] for d, name in names]

    likes = [layer.over_time(tables[d][name] * layer.hidden) for d, name in names]
    saved: list[dict[str, Any]] = [dict.fromkeys(table) for table in tables]
    for (d, name), value in zip(names, op.save(node, likes, compute)):
        saved[d][name] = value
    return saved


def _replace_uses(node: ir.Node, values: Sequence[ir.Value]) -> None:
    """Let the rest of the graph read other values than a node's outputs; outputs of the model stay the node's own."""
    for old, new in zip(node.outputs, values):
        new.shape = old.shape if new.shape is None else new.shape
        for use in list(old.uses()):
            use.node.replace_input_with(use.idx, new)


# --- What the gradient of SoftmaxCrossEntropyLoss reads: the forward node is written out, so that it is
# computed once.


def by_products(op, node: ir.Node) -> list[ir.Value]:
    """ℓ = log softmax(x), the labels as rows of one 1, and c of loss = c·Σ ℓ·onehot, which the loss becomes.

    Half as many nodes as picking and scattering, which for a small model is half of the loss's time.
    """
    scores = required_input(node)
    return op.save(
        node, [scores, scores, ir.Value(type=scores.type, shape=ir.Shape([]))],
        functools.partial(_write_as_product, op, node),
    )  # fmt: skip


def _write_as_product(op, node: ir.Node) -> list[ir.Value]:
    scores, labels = required_input(node), required_input(node, 1)
    log_prob = op.LogSoftmax(scores, axis=1)
    ends = op.constant(np.asarray([0, 1], op.dtype(scores).numpy()))
    # int32 has no kernel
    number = labels if op.dtype(labels) == ir.DataType.INT64 else op.Cast(labels, to=7)
    onehot = op.OneHot(number, np.asarray(op.static_dim(scores, 1), np.int64), ends, axis=1)
    total = op.ReduceSum(op.Mul(log_prob, onehot), keepdims=0)
    factor = op.constant_like(-1.0, scores)
    if node.attributes.get_string("reduction", "mean") == "mean":
        factor = op.Div(factor, op.CastLike(op.Size(labels), scores))
    node.resize_outputs(1)
    # The node itself, so that the loss keeps its name and its place.
    node.op_type = "Mul"
    node.attributes.clear()
    node.replace_input_with(0, total)
    node.replace_input_with(1, factor)
    return [log_prob, onehot, factor]


def log_probabilities(op, node: ir.Node) -> ir.Value:
    """log softmax(x) of the forward pass."""
    scores = required_input(node)
    (log_prob,) = op.save(node, [scores], functools.partial(_write_as_likelihood, op, node))
    return log_prob


def _write_as_likelihood(op, node: ir.Node) -> list[ir.Value]:
    """Runtimes write the operator out with a softmax over an inner axis, half as fast as one over the last.

    So the node becomes LogSoftmax and NegativeLogLikelihoodLoss, unless its second output is the model's own.
    """
    scores = required_input(node)
    if any(value.is_graph_output() for value in node.outputs[1:]):
        return [add_output(op, node, 1, scores)]
    log_prob = op.LogSoftmax(scores, axis=1)
    for value in node.outputs[1:]:
        ir.convenience.replace_all_uses_with(value, log_prob)
    node.resize_outputs(1)
    node.replace_input_with(0, log_prob)
    node.op_type = "NegativeLogLikelihoodLoss"
    return [log_prob]
