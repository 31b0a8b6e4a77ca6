"""Prepares a torch module for export and restores it afterwards: wrappers, names, buffers, flags, random state."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from onward.errors import ExportError
from onward.export.torch.experts import traceable_experts

__all__ = ["borrowed", "changed_buffers", "clean_names", "prepared", "refuse_unusable", "unwrap"]


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
        if isinstance(module, torch.jit.ScriptModule):
            which = f"'{name}'" if name else "the model"
            raise ExportError(
                f"{which} was made by torch.jit (script or trace): export the module that it was made from"
            )
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


def changed_buffers(model: nn.Module, before: Mapping[str, torch.Tensor]) -> list[str]:
    """Buffers that running the module has changed, but for those of batch norm, which exports keep track of."""
    norms = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for name in module._buffers
    }
    return [
        name
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name in before and name not in norms and not torch.equal(buffer, before[name])
    ]


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
        stack.enter_context(_unwrapped_parts(model))
        yield


@contextmanager
def _unwrapped_parts(model: nn.Module) -> Iterator[None]:
    """Compiled and parallel parts stand aside for what they wrap: a tracer cannot enter them."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and unwrap(child) is not child:
                replaced.append((parent, name, child))
    try:
        for parent, name, child in replaced:
            parent._modules[name] = unwrap(child)
        yield
    finally:
        for parent, name, child in replaced:
            parent._modules[name] = child


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
        with traceable_experts(model):
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
