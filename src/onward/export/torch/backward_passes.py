"""Backward passes of torch's layers in primitive operators, for modules that differentiate inside forward.

Torch decomposes most of them itself; what is here it computes in kernels that have no form in ONNX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

_aten: Any = torch.ops.aten


def _convolution_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int, mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """y = x ∗ w   ⇒   dx is the transposed convolution of dy with w, dw the convolution of x with dy

    A transposed convolution is the backward pass of an ordinary one: x and dy exchange their parts.
    """
    rank = x.dim() - 2
    dx = dw = db = None
    stride, padding, dilation = (_each(value, rank) for value in (stride, padding, dilation))
    if mask[0] and transposed:
        dx = torch.convolution(dy, weight, None, stride, padding, dilation, False, [0] * rank, groups)
    elif mask[0]:
        reach = [dilation[a] * (weight.shape[a + 2] - 1) + 1 for a in range(rank)]
        spare = _rows_without_window(x, dy, reach, stride, padding)
        dx = torch.convolution(dy, weight, None, stride, padding, dilation, True, spare, groups)
    if mask[1]:
        pieces = []
        read, written = (dy, x) if transposed else (x, dy)
        for own, above in zip(read.chunk(groups, 1), written.chunk(groups, 1)):
            own, above = own.transpose(0, 1), above.transpose(0, 1)
            piece = torch.convolution(own, above, None, dilation, padding, stride, False, [0] * rank, 1)
            for axis in range(rank):
                piece = piece.narrow(axis + 2, 0, weight.shape[axis + 2])
            pieces.append(piece.transpose(0, 1))
        dw = torch.cat(pieces)
    if mask[2]:
        db = dy.sum([0, *range(2, rank + 2)])
    return dx, dw, db


def _each(value: Sequence[int], rank: int) -> list[int]:
    return [*value] * (rank if len(value) == 1 else 1)


def _rows_without_window(
    x: torch.Tensor, dy: torch.Tensor, reach: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> list[int]:
    """How many rows at the end of each axis no window begins in: a transposed convolution does not know of them."""
    return [
        int(x.shape[a + 2]) - ((dy.shape[a + 2] - 1) * stride[a] - 2 * padding[a] + reach[a])
        if stride[a] > 1
        else 0
        for a in range(len(stride))
    ]


def _avg_pool_backward(
    dy: torch.Tensor, x: torch.Tensor, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None,
) -> torch.Tensor:  # fmt: skip
    """Each number goes to its window in equal shares."""
    rank = x.dim() - 2 if x.dim() > 3 else x.dim() - 1
    size = _each(kernel, rank)
    step, pads = _each(stride or kernel, rank), _each(padding, rank)
    if ceil_mode or (not count_include_pad and divisor_override is None):
        share = dy / _counts(x, dy, size, step, pads, count_include_pad, divisor_override)
    else:
        share = dy / (divisor_override or math.prod(size))
    flat = share.reshape(-1, 1, *share.shape[-rank:])
    like = x.reshape(-1, 1, *x.shape[-rank:])
    ends = [int(like.shape[a + 2]) + pads[a] - (flat.shape[a + 2] - 1) * step[a] for a in range(rank)]
    ones = torch.ones(1, 1, *size, dtype=x.dtype)
    full = torch.convolution(flat, ones, None, step, [0] * rank, [1] * rank, True, [0] * rank, 1)
    edges = [(-pads[a], int(ends[a]) - size[a]) for a in range(rank)]  # cut or fill up to x
    return F.pad(full, [n for pair in reversed(edges) for n in pair]).reshape(x.shape)


def _counts(
    x: torch.Tensor, dy: torch.Tensor, size: Sequence[int], step: Sequence[int], pads: Sequence[int],
    count_include_pad: bool, divisor_override: int | None,
) -> torch.Tensor:  # fmt: skip
    """By how much each window's sum is divided, where that depends on how much of it lies inside."""
    if divisor_override is not None:
        return torch.full((), float(divisor_override))
    rank = len(size)
    counts = torch.ones((), dtype=x.dtype)
    for axis in range(-rank, 0):
        length, windows = x.shape[axis], dy.shape[axis]
        begin = torch.arange(windows) * step[axis] - pads[axis]
        end = torch.clamp(begin + size[axis], max=length + pads[axis])
        if not count_include_pad:
            begin, end = torch.clamp(begin, min=0), torch.clamp(end, max=length)
        counts = counts.unsqueeze(-1) * (end - begin).to(x.dtype)
    return counts


def _max_pool_backward(rank: int) -> Callable[..., torch.Tensor]:
    def backward(
        dy: torch.Tensor, x: torch.Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool,
        indices: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Each number goes to the place that was the largest of its window."""
        zeros = torch.zeros_like(x).flatten(-rank)
        return zeros.scatter_add(-1, indices.flatten(-rank), dy.flatten(-rank)).reshape(x.shape)

    return backward


def _adaptive_avg_pool_backward(rank: int) -> Callable[..., torch.Tensor]:
    def backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Axis by axis a product with the matrix that spreads each cell over its rows."""
        for axis in range(-rank, 0):
            size, cells = int(x.shape[axis]), int(dy.shape[axis])
            spread = torch.zeros(cells, size)
            for cell in range(cells):
                begin, end = cell * size // cells, -((cell + 1) * size // -cells)
                spread[cell, begin:end] = 1 / (end - begin)
            dy = (dy.transpose(axis, -1) @ spread.to(x.dtype)).transpose(axis, -1)
        return dy

    return backward


def _replication_pad_backward(dy: torch.Tensor, x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """What was copied from an edge is added to it."""
    for index in range(len(padding) // 2):
        axis, before = -1 - index, padding[2 * index]
        size = x.shape[axis]
        rows = (torch.arange(dy.shape[axis]) - before).clamp(min=0).clamp(max=size - 1)
        shape = [*dy.shape]
        shape[axis] = size
        dy = torch.zeros(shape, dtype=dy.dtype).index_add(dy.dim() + axis, rows, dy)
    return dy


BACKWARD_PASSES: dict[Any, Callable[..., Any]] = {
    _aten.convolution_backward.default: _convolution_backward,
    _aten.avg_pool2d_backward.default: _avg_pool_backward,
    _aten.avg_pool3d_backward.default: _avg_pool_backward,
    _aten.max_pool2d_with_indices_backward.default: _max_pool_backward(2),
    _aten.max_pool3d_with_indices_backward.default: _max_pool_backward(3),
    _aten._adaptive_avg_pool2d_backward.default: _adaptive_avg_pool_backward(2),
    _aten._adaptive_avg_pool3d_backward.default: _adaptive_avg_pool_backward(3),
    _aten.replication_pad1d_backward.default: _replication_pad_backward,
    _aten.replication_pad2d_backward.default: _replication_pad_backward,
    _aten.replication_pad3d_backward.default: _replication_pad_backward,
}
