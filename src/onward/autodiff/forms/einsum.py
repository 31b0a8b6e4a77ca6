"""Einsum equations: how one is read, and the equation of each operand's gradient. Registers no rule."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError

__all__ = ["Contraction"]


@dataclasses.dataclass(frozen=True)
class Contraction:
    """The labels of each operand and of the result, an ellipsis written out as labels of its own.

    >>> Contraction.parse("...ij,jk", [3, 2])
    Contraction(operands=('Aij', 'jk'), result='Aik', broadcast=frozenset({'A'}))
    """

    operands: tuple[str, ...]
    result: str
    broadcast: frozenset[str]

    @staticmethod
    def parse(equation: str, ranks: Sequence[int]) -> Contraction:
        """Read an equation for operands of the given ranks."""
        left, arrow, right = equation.replace(" ", "").partition("->")
        terms = left.split(",")
        if len(terms) != len(ranks):
            raise ModelError(f"Einsum '{equation}' names {len(terms)} operands and has {len(ranks)}")
        free = [c for c in string.ascii_uppercase + string.ascii_lowercase if c not in equation]
        hidden = [
            rank - len(term.replace("...", "")) if "..." in term else 0 for term, rank in zip(terms, ranks)
        ]
        ellipsis = "".join(free[: max(hidden, default=0)])
        spelled = tuple(
            term.replace("...", ellipsis[len(ellipsis) - count :]) for term, count in zip(terms, hidden)
        )
        if not arrow:
            letters = left.replace("...", "").replace(",", "")
            right = "..." + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
        return Contraction(spelled, right.replace("...", ellipsis), frozenset(ellipsis))

    def gradient(self, op, index: int, operands: list[ir.Value], dy: ir.Value) -> ir.Value:
        """The gradient of one operand."""
        x, labels = operands[index], self.operands[index]
        own = "".join(dict.fromkeys(labels))
        terms = [self.result, *(t for i, t in enumerate(self.operands) if i != index)]
        values = [dy, *(v for i, v in enumerate(operands) if i != index)]
        present = set("".join(terms))
        kept = "".join(c for c in own if c in present)
        found = values[0]
        if len(terms) > 1 or terms[0] != kept:
            found = op.Einsum(*values, equation=f"{','.join(terms)}->{kept}")
        if labels == kept:
            return op.sum_to(found, x) if self._may_broadcast(op, index, operands) else found
        # Labels summed away in x alone come back as axes of size 1, spread over x's own shape; of a label
        # that x repeats, only the diagonal is not zero.
        axes = [axis for axis, c in enumerate(labels) if c not in kept or c in labels[:axis]]
        found = op.Unsqueeze(found, axes) if axes else found
        if self._may_broadcast(op, index, operands):
            found = self._sum_broadcast(op, found, x, labels)
        found = op.Expand(found, op.shape(x))
        for axis, c in enumerate(labels):
            first = labels.index(c)
            if first != axis:
                found = op.Where(_diagonal(op, x, first, axis), found, op.constant_like(0.0, x))
        return found

    def _may_broadcast(self, op, index: int, operands: list[ir.Value]) -> bool:
        """Whether an axis of x may be 1 where the others' is not: under an ellipsis, or as shapes show."""
        labels = self.operands[index]
        return any(
            (c in self.broadcast and op.static_dim(operands[index], axis) in (None, 1))
            or op.static_dim(operands[index], axis) == 1
            for axis, c in enumerate(labels)
        )

    def _sum_broadcast(self, op, found: ir.Value, x: ir.Value, labels: str) -> ir.Value:
        """Sum over the axes where x has size 1 and the gradient has more."""
        ones = op.Equal(op.Shape(x), 1)
        axes = op.Squeeze(op.NonZero(ones), [0])
        return op.ReduceSum(found, axes, keepdims=1, noop_with_empty_axes=1)


def _diagonal(op, x: ir.Value, first: int, second: int) -> ir.Value:
    """True where two axes of x have the same index, shaped to broadcast against x."""
    rank = op.rank(x)

    def positions(axis: int) -> ir.Value:
        count = op.Squeeze(op.dim(x, axis), [0])
        along = op.Range(np.int64(0), count, np.int64(1))
        return op.Unsqueeze(along, [a for a in range(rank) if a != axis]) if rank > 1 else along

    return op.Equal(positions(first), positions(second))
