"""Make mixtures of experts traceable: each expert reads the tokens that were sent to it, whichever they are.

transformers sorts tokens by expert with operators that have no export, or loops over the experts that one batch
happens to use, which a trace would freeze.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.export.torch.replace import replaced

_NAME = "onward"


@contextmanager
def traceable_experts(model: Any) -> Iterator[None]:
    """Let the experts of a Hugging Face model be computed one by one, for as long as the context lasts."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    moe_configs: dict[int, Any] = {
        id(c): c for c in configs if getattr(c, "_experts_implementation", None) is not None
    }
    if moe_configs:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(_NAME, _experts)
    with replaced(*((config, "_experts_implementation", _NAME) for config in moe_configs.values())):
        yield


def _experts(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Σ weight · expert(token) over the experts chosen for each token; `chosen` and `weights` are [tokens, k]."""
    total = torch.zeros_like(hidden)
    for expert in range(self.num_experts):
        sent = chosen == expert
        share = (weights * sent.to(weights.dtype)).sum(-1)
        # Only the tokens sent here: all tokens through all experts would cost as much as a dense model of their sum.
        rows = torch.nonzero(sent.any(-1)).squeeze(1)
        x = hidden.index_select(0, rows)
        x = _linear(self, x, "gate_up" if self.has_gate else "up", expert)
        x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
        x = _linear(self, x, "down", expert)
        if getattr(self, "has_post_expert_norm", False):
            x = self.post_expert_norm(x)
        x = x * share.index_select(0, rows).unsqueeze(1).to(x.dtype)
        # No token is sent twice to one expert, so nothing is overwritten.
        total = total + torch.zeros_like(hidden).scatter(0, rows.unsqueeze(1).expand(-1, hidden.shape[1]), x)
    return total


def _linear(self: Any, x: Tensor, part: str, expert: int) -> Tensor:
    weight = getattr(self, f"{part}_proj")[expert]
    bias = getattr(self, f"{part}_proj_bias")[expert] if getattr(self, "has_bias", False) else None
    return F.linear(x, weight.t() if getattr(self, "is_transposed", False) else weight, bias)
