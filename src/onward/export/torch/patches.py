"""Patches torch layers with equivalent code that exporters translate correctly.

Recurrent layers with dropout, fused attention, and operations that change shapes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from onward.errors import ExportError
from onward.export.torch import missing_arrays, missing_functions, missing_layers
from onward.export.torch.missing_layers import layer_by_layer
from onward.export.torch.modules import replaced_forward
from onward.export.torch.replace import replaced


@contextmanager
def traceable(model: nn.Module) -> Iterator[None]:
    """Replace layers that exporters reject or translate wrongly by equivalent code.

    Functions are replaced where modules look them up, for as long as the trace takes. A torch function mode
    would be neater, but sizes that pass through one become constants in a trace.
    """
    functions = [*missing_arrays.MISSING, *missing_functions.MISSING, *missing_layers.MISSING]
    if any(hasattr(module, "layerdrop") for module in model.modules()):
        # only there: elsewhere a drawn number may be what the model computes with
        functions.append((torch, "rand", _rand))
    with ExitStack() as stack:
        stack.enter_context(one_dropout(F.dropout))
        stack.enter_context(replaced(*functions, missing_arrays.FOLLOWED_LENGTHS))
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                if module.proj_size or (module.dropout > 0 and module.training):
                    stack.enter_context(replaced_forward(module, layer_by_layer))
            elif hasattr(module, "fake_quant_enabled") and hasattr(module, "activation_post_process"):
                stack.enter_context(replaced_forward(module, _fake_quantization(module)))
        yield


@contextmanager
def plain_control_flow() -> Iterator[None]:
    """`torch.cond` and `scan` as what they compute: tracers follow no branch and no loop of theirs."""
    scan = importlib.import_module("torch._higher_order_ops.scan")
    with replaced(
        (torch, "cond", _cond),
        (scan, "_maybe_compile_and_run_fn", lambda run, *args: run(*args)),
        (scan, "scan_op", _scan),
    ):
        yield


def _cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    """Both branches, and a choice between what they give."""
    if not isinstance(pred, torch.Tensor):
        return true_fn(*operands) if pred else false_fn(*operands)
    return pytree.tree_map(
        # Both are computed: bodies of If would hide ranks and gradients that a choice shows.
        lambda a, b: torch.where(pred.reshape(()), a, b),
        true_fn(*operands),
        false_fn(*operands),
    )


def _scan(combine_fn: Any, init: Any, xs: Any, additional_inputs: Any = ()) -> Any:
    """One step after another over the first axis, whose length the export fixes."""
    carried, stacks = list(init), []
    for step in range(int(xs[0].shape[0])):
        results = combine_fn(*carried, *(x[step] for x in xs), *additional_inputs)
        carried = list(results[: len(init)])
        stacks.append(results[len(init) :])
    return (*carried, *(torch.stack(parts) for parts in zip(*stacks)))


@contextmanager
def one_dropout(dropout: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Every kind of dropout, attention's included, in terms of this one."""
    with replaced(
        (F, "dropout", dropout),
        (F, "scaled_dot_product_attention", _attention),
        *((F, f"dropout{rank}d", _channel_dropout) for rank in (1, 2, 3)),
        (F, "alpha_dropout", _alpha_dropout),
        (F, "feature_alpha_dropout", _feature_alpha_dropout),
    ):
        yield


def _fake_quantization(module: Any) -> Callable[..., torch.Tensor]:
    """torch.ao's fake quantization: with the scale that it has observed as a constant, or still observing."""
    if module.observer_enabled[0]:
        return _observing_quantization(module)
    low, high = module.activation_post_process.quant_min, module.activation_post_process.quant_max
    scales, zeros = module.scale.detach().clone(), module.zero_point.detach().to(torch.int32)

    def forward(self: Any, X: torch.Tensor) -> torch.Tensor:
        if not is_on:
            return X
        if self.is_per_channel:
            return torch.fake_quantize_per_channel_affine(X, scales, zeros, self.ch_axis, low, high)
        return torch.fake_quantize_per_tensor_affine(X, scale, zero, low, high)

    # read before the trace, which would warn of numbers that become constants
    is_on, scale, zero = bool(module.fake_quant_enabled[0]), float(scales[0]), int(zeros[0])
    return forward


