"""Functions that torch's exporters lack, written in those that they know.

`patches.traceable` puts them where modules look them up. Lengths along which they run step by step are fixed by the
export; what follows notices and says so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from onward.errors import ExportError

__all__ = ["MISSING", "projected_lstm"]

# Gauss-Jordan elimination is written out step by step.
_LARGEST_MATRIX = 32
# Stands for log 0: finite, so that its gradient is.
_NEVER = -1e30


class _Found(NamedTuple):
    values: torch.Tensor
    indices: torch.Tensor


def _cumprod(self: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Running product, by doubling: after k rounds each element holds the product of the last 2ᵏ."""
    x = self if dtype is None else self.to(dtype)
    axis, length, shift = dim % max(self.dim(), 1), int(self.shape[dim]) if self.dim() else 1, 1
    while shift < length:
        before = x.narrow(axis, 0, length - shift)
        x = x * torch.cat([torch.ones_like(x.narrow(axis, 0, shift)), before], axis)
        shift *= 2
    return x


def _extreme_so_far(self: torch.Tensor, dim: int, largest: bool) -> _Found:
    """Running maximum or minimum and its place, the last of equal ones, by doubling."""
    axis, length, shift = dim % self.dim(), int(self.shape[dim]), 1
    values = self.detach()
    shape = [1] * self.dim()
    shape[axis] = length
    places = torch.zeros_like(values, dtype=torch.int64) + torch.arange(length).reshape(shape)
    while shift < length:
        left, right = values.narrow(axis, 0, length - shift), values.narrow(axis, shift, length - shift)
        at, own = places.narrow(axis, 0, length - shift), places.narrow(axis, shift, length - shift)
        later = (right >= left) if largest else (right <= left)
        later = later | right.isnan()
        later = later & ~(left.isnan() & ~right.isnan())
        head, first = values.narrow(axis, 0, shift), places.narrow(axis, 0, shift)
        values = torch.cat([head, torch.where(later, right, left)], axis)
        places = torch.cat([first, torch.where(later, own, at)], axis)
        shift *= 2
    return _Found(self.gather(axis, places), places)


def _cummax(self: torch.Tensor, dim: int) -> _Found:
    return _extreme_so_far(self, dim, True)


def _cummin(self: torch.Tensor, dim: int) -> _Found:
    return _extreme_so_far(self, dim, False)


