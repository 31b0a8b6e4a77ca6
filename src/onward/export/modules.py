"""Borrow a torch module for export and give it back as it was.

Knows modules: wrappers, names, buffers, flags, random state, and the few layers that must behave differently
while they are traced. Knows nothing of ONNX.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from onward.errors import ExportError

__all__ = [
    "Neutral",
    "borrowed",
    "clean_names",
    "neutral_dropout",
    "prepared",
    "refuse_unusable",
    "traceable",
    "unwrap",
]


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel and torch.compile wrappers."""
    while (name := _transparent_child(model)) in ("module", "_orig_mod"):
        model = model._modules[name]  # type: ignore[assignment]
    return model


def _transparent_child(module: nn.Module) -> str | None:
    """The child through which a wrapper's names pass unchanged; None for ordinary modules."""
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return "module"
    if "_orig_mod" in module._modules and type(module).__name__ == "OptimizedModule":
        return "_orig_mod"
    if type(module).__module__.partition(".")[0] == "peft":
        # PeftModel holds the tuner as base_model, and the tuner the user's model as model.
        return next((name for name in ("base_model", "model") if name in module._modules), None)
    return None


def clean_names(model: nn.Module) -> dict[str, str]:
    """For every parameter and buffer, aliases included: its name in the module → its name in the export.

    Tied tensors share the first alias's name; wrappers inside the module leave no trace in names.
    """
    renamed: dict[str, str] = {}
    first: dict[int, str] = {}
    for raw, clean, module in _walk(model, "", ""):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                renamed[raw + name] = first.setdefault(id(tensor), clean + name)
    by_clean: dict[str, set[int]] = {}
    tensors = dict(_all_tensors(model))
    for raw, clean in renamed.items():
        by_clean.setdefault(clean, set()).add(id(tensors[raw]))
    # Two different tensors must not meet under one name (base_model.model.x next to x): those keep their own.
    return {raw: clean if len(by_clean[clean]) == 1 else raw for raw, clean in renamed.items()}


def _walk(module: nn.Module, raw: str, clean: str) -> Iterator[tuple[str, str, nn.Module]]:
    yield raw, clean, module
    transparent = _transparent_child(module)
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{raw}{name}.", clean if name == transparent else f"{clean}{name}.")


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def refuse_unusable(model: nn.Module, *, training: bool) -> None:
    """Raise where exporting would have to guess."""
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ExportError(
                f"parameter '{name}' has no shape yet: call the module once before exporting it"
            )
        if parameter.is_meta:
            raise ExportError(f"parameter '{name}' is on the meta device and has no values")
    for name, module in model.named_modules():
        cumulative = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None
        if training and cumulative and module.track_running_stats:
            raise ExportError(
                f"batch norm '{name}' has momentum=None (a cumulative average), which "
                "BatchNormalization cannot express: set a momentum"
            )
        for owner in (module, vars(module).get("config")):
            for kind in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
                rate = getattr(owner, kind, 0.0)
                if training and isinstance(rate, float) and rate > 0:
                    raise ExportError(
                        f"'{name}' has {kind}={rate}: a graph cannot skip whole layers at random; set it to 0"
                    )


@contextmanager
def borrowed(model: nn.Module) -> Iterator[None]:
    """Restore buffers, training flags and every random state on leaving, whatever happened in between."""
    flags = [(module, module.training) for module in model.modules()]
    held = [(module, dict(module._buffers)) for module in model.modules()]
    values = {
        id(b): (b, b.detach().clone()) for _, buffers in held for b in buffers.values() if b is not None
    }
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        for module, buffers in held:
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values.values():
                if buffer.shape == value.shape:
                    buffer.copy_(value)
                else:
                    buffer.data = value
        for module, flag in flags:
            module.training = flag
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def prepared(model: nn.Module, *, training: bool) -> Iterator[None]:
    """The module in the mode to export, without shortcuts, compilation or gradients.

    A module that is already in training mode keeps the modes of its parts (a frozen backbone in eval mode
    stays so); one that is not is put into it as a whole.
    """
    if not training:
        model.eval()
    elif not model.training:
        model.train()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_plain_transformers(model))
        yield


@contextmanager
def traceable(model: nn.Module) -> Iterator[None]:
    """Layers that exporters refuse or garble compute the same thing in a form that they take."""
    with ExitStack() as stack:
        stack.enter_context(_Plain(layers_drop=any(hasattr(m, "layerdrop") for m in model.modules())))
        for module in model.modules():
            if isinstance(module, nn.RNNBase) and module.dropout > 0 and module.training:
                stack.enter_context(_forward(module, _layer_by_layer))
        yield


