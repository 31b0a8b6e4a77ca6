"""Functions that move elements and that exporters lack, or fix at the example's sizes, in functions that they know.

`patches.traceable` puts them where modules look them up, as those of `missing_functions`.
"""

from __future__ import annotations

import builtins
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from onward.errors import ExportError

if TYPE_CHECKING:
    from onward.export.torch.replace import Replacement

_Axes = int | Sequence[int]
_length = builtins.len


def _followed_length(value: Any) -> Any:
    """`len(x)` as `x.shape[0]`, which a trace follows: Python's own has to be a number."""
    if isinstance(value, torch.Tensor) and value.dim():
        size = value.shape[0]
        if not isinstance(size, int):  # a symbol, or what stands for it in a trace
            return size
    return _length(value)


FOLLOWED_LENGTHS: Replacement = (builtins, "len", _followed_length)


def _moved_axes(self: torch.Tensor, source: _Axes, destination: _Axes) -> torch.Tensor:
    """Axes in another order; the tracer's own writes negative ones as they are."""
    sources, targets = (
        [axis % self.dim() for axis in ([axes] if isinstance(axes, int) else axes)] for axes in (source, destination)
    )  # fmt: skip
    # Python numbers alone: a permutation is an attribute in ONNX.
    order = [axis for axis in range(self.dim()) if axis not in sources]
    for target, axis in sorted(zip(targets, sources)):
        order.insert(target, axis)
    return self.permute(order)


_permute_of_torch = torch.Tensor.permute


def _permute(self: torch.Tensor, *axes: Any, dims: Any = None) -> torch.Tensor:
    """Axes in an order that may count from the end, which the tracer writes as it is and ONNX does not allow."""
    order = dims if dims is not None else axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
    return _permute_of_torch(self, [axis % self.dim() for axis in order])