def _kthvalue(self: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> _Found:
    """The k-th smallest along an axis."""
    values, places = self.sort(dim)
    values, places = values.narrow(dim, k - 1, 1), places.narrow(dim, k - 1, 1)
    return _Found(*(x if keepdim else x.squeeze(dim) for x in (values, places)))


def _median(self: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The middle one, the lower of two; NaN where there is one."""
    flat = self.flatten() if dim is None else self
    axis = 0 if dim is None else dim
    found = _kthvalue(flat, (int(flat.shape[axis]) + 1) // 2, axis, keepdim)
    if flat.is_floating_point():
        unknown = flat.isnan().any(axis, keepdim)
        found = _Found(found.values.masked_fill(unknown, torch.nan), found.indices)
    return found.values if dim is None else found


def _inv(A: torch.Tensor, **unused: Any) -> torch.Tensor:
    """X with A·X = 1: elimination with pivots, then 2X − X·A·X, which has the inverse's own gradient.

    The elimination passes no gradient: d(2X − X·A·X) = −X·dA·X is that of A⁻¹, and the step refines X besides.
    """
    size = int(A.shape[-1])
    if A.shape[-2] != size:
        raise ExportError(f"an inverse of matrices of shape {tuple(A.shape[-2:])} does not exist")
    if size > _LARGEST_MATRIX:
        raise ExportError(
            f"the inverse of {size} x {size} matrices cannot be exported: {_LARGEST_MATRIX} rows are the most"
        )
    given = A.detach()
    unit = torch.eye(size, dtype=A.dtype)
    rows = torch.cat([given, torch.zeros_like(given) + unit], -1)
    for column in range(size):
        below = rows[..., column:, column].abs()
        pick = torch.cat([torch.zeros_like(rows[..., :column, column]), below], -1).argmax(-1)
        chosen = F.one_hot(pick, size).to(A.dtype)
        own = torch.zeros_like(chosen) + unit[column]
        # exchange two rows: the chosen one, and the one in its place
        pivot = (rows * chosen.unsqueeze(-1)).sum(-2, keepdim=True)
        here = (rows * own.unsqueeze(-1)).sum(-2, keepdim=True)
        rows = torch.where((chosen > 0).unsqueeze(-1), here, rows)
        rows = torch.where((own > 0).unsqueeze(-1), pivot, rows)
        scaled = pivot / pivot[..., column : column + 1]
        factor = rows[..., column : column + 1] * (1 - own).unsqueeze(-1)
        rows = torch.where((own > 0).unsqueeze(-1), scaled, rows - factor * scaled)
    found = rows[..., size:].detach()
    return 2 * found - found @ A @ found


def _solve(A: torch.Tensor, B: torch.Tensor, *, left: bool = True, **unused: Any) -> torch.Tensor:
    """X with A·X = B"""
    inverse = _inv(A)
    if not left:
        return B @ inverse
    if B.dim() == A.dim() - 1 and B.shape == A.shape[:-1]:
        return (inverse @ B.unsqueeze(-1)).squeeze(-1)
    return inverse @ B


def _cholesky(input: torch.Tensor, *, upper: bool = False, **unused: Any) -> torch.Tensor:
    """L with L·Lᵀ = A, column by column."""
    size = int(input.shape[-1])
    if size > _LARGEST_MATRIX:
        raise ExportError(
            f"the Cholesky factor of {size} x {size} matrices cannot be exported: {_LARGEST_MATRIX} rows are the most"
        )
    columns: list[torch.Tensor] = []
    for place in range(size):
        rest = input[..., place]
        for column in columns:
            rest = rest - column * column[..., place : place + 1]
        below = (torch.arange(size) >= place).to(input.dtype)
        columns.append(rest * below / rest[..., place : place + 1].sqrt())
    made = torch.stack(columns, -1)
    return made.transpose(-2, -1) if upper else made


def _transposed(self: torch.Tensor) -> torch.Tensor:
    return self.transpose(-2, -1)


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """−log of the sum over all alignments: one step of the forward recursion for each frame."""
    if log_probs.dim() == 2 or targets.dim() != 2:
        raise ExportError(
            "ctc_loss is exported for log_probs of shape (T, N, C) and padded targets of shape (N, S): "
            "give those rather than concatenated targets"
        )
    frames, own = torch.as_tensor(input_lengths), torch.as_tensor(target_lengths)
    targets = targets.to(torch.int64)
    blanks = torch.zeros_like(targets[:, :1]) + blank
    spread = torch.stack([torch.zeros_like(targets) + blank, targets], -1).flatten(1)
    labels = torch.cat([spread, blanks], 1)
    emitted = log_probs.gather(2, labels.unsqueeze(0).expand(log_probs.shape[0], -1, -1))
    other = labels[:, 2:] != labels[:, :-2]
    jumps = torch.cat([labels[:, :2] < labels[:, :2], other & (labels[:, 2:] != blank)], 1)
    never = torch.zeros_like(emitted[0]) + _NEVER
    alpha = torch.cat([emitted[0, :, :2], never[:, 2:]], 1)
    for frame in range(1, int(log_probs.shape[0])):
        one = torch.cat([never[:, :1], alpha[:, :-1]], 1)
        two = torch.cat([never[:, :2], alpha[:, :-2]], 1)
        paths = torch.stack([alpha, one, torch.where(jumps, two, never)])
        alpha = torch.where((frames > frame).unsqueeze(1), paths.logsumexp(0) + emitted[frame], alpha)
    last = (2 * own).to(torch.int64).unsqueeze(1)
    ends = torch.where(last > 0, alpha.gather(1, (last - 1).clamp(min=0)), never[:, :1])
    loss = -torch.stack([alpha.gather(1, last), ends]).logsumexp(0).squeeze(1)
    impossible = loss > -_NEVER / 2
    loss = loss.masked_fill(impossible, 0.0 if zero_infinity else torch.inf)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return (loss / own.clamp(min=1)).mean()


def projected_lstm(self: nn.LSTM, input: torch.Tensor, hx: Any = None) -> Any:
    """An LSTM whose hidden state is projected, step by step: ONNX's operator has no projection."""
    if isinstance(input, nn.utils.rnn.PackedSequence):
        raise ExportError("an LSTM with proj_size takes a PackedSequence: export it over padded tensors")
    batched = input.dim() == 3
    x = input if batched else input.unsqueeze(0 if self.batch_first else 1)
    x = x.transpose(0, 1) if self.batch_first else x
    directions = 2 if self.bidirectional else 1
    hidden, cell = (None, None) if hx is None else (state if batched else state.unsqueeze(1) for state in hx)
    lasts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in range(self.num_layers):
        sides = []
        for side in range(directions):
            weights = self.all_weights[layer * directions + side]
            w_in, w_hidden, w_out = weights[0], weights[1], weights[-1]
            gates = F.linear(x, w_in, weights[2] + weights[3] if self.bias else None)
            place = layer * directions + side
            h = gates.new_zeros(x.shape[1], self.proj_size) if hidden is None else hidden[place]
            c = gates.new_zeros(x.shape[1], self.hidden_size) if cell is None else cell[place]
            steps = []
            order = range(int(x.shape[0]))
            for step in reversed(order) if side else order:
                i, f, g, o = (gates[step] + F.linear(h, w_hidden)).chunk(4, -1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = F.linear(o.sigmoid() * c.tanh(), w_out)
                steps.append(h)
            sides.append(torch.stack(steps[::-1] if side else steps))
            lasts.append((h, c))
        x = torch.cat(sides, -1)
        if layer + 1 < self.num_layers:
            x = F.dropout(x, self.dropout, training=self.training)
    x = x.transpose(0, 1) if self.batch_first else x
    final = tuple(torch.stack(part) for part in zip(*lasts))
    if not batched:
        x = x.squeeze(0 if self.batch_first else 1)
        final = tuple(state.squeeze(1) for state in final)
    return x, final


# where a function is looked up, its name, and what stands in for it
MISSING: list[tuple[Any, str, Any]] = [
    *((owner, "cumprod", _cumprod) for owner in (torch, torch.Tensor)),
    *((owner, "cummax", _cummax) for owner in (torch, torch.Tensor)),
    *((owner, "cummin", _cummin) for owner in (torch, torch.Tensor)),
    *((owner, "kthvalue", _kthvalue) for owner in (torch, torch.Tensor)),
    *((owner, "median", _median) for owner in (torch, torch.Tensor)),
    *((owner, "inverse", _inv) for owner in (torch, torch.Tensor)),
    (torch.linalg, "inv", _inv),
    (torch.linalg, "solve", _solve),
    (torch.linalg, "cholesky", _cholesky),
    (torch.Tensor, "mT", property(_transposed)),
    (F, "ctc_loss", _ctc_loss),
]
