"""Functions of tensors that exporters lack or write wrongly, in functions that they know.

`patches.traceable` puts them where modules look them up. Lengths along which they run step by step are fixed by the
export; what follows notices and says so.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from onward.errors import ExportError


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
    x = self if dtype is None else self.to(dtype)
    axis, length, shift = dim % max(self.dim(), 1), int(self.shape[dim]) if self.dim() else 1, 1
    while shift < length:
        before = x.narrow(axis, 0, length - shift)
        x = x * torch.cat([torch.ones_like(x.narrow(axis, 0, shift)), before], axis)
        shift *= 2
    return x


def _running_extreme(self: torch.Tensor, dim: int, largest: bool) -> _ValuesAndIndices:
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
    contained = (_tensor(elements).unsqueeze(-1) == others).any(-1)
    return ~contained if invert else contained


def _normal(mean: Any, std: Any = 1.0, size: Any = None, **unused: Any) -> torch.Tensor:
    """Standard normal numbers times the deviation, plus the mean; no gradient passes, as in torch."""
    mean, std = (x.detach() if isinstance(x, torch.Tensor) else x for x in (mean, std))
    drawn = torch.randn(size) if size is not None else torch.randn_like(_tensor(mean + std * 0.0))
    return drawn * std + mean


def _randperm(n: int, **unused: Any) -> torch.Tensor:
    """An order drawn at random: that of random numbers."""
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


def _diag_embed(self: torch.Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> torch.Tensor:
    """Matrices that have the elements of the last axis on a diagonal, and zeros elsewhere."""
    padded = F.pad(self, (0, abs(offset)))
    index = torch.arange(self.shape[-1] + abs(offset))
    # Above the main diagonal the row says which element it is, below it the column.
    elements = padded.unsqueeze(-1 if offset >= 0 else -2)
    matrices = torch.where(index - index.unsqueeze(-1) == offset, elements, torch.zeros_like(elements))
    rank = self.dim() + 1
    if (dim1, dim2) == (-2, -1):
        return matrices
    return matrices.movedim((rank - 2, rank - 1), (dim1 % rank, dim2 % rank))


def _diag(self: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
    return self.diagonal(diagonal) if self.dim() == 2 else _diag_embed(self, diagonal)


def _bincount(self: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    """How often each number occurs; as many counts as the largest needs."""
    largest = torch.cat([self.to(torch.int64), torch.tensor([minlength - 1])]).max()
    ones = torch.ones_like(self, dtype=torch.int64) if weights is None else weights
    numbers: Any = largest + 1  # a tensor, which `arange` takes in a trace and its types do not
    counts = torch.zeros_like(torch.arange(numbers), dtype=ones.dtype)
    return counts.scatter_add(0, self.to(torch.int64), ones)


def _unflatten(self: torch.Tensor, dim: int, sizes: Any) -> torch.Tensor:
    """One axis split into several by reshaping; the tracer would fix the sizes of all the others."""
    if isinstance(dim, str):
        raise ExportError("unflatten of a named dimension cannot be exported")
    axis = dim % self.dim()
    return self.reshape(*self.shape[:axis], *sizes, *self.shape[axis + 1 :])


_repeat = torch.repeat_interleave


def _repeat_interleave(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Elements repeated along one axis, by a new axis that is then merged; the tracer's own loses the rank."""
    repeats = args[0] if args else options.get("repeats")
    dim = args[1] if len(args) > 1 else options.get("dim")
    if not isinstance(repeats, int) or not isinstance(dim, int):
        return _repeat(self, *args, **options)
    axis = dim % self.dim()
    wider = self.unsqueeze(axis + 1).expand(*self.shape[: axis + 1], repeats, *self.shape[axis + 1 :])
    return wider.flatten(axis, axis + 1)


