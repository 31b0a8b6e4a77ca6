"""Functions of numbers and matrices that exporters lack or write wrongly, in functions that they know.

`patches.traceable` puts them where modules look them up. Lengths along which they run step by step are fixed by the
export; what follows notices and says so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F

from onward.errors import ExportError

if TYPE_CHECKING:
    from onward.export.torch.replace import Replacement


class _ValuesAndIndices(NamedTuple):
    values: torch.Tensor
    indices: torch.Tensor

    def without_axis(self, axis: int, keepdim: bool) -> _ValuesAndIndices:
        """The same without an axis of one, unless it is to stay."""
        return self if keepdim else _ValuesAndIndices(self.values.squeeze(axis), self.indices.squeeze(axis))


def _tensor(value: Any) -> torch.Tensor:
    """A number as a tensor; `as_tensor` of a traced one would be a constant."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


def _cumprod(self: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Running product, by doubling: after k rounds each element holds the product of the last 2ᵏ."""
    # Not exp of the sum of logarithms, as factors may be negative or zero.
    x = self if dtype is None else self.to(dtype)
    axis, length, shift = dim % max(self.dim(), 1), int(self.shape[dim]) if self.dim() else 1, 1
    while shift < length:
        before = x.narrow(axis, 0, length - shift)
        x = x * torch.cat([torch.ones_like(x.narrow(axis, 0, shift)), before], axis)
        shift *= 2
    return x


def _logcumsumexp(self: torch.Tensor, dim: int) -> torch.Tensor:
    """Running log Σ exp, each from all elements up to its own: quadratic, but exact, and of any length."""
    x = self.transpose(dim, -1) if self.dim() else self.reshape(1)
    order = torch.arange(x.shape[-1])
    lowest = torch.full((), torch.finfo(x.dtype).min, dtype=x.dtype)
    sums = torch.where(order <= order.unsqueeze(-1), x.unsqueeze(-2), lowest).logsumexp(-1)
    return sums.transpose(dim, -1) if self.dim() else sums.reshape(())


def _running_extreme(self: torch.Tensor, dim: int, largest: bool) -> _ValuesAndIndices:
    """Running maximum or minimum and its place, the last of equal ones, by doubling."""
    axis, length, shift = dim % self.dim(), int(self.shape[dim]), 1
    # The places are found without a gradient; gathering from them has the right one.
    values = self.detach()
    shape = [1] * self.dim()
    shape[axis] = length
    places = torch.zeros_like(values, dtype=torch.int64) + torch.arange(length).reshape(shape)
    while shift < length:
        left, right = values.narrow(axis, 0, length - shift), values.narrow(axis, shift, length - shift)
        at, own = places.narrow(axis, 0, length - shift), places.narrow(axis, shift, length - shift)
        later = (right >= left) if largest else (right <= left)
        # torch's extremes are NaN from the first one on.
        later = later | right.isnan()
        later = later & ~(left.isnan() & ~right.isnan())
        head, first = values.narrow(axis, 0, shift), places.narrow(axis, 0, shift)
        values = torch.cat([head, torch.where(later, right, left)], axis)
        places = torch.cat([first, torch.where(later, own, at)], axis)
        shift *= 2
    return _ValuesAndIndices(self.gather(axis, places), places)


def _kthvalue(self: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> _ValuesAndIndices:
    """The k-th smallest along an axis."""
    values, places = self.sort(dim)
    kth = _ValuesAndIndices(values.narrow(dim, k - 1, 1), places.narrow(dim, k - 1, 1))
    return kth.without_axis(dim, keepdim)


def _median(self: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The middle one, the lower of two; NaN where there is one."""
    flat = self.flatten() if dim is None else self
    axis = 0 if dim is None else dim
    middle_element = _kthvalue(flat, (int(flat.shape[axis]) + 1) // 2, axis, keepdim)
    if flat.is_floating_point():
        # ONNX does not say where TopK sorts NaN.
        unknown = flat.isnan().any(axis, keepdim)
        values = middle_element.values.masked_fill(unknown, torch.nan)
        middle_element = _ValuesAndIndices(values, middle_element.indices)
    return middle_element.values if dim is None else middle_element


def _nanmedian(self: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The middle one of those that are no NaN, the lower of two."""
    flat = self.flatten() if dim is None else self
    axis = 0 if dim is None else dim
    present = (~flat.isnan()).sum(axis, keepdim=True)
    values, places = torch.where(flat.isnan(), torch.full_like(flat, torch.inf), flat).sort(axis)
    middle = ((present - 1) // 2).clamp(min=0)
    values, places = values.gather(axis, middle), places.gather(axis, middle)
    values = torch.where(present > 0, values, torch.full_like(values, torch.nan))
    middle_element = _ValuesAndIndices(values, places).without_axis(axis, keepdim)
    return middle_element.values if dim is None else middle_element


def _mode(self: torch.Tensor, dim: int = -1, keepdim: bool = False) -> _ValuesAndIndices:
    """The most frequent value, the smallest of equally frequent ones, and its last place."""
    x = self.transpose(dim, -1)
    # All pairs: quadratic in the axis, and in operators that every opset has.
    count = (x.unsqueeze(-1) == x.unsqueeze(-2)).sum(-1)
    often = count == count.amax(-1, keepdim=True)
    x_values = x.detach()
    least = torch.where(often, x_values, torch.full_like(x_values, torch.inf)).amin(-1, keepdim=True)
    order = torch.arange(int(x.shape[-1]))
    places = torch.where(x_values == least, order, torch.full_like(order, -1)).amax(-1, keepdim=True)
    values = x.gather(-1, places)
    result = _ValuesAndIndices(values.transpose(dim, -1), places.transpose(dim, -1))
    return result.without_axis(dim, keepdim)


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


# erfc(z) = t·exp(p(t) − z²) with t = 2/(2 + z): the coefficients of p in Chebyshev polynomials of 2t − 1.
_ERFC = (
    -1.3026537197817094, 0.6419697923564902, 0.019476473204185836, -0.009561514786808632,
    -0.0009465953444820369, 0.00036683949785276145, 4.252332480690777e-05, -2.0278578112534242e-05,
    -1.6242900046470256e-06, 1.3036558355805232e-06, 1.5626441722066142e-08, -8.523809591492654e-08,
    6.5290544390988515e-09, 5.059343495551469e-09, -9.91364156493033e-10, -2.273651222931836e-10,
    9.646791102015527e-11, 2.3940380830391146e-12, -6.886027526497553e-12, 8.944879273090725e-13,
    3.130921399342958e-13, -1.1270822361367252e-13, 3.810905255189232e-16, 7.106097613609237e-15,
    -1.5230282014571043e-15, -9.457494571291233e-17, 1.210237189224279e-16,
)  # fmt: skip


_erf_of_torch = torch.erf


def _erf(self: torch.Tensor) -> torch.Tensor:
    """In float64, for which onnxruntime has no kernel, by a polynomial (Clenshaw's recurrence) for erfc(|x|)."""
    if self.dtype != torch.float64:
        return _erf_of_torch(self)
    # not abs, whose gradient at zero is zero
    z = torch.where(self < 0, -self, self)
    t = 2 / (2 + z)
    y, one, two = 4 * t - 2, torch.zeros_like(t), torch.zeros_like(t)
    for coefficient in reversed(_ERFC[1:]):
        one, two = y * one - two + coefficient, one
    p = 0.5 * (_ERFC[0] + y * one) - two
    rest = t * torch.exp(p - z * z)
    return torch.where(self < 0, rest - 1, 1 - rest)


_gelu_of_torch = F.gelu


def _gelu(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    if input.dtype != torch.float64 or approximate != "none":
        return _gelu_of_torch(input, approximate=approximate)
    return 0.5 * input * (1 + _erf(input / math.sqrt(2)))


def _erfinv(self: torch.Tensor) -> torch.Tensor:
    """x with erf(x) = y: polynomials in −log(1 − y²) (Giles 2010); the gradient is the inverse of erf's."""
    y = self.detach()
    # (1 − y)(1 + y) rather than 1 − y²: near ±1 the square would lose all its digits.
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
    # The polynomials approximate values to float32's last digit, their derivatives do not.
    slope = (math.sqrt(math.pi) / 2 * (x * x).exp()).detach()
    return x + (self - y) * slope


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
    contained = (_tensor(elements).unsqueeze(-1) == others).any(-1)
    return ~contained if invert else contained


def _normal(mean: Any, std: Any = 1.0, size: Any = None, **unused: Any) -> torch.Tensor:
    """Standard normal numbers times the deviation, plus the mean; no gradient passes, as in torch."""
    mean, std = (x.detach() if isinstance(x, torch.Tensor) else x for x in (mean, std))
    drawn = torch.randn(size) if size is not None else torch.randn_like(_tensor(mean + std * 0.0))
    return drawn * std + mean


def _randperm(n: int, **unused: Any) -> torch.Tensor:
    """An order drawn at random: that of random numbers."""
    # Two equal numbers among 2²⁴ possible ones favour one order; no model notices.
    return torch.rand(n).argsort()


_sort_of_torch = torch.sort


def _sort(
    self: torch.Tensor, dim: int = -1, descending: bool = False, *, stable: bool = False
) -> _ValuesAndIndices:
    """`stable` needs nothing: equal elements keep their order in ONNX's TopK."""
    # onnxruntime's TopK has kernels for floats, int32 and int64 alone.
    small = self.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16)
    values, indices = _sort_of_torch(self.to(torch.int32) if small else self, dim, descending)
    return _ValuesAndIndices(values.to(self.dtype), indices)


def _argsort(
    self: torch.Tensor, dim: int = -1, descending: bool = False, *, stable: bool = False
) -> torch.Tensor:
    return _sort(self, dim, descending).indices


# Elimination is written out step by step.
_LARGEST_MATRIX = 32


def _require_small(result: str, matrices: torch.Tensor) -> int:
    size = int(matrices.shape[-1])
    if size > _LARGEST_MATRIX:
        raise ExportError(
            f"{result} of {size} x {size} matrices cannot be exported: {_LARGEST_MATRIX} rows are the most"
        )
    return size


_product = torch.matmul


def _matmul(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A matrix times a vector as a matrix of one column: onnxruntime errs on transposed matrices and vectors."""
    if self.dim() > 1 and other.dim() == 1:
        return _product(self, other.unsqueeze(-1)).squeeze(-1)
    return _product(self, other)


def _adjoint(self: torch.Tensor) -> torch.Tensor:
    """The last two axes exchanged, and conjugated where there is something to conjugate."""
    return self.transpose(-2, -1).conj() if self.is_complex() else self.transpose(-2, -1)


def _transposed(self: torch.Tensor) -> torch.Tensor:
    return self.transpose(-2, -1)


def _vdot(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Σ x·y of two vectors."""
    if input.is_complex():
        raise ExportError("vdot of complex numbers cannot be exported")
    return (input * other).sum()


def _inv(A: torch.Tensor, **unused: Any) -> torch.Tensor:
    """X with A·X = 1: elimination with pivots, then 2X − X·A·X, which has the inverse's own gradient.

    The elimination passes no gradient: d(2X − X·A·X) = −X·dA·X is that of A⁻¹, and the step refines X besides. A second
    step makes second derivatives right too.
    """
    if A.dim() == 2:
        return _inv(A.unsqueeze(0)).squeeze(0)
    size = _require_small("the inverse", A)
    if A.shape[-2] != size:
        raise ExportError(f"an inverse of matrices of shape {tuple(A.shape[-2:])} does not exist")
    # Pivots are chosen by comparisons, and a choice has no useful gradient.
    matrix = A.detach()
    unit = torch.eye(size, dtype=A.dtype)
    rows = torch.cat([matrix, torch.zeros_like(matrix) + unit], -1)
    for column in range(size):
        below = rows[..., column:, column].abs()
        pick = torch.cat([torch.zeros_like(rows[..., :column, column]), below], -1).argmax(-1)
        # Rows by products with ones and zeros: indexed assignment has no form that follows a batch.
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
    # A Newton step also doubles the digits that elimination in float32 has got right.
    inverse = rows[..., size:].detach()
    for _ in range(2):
        inverse = 2 * inverse - inverse @ A @ inverse
    return inverse


def _solve(A: torch.Tensor, B: torch.Tensor, *, left: bool = True, **unused: Any) -> torch.Tensor:
    """X with A·X = B"""
    inverse = _inv(A)
    if not left:
        return B @ inverse
    if B.dim() == A.dim() - 1 and B.shape == A.shape[:-1]:
        return (inverse @ B.unsqueeze(-1)).squeeze(-1)
    return inverse @ B


def _solve_triangular(
    A: torch.Tensor, B: torch.Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False, out: Any = None
) -> torch.Tensor:  # fmt: skip
    """X with A·X = B, as (1 + N)⁻¹ = (1 − N)(1 + N²)(1 + N⁴)…, which ends where a triangular N has no powers left."""
    if not left:
        solution = _solve_triangular(
            _transposed(A), _transposed(B), upper=not upper, unitriangular=unitriangular
        )
        return _transposed(solution)
    size, power = int(A.shape[-1]), -(A.triu(1) if upper else A.tril(-1))
    if not unitriangular:
        diagonal = A.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        power, B = power / diagonal, B / diagonal
    reach = 1
    while reach < size:
        B = B + power @ B
        power, reach = power @ power, 2 * reach
    return B


def _cholesky(input: torch.Tensor, upper: bool = False, **unused: Any) -> torch.Tensor:
    """L with L·Lᵀ = A, column by column."""
    size = _require_small("the Cholesky factor", input)
    columns: list[torch.Tensor] = []
    for index in range(size):
        remainder = input[..., index]
        for column in columns:
            remainder = remainder - column * column[..., index : index + 1]
        # what lies above the diagonal is rounding, and would grow from column to column
        below = (torch.arange(size) >= index).to(input.dtype)
        columns.append(remainder * below / remainder[..., index : index + 1].sqrt())
    factor = torch.stack(columns, -1)
    return factor.transpose(-2, -1) if upper else factor


def _cholesky_solve(B: torch.Tensor, L: torch.Tensor, upper: bool = False) -> torch.Tensor:
    """X with L·Lᵀ·X = B"""
    return _inv(L.transpose(-2, -1) @ L if upper else L @ L.transpose(-2, -1)) @ B


def _slogdet(A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    determinant = torch.det(A)
    return determinant.sign(), determinant.abs().log()


def _cov(
    self: torch.Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None
) -> torch.Tensor:
    """Covariances of the rows."""
    if fweights is not None or aweights is not None:
        raise ExportError("cov with weights cannot be exported: weight the rows before it")
    x = self.unsqueeze(0) if self.dim() < 2 else self
    # Centred first: the difference of two large sums would lose the digits.
    centred = x - x.mean(1, keepdim=True)
    covariance = centred @ centred.transpose(0, 1) / (x.shape[1] - correction)
    return covariance.reshape(()) if self.dim() < 2 else covariance


def _corrcoef(self: torch.Tensor) -> torch.Tensor:
    """Covariances over the spreads of both rows, within −1 and 1."""
    covariance = _cov(self)
    spread = covariance.diagonal().sqrt()
    return (covariance / spread.unsqueeze(1) / spread.unsqueeze(0)).clamp(-1, 1)


def _vander(x: torch.Tensor, N: int | None = None, increasing: bool = False) -> torch.Tensor:
    """Powers of the elements as columns."""
    count = int(x.shape[-1]) if N is None else N
    # a running product, as torch's is
    powers = [torch.ones_like(x)]
    for _ in range(count - 1):
        powers.append(powers[-1] * x)
    return torch.stack(powers[:count] if increasing else powers[:count][::-1], -1)


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
    # √ has an infinite slope at zero, and inf · 0 in the branch not taken would be NaN: hence two choices.
    some = total > 0
    return torch.where(
        some, torch.where(some, total, torch.ones_like(total)).pow(1 / p), torch.zeros_like(total)
    )


def _pdist(input: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    """The distances of all pairs of different rows, in the order of the upper triangle."""
    # the number of rows becomes that of the example, which the check at other sizes sees
    rows, columns = torch.triu_indices(int(input.shape[0]), int(input.shape[0]), 1)
    return _cdist(input, input, p)[rows, columns]


# Functions that are methods of tensors too.
_BOTH = {
    "argsort": _argsort,
    "copysign": _copysign,
    "cummax": lambda self, dim: _running_extreme(self, dim, largest=True),
    "cummin": lambda self, dim: _running_extreme(self, dim, largest=False),
    "cumprod": _cumprod,
    "digamma": _digamma,
    "erf": _erf,
    "erfinv": _erfinv,
    "fmax": _fmax,
    "fmin": _fmin,
    "hypot": _hypot,
    "kthvalue": _kthvalue,
    "lgamma": _lgamma,
    "logcumsumexp": _logcumsumexp,
    "median": _median,
    "mode": _mode,
    "nanmedian": _nanmedian,
    "sort": _sort,
}
# where a function is looked up, its name, and what stands in for it
MISSING: list[Replacement] = [
    *((owner, name, function) for owner in (torch, torch.Tensor) for name, function in _BOTH.items()),
    (torch.special, "gammaln", _lgamma),
    (torch.special, "digamma", _digamma),
    *((torch.special, name, function) for name, function in (("erf", _erf), ("erfinv", _erfinv))),
    (F, "gelu", _gelu),
    (torch, "normal", _normal),
    (torch, "randperm", _randperm),
    (torch, "searchsorted", _searchsorted),
    (torch, "bucketize", _bucketize),
    (torch, "isin", _isin),
    *((owner, name, _matmul) for owner in (torch, torch.Tensor) for name in ("matmul", "mv")),
    (torch.Tensor, "__matmul__", _matmul),
    *((torch.Tensor, name, property(_adjoint)) for name in ("H", "mH")),
    (torch.Tensor, "mT", property(_transposed)),
    (torch, "vdot", _vdot),
    *((owner, "inverse", _inv) for owner in (torch, torch.Tensor)),
    (torch.linalg, "inv", _inv),
    (torch.linalg, "solve", _solve),
    (torch.linalg, "solve_triangular", _solve_triangular),
    *((owner, "cholesky", _cholesky) for owner in (torch, torch.Tensor, torch.linalg)),
    *((owner, "cholesky_solve", _cholesky_solve) for owner in (torch, torch.Tensor)),
    *((owner, "slogdet", _slogdet) for owner in (torch, torch.Tensor, torch.linalg)),
    *((owner, "cov", _cov) for owner in (torch, torch.Tensor)),
    *((owner, "corrcoef", _corrcoef) for owner in (torch, torch.Tensor)),
    *((owner, "vander", _vander) for owner in (torch, torch.linalg)),
    (torch, "cdist", _cdist),
    *((owner, "pdist", _pdist) for owner in (torch, F)),
]
