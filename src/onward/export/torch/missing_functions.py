"""Functions that torch's exporters lack, written in those that they know.

`patches.traceable` puts them where modules look them up. Lengths along which they run step by step are fixed by the
export; what follows notices and says so.
"""

from __future__ import annotations

import math
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


def _tensor(value: Any) -> torch.Tensor:
    """A number as a tensor; `as_tensor` of a traced one would be a constant."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


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


def _nanmedian(self: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The middle one of those that are no NaN, the lower of two."""
    flat = self.flatten() if dim is None else self
    axis = 0 if dim is None else dim
    known = (~flat.isnan()).sum(axis, keepdim=True)
    values, places = torch.where(flat.isnan(), torch.full_like(flat, torch.inf), flat).sort(axis)
    middle = ((known - 1) // 2).clamp(min=0)
    values, places = values.gather(axis, middle), places.gather(axis, middle)
    values = torch.where(known > 0, values, torch.full_like(values, torch.nan))
    found = _Found(*(x if keepdim else x.squeeze(axis) for x in (values, places)))
    return found.values if dim is None else found


def _mode(self: torch.Tensor, dim: int = -1, keepdim: bool = False) -> _Found:
    """The most frequent value, the smallest of equally frequent ones, and its last place."""
    x = self.transpose(dim, -1)
    count = (x.unsqueeze(-1) == x.unsqueeze(-2)).sum(-1)
    often = count == count.amax(-1, keepdim=True)
    given = x.detach()
    least = torch.where(often, given, torch.full_like(given, torch.inf)).amin(-1, keepdim=True)
    order = torch.arange(int(x.shape[-1]))
    places = torch.where(given == least, order, torch.full_like(order, -1)).amax(-1, keepdim=True)
    values = x.gather(-1, places)
    return _Found(
        *(y if keepdim else y.squeeze(dim) for y in (values.transpose(dim, -1), places.transpose(dim, -1)))
    )


def _cdist(
    x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: str | None = None
) -> torch.Tensor:
    """Distances of all pairs of rows; the gradient of a distance of zero is zero, as torch's is."""
    apart = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    if p == 0:
        return (apart != 0).to(apart.dtype).sum(-1)
    if p == 1:
        return apart.abs().sum(-1)
    if p == torch.inf:
        return apart.abs().amax(-1)
    total = (apart * apart if p == 2 else apart.abs().pow(p)).sum(-1)
    some = total > 0
    return torch.where(
        some, torch.where(some, total, torch.ones_like(total)).pow(1 / p), torch.zeros_like(total)
    )


def _pdist(input: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    """The distances of all pairs of different rows, in the order of the upper triangle."""
    rows, columns = torch.triu_indices(int(input.shape[0]), int(input.shape[0]), 1)
    return _cdist(input, input, p)[rows, columns]


def _hypot(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (self * self + other * other).sqrt()


def _copysign(self: torch.Tensor, other: Any) -> torch.Tensor:
    """|x| with the sign of y; a graph does not tell −0 from 0."""
    return self.abs() * torch.where(_tensor(other) < 0, -1.0, 1.0).to(self.dtype)


def _fmin(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The smaller one, the other where one is NaN."""
    return torch.where(self.isnan(), other, torch.where(other.isnan(), self, torch.minimum(self, other)))


def _fmax(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return -_fmin(-self, -other)


def _lgamma(self: torch.Tensor) -> torch.Tensor:
    """log |Γ(x)|: Stirling's series at x + 8, less the logarithms of the steps; below ½ by reflection."""
    x = self.double()
    low = x < 0.5
    z = torch.where(low, 1 - x, x)
    steps = torch.ones_like(z)
    for step in range(8):
        steps = steps * (z + step)
    w = z + 8
    r = 1 / w
    series = r * (1 / 12 - r * r * (1 / 360 - r * r * (1 / 1260 - r * r / 1680)))
    value = (w - 0.5) * w.log() - w + 0.5 * math.log(2 * math.pi) + series - steps.log()
    sine = torch.where(low, torch.sin(math.pi * x).abs(), torch.ones_like(x))
    return torch.where(low, math.log(math.pi) - sine.log() - value, value).to(self.dtype)


def _digamma(self: torch.Tensor) -> torch.Tensor:
    """ψ(x): the asymptotic series at x + 8, less the reciprocals of the steps; below ½ by reflection."""
    x = self.double()
    low = x < 0.5
    z = torch.where(low, 1 - x, x)
    w = z + 8
    r = 1 / (w * w)
    value = w.log() - 0.5 / w - r * (1 / 12 - r * (1 / 120 - r * (1 / 252 - r * (1 / 240 - r / 132))))
    for step in range(8):
        value = value - 1 / (z + step)
    turn = torch.where(low, math.pi * x, torch.full_like(x, math.pi / 4))
    return torch.where(low, value - math.pi * torch.cos(turn) / torch.sin(turn), value).to(self.dtype)


def _erfinv(self: torch.Tensor) -> torch.Tensor:
    """x with erf(x) = y: polynomials in −log(1 − y²) (Giles 2010); the gradient is the inverse of erf's."""
    y = self.detach()
    w = -((1 - y) * (1 + y)).log()

    def series(at: torch.Tensor, *numbers: float) -> torch.Tensor:
        total = torch.full_like(at, numbers[0])
        for number in numbers[1:]:
            total = total * at + number
        return total

    near = series(
        w - 2.5, 2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503,
        -0.00417768164, 0.246640727, 1.50140941,
    )  # fmt: skip
    far = series(
        torch.where(w < 5, torch.full_like(w, 5.0), w).sqrt() - 3, -0.000200214257, 0.000100950558, 0.00134934322,
        -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047, 1.00167406, 2.83297682,
    )  # fmt: skip
    x = (torch.where(w < 5, near, far) * y).detach()
    x = torch.where(y.abs() == 1, y * torch.inf, x)
    slope = (math.sqrt(math.pi) / 2 * (x * x).exp()).detach()
    return x + (self - y) * slope


def _index_reduce(
    self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:  # fmt: skip
    """Rows of the source reduced into those of `self` that the index names."""
    shape = [1] * self.dim()
    shape[dim] = -1
    places = index.reshape(shape).expand_as(source)
    return self.scatter_reduce(dim, places, source, reduce, include_self=include_self)


def _searchsorted(
    sorted_sequence: torch.Tensor, input: Any, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """How many boundaries lie before each value."""
    bounds = sorted_sequence if sorter is None else sorted_sequence.gather(-1, sorter)
    values = _tensor(input)
    bounds = bounds if bounds.dim() == 1 else bounds.unsqueeze(-2)
    values = values.unsqueeze(-1)
    before = bounds <= values if right or side == "right" else bounds < values
    return before.sum(-1).to(torch.int32 if out_int32 else torch.int64)


def _bucketize(
    input: Any, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False
) -> torch.Tensor:
    return _searchsorted(boundaries, input, out_int32=out_int32, right=right)


def _isin(
    elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> torch.Tensor:
    """Which elements are among the others."""
    others = _tensor(test_elements).reshape(-1)
    found = (_tensor(elements).unsqueeze(-1) == others).any(-1)
    return ~found if invert else found


def _vander(x: torch.Tensor, N: int | None = None, increasing: bool = False) -> torch.Tensor:
    """Powers of the elements as columns."""
    count = int(x.shape[-1]) if N is None else N
    powers = [torch.ones_like(x)]
    for _ in range(count - 1):
        powers.append(powers[-1] * x)
    return torch.stack(powers[:count] if increasing else powers[:count][::-1], -1)


def _cov(
    self: torch.Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None
) -> torch.Tensor:
    """Covariances of the rows."""
    if fweights is not None or aweights is not None:
        raise ExportError("cov with weights cannot be exported: weight the rows before it")
    x = self.unsqueeze(0) if self.dim() < 2 else self
    centred = x - x.mean(1, keepdim=True)
    found = centred @ centred.transpose(0, 1) / (x.shape[1] - correction)
    return found.reshape(()) if self.dim() < 2 else found


def _corrcoef(self: torch.Tensor) -> torch.Tensor:
    """Covariances over the spreads of both rows, within −1 and 1."""
    found = _cov(self)
    spread = found.diagonal().sqrt()
    return (found / spread.unsqueeze(1) / spread.unsqueeze(0)).clamp(-1, 1)


def _slogdet(A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.det(A)
    return found.sign(), found.abs().log()


def _normal(mean: Any, std: Any = 1.0, size: Any = None, **unused: Any) -> torch.Tensor:
    """Standard normal numbers times the deviation, plus the mean; no gradient passes, as in torch."""
    mean, std = (x.detach() if isinstance(x, torch.Tensor) else x for x in (mean, std))
    drawn = torch.randn(size) if size is not None else torch.randn_like(_tensor(mean + std * 0.0))
    return drawn * std + mean


def _randperm(n: int, **unused: Any) -> torch.Tensor:
    """An order drawn at random: that of random numbers."""
    return torch.rand(n).argsort()


_sort_of_torch = torch.sort


def _sort(self: torch.Tensor, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Any:
    """`stable` needs nothing: equal elements keep their order in ONNX's TopK."""
    return _sort_of_torch(self, dim, descending)


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
    *((owner, "nanmedian", _nanmedian) for owner in (torch, torch.Tensor)),
    *((owner, "mode", _mode) for owner in (torch, torch.Tensor)),
    *((owner, "hypot", _hypot) for owner in (torch, torch.Tensor)),
    *((owner, "copysign", _copysign) for owner in (torch, torch.Tensor)),
    *((owner, "fmin", _fmin) for owner in (torch, torch.Tensor)),
    *((owner, "fmax", _fmax) for owner in (torch, torch.Tensor)),
    *((owner, "lgamma", _lgamma) for owner in (torch, torch.Tensor)),
    *((owner, "digamma", _digamma) for owner in (torch, torch.Tensor)),
    *((owner, "erfinv", _erfinv) for owner in (torch, torch.Tensor)),
    (torch.special, "gammaln", _lgamma),
    (torch.special, "digamma", _digamma),
    (torch.special, "erfinv", _erfinv),
    *((owner, "index_reduce", _index_reduce) for owner in (torch, torch.Tensor)),
    *((owner, "sort", _sort) for owner in (torch, torch.Tensor)),
    *((owner, "cov", _cov) for owner in (torch, torch.Tensor)),
    *((owner, "corrcoef", _corrcoef) for owner in (torch, torch.Tensor)),
    *((owner, "slogdet", _slogdet) for owner in (torch, torch.Tensor, torch.linalg)),
    (torch, "normal", _normal),
    (torch, "randperm", _randperm),
    (torch, "cdist", _cdist),
    (torch, "pdist", _pdist),
    (F, "pdist", _pdist),
    (torch, "searchsorted", _searchsorted),
    (torch, "bucketize", _bucketize),
    (torch, "isin", _isin),
    *((owner, "vander", _vander) for owner in (torch, torch.linalg)),
    *((owner, "inverse", _inv) for owner in (torch, torch.Tensor)),
    (torch.linalg, "inv", _inv),
    (torch.linalg, "solve", _solve),
    (torch.linalg, "cholesky", _cholesky),
    (torch.Tensor, "mT", property(_transposed)),
    (F, "ctc_loss", _ctc_loss),
]