def _rot90(self: torch.Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> torch.Tensor:
    """Quarter turns in a plane."""
    one, two = dims
    if k % 4 == 2:
        return self.flip(one, two)
    if k % 2 == 0:
        return self.clone()
    return self.transpose(one, two).flip(one if k % 4 == 1 else two)


_split_of_torch = torch.Tensor.split


def _split(self: torch.Tensor, split_size: Any, dim: int = 0) -> Sequence[torch.Tensor]:
    """Pieces of a size that the trace follows; how many there are the export fixes."""
    if not isinstance(split_size, torch.Tensor):
        return _split_of_torch(self, split_size, dim)
    # The last piece may be shorter: its end is left open.
    axis, count = dim % self.dim(), -(-int(self.shape[dim]) // int(split_size))
    before = (slice(None),) * axis
    return tuple(
        self[(*before, slice(i * split_size, (i + 1) * split_size if i + 1 < count else None))]  # type: ignore[misc]
        for i in range(count)
    )


def _eye(n: Any, m: Any = None, *, dtype: torch.dtype | None = None, **unused: Any) -> torch.Tensor:
    """Ones on the diagonal, in types that onnxruntime's EyeLike lacks too."""
    # compared rather than filled, so that sizes may be traced tensors
    rows, columns = torch.arange(n), torch.arange(n if m is None else m)
    return (rows.unsqueeze(1) == columns).to(torch.get_default_dtype() if dtype is None else dtype)


def _index_add(
    self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    """Rows added where an index says, of which several may fall on one: the tracer's own takes the last."""
    if self.dim() == 0:
        return self + alpha * source.sum()
    shape = [1] * self.dim()
    shape[dim] = -1
    # ScatterElements wants an index for each element.
    rows = index.to(torch.int64).reshape(shape).expand_as(source)
    return self.scatter_add(dim, rows, source if alpha == 1 else alpha * source)


def _index_add_in_place(
    self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    return self.copy_(_index_add(self, dim, index, source, alpha=alpha))


def _affine_grid(theta: torch.Tensor, size: Sequence[Any], align_corners: bool | None = None) -> torch.Tensor:
    """Places of a picture's (or a volume's) elements between −1 and 1, moved by a matrix for each example."""
    space = list(size[2:])
    coordinates = []
    for length in space:
        steps = 2 * torch.arange(length).to(theta.dtype)
        place = steps / (length - 1 + (length == 1)) if align_corners else (steps + 1) / length
        coordinates.append(place - 1)
    axes = torch.meshgrid(*coordinates, indexing="ij")
    base = torch.stack([*reversed(axes), torch.ones_like(axes[0])], -1)
    flat = base.reshape(-1, len(space) + 1)
    return torch.matmul(flat, theta.transpose(1, 2)).reshape(size[0], *space, len(space))


def _one_by_one(name: str) -> Any:
    def update(tensors: Sequence[torch.Tensor], *others: Any, **options: Any) -> None:
        """What torch does to lists of tensors at once."""
        for index, tensor in enumerate(tensors):
            own = [value[index] if isinstance(value, list | tuple) else value for value in others]
            getattr(tensor, name)(*own, **options)

    return update


def _xlogy(self: Any, other: Any) -> torch.Tensor:
    """x·log y, and 0 where x is 0"""
    x, y = (value if isinstance(value, torch.Tensor) else torch.tensor(value) for value in (self, other))
    # 0·log 0 would be NaN, and so would its gradient: the logarithm gets a one there.
    nothing = (x == 0) & ~y.isnan()
    return torch.where(
        nothing, torch.zeros_like(x * y), x * torch.where(nothing, torch.ones_like(y), y).log()
    )


def _index_reduce(
    self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:  # fmt: skip
    """Rows of the source reduced into those of `self` that the index names."""
    shape = [1] * self.dim()
    shape[dim] = -1
    places = index.reshape(shape).expand_as(source)
    return self.scatter_reduce(dim, places, source, reduce, include_self=include_self)


def _diag_embed(self: torch.Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> torch.Tensor:
    """Matrices that have the elements of the last axis on a diagonal, and zeros elsewhere."""
    padded = F.pad(self, (0, abs(offset)))
    index = torch.arange(self.shape[-1] + abs(offset))
    # Above the main diagonal the row says which element it is, below it the column.
    # Chosen by comparing places, as ONNX can pick a diagonal only with indices of a fixed size.
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
    # The result's size depends on the data, as torch's does.
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
    # no copy until they are merged
    wider = self.unsqueeze(axis + 1).expand(*self.shape[: axis + 1], repeats, *self.shape[axis + 1 :])
    return wider.flatten(axis, axis + 1)


def _unfold(self: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    """Windows along one axis, their elements in a new last one; the tracer's own takes no negative axis."""
    axis = dimension % self.dim()
    count = (self.shape[axis] - size) // step + 1
    # Gathered by index: overlapping windows are no view in ONNX.
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
    # largest stride first is the order in memory
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


def _with_number(owner: Any, name: str) -> Replacement:
    """A function that takes a truth value for a number: in a trace, torch's schemas match no truth values."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if type(args[-1]) is bool:
            args = (*args[:-1], int(args[-1]))
        kwargs |= {
            key: int(kwargs[key]) for key in ("value", "other", "fill_value") if type(kwargs.get(key)) is bool
        }
        return original(*args, **kwargs)

    return owner, name, call


def _with_tensor(owner: Any, name: str) -> Replacement:
    """The same for what combines truth values."""
    original = getattr(owner, name)
    return (
        owner,
        name,
        lambda self, other: original(self, torch.tensor(other) if type(other) is bool else other),
    )


_full_of_torch, _where_of_torch, _masked_fill_of_torch = torch.full, torch.where, torch.Tensor.masked_fill


def _full(size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    """The same number everywhere; a truth value, unlike the number that stands for it, gives truth values."""
    if type(fill_value) is bool:
        return _full_of_torch(size, int(fill_value), dtype=dtype or torch.bool, **options)
    return _full_of_torch(size, fill_value, dtype=dtype, **options)


def _is_boolean(value: Any) -> bool:
    return value.dtype == torch.bool if isinstance(value, torch.Tensor) else type(value) is bool


def _where(condition: torch.Tensor, *branches: Any, **named: Any) -> Any:
    """A choice; between truth values by logic, as onnxruntime's Where has no kernel for them."""
    if branches and all(map(_is_boolean, branches)):
        one, other = (torch.tensor(b) if type(b) is bool else b for b in branches)
        return (condition & one) | (~condition & other)
    return _where_of_torch(condition, *branches, **named)


def _method_where(self: torch.Tensor, condition: torch.Tensor, other: Any) -> torch.Tensor:
    return _where(condition, self, other)


def _masked_fill(self: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    value = bool(value) if self.dtype == torch.bool and isinstance(value, bool | int) else value
    return _where(mask, value, self) if _is_boolean(value) else _masked_fill_of_torch(self, mask, value)


def _masked_fill_in_place(self: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    return self.copy_(_masked_fill(self, mask, value))


# Functions that are methods of tensors too.
_BOTH = {
    "as_strided": _as_strided,
    "bincount": _bincount,
    "diag": _diag,
    "diag_embed": _diag_embed,
    "index_add": _index_add,
    "index_reduce": _index_reduce,
    "moveaxis": _moved_axes,
    "movedim": _moved_axes,
    "permute": _permute,
    "repeat_interleave": _repeat_interleave,
    "rot90": _rot90,
    "split": _split,
    "unflatten": _unflatten,
    "xlogy": _xlogy,
}
# Functions whose last argument may be a truth value that stands for a number.
_TAKE_A_NUMBER = (
    *("full_like", "new_full", "fill_", "scatter", "scatter_", "index_fill", "index_fill_", "eq", "ne"),
    *("__eq__", "__ne__", "mul", "__mul__", "__rmul__", "add", "__add__", "__radd__", "__sub__", "__rsub__"),
)
_TAKE_A_TENSOR = ("and", "rand", "iand", "or", "ror", "ior", "xor", "rxor", "ixor")
# where a function is looked up, its name, and what stands in for it
MISSING: list[Replacement] = [
    *((owner, name, function) for owner in (torch, torch.Tensor) for name, function in _BOTH.items()),
    (torch.special, "xlogy", _xlogy),
    (torch.Tensor, "index_add_", _index_add_in_place),
    (torch.Tensor, "unfold", _unfold),
    *(
        (torch, f"_foreach_{name}", _one_by_one(name))
        for name in ("add_", "copy_", "div_", "lerp_", "mul_", "sub_")
    ),
    *(
        _with_number(owner, name)
        for name in _TAKE_A_NUMBER
        for owner in (torch, torch.Tensor)
        if hasattr(owner, name)
    ),
    *(_with_tensor(torch.Tensor, f"__{name}__") for name in _TAKE_A_TENSOR),
    *(
        _with_tensor(owner, f"bitwise_{name}")
        for name in ("and", "or", "xor")
        for owner in (torch, torch.Tensor)
    ),
    (torch, "full", _full),
    (torch, "where", _where),
    (torch.Tensor, "where", _method_where),
    (torch, "masked_fill", _masked_fill),
    (torch.Tensor, "masked_fill", _masked_fill),
    (torch.Tensor, "masked_fill_", _masked_fill_in_place),
    (torch, "eye", _eye),
    (F, "affine_grid", _affine_grid),
]
