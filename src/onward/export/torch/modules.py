"""Prepares a torch module for export and restores it afterwards: wrappers, names, buffers, flags, random state."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from onward.errors import ExportError
from onward.export.torch.experts import traceable_experts
from onward.export.torch.replace import Replacement, replaced


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel and torch.compile wrappers."""
    while (name := _transparent_child(model)) in ("module", "_orig_mod"):
        model = model._modules[name]  # type: ignore[assignment]
    return model


def _transparent_child(module: nn.Module) -> str | None:
    """The child through which a wrapper's names pass unchanged; None for ordinary modules."""
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return "module"
    # By name: importing torch._dynamo to ask for the class takes seconds.
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
    # By identity: two tensors that hold equal numbers are two parameters.
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
        for owner in (module, vars(module).get("config")):
            for kind in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
                rate = getattr(owner, kind, 0.0)
                if training and isinstance(rate, float) and rate > 0:
                    raise ExportError(
                        f"'{name}' has {kind}={rate}: a graph cannot skip whole layers at random; set it to 0"
                    )


def changed_state(model: nn.Module, before: Mapping[str, torch.Tensor], observer: WriteObserver) -> list[str]:
    """What no optimizer trains and running the module changes, but for batch norm's, which its operator moves."""
    norms = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is not None
        for name in module._buffers
    }
    # what is written may be the same by chance: the average of two networks that start as one
    written = {name for name in observer.before if not model.get_parameter(name).requires_grad}
    return [
        name
        for name, tensor in _all_tensors(model)
        if name in written
        or (
            name in before
            and name not in norms
            and tensor.shape == before[name].shape
            and (name in observer.written_buffers or not torch.equal(tensor, before[name]))
        )
    ]


class WriteObserver(TorchDispatchMode):
    """Keeps what parameters were before forward wrote to them (a moving average of another network, a mask of weights).

    They are copied when that happens: copies of all would double a large model's memory.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.before: dict[str, torch.Tensor] = {}
        self.written_buffers: set[str] = set()

    def __enter__(self) -> WriteObserver:
        self._parameters = {name: p for name, p in self._model.named_parameters() if not p.is_meta}
        # as long as these are held, memory that `p.data = …` replaces stays
        self._held = {name: parameter.data for name, parameter in self._parameters.items()}
        self._names = {_memory(tensor): name for name, tensor in self._held.items()}
        self._buffers = {_memory(b): name for name, b in self._model.named_buffers() if not b.is_meta}
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Only operators that write are looked at: the mode sees every operator of forward.
        if func._schema.is_mutable:
            written = [
                value
                for argument, value in zip(func._schema.arguments, args)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            for tensor in pytree.tree_leaves((written, (kwargs or {}).get("out"))):
                if not isinstance(tensor, torch.Tensor):
                    continue
                name = self._names.get(_memory(tensor))
                if name is not None and name not in self.before:
                    self.before[name] = self._held[name].clone()
                if _memory(tensor) in self._buffers:
                    self.written_buffers.add(self._buffers[_memory(tensor)])
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, parameter in self._parameters.items():
            if parameter.data_ptr() != self._held[name].data_ptr():
                self.before.setdefault(name, self._held[name])


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def borrowed(model: nn.Module) -> Iterator[WriteObserver]:
    """Restore parameters that `WriteObserver` saw change, buffers, flags and random states on leaving."""
    # An export runs forward, which moves batch norm's statistics; the moved ones would be in the file (off by 0.08).
    # Buffers are small and are copied in any case; parameters only when something writes to them.
    observer = WriteObserver(model)
    parameters = dict(model.named_parameters())
    held = [(module, dict(module._buffers)) for module in model.modules()]
    values = {
        id(b): (b, b.detach().clone()) for _, buffers in held for b in buffers.values() if b is not None
    }
    # Forward draws (dropout, random depth): whoever exports between two epochs must not get another second one.
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    # the same flags, which are set again at the end
    flags = [(module, "training", module.training) for module in model.modules()]
    try:
        with replaced(*flags):
            yield observer
    finally:
        for name, value in observer.before.items():
            parameters[name].data = value.to(parameters[name].dtype)
        for module, buffers in held:
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values.values():
                if buffer.shape == value.shape:
                    buffer.copy_(value)
                else:
                    buffer.data = value
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
        # The fused encoder layer of inference has no form in ONNX.
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        # a compiled part would be traced as one opaque call
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # what forward keeps for a backward pass would be a second copy of its activations
        stack.enter_context(torch.no_grad())
        stack.enter_context(replaced(*_plain_transformers(model)))
        stack.enter_context(traceable_experts(model))
        stack.enter_context(replaced(*_unwrapped_parts(model)))
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and _accumulates(module):
                stack.enter_context(replaced_forward(module, _cumulative_batch_norm))
        yield


def _accumulates(norm: Any) -> bool:
    return norm.training and norm.momentum is None and norm.track_running_stats


def _cumulative_batch_norm(self: Any, input: torch.Tensor) -> torch.Tensor:
    """Batch norm whose statistics are the mean over all batches: operators only know a momentum."""
    self._check_input_dim(input)
    mean, variance = self.running_mean.clone(), self.running_var.clone()
    y = F.batch_norm(input, None, None, self.weight, self.bias, True, 0.1, self.eps)
    with torch.no_grad():
        axes = [0, *range(2, input.dim())]
        self.num_batches_tracked.add_(1)
        share = 1 / self.num_batches_tracked.to(mean.dtype)
        self.running_mean.copy_(mean + (input.mean(axes) - mean) * share)
        self.running_var.copy_(variance + (input.var(axes) - variance) * share)
    return y


@contextmanager
def replaced_forward(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """A module that computes the same by another function."""
    if "forward" in vars(module):
        raise ExportError(f"{type(module).__name__}.forward was replaced on the instance; restore it first")
    with replaced((module, "forward", function.__get__(module))):
        yield


def _unwrapped_parts(model: nn.Module) -> list[Replacement]:
    """Compiled and parallel parts stand aside for what they wrap: a tracer cannot enter them."""
    return [
        (parent, name, unwrap(child))
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and unwrap(child) is not child
    ]


def _plain_transformers(model: nn.Module) -> list[Replacement]:
    """Hugging Face models: eager attention (real dropout, plain operators) and no cache among the outputs."""
    # The fused attention's dropout is written with two inputs, which drops nothing: outputs would not vary.
    settings = {"_attn_implementation": "eager", "use_cache": False}
    return [
        (config, name, value)
        for config in _configs(model)
        for name, value in settings.items()
        if getattr(config, name, None) not in (None, value)
    ]


def _configs(model: nn.Module) -> list[Any]:
    """Every Hugging Face configuration in the module, inner ones first so that outer setters cascade last."""
    configs: dict[int, Any] = {}

    def add(config: Any) -> None:
        if config is None or not hasattr(config, "to_dict") or id(config) in configs:
            return
        # An outer configuration's setter sets the inner ones too: undone in another order, they would keep it.
        for name in getattr(config, "sub_configs", {}):
            add(getattr(config, name, None))
        configs[id(config)] = config

    for module in model.modules():
        add(vars(module).get("config"))
    return list(configs.values())
