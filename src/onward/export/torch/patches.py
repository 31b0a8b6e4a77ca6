"""Patches torch layers with equivalent code that exporters translate correctly.

Recurrent layers with dropout, fused attention, and operations that change shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from onward.errors import ExportError
from onward.export.torch import missing_functions, missing_layers

__all__ = ["traceable"]


@contextmanager
def traceable(model: nn.Module) -> Iterator[None]:
    """Replace layers that exporters reject or translate wrongly by equivalent code.

    Functions are replaced where modules look them up, for as long as the trace takes. A torch function mode
    would be neater, but sizes that pass through one become constants in a trace.
    """
    with ExitStack() as stack:
        stack.enter_context(_replaced(F, "scaled_dot_product_attention", _attention))
        for name in ("dropout1d", "dropout2d", "dropout3d"):
            stack.enter_context(_replaced(F, name, _channel_dropout))
        for name in ("alpha_dropout", "feature_alpha_dropout"):
            stack.enter_context(
                _replaced(F, name, _alpha_dropout if name[0] == "a" else _feature_alpha_dropout)
            )
        stack.enter_context(_replaced(F, "rms_norm", _rms_norm))
        for owner in (torch, torch.Tensor):
            for name in ("matmul", "mv"):
                stack.enter_context(_replaced(owner, name, _matmul))
        stack.enter_context(_replaced(torch.Tensor, "__matmul__", _matmul))
        stack.enter_context(_replaced(F, "normalize", _normalize))
        stack.enter_context(_replaced(torch, "vdot", _vdot))
        for name in ("H", "mH"):
            stack.enter_context(_replaced(torch.Tensor, name, property(_adjoint)))
        stack.enter_context(_replaced(F, "channel_shuffle", _channel_shuffle))
        stack.enter_context(_replaced(F, "bilinear", _bilinear))
        stack.enter_context(_replaced(torch.Tensor, "unflatten", _unflatten))
        stack.enter_context(_replaced(torch, "unflatten", _unflatten))
        for owner in (torch, torch.Tensor):
            stack.enter_context(_replaced(owner, "repeat_interleave", _repeat_interleave))
        stack.enter_context(_replaced(torch.Tensor, "unfold", _unfold))
        for owner in (torch, torch.Tensor):
            stack.enter_context(_replaced(owner, "as_strided", _as_strided))
        for owner, name, function in [*missing_functions.MISSING, *missing_layers.MISSING]:
            stack.enter_context(_replaced(owner, name, function))
        if any(hasattr(module, "layerdrop") for module in model.modules()):
            stack.enter_context(_replaced(torch, "rand", _rand))
        for module in model.modules():
            if isinstance(module, nn.LSTM) and module.proj_size:
                stack.enter_context(_forward(module, missing_functions.projected_lstm))
            elif isinstance(module, nn.RNNBase) and module.dropout > 0 and module.training:
                stack.enter_context(_forward(module, _layer_by_layer))
        yield


@contextmanager
def _replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _forward(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    if "forward" in vars(module):
        raise ExportError(f"{type(module).__name__}.forward was replaced on the instance; restore it first")
    module.forward = function.__get__(module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward


def _layer_by_layer(self: nn.RNNBase, input: torch.Tensor, hx: Any = None) -> Any:
    """What LSTM, GRU and RNN with dropout compute, one layer at a time: exporters take no dropout inside."""
    if isinstance(input, nn.utils.rnn.PackedSequence):
        raise ExportError(
            "a recurrent layer with dropout takes a PackedSequence: export it over padded tensors"
        )
    batched = input.dim() == 3
    batch_axis = 0 if self.batch_first else 1
    x = input if batched else input.unsqueeze(batch_axis)
    lstm = isinstance(self, nn.LSTM)
    directions = 2 if self.bidirectional else 1
    if hx is None:
        depth, batch = self.num_layers * directions, x.size(batch_axis)
        hidden = x.new_zeros(depth, batch, self.proj_size or self.hidden_size)
        states = (hidden, x.new_zeros(depth, batch, self.hidden_size)) if lstm else (hidden,)
    else:
        states = tuple(hx) if lstm else (hx,)
        states = states if batched else tuple(state.unsqueeze(1) for state in states)
    step = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}[
        self.mode
    ]
    last: list[tuple[torch.Tensor, ...]] = []
    for layer in range(self.num_layers):
        rows = slice(layer * directions, (layer + 1) * directions)
        state = tuple(s[rows] for s in states)
        weights = [weight for group in self.all_weights[rows] for weight in group]
        x, *ended = step(
            x,
            state if lstm else state[0],
            weights,
            self.bias,
            1,
            0.0,
            self.training,
            self.bidirectional,
            self.batch_first,
        )
        last.append(tuple(ended))
        if layer + 1 < self.num_layers:
            x = F.dropout(x, self.dropout, training=self.training)
    final = tuple(torch.cat(parts) for parts in zip(*last))
    if not batched:
        x, final = x.squeeze(batch_axis), tuple(state.squeeze(1) for state in final)
    return x, final if lstm else final[0]


def _channel_dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Whole channels dropped: ordinary dropout of one number per channel, times the input."""
    if not training or p == 0:
        return input
    ones = input.new_ones(input.size(0), input.size(1), *[1] * (input.dim() - 2))
    return input * F.dropout(ones, p, training=True)


