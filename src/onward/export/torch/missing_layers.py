"""Pooling, norms and losses of `torch.nn.functional` that exporters lack or write wrongly, in functions that they know.

`patches.traceable` puts them where modules look them up, as those of `missing_functions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from onward.errors import ExportError

__all__ = ["MISSING"]

_Function = Callable[..., torch.Tensor]


def _sizes(value: Any, rank: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list | torch.Size) else (value,) * rank


def _adaptive(name: str, rank: int, reduce: Callable[[torch.Tensor, int], torch.Tensor]) -> _Function:
    """Pooling to a grid that does not divide the input: cell i of n covers ⌊i·size/n⌋ to ⌈(i+1)·size/n⌉."""
    original = getattr(F, name)

    def pooled(input: torch.Tensor, output_size: Any, return_indices: bool = False) -> torch.Tensor:
        counts = _sizes(output_size, rank)
        if return_indices:
            return original(input, output_size, return_indices=True)
        if all(count == 1 for count in counts):
            return original(input, output_size)
        sizes = [int(size) for size in input.shape[-rank:]]
        counts = tuple(size if count is None else int(count) for size, count in zip(sizes, counts))
        if all(size % count == 0 for size, count in zip(sizes, counts)):
            return original(input, output_size)
        for axis, (size, count) in enumerate(zip(sizes, counts), -rank):
            cells = [(i * size // count, -((i + 1) * size // -count)) for i in range(count)]
            parts = [reduce(input.narrow(axis, start, stop - start), axis) for start, stop in cells]
            input = torch.stack(parts, axis)
        return input

    return pooled


def _avg_pool(name: str, rank: int) -> _Function:
    """Exporters drop `divisor_override`: sums are averages times the window's area."""
    original = getattr(F, name)

    def pooled(
        input: torch.Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> torch.Tensor:
        step = kernel_size if stride is None else stride
        if divisor_override is None:
            return original(input, kernel_size, step, padding, ceil_mode, count_include_pad)
        if ceil_mode:
            raise ExportError(
                f"{name} with both ceil_mode and divisor_override cannot be exported: pad the input instead"
            )
        area = math.prod(_sizes(kernel_size, rank))
        return original(input, kernel_size, step, padding, False, True) * (area / divisor_override)

    return pooled


_batch_norm_of_torch = F.batch_norm


def _batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Batch norm that keeps no statistics, in either mode: exporters need some to write the operator."""
    if running_mean is not None:
        return _batch_norm_of_torch(input, running_mean, running_var, weight, bias, training, momentum, eps)
    axes = [axis for axis in range(input.dim()) if axis != 1]
    centred = input - input.mean(axes, keepdim=True)
    normal = centred * torch.rsqrt((centred * centred).mean(axes, keepdim=True) + eps)
    shape = [1, -1] + [1] * (input.dim() - 2)
    normal = normal if weight is None else normal * weight.reshape(shape)
    return normal if bias is None else normal + bias.reshape(shape)


def _reduced(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


def _how(size_average: Any, reduce: Any, reduction: str) -> str:
    """What the two old options of torch's losses say, where one of them is given."""
    if size_average is None and reduce is None:
        return reduction
    return "none" if reduce is False else "sum" if size_average is False else "mean"


def _smooth_l1_loss(
    input: torch.Tensor, target: torch.Tensor, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean", beta: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """½·d²/β where |d| < β, |d| − ½·β elsewhere"""
    apart = (input - target).abs()
    near = apart if beta == 0 else torch.where(apart < beta, 0.5 * apart * apart / beta, apart - 0.5 * beta)
    return _reduced(near, _how(size_average, reduce, reduction))


def _huber_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """½·d² where |d| ≤ δ, δ·(|d| − ½·δ) elsewhere"""
    apart = (input - target).abs()
    loss = torch.where(apart <= delta, 0.5 * apart * apart, delta * (apart - 0.5 * delta))
    if weight is None:
        return _reduced(loss, reduction)
    total = _reduced(loss * weight, "none" if reduction == "none" else "sum")
    return total / weight.sum() if reduction == "mean" else total


def _poisson_nll_loss(
    input: torch.Tensor, target: torch.Tensor, log_input: bool = True, full: bool = False, size_average: Any = None,
    eps: float = 1e-8, reduce: Any = None, reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    """eˣ − t·x of logarithms, x − t·log(x + ε) of rates; `full` adds Stirling's formula where t > 1"""
    loss = input.exp() - target * input if log_input else input - target * torch.log(input + eps)
    if full:
        known = torch.where(target > 1, target, torch.ones_like(target))
        stirling = known * known.log() - known + 0.5 * torch.log(2 * math.pi * known)
        loss = loss + torch.where(target > 1, stirling, torch.zeros_like(target))
    return _reduced(loss, _how(size_average, reduce, reduction))


def _gaussian_nll_loss(
    input: torch.Tensor, target: torch.Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> torch.Tensor:  # fmt: skip
    """½·(log v + (x − t)²/v), the variance at least ε; the gradient passes that limit, as torch's does"""
    var = torch.full_like(input, var) if isinstance(var, float | int) else var
    if var.dim() == input.dim() - 1 and var.shape != input.shape:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    return _reduced(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


_cross_entropy_of_torch = F.cross_entropy


def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross-entropy with smoothed labels or of probabilities, which ONNX's operator does not have."""
    how = _how(size_average, reduce, reduction)
    probabilities = target.is_floating_point()
    if not probabilities and not label_smoothing:
        return _cross_entropy_of_torch(input, target, weight, None, ignore_index, None, how)
    axis = 1 if input.dim() > 1 else 0
    logs = input.log_softmax(axis)
    shape = [1] * input.dim()
    shape[axis] = -1
    weighted = logs if weight is None else logs * weight.reshape(shape)
    classes = int(input.shape[axis])
    if probabilities:
        target = target * (1 - label_smoothing) + label_smoothing / classes if label_smoothing else target
        loss = -(weighted * target).sum(axis)
        return loss.sum() / (loss.numel() or 1) if how == "mean" else _reduced(loss, how)
    kept = target != ignore_index
    places = torch.where(kept, target, torch.zeros_like(target)).unsqueeze(axis)
    hard = -weighted.gather(axis, places).squeeze(axis)
    loss = (1 - label_smoothing) * hard - label_smoothing / classes * weighted.sum(axis)
    loss = torch.where(kept, loss, torch.zeros_like(loss))
    if how != "mean":
        return _reduced(loss, how)
    share = torch.ones_like(loss) if weight is None else weight[places.squeeze(axis)]
    return loss.sum() / torch.where(kept, share, torch.zeros_like(share)).sum()


# where a function is looked up, its name, and what stands in for it
MISSING: list[tuple[Any, str, Any]] = [
    *((F, f"adaptive_avg_pool{n}d", _adaptive(f"adaptive_avg_pool{n}d", n, torch.mean)) for n in (1, 2, 3)),
    *((F, f"adaptive_max_pool{n}d", _adaptive(f"adaptive_max_pool{n}d", n, torch.amax)) for n in (1, 2, 3)),
    *((F, f"avg_pool{n}d", _avg_pool(f"avg_pool{n}d", n)) for n in (2, 3)),
    (F, "batch_norm", _batch_norm),
    (F, "smooth_l1_loss", _smooth_l1_loss),
    (F, "huber_loss", _huber_loss),
    (F, "poisson_nll_loss", _poisson_nll_loss),
    (F, "gaussian_nll_loss", _gaussian_nll_loss),
    (F, "cross_entropy", _cross_entropy),
]
