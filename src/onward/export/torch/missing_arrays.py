"""Functions that move elements and that exporters lack, or fix at the example's sizes, in functions that they know.

`patches.traceable` puts them where modules look them up, as those of `missing_functions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

_Axes = int | Sequence[int]


def _moved_axes(self: torch.Tensor, source: _Axes, destination: _Axes) -> torch.Tensor:
    """Axes in another order; the tracer's own writes negative ones as they are."""
    sources, targets = (
        [axis % self.dim() for axis in ([axes] if isinstance(axes, int) else axes)] for axes in (source, destination)
    )  # fmt: skip
    order = [axis for axis in range(self.dim()) if axis not in sources]
    for target, axis in sorted(zip(targets, sources)):
        order.insert(target, axis)
    return self.permute(order)


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
    axis, count = dim % self.dim(), -(-int(self.shape[dim]) // int(split_size))
    before = (slice(None),) * axis
    return tuple(
        self[(*before, slice(i * split_size, (i + 1) * split_size if i + 1 < count else None))]  # type: ignore[misc]
        for i in range(count)
    )


def _eye(n: Any, m: Any = None, *, dtype: torch.dtype | None = None, **unused: Any) -> torch.Tensor:
    """Ones on the diagonal, in types that onnxruntime's EyeLike lacks too."""
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


_conv2d = F.conv2d


def _conv2d_by_example(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: Any = 1,
) -> torch.Tensor:  # fmt: skip
    """A convolution of as many groups as the batch has examples, each with a kernel of its own: products of windows.

    ONNX's operator has a fixed number of groups.
    """
    examples: Any = groups  # a tensor where the trace follows it
    if not isinstance(groups, torch.Tensor) or isinstance(padding, str):
        return _conv2d(input, weight, bias, stride, padding, dilation, examples)
    pairs = [
        (value, value) if isinstance(value, int) else tuple(value) for value in (stride, padding, dilation)
    ]
    steps, pads, spread = pairs
    sizes = tuple(int(length) for length in weight.shape[2:])
    images = input.reshape(input.size(0) * examples, -1, *input.shape[2:])
    kernels = weight.reshape(examples, -1, *weight.shape[1:]).flatten(2)
    windows = F.unfold(images, sizes, spread, pads, steps)
    windows = windows.reshape(input.size(0), examples, *windows.shape[1:])
    height, width = (
        (length + 2 * pad - space * (size - 1) - 1) // step + 1
        for length, size, pad, space, step in zip(input.shape[2:], sizes, pads, spread, steps)
    )
    out = torch.matmul(kernels, windows).reshape(input.size(0), -1, height, width)
    return out if bias is None else out + bias.reshape(1, -1, 1, 1)


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
    nothing = (x == 0) & ~y.isnan()
    return torch.where(
        nothing, torch.zeros_like(x * y), x * torch.where(nothing, torch.ones_like(y), y).log()
    )


# where a function is looked up, its name, and what stands in for it
MISSING: list[tuple[Any, str, Any]] = [
    *((owner, name, _moved_axes) for owner in (torch, torch.Tensor) for name in ("movedim", "moveaxis")),
    *((owner, "rot90", _rot90) for owner in (torch, torch.Tensor)),
    *((owner, "split", _split) for owner in (torch, torch.Tensor)),
    *((owner, "index_add", _index_add) for owner in (torch, torch.Tensor)),
    *((owner, "xlogy", _xlogy) for owner in (torch, torch.Tensor, torch.special)),
    (torch.Tensor, "index_add_", _index_add_in_place),
    *(
        (torch, f"_foreach_{name}", _one_by_one(name))
        for name in ("add_", "copy_", "div_", "lerp_", "mul_", "sub_")
    ),
    (torch, "eye", _eye),
    (F, "affine_grid", _affine_grid),
    (F, "conv2d", _conv2d_by_example),
]
