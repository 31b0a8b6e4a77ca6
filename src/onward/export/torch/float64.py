"""Runs a torch module in float64: the reference for the float32 errors of torch and of an export.

The module is not copied: its parameters are converted temporarily.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["in_float64"]


class _Wide(TorchFunctionMode):
    """Whatever asks for float32 gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _wider(value) for name, value in (kwargs or {}).items()}
        if getattr(func, "__name__", "") == "float":
            return args[0].double()
        return func(*(_wider(value) for value in args), **kwargs)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Within it, the module's parameters and buffers are float64, and so is what it computes from them."""
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()] if t.dtype == torch.float32}
    held = [(tensor, tensor.data) for tensor in tensors.values()]
    default = torch.get_default_dtype()
    try:
        for tensor, data in held:
            tensor.data = data.double()
        torch.set_default_dtype(torch.float64)
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(default)
        for tensor, data in held:
            tensor.data = data
