"""One vector from many: the pooling of sentence encoders, as a torch module.

Knows the modes of sentence-transformers, dense layers after them and unit length; nothing of models or ONNX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from onward.errors import ExportError

if TYPE_CHECKING:
    from onward.export.huggingface.find_model import Pooling

__all__ = ["PoolingHead", "pooling_head"]


class PoolingHead(nn.Module):
    """Token vectors and their mask to one vector for each row."""

    def __init__(self, modes: tuple[str, ...], layers: list[nn.Module], *, normalize: bool) -> None:
        super().__init__()
        self.modes = modes
        self.normalize = normalize
        self.dense = nn.ModuleList(layers)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            mask = torch.ones(hidden.shape[:2], dtype=torch.int64)
        vectors = [_pool(mode, hidden, mask) for mode in self.modes]
        vector = vectors[0] if len(vectors) == 1 else torch.cat(vectors, dim=1)
        for layer in self.dense:
            vector = layer(vector)
        if self.normalize:
            # Written out: the exporter keeps the size of the last axis through these, not through normalize().
            vector = vector / (vector * vector).sum(1, keepdim=True).sqrt().clamp(min=1e-12)
        return vector


def pooling_head(pooling: Pooling) -> PoolingHead:
    """The module for a folder's settings."""
    layers: list[nn.Module] = []
    for dense in pooling.dense:
        linear = nn.Linear(dense.weight.shape[1], dense.weight.shape[0], bias=dense.bias is not None)
        linear.weight = nn.Parameter(dense.weight.float())
        if dense.bias is not None:
            linear.bias = nn.Parameter(dense.bias.float())
        activation = getattr(nn, dense.activation, None)
        if activation is None:
            raise ExportError(f"unknown activation {dense.activation!r} after the pooling")
        layers += [linear, activation()]
    return PoolingHead(pooling.modes, layers, normalize=pooling.normalize)


def _pool(mode: str, hidden: Tensor, mask: Tensor) -> Tensor:
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    if mode == "cls":
        # The first real token: with padding on the left it is not at 0.
        return _pick(hidden, mask.to(torch.int32).argmax(dim=1))
    if mode == "lasttoken":
        positions = torch.arange(1, 1 + mask.shape[1], dtype=torch.int32)
        return _pick(hidden, (mask.to(torch.int32) * positions).argmax(dim=1))
    if mode == "max":
        return (hidden + (1.0 - weight) * torch.finfo(hidden.dtype).min).max(dim=1).values
    if mode == "weightedmean":
        weight = weight * torch.cumsum(weight, dim=1)
    total = (hidden * weight).sum(1)
    count = weight.sum(1).clamp(min=1e-9)
    return total / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)


def _pick(hidden: Tensor, position: Tensor) -> Tensor:
    index = position.reshape(-1, 1, 1).expand(-1, 1, hidden.shape[-1])
    return hidden.gather(1, index).squeeze(1)