def _alpha_dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> torch.Tensor:
    """Elements dropped to the value that SELU tends to, then scaled so that mean and variance stay."""
    return _dropped_to_alpha(input, input, p) if training and p > 0 else input


def _feature_alpha_dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> torch.Tensor:
    """The same for whole channels."""
    if not training or p == 0:
        return input
    return _dropped_to_alpha(input, input.new_ones(*input.shape[:2], *[1] * (input.dim() - 2)), p)


def _dropped_to_alpha(x: torch.Tensor, like: torch.Tensor, p: float) -> torch.Tensor:
    kept = F.dropout(torch.ones_like(like), p, training=True) > 0
    scale, shift, alpha = alpha_dropout_constants(p)
    return torch.where(kept, x, torch.full_like(x, alpha)) * scale + shift


def alpha_dropout_constants(p: float) -> tuple[float, float, float]:
    """Scale, shift and the value of a dropped element."""
    alpha = -1.7580993408473766
    scale = ((1 - p) * (1 + p * alpha**2)) ** -0.5
    return scale, -scale * alpha * p, alpha


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """x / √(mean x² + ε), times the weight."""
    axes = list(range(-len(normalized_shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    normal = input * torch.rsqrt((input * input).mean(axes, keepdim=True) + eps)
    return normal if weight is None else normal * weight


_product = torch.matmul


def _matmul(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A matrix times a vector as a matrix of one column: onnxruntime errs on transposed matrices and vectors."""
    if self.dim() > 1 and other.dim() == 1:
        return _product(self, other.unsqueeze(-1)).squeeze(-1)
    return _product(self, other)


_unit = F.normalize


def _normalize(
    input: torch.Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x / max(‖x‖, ε); exporters take no `out`, into which spectral norm writes."""
    made = _unit(input, p, dim, eps)
    return made if out is None else out.mul_(0).add_(made)


def _adjoint(self: torch.Tensor) -> torch.Tensor:
    """The last two axes exchanged, and conjugated where there is something to conjugate."""
    return self.transpose(-2, -1).conj() if self.is_complex() else self.transpose(-2, -1)


def _vdot(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Σ x·y of two vectors."""
    if input.is_complex():
        raise ExportError("vdot of complex numbers cannot be exported")
    return (input * other).sum()


def _channel_shuffle(input: torch.Tensor, groups: int) -> torch.Tensor:
    """Channels dealt out to the groups in turn."""
    rest = input.shape[2:]
    parts = input.reshape(input.shape[0], groups, input.shape[1] // groups, *rest).transpose(1, 2)
    return parts.reshape(input.shape)


def _bilinear(
    input1: torch.Tensor, input2: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y_o = x·W_o·z + b_o"""
    made = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return made if bias is None else made + bias


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
    for axis, wanted in enumerate(zip(sizes, strides)):
        found = next((own for own in left if (lengths[own], steps[own]) == wanted), None)
        if found is not None:
            same[axis] = found
            left.remove(found)
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
    kept = list(same.values())
    merged = self.permute(*kept, *left).reshape(*(self.shape[axis] for axis in kept), -1)
    made = merged.index_select(-1, (places // unit).flatten())
    made = made.reshape(*(self.shape[axis] for axis in kept), *(sizes[axis] for axis in picked))
    order = [*same, *picked]
    return made.permute(*(order.index(axis) for axis in range(len(sizes))))


_draw = torch.rand


def _rand(*size: Any, **options: Any) -> Any:
    """A number where a module draws one to decide whether to skip a layer, so that no branch depends on a tensor.

    The rate of skipping is known to be zero (`modules.refuse_unusable`).
    """
    return 0.5 if size in (([],), ((),)) and not options else _draw(*size, **options)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """softmax(q·kᵀ·scale + mask)·v, with dropout on the weights; a row that may see nothing gives zeros."""
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query * factor, key.transpose(-2, -1))
    if is_causal:
        rows = torch.arange(query.size(-2), device=query.device)
        attn_mask = torch.arange(key.size(-2), device=query.device) <= rows.unsqueeze(-1)
    if attn_mask is None:
        weights = scores.softmax(-1)
    elif attn_mask.dtype == torch.bool:
        hidden = attn_mask.logical_not()
        lowest = torch.finfo(scores.dtype).min
        weights = scores.masked_fill(hidden, lowest).softmax(-1).masked_fill(hidden, 0.0)
    else:
        weights = (scores + attn_mask).softmax(-1)
    if dropout_p > 0.0:
        weights = F.dropout(weights, dropout_p, training=True)
    return torch.matmul(weights, value)