def _unfold(self: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    """Windows along one axis, their elements in a new last one; the tracer's own takes no negative axis."""
    axis = dimension % self.dim()
    count = (self.shape[axis] - size) // step + 1
    places = (torch.arange(count, device=self.device) * step).unsqueeze(1) + torch.arange(
        size, device=self.device
    )
    windows = self.index_select(axis, places.flatten())
    windows = windows.reshape(*self.shape[:axis], -1, size, *self.shape[axis + 1 :])
    return windows.movedim(axis + 1, -1)


_strided = torch.as_strided


def _as_strided(
    self: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None
) -> torch.Tensor:
    """Elements by their places in memory; the tracer's own counts along the axes, whatever their order in memory.

    Axes that stay as they are keep their size open. The others are merged, and picked from by constant places.
    """
    if not torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return _strided(self, size, stride, storage_offset)
    sizes, strides = [int(length) for length in size], [int(step) for step in stride]
    lengths, steps = [int(length) for length in self.shape], list(self.stride())
    left = list(range(self.dim()))
    same: dict[int, int] = {}
    for axis, layout in enumerate(zip(sizes, strides)):
        source_axis = next((own for own in left if (lengths[own], steps[own]) == layout), None)
        if source_axis is not None:
            same[axis] = source_axis
            left.remove(source_axis)
    if storage_offset is not None and storage_offset != self.storage_offset():
        same, left = {}, list(range(self.dim()))
    left.sort(key=lambda axis: -steps[axis])  # as they lie in memory
    dense = all(steps[a] == steps[b] * lengths[b] for a, b in itertools.pairwise(left))
    unit = steps[left[-1]] if left else 1
    start = 0 if storage_offset is None else storage_offset - self.storage_offset()
    places = torch.tensor(start)
    picked = [axis for axis in range(len(sizes)) if axis not in same]
    for axis in picked:
        places = places.unsqueeze(-1) + torch.arange(sizes[axis]) * strides[axis]
    total = math.prod(lengths[axis] for axis in left)
    if (
        not dense
        or bool((places % unit != 0).any())
        or not 0 <= int(places.min()) <= int(places.max()) // unit < total
    ):
        raise ExportError(
            f"as_strided reads memory that its tensor of shape {lengths} and strides {steps} does not cover in one "
            "piece: take it from the tensor that owns the memory, or write it with unfold or indexing"
        )
    open_axes = list(same.values())
    merged = self.permute(*open_axes, *left).reshape(*(self.shape[axis] for axis in open_axes), -1)
    elements = merged.index_select(-1, (places // unit).flatten())
    elements = elements.reshape(*(self.shape[axis] for axis in open_axes), *(sizes[axis] for axis in picked))
    order = [*same, *picked]
    return elements.permute(*(order.index(axis) for axis in range(len(sizes))))


# Functions that are methods of tensors too.
_BOTH = {
    "argsort": _argsort,
    "as_strided": _as_strided,
    "bincount": _bincount,
    "copysign": _copysign,
    "cummax": lambda self, dim: _running_extreme(self, dim, largest=True),
    "cummin": lambda self, dim: _running_extreme(self, dim, largest=False),
    "cumprod": _cumprod,
    "diag": _diag,
    "diag_embed": _diag_embed,
    "digamma": _digamma,
    "erfinv": _erfinv,
    "fmax": _fmax,
    "fmin": _fmin,
    "hypot": _hypot,
    "index_reduce": _index_reduce,
    "kthvalue": _kthvalue,
    "lgamma": _lgamma,
    "median": _median,
    "mode": _mode,
    "nanmedian": _nanmedian,
    "repeat_interleave": _repeat_interleave,
    "sort": _sort,
    "unflatten": _unflatten,
}
# where a function is looked up, its name, and what stands in for it
MISSING: list[tuple[Any, str, Any]] = [
    *((owner, name, function) for owner in (torch, torch.Tensor) for name, function in _BOTH.items()),
    (torch.special, "gammaln", _lgamma),
    (torch.special, "digamma", _digamma),
    (torch.special, "erfinv", _erfinv),
    (torch.Tensor, "unfold", _unfold),
    (torch, "normal", _normal),
    (torch, "randperm", _randperm),
    (torch, "searchsorted", _searchsorted),
    (torch, "bucketize", _bucketize),
    (torch, "isin", _isin),
]
