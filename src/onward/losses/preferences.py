"""Losses of preferences: of two answers to a prompt, one was chosen and the other rejected.

A batch has the two answers of a pair in rows behind one another, chosen before rejected. The values are those of the
papers as TRL's trainers compute them; the slopes, by which each token's loss is to be changed, are their derivatives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.losses.next_token import Tokens, token_loss

if TYPE_CHECKING:
    from onward.graph.builder import Builder

# what evaluation tells of each row: the logarithm of its answer's probability, or its mean over the tokens
LOG_PROBABILITIES = "log_probabilities"
# chosen above rejected
_SIGNS = np.asarray([[1.0, -1.0]], np.float32)
# the mean log probability of a token is below this: log(1 − p) has no value at p = 1
_CERTAIN = -1e-6


def dpo_loss(
    op: Builder,
    logits: ir.Value,
    labels: ir.Value,
    reference: ir.Value,
    *,
    beta: float = 0.1,
    slices: int = 8,
) -> tuple[ir.Value, ir.Value]:
    """−log σ(m), m = β·(log p(chosen) − log p(rejected) − the same of the reference); the mean over pairs

    `reference` [rows] has the log probabilities of the model before training (Rafailov et al. 2023). Returns the loss
    and the rows' own log probabilities.
    """
    outputs: list[ir.Value] = []

    def objective(losses: ir.Value, tokens: Tokens) -> tuple[ir.Value, ir.Value]:
        sums = op.Neg(_row_sums(op, losses, tokens, labels))
        outputs.append(sums)
        margin = op.Mul(_difference(op, op.Sub(sums, reference)), np.float32(beta))
        value = op.ReduceMean(op.Softplus(op.Neg(margin)), keepdims=0)
        # dL/dm = −σ(−m)/pairs; m falls by β with the loss of a chosen token and rises by β with that of a rejected
        slopes = op.Mul(_share(op, margin), np.float32(beta) * _SIGNS)
        return value, _of_tokens(op, slopes, tokens)

    loss = token_loss(op, logits, labels, objective, slices=slices)
    return loss, _named(op, outputs[0], labels)


def orpo_loss(
    op: Builder,
    logits: ir.Value,
    labels: ir.Value,
    answers: ir.Value,
    *,
    beta: float = 0.1,
    slices: int = 8,
) -> tuple[ir.Value, ir.Value]:
    """The loss of the chosen texts − β·log σ(log odds(chosen) − log odds(rejected)), odds(p) = p/(1 − p)

    p is the geometric mean of an answer's token probabilities; `answers` [batch, sequence] is 1 where a label belongs
    to the answer. The first part counts the labels of the chosen rows, prompts included (Hong et al. 2024). Returns
    the loss and the rows' mean log probabilities.
    """
    outputs: list[ir.Value] = []

    def objective(losses: ir.Value, tokens: Tokens) -> tuple[ir.Value, ir.Value]:
        shifted = op.Slice(answers, [1], [np.iinfo(np.int64).max], [1])
        every = op.Reshape(op.Cast(shifted, to=ir.DataType.FLOAT), [-1])
        answering = op.Unsqueeze(op.Gather(every, tokens.places, axis=0), [1])
        counts = op.Max(_row_sums(op, answering, tokens, labels), np.float32(1.0))
        means = op.Neg(op.Div(_row_sums(op, op.Mul(losses, answering), tokens, labels), counts))
        outputs.append(means)
        pairs = op.Reshape(op.Min(means, np.float32(_CERTAIN)), [-1, 2])
        against = op.Sub(np.float32(1.0), op.Exp(pairs))
        margin = _difference(op, op.Sub(pairs, op.Log(against)))
        odds = op.ReduceMean(op.Softplus(op.Neg(margin)), keepdims=0)
        # d log odds/d log p = 1/(1 − p), and log p falls by 1/count with the loss of a token
        slopes = op.Div(op.Mul(_share(op, margin), np.float32(beta) * _SIGNS), against)
        slopes = op.Div(slopes, op.Reshape(counts, [-1, 2]))
        chosen = op.Unsqueeze(
            op.Cast(op.Equal(op.Mod(tokens.rows, np.int64(2)), np.int64(0)), to=ir.DataType.FLOAT), [1]
        )
        number = op.Max(op.ReduceSum(chosen, keepdims=0), np.float32(1.0))
        likelihood = op.Div(op.ReduceSum(op.Mul(losses, chosen), keepdims=0), number)
        value = op.Add(likelihood, op.Mul(odds, np.float32(beta)))
        return value, op.Add(op.Mul(_of_tokens(op, slopes, tokens), answering), op.Div(chosen, number))

    loss = token_loss(op, logits, labels, objective, slices=slices)
    return loss, _named(op, outputs[0], labels)


def _row_sums(op: Builder, values: ir.Value, tokens: Tokens, labels: ir.Value) -> ir.Value:
    """The sum of the tokens' values [tokens, 1] of each row, [rows]"""
    nothing = op.Expand(np.float32(0.0), op.Shape(labels, start=0, end=1))
    return op.ScatterElements(nothing, tokens.rows, op.Squeeze(values, [1]), axis=0, reduction="add")


def _difference(op: Builder, values: ir.Value) -> ir.Value:
    """Chosen minus rejected, [pairs, 1]"""
    pairs = op.Reshape(values, [-1, 2])
    return op.ReduceSum(op.Mul(pairs, _SIGNS), [1], keepdims=1)


def _share(op: Builder, margin: ir.Value) -> ir.Value:
    """σ(−m)/pairs: how far each pair still is from being told apart"""
    pairs = op.Cast(op.Shape(margin, start=0, end=1), to=ir.DataType.FLOAT)
    return op.Div(op.Sigmoid(op.Neg(margin)), pairs)


def _of_tokens(op: Builder, pairs: ir.Value, tokens: Tokens) -> ir.Value:
    """What the pairs' rows have, [pairs, 2], for each of their tokens, [tokens, 1]"""
    rows = op.Reshape(pairs, [-1])
    return op.Unsqueeze(op.Gather(rows, tokens.rows, axis=0), [1])


def _named(op: Builder, value: ir.Value, labels: ir.Value) -> ir.Value:
    """A value as an output of the model: the tokens' losses have no gradient of their own, and it none either"""
    value.name = op.namer(LOG_PROBABILITIES)
    value.shape = ir.Shape([None if labels.shape is None else labels.shape[0]])
    return value
