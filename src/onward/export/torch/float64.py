"""Runs a torch module in another precision: in float64, the reference for float32 errors, or 16 bits in float32.

The module is not copied: its parameters are converted temporarily.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from onward.export.torch.replace import replaced


class _Wide(TorchFunctionMode):
    """Whatever asks for float32 gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A module that writes `.to(torch.float32)` would round in the middle of the reference.
        kwargs = {name: _wider(value) for name, value in (kwargs or {}).items()}
        if getattr(func, "__name__", "") == "float":
            return args[0].double()
        return func(*(_wider(value) for value in args), **kwargs)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Within it, the module's parameters and buffers are float64, and so is what it computes from them."""
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with _stored_as(torch.float64, (torch.float32,), model), _Wide():
            yield
    finally:
        torch.set_default_dtype(default)


@contextmanager
def _stored_as(dtype: torch.dtype, narrow: tuple[torch.dtype, ...], model: nn.Module) -> Iterator[None]:
    # by identity, for tied tensors must stay one
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()] if t.dtype in narrow}
    with replaced(*((tensor, "data", tensor.data.to(dtype)) for tensor in tensors.values())):
        yield


_HALVES = (torch.float16, torch.bfloat16)


def is_half(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds numbers of 16 bits."""
    return tensor.dtype in _HALVES


@contextmanager
def halves_in_float32(model: nn.Module) -> Iterator[None]:
    """Within it, parameters of 16 bits are float32, and so is what forward would compute in 16 bits.

    The runtime has few kernels for 16 bits on the CPU, and an optimizer needs float32 weights in any case. Methods are
    replaced rather than functions intercepted, so that it holds in a trace too.
    """
    convert = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args, kwargs = (
            tuple(map(_at_least_float32, args)),
            {k: _at_least_float32(v) for k, v in kwargs.items()},
        )
        return convert(self, *args, **kwargs)

    methods = (
        (torch.Tensor, "to", to),
        (torch.Tensor, "half", lambda self: self.float()),
        (torch.Tensor, "bfloat16", lambda self: self.float()),
        # autocast on the CPU means bfloat16, for which the runtime has hardly a kernel there
        (torch.autocast, "__enter__", lambda self: self),
        (torch.autocast, "__exit__", lambda self, *error: None),
    )
    with replaced(*methods), _stored_as(torch.float32, _HALVES, model):
        yield


def _at_least_float32(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in _HALVES else value
