"""Pooling, norms, losses and recurrent layers that exporters lack or write wrongly, in functions that they know.

`patches.traceable` puts them where modules look them up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from onward.errors import ExportError

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
        # None stands for "as it is" in a grid of two or three sizes.
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
        # count_include_pad, so that every window is divided by its whole area, which is known here.
        area = math.prod(_sizes(kernel_size, rank))
        return original(input, kernel_size, step, padding, False, True) * (area / divisor_override)

    return pooled


def _conv(rank: int) -> _Function:
    """Convolution in float64 as a product of windows: onnxruntime's kernels are for float32 and less."""
    original = getattr(F, f"conv{rank}d")

    def convolved(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: Any = 1,
    ) -> torch.Tensor:  # fmt: skip
        if input.dtype != torch.float64:
            return original(input, weight, bias, stride, padding, dilation, groups)
        if input.dim() == rank + 1:
            return convolved(input.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
        kernel = [int(size) for size in weight.shape[2:]]
        steps, spread = _sizes(stride, rank), _sizes(dilation, rank)
        reach = [space * (size - 1) for size, space in zip(kernel, spread)]
        if padding == "same":
            pads = [(total // 2, total - total // 2) for total in reach]
        else:
            pads = [(pad, pad) for pad in _sizes(0 if padding == "valid" else padding, rank)]
        x = F.pad(input, [pad for pair in reversed(pads) for pad in pair])
        counts = [(length - total - 1) // step + 1 for length, total, step in zip(x.shape[2:], reach, steps)]
        windows = []
        for place in itertools.product(*map(range, kernel)):
            offsets = [at * space for at, space in zip(place, spread)]
            slices = [slice(at, at + (n - 1) * s + 1, s) for at, n, s in zip(offsets, counts, steps)]
            windows.append(x[(..., *slices)])
        n, out = input.shape[0], int(weight.shape[0])
        columns = torch.stack(windows, 2).reshape(n, groups, -1, math.prod(counts))
        y = (weight.reshape(groups, out // groups, -1) @ columns).reshape(n, out, *counts)
        return y if bias is None else y + bias.reshape(-1, *[1] * rank)

    return convolved


_conv_of_any_type = _conv(2)


def _conv2d_by_example(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: Any = 1,
) -> torch.Tensor:  # fmt: skip
    """A convolution of as many groups as the batch has examples, each with a kernel of its own: products of windows.

    ONNX's operator has a fixed number of groups.
    """
    examples: Any = groups  # a tensor where the trace follows it
    if not isinstance(groups, torch.Tensor) or isinstance(padding, str):
        return _conv_of_any_type(input, weight, bias, stride, padding, dilation, examples)
    pairs = [
        (value, value) if isinstance(value, int) else tuple(value) for value in (stride, padding, dilation)
    ]
    steps, pads, spread = pairs
    sizes = tuple(int(length) for length in weight.shape[2:])
    images = input.reshape(input.size(0) * examples, -1, *input.shape[2:])
    kernels = weight.reshape(examples, -1, *weight.shape[1:]).flatten(2)
    # One product over windows for the whole batch, instead of a loop over its examples.
    windows = F.unfold(images, sizes, spread, pads, steps)
    windows = windows.reshape(input.size(0), examples, *windows.shape[1:])
    height, width = (
        (length + 2 * pad - space * (size - 1) - 1) // step + 1
        for length, size, pad, space, step in zip(input.shape[2:], sizes, pads, spread, steps)
    )
    out = torch.matmul(kernels, windows).reshape(input.size(0), -1, height, width)
    return out if bias is None else out + bias.reshape(1, -1, 1, 1)


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
    # The two moments written out: the operator would want running statistics that this layer does not have.
    axes = [axis for axis in range(input.dim()) if axis != 1]
    centred = input - input.mean(axes, keepdim=True)
    normal = centred * torch.rsqrt((centred * centred).mean(axes, keepdim=True) + eps)
    shape = [1, -1] + [1] * (input.dim() - 2)
    normal = normal if weight is None else normal * weight.reshape(shape)
    return normal if bias is None else normal + bias.reshape(shape)


def _reduced(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


def _weighted(loss: torch.Tensor, weight: torch.Tensor | None, reduction: str) -> torch.Tensor:
    """Reduced with weights, by whose sum a mean is divided."""
    if weight is None:
        return _reduced(loss, reduction)
    total = _reduced(loss * weight, "none" if reduction == "none" else "sum")
    return total / weight.sum() if reduction == "mean" else total


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
    return _weighted(loss, weight, reduction)


def _l1_loss(
    input: torch.Tensor, target: torch.Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
    weight: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """|d|"""
    return _weighted((input - target).abs(), weight, _how(size_average, reduce, reduction))


def _poisson_nll_loss(
    input: torch.Tensor, target: torch.Tensor, log_input: bool = True, full: bool = False, size_average: Any = None,
    eps: float = 1e-8, reduce: Any = None, reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    """eˣ − t·x of logarithms, x − t·log(x + ε) of rates; `full` adds Stirling's formula where t > 1"""
    loss = input.exp() - target * input if log_input else input - target * torch.log(input + eps)
    if full:
        # Both branches of a choice have a gradient: the one not taken must be finite too.
        safe_target = torch.where(target > 1, target, torch.ones_like(target))
        stirling = safe_target * safe_target.log() - safe_target + 0.5 * torch.log(2 * math.pi * safe_target)
        loss = loss + torch.where(target > 1, stirling, torch.zeros_like(target))
    return _reduced(loss, _how(size_average, reduce, reduction))


def _gaussian_nll_loss(
    input: torch.Tensor, target: torch.Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> torch.Tensor:  # fmt: skip
    """½·(log v + (x − t)²/v), the variance at least ε; the gradient passes that limit, as torch's does"""
    var = torch.full_like(input, var) if isinstance(var, float | int) else var
    # one variance for all columns of a row, as torch allows
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
        # Smoothing spreads over all classes, the right one included.
        target = target * (1 - label_smoothing) + label_smoothing / classes if label_smoothing else target
        loss = -(weighted * target).sum(axis)
        return loss.sum() / (loss.numel() or 1) if how == "mean" else _reduced(loss, how)
    counted = target != ignore_index
    # -100 is no row of the scores: any that exists does, as it is left out below.
    places = torch.where(counted, target, torch.zeros_like(target)).unsqueeze(axis)
    hard = -weighted.gather(axis, places).squeeze(axis)
    loss = (1 - label_smoothing) * hard - label_smoothing / classes * weighted.sum(axis)
    loss = torch.where(counted, loss, torch.zeros_like(loss))
    if how != "mean":
        return _reduced(loss, how)
    share = torch.ones_like(loss) if weight is None else weight[places.squeeze(axis)]
    return loss.sum() / torch.where(counted, share, torch.zeros_like(share)).sum()


def _multilabel_margin_loss(
    input: torch.Tensor, target: torch.Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> torch.Tensor:  # fmt: skip
    """Σ max(0, 1 − (x_t − x_i)) / classes over labels t, which end at the first −1, and classes i that are none"""
    # Numbers after the first negative one are no labels, whatever they are.
    is_label = (target < 0).to(torch.int64).cumsum(-1) == 0
    classes = torch.where(is_label, target, torch.zeros_like(target))
    # Added, as the first class is also what unused places point at, with nothing to add.
    labels = torch.zeros_like(target).scatter_add(-1, classes, is_label.to(torch.int64)) > 0
    margins = (1 - input.gather(-1, classes).unsqueeze(-1) + input.unsqueeze(-2)).clamp(min=0)
    counted = is_label.unsqueeze(-1) & ~labels.unsqueeze(-2)
    loss = torch.where(counted, margins, torch.zeros_like(margins)).sum((-2, -1)) / input.shape[-1]
    return _reduced(loss, _how(size_average, reduce, reduction))


def _multi_margin_loss(
    input: torch.Tensor, target: torch.Tensor, p: int = 1, margin: float = 1.0, weight: torch.Tensor | None = None,
    size_average: Any = None, reduce: Any = None, reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    """Σ max(0, m − x_t + x_i)ᵖ·w_t / classes over the classes i other than t"""
    label = target.unsqueeze(-1)
    margins = (margin - input.gather(-1, label) + input).clamp(min=0)
    margins = margins if p == 1 else margins * margins
    margins = margins if weight is None else margins * weight[target].unsqueeze(-1)
    others = torch.arange(input.shape[-1]) != label
    loss = torch.where(others, margins, torch.zeros_like(margins)).sum(-1) / input.shape[-1]
    return _reduced(loss, _how(size_average, reduce, reduction))


def _embedding_bag(
    input: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """The sum, mean or maximum of each bag's rows; padding counts nowhere, and an empty bag gives zeros.

    Exporters write a loop over the bags, which has no gradient in reach.
    """
    if max_norm is not None or scale_grad_by_freq:
        raise ExportError(
            "embedding_bag with max_norm or scale_grad_by_freq cannot be exported: both change what a step does to "
            "the table; leave them out"
        )
    padding = None if padding_idx is None else padding_idx % int(weight.shape[0])
    rows = F.embedding(input, weight, padding)
    counts = torch.ones_like(input) if padding is None else (input != padding).to(input.dtype)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    counts = counts.to(rows.dtype).unsqueeze(-1)
    if offsets is None:  # a bag in each row
        if mode == "max":
            # Finite: a bag of padding alone would be -inf times 0, which is NaN.
            lowest = torch.full_like(rows, torch.finfo(rows.dtype).min)
            rows, empty = torch.where(counts > 0, rows, lowest).amax(1), counts.sum(1) == 0
            return torch.where(empty, torch.zeros_like(rows), rows)
        total, number = (rows * counts).sum(1), counts.sum(1)
    else:
        starts = offsets[:-1] if include_last_offset else offsets
        # The bag of each index is the last that starts no later.
        bags = (starts <= torch.arange(input.shape[0]).unsqueeze(-1)).to(torch.int64).sum(
            -1, keepdim=True
        ) - 1
        if mode == "max":
            # Padding goes to one bag more, which is then left out.
            bags = torch.where(counts > 0, bags, torch.zeros_like(bags) + starts.shape[0])
            base = torch.cat([torch.zeros_like(starts), torch.zeros_like(starts[:1])])
            base = base.to(rows.dtype).unsqueeze(-1).expand(-1, rows.shape[1])
            largest = base.scatter_reduce(0, bags.expand_as(rows), rows, "amax", include_self=False)
            return largest[:-1]
        base = torch.zeros_like(starts, dtype=rows.dtype).unsqueeze(-1)
        total = base.expand(-1, rows.shape[1]).scatter_add(0, bags.expand_as(rows), rows * counts)
        number = base.scatter_add(0, bags, counts)
    return total if mode == "sum" else total / number.clamp(min=1)


_Adaptive = torch.nn.AdaptiveLogSoftmaxWithLoss


def _adaptive_log_probabilities(
    self: _Adaptive, input: torch.Tensor, head_output: torch.Tensor
) -> torch.Tensor:
    """The logarithms of all classes' probabilities: a rare class's is its cluster's plus its own in there."""
    head = head_output.log_softmax(1)
    frequent = self.shortlist_size
    parts = [head[:, :frequent]]
    for index, cluster in enumerate(self.tail):
        # every cluster for every row: more products than torch's, and no size that depends on the data
        parts.append(cluster(input).log_softmax(1) + head[:, frequent + index].unsqueeze(1))
    return torch.cat(parts, 1)


def _adaptive_log_softmax(self: _Adaptive, input_: torch.Tensor, target_: torch.Tensor) -> Any:
    """Every cluster for every row: torch takes the rows of each cluster alone, whose number a trace would fix."""
    from torch.nn.modules.adaptive import _ASMoutput

    input, target = (input_, target_) if target_.dim() else (input_.unsqueeze(0), target_.unsqueeze(0))
    logs = _adaptive_log_probabilities(self, input, self.head(input))
    output = logs.gather(1, target.unsqueeze(1)).squeeze(1)
    return _ASMoutput(output if target_.dim() else output.squeeze(0), -output.mean())


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """x / √(mean x² + ε), times the weight."""
    axes = list(range(-len(normalized_shape), 0))
    # torch's default, which depends on the type
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    normal = input * torch.rsqrt((input * input).mean(axes, keepdim=True) + eps)
    return normal if weight is None else normal * weight


_unit = F.normalize


def _normalize(
    input: torch.Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x / max(‖x‖, ε); exporters take no `out`, into which spectral norm writes."""
    unit = _unit(input, p, dim, eps)
    return unit if out is None else out.mul_(0).add_(unit)


def _channel_shuffle(input: torch.Tensor, groups: int) -> torch.Tensor:
    """Channels dealt out to the groups in turn."""
    spatial = input.shape[2:]
    parts = input.reshape(input.shape[0], groups, input.shape[1] // groups, *spatial).transpose(1, 2)
    return parts.reshape(input.shape)


def _bilinear(
    input1: torch.Tensor, input2: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y_o = x·W_o·z + b_o"""
    # the tracer has no form of torch's own operator
    product = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return product if bias is None else product + bias


# Stands for log 0: finite, so that its gradient is.
_NEVER = -1e30


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
    # Written as products and sums of what is traced: sizes read from Python would be the example's.
    blanks = torch.zeros_like(targets[:, :1]) + blank
    spread = torch.stack([torch.zeros_like(targets) + blank, targets], -1).flatten(1)
    labels = torch.cat([spread, blanks], 1)
    emitted = log_probs.gather(2, labels.unsqueeze(0).expand(log_probs.shape[0], -1, -1))
    other = labels[:, 2:] != labels[:, :-2]
    # The first two states have no state two before them: compared with themselves, never.
    jumps = torch.cat([labels[:, :2] < labels[:, :2], other & (labels[:, 2:] != blank)], 1)
    # log-space: products of hundreds of probabilities are below what float32 holds
    never = torch.zeros_like(emitted[0]) + _NEVER
    alpha = torch.cat([emitted[0, :, :2], never[:, 2:]], 1)
    for frame in range(1, int(log_probs.shape[0])):
        one = torch.cat([never[:, :1], alpha[:, :-1]], 1)
        two = torch.cat([never[:, :2], alpha[:, :-2]], 1)
        paths = torch.stack([alpha, one, torch.where(jumps, two, never)])
        alpha = torch.where((frames > frame).unsqueeze(1), paths.logsumexp(0) + emitted[frame], alpha)
    last = (2 * own).to(torch.int64).unsqueeze(1)
    # An empty text has one state, the blank, and none before it.
    ends = torch.where(last > 0, alpha.gather(1, (last - 1).clamp(min=0)), never[:, :1])
    loss = -torch.stack([alpha.gather(1, last), ends]).logsumexp(0).squeeze(1)
    # More labels than frames: torch gives inf there, or zero where it is told to.
    impossible = loss > -_NEVER / 2
    loss = loss.masked_fill(impossible, 0.0 if zero_infinity else torch.inf)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return (loss / own.clamp(min=1)).mean()


# ---- recurrent layers, one at a time: with dropout between them, or projections ----------------------------------

_STEPS = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}


def layer_by_layer(self: nn.RNNBase, input: torch.Tensor, hx: Any = None) -> Any:
    """What LSTM, GRU and RNN compute: exporters take no dropout inside, and ONNX's LSTM has no projection."""
    if isinstance(input, nn.utils.rnn.PackedSequence):
        kind = "a recurrent layer with dropout" if not self.proj_size else "an LSTM with proj_size"
        raise ExportError(f"{kind} takes a PackedSequence: export it over padded tensors")
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
    ends: list[Sequence[torch.Tensor]] = []
    for layer in range(self.num_layers):
        rows = slice(layer * directions, (layer + 1) * directions)
        x, *ended = _run_layer(self, x, [state[rows] for state in states], self.all_weights[rows])
        ends.append(ended)
        if layer + 1 < self.num_layers:
            x = F.dropout(x, self.dropout, training=self.training)
    final = tuple(torch.cat(parts) for parts in zip(*ends))
    if not batched:
        x, final = x.squeeze(batch_axis), tuple(state.squeeze(1) for state in final)
    return x, final if lstm else final[0]


def _run_layer(
    self: nn.RNNBase, x: torch.Tensor, states: list[torch.Tensor], weights: Sequence[Sequence[torch.Tensor]]
) -> tuple[torch.Tensor, ...]:
    """The outputs of one layer, and its last states; `weights` and the states' rows are by direction."""
    if self.proj_size:
        return _project_steps(self, x, states, weights)
    flat = [weight for group in weights for weight in group]
    step = _STEPS[self.mode]
    state = states if self.mode == "LSTM" else states[0]
    return step(x, state, flat, self.bias, 1, 0.0, self.training, self.bidirectional, self.batch_first)


def _project_steps(
    self: nn.RNNBase, x: torch.Tensor, states: list[torch.Tensor], weights: Sequence[Sequence[torch.Tensor]]
) -> tuple[torch.Tensor, ...]:
    """An LSTM whose hidden state is projected, step by step."""
    x = x.transpose(0, 1) if self.batch_first else x
    outputs, ends = [], []
    for direction, (w_in, w_hidden, *more) in enumerate(weights):
        # the inputs' part of all steps in one product; only the state's part has to wait for the step before
        gates = F.linear(x, w_in, more[0] + more[1] if self.bias else None)
        h, c = (state[direction] for state in states)
        # The number of steps becomes that of the example: the check at other lengths finds that and fixes the axis.
        order = range(int(x.shape[0]))
        steps = []
        for step in reversed(order) if direction else order:
            i, f, g, o = (gates[step] + F.linear(h, w_hidden)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = F.linear(o.sigmoid() * c.tanh(), more[-1])
            steps.append(h)
        outputs.append(torch.stack(steps[::-1] if direction else steps))
        ends.append((h, c))
    y = torch.cat(outputs, -1)
    return (y.transpose(0, 1) if self.batch_first else y, *(torch.stack(part) for part in zip(*ends)))


def _gru_cell(
    input: torch.Tensor, hx: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None, b_hh: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """One step; torch's own divides the gates in a way that the tracer refuses where it has lost a shape."""
    r, z, n = _gates(F.linear(input, w_ih, b_ih), 3)
    of_state = _gates(F.linear(hx, w_hh, b_hh), 3)
    new = torch.tanh(n + torch.sigmoid(r + of_state[0]) * of_state[2])
    return new + torch.sigmoid(z + of_state[1]) * (hx - new)


def _lstm_cell(
    input: torch.Tensor, hx: Sequence[torch.Tensor], w_ih: torch.Tensor, w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None, b_hh: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    i, f, g, o = _gates(F.linear(input, w_ih, b_ih) + F.linear(hx[0], w_hh, b_hh), 4)
    c = torch.sigmoid(f) * hx[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gates(joined: torch.Tensor, count: int) -> list[torch.Tensor]:
    size = int(joined.shape[-1]) // count
    return [joined[..., index * size : (index + 1) * size] for index in range(count)]


# where a function is looked up, its name, and what stands in for it
MISSING: list[tuple[Any, str, Any]] = [
    *((F, f"adaptive_avg_pool{n}d", _adaptive(f"adaptive_avg_pool{n}d", n, torch.mean)) for n in (1, 2, 3)),
    *((F, f"adaptive_max_pool{n}d", _adaptive(f"adaptive_max_pool{n}d", n, torch.amax)) for n in (1, 2, 3)),
    *((F, f"avg_pool{n}d", _avg_pool(f"avg_pool{n}d", n)) for n in (2, 3)),
    *((owner, "gru_cell", _gru_cell) for owner in (torch, torch._VF)),
    *((owner, "lstm_cell", _lstm_cell) for owner in (torch, torch._VF)),
    (F, "conv1d", _conv(1)),
    (F, "conv2d", _conv2d_by_example),
    (F, "conv3d", _conv(3)),
    (F, "batch_norm", _batch_norm),
    (F, "rms_norm", _rms_norm),
    (F, "normalize", _normalize),
    (F, "channel_shuffle", _channel_shuffle),
    (F, "bilinear", _bilinear),
    (F, "smooth_l1_loss", _smooth_l1_loss),
    (F, "huber_loss", _huber_loss),
    (F, "l1_loss", _l1_loss),
    (F, "poisson_nll_loss", _poisson_nll_loss),
    (F, "gaussian_nll_loss", _gaussian_nll_loss),
    (F, "cross_entropy", _cross_entropy),
    (F, "multilabel_margin_loss", _multilabel_margin_loss),
    (F, "ctc_loss", _ctc_loss),
    (F, "multi_margin_loss", _multi_margin_loss),
    (F, "embedding_bag", _embedding_bag),
    (_Adaptive, "forward", _adaptive_log_softmax),
    (_Adaptive, "_get_full_log_prob", _adaptive_log_probabilities),
]