@contextmanager
def _forward(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    if "forward" in vars(module):
        raise ExportError(f"{type(module).__name__}.forward was replaced on the instance; restore it first")
    module.forward = function.__get__(module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward


@contextmanager
def _plain_transformers(model: nn.Module) -> Iterator[None]:
    """Hugging Face models: eager attention (real dropout, plain operators) and no cache among the outputs."""
    saved: list[tuple[Any, str, Any]] = []

    def set_aside(config: Any, name: str, value: Any) -> None:
        old = getattr(config, name, None)
        if old is not None and old != value:
            saved.append((config, name, old))
            setattr(config, name, value)

    for config in _configs(model):
        set_aside(config, "_attn_implementation", "eager")
        set_aside(config, "use_cache", False)
    try:
        yield
    finally:
        for config, name, old in reversed(saved):
            setattr(config, name, old)


def _configs(model: nn.Module) -> list[Any]:
    """Every Hugging Face configuration in the module, inner ones first so that outer setters cascade last."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if config is None or not hasattr(config, "to_dict") or id(config) in found:
            return
        for name in getattr(config, "sub_configs", {}):
            add(getattr(config, name, None))
        found[id(config)] = config

    for module in model.modules():
        add(vars(module).get("config"))
    return list(found.values())


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


class _Plain(TorchFunctionMode):
    """Fused attention spelled out, because exporters write its dropout so that it never drops.

    With `layers_drop`, the draw that decides whether a layer is skipped is a number and not a tensor, so that no
    exporter sees a branch on it; the rate is known to be zero (`refuse_unusable`).
    """

    def __init__(self, *, layers_drop: bool) -> None:
        super().__init__()
        self.layers_drop = layers_drop

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return _attention(*args, **kwargs)
        if name == "multi_head_attention_forward" and not kwargs.get("need_weights", True):
            # Asked for its weights, the function takes its unfused branch.
            return func(*args, **(kwargs | {"need_weights": True}))[0], None
        if self.layers_drop and name == "rand" and args in (([],), ((),)) and not kwargs:
            return 0.5
        return func(*args, **kwargs)


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


class Neutral(TorchFunctionMode):
    """Within it nothing is random: dropout passes its input on, draws return a fixed value in their place.

    `active` counts the dropouts that would have dropped something. The same stand-ins are put into the ONNX
    model for comparison: uniform draws give 0.5, Bernoulli draws 1 where p >= 0.5, normal draws their mean.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _DROPOUTS:
            bound = dict(zip(("input", "p", "training"), args)) | kwargs
            on = bound.get("training", bound.get("train", True))
            self.active += bool(on and bound.get("p", 0.5) > 0)
            return bound["input"]
        if name == "scaled_dot_product_attention":
            bound = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args)) | kwargs
            self.active += bound.get("dropout_p", 0.0) > 0
            return func(*args[5:], **(bound | {"dropout_p": 0.0}))
        if name == "multi_head_attention_forward":
            args = list(args)
            on = kwargs.get("training", True)
            if len(args) > 10:
                self.active += bool(on and args[10] > 0)
                args[10] = 0.0
            return func(*args, **kwargs)
        if name in _DRAWS:
            return _DRAWS[name](func(*args, **kwargs), args, kwargs)
        return func(*args, **kwargs)


_DROPOUTS = {
    "dropout",
    "dropout_",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "alpha_dropout_",
    "feature_dropout",
    "feature_dropout_",
    "feature_alpha_dropout",
}


def _bernoulli(drawn: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    p = kwargs.get("p", args[1] if len(args) > 1 else None)
    p = args[0] if p is None or isinstance(p, torch.Generator) else p
    return drawn.copy_((torch.as_tensor(p) >= 0.5).to(drawn.dtype).expand_as(drawn))


_DRAWS: dict[str, Callable[[torch.Tensor, Any, Any], torch.Tensor]] = {
    "rand": lambda drawn, args, kwargs: drawn.fill_(0.5),
    "rand_like": lambda drawn, args, kwargs: drawn.fill_(0.5),
    "randn": lambda drawn, args, kwargs: drawn.zero_(),
    "randn_like": lambda drawn, args, kwargs: drawn.zero_(),
    "bernoulli": _bernoulli,
    "bernoulli_": lambda drawn, args, kwargs: drawn.fill_(float(args[1] >= 0.5)) if len(args) > 1 else drawn,
}


@contextmanager
def neutral_dropout(model: nn.Module) -> Iterator[Neutral]:
    """Run torch without randomness, in its own kernels: the reference for the exported model."""
    recurrent = [(m, m.dropout) for m in model.modules() if isinstance(m, nn.RNNBase) and m.dropout > 0]
    mode = Neutral()
    mode.active += sum(m.num_layers - 1 for m, _ in recurrent if m.training)
    try:
        for module, _ in recurrent:
            module.dropout = 0.0
        with mode:
            yield mode
    finally:
        for module, rate in recurrent:
            module.dropout = rate