def _observing_quantization(module: Any) -> Callable[..., torch.Tensor]:
    """q = clamp(round(x/s) + z), y = (q − z)·s, where s and z follow the ranges of the batches: state of the step."""
    observer = module.activation_post_process
    name = type(observer).__name__
    symmetric = observer.qscheme in (torch.per_tensor_symmetric, torch.per_channel_symmetric)
    known = symmetric or observer.qscheme in (torch.per_tensor_affine, torch.per_channel_affine)
    if not name.endswith("MinMaxObserver") or not known:
        raise ExportError(
            f"the module's observers are on, and a {name} cannot be exported: after some batches fix the ranges with "
            "model.apply(torch.ao.quantization.disable_observer), and export then"
        )
    if not observer.min_val.numel():  # its first batch gives it a shape
        raise ExportError(
            "the module's observers have seen no batch: call the module once before exporting it"
        )
    low, high = observer.quant_min, observer.quant_max
    # of the type, whatever the range
    one = torch.ones_like(observer.min_val)
    middle = int(observer._calculate_qparams(-one, one)[1].reshape(-1)[0]) if symmetric else 0
    share = getattr(observer, "averaging_constant", None)
    rounds, fused = bool(module.fake_quant_enabled[0]), hasattr(module, "is_symmetric_quant")

    def follow(seen: torch.Tensor, now: torch.Tensor, furthest: Callable[..., torch.Tensor]) -> torch.Tensor:
        moved = furthest(seen, now) if share is None else seen + share * (now - seen)
        seen.copy_(torch.where(torch.isinf(seen), now, moved))  # infinite until the first batch
        return seen

    def forward(self: Any, X: torch.Tensor) -> torch.Tensor:
        x = X.detach()
        others = [other for other in range(x.dim()) if other != self.ch_axis] if self.is_per_channel else []
        smallest = follow(observer.min_val, x.amin(others), torch.minimum).clamp(max=0.0)
        largest = follow(observer.max_val, x.amax(others), torch.maximum).clamp(min=0.0)
        scale = torch.clamp((largest - smallest) / float(high - low), min=float(observer.eps))
        zero = (low - (smallest / scale).round()).clamp(low, high)
        if symmetric and fused:  # the one kernel for both uses the range's two halves as they are
            both = (smallest < 0) & (largest > 0)
            half = (high - low) // 2
            scale = torch.where(both, torch.maximum(-smallest / (half + 1), largest / half), scale)
            zero = torch.where(both, torch.full_like(zero, middle), zero)
        elif symmetric:
            scale = (2.0 * torch.maximum(-smallest, largest) / float(high - low)).clamp(
                min=float(observer.eps)
            )
            zero = torch.full_like(scale, middle)
        self.scale.copy_(scale.reshape(self.scale.shape))
        self.zero_point.copy_(zero.reshape(self.zero_point.shape))
        if not rounds:
            return X
        if others:
            spread = [1 if other in others else -1 for other in range(x.dim())]
            scale, zero = scale.reshape(spread), zero.reshape(spread)
        steps = (x / scale).round() + zero
        inside = torch.where((steps >= low) & (steps <= high), X, x)
        return (steps.clamp(low, high) - zero) * scale + (inside - inside.detach())

    return forward


def _channel_dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Whole channels dropped: ordinary dropout of one number per channel, times the input."""
    if not training or p == 0:
        return input
    # One number a channel that is spread out, as ONNX's Dropout draws one for each element.
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
    survives = F.dropout(torch.ones_like(like), p, training=True) > 0
    scale, shift, alpha = alpha_dropout_constants(p)
    return torch.where(survives, x, torch.full_like(x, alpha)) * scale + shift


def alpha_dropout_constants(p: float) -> tuple[float, float, float]:
    """Scale, shift and the value of a dropped element."""
    # −scale·alpha of SELU
    alpha = -1.7580993408473766
    scale = ((1 - p) * (1 + p * alpha**2)) ** -0.5
    return scale, -scale * alpha * p, alpha


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
        # grouped queries: each key serves several heads in a row
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query * factor, key.transpose(-2, -1))
    if is_causal:
        rows = torch.arange(query.size(-2), device=query.device)
        attn_mask = torch.arange(key.size(-2), device=query.device) <= rows.unsqueeze(-1)
    sees_any: torch.Tensor | None = None
    if attn_mask is None:
        weights = scores.softmax(-1)
    elif attn_mask.dtype == torch.bool:
        # The lowest finite number rather than -inf: a row that sees nothing would be NaN; zeros are put there after.
        hidden = attn_mask.logical_not()
        lowest = torch.finfo(scores.dtype).min
        weights = scores.masked_fill(hidden, lowest).softmax(-1).masked_fill(hidden, 0.0)
    else:
        # A row of -inf alone would be NaN here; torch's kernels give zeros, and a padded batch has such rows.
        sees_any = attn_mask.amax(-1, keepdim=True) > -torch.inf
        weights = (scores + attn_mask.clamp(min=torch.finfo(scores.dtype).min)).softmax(-1)
    if dropout_p > 0.0:
        weights = F.dropout(weights, dropout_p, training=True)
    mixed = torch.matmul(weights, value)
    return mixed if sees_any is None else mixed * sees_any.to(mixed.dtype)
