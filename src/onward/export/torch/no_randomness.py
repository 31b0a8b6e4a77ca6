"""Runs a torch module in training mode without randomness, so that outputs can be compared.

The ONNX counterparts of torch's random functions are in `assemble.neutralised`, with the same values.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from onward.export.torch.patches import alpha_dropout_constants

__all__ = ["Neutral", "calling_line", "neutral_dropout"]


class Neutral(TorchFunctionMode):
    """Within it nothing is random: dropout is the identity, random functions return fixed values.

    `active` counts the dropouts that would have dropped something. The same stand-ins are put into the ONNX
    model for comparison: uniform draws give 0.5, Bernoulli draws 1 where p >= 0.5, normal draws their mean.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active = 0
        # the lines of the module that ask a tensor whether it is true
        self.decisions: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__bool__":
            self.decisions[calling_line()] = None
        if name in _DROPOUTS:
            bound = dict(zip(("input", "p", "training"), args)) | kwargs
            on = bound.get("training", bound.get("train", True)) and bound.get("p", 0.5) > 0
            self.active += bool(on)
            if not on or "alpha" not in name:
                return bound["input"]
            scale, shift, _ = alpha_dropout_constants(
                bound.get("p", 0.5)
            )  # that stay where nothing is dropped
            return bound["input"] * scale + shift
        if name in ("rrelu", "rrelu_"):
            bound = dict(zip(("input", "lower", "upper", "training"), args)) | kwargs
            if bound.get("training", False):
                slope = (bound.get("lower", 1 / 8) + bound.get("upper", 1 / 3)) / 2
                return torch.nn.functional.leaky_relu(bound["input"], slope)
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


def calling_line() -> str:
    """Where in the user's own code, or a library's, we are: the nearest line that is not torch's or ours."""
    own = (torch.__path__[0], str(Path(__file__).parent))
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(own):
            return f"at {frame.filename}:{frame.lineno} ({frame.line})"
    return "somewhere"


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


def _between(drawn: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    bound = dict(zip(("self", "from", "to"), args)) | kwargs
    low, high = bound.get("from", 0.0), bound.get("to", 1.0)
    return drawn.fill_(low + (high - low) / 2)


_DRAWS: dict[str, Callable[[torch.Tensor, Any, Any], torch.Tensor]] = {
    "rand": lambda drawn, args, kwargs: drawn.fill_(0.5),
    "rand_like": lambda drawn, args, kwargs: drawn.fill_(0.5),
    "randn": lambda drawn, args, kwargs: drawn.zero_(),
    "randn_like": lambda drawn, args, kwargs: drawn.zero_(),
    "normal": lambda drawn, args, kwargs: drawn.copy_(
        torch.as_tensor(kwargs.get("mean", (*args, 0.0)[0])).detach()
    ),
    "randperm": lambda drawn, args, kwargs: drawn.copy_(torch.arange(drawn.numel())),
    "uniform_": _between,
    "normal_": lambda drawn, args, kwargs: drawn.fill_(kwargs.get("mean", args[1] if len(args) > 1 else 0.0)),
    "exponential_": lambda drawn, args, kwargs: drawn.fill_(
        math.log(2) / kwargs.get("lambd", args[1] if len(args) > 1 else 1.0)
    ),
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
