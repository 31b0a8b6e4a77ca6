"""The models that every engine trains, as torch modules that return scores, with one batch of data each.

The loss is cross entropy, which each engine adds in its own way.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["MODELS", "NETWORKS", "Workload", "sized_encoder", "workload"]

Made = tuple[nn.Module, tuple[torch.Tensor, ...], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A module that maps inputs to scores [rows, classes], inputs for it, and the labels of the rows."""

    name: str
    make: Callable[[], Made]
    dynamic: dict[str, dict[int, str]]

    def build(self) -> Made:
        torch.manual_seed(0)
        module, inputs, labels = self.make()
        return module.train(), inputs, labels


def _mlp() -> Made:
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return net, (torch.randn(32, 64),), torch.randint(0, 10, (32,))


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.short = nn.Identity()
        if stride != 1 or inside != outside:
            self.short = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.short(x))


def _resnet() -> Made:
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    return net, (torch.randn(32, 3, 32, 32),), torch.randint(0, 10, (32,))


class Inverted(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int, expand: int = 4) -> None:
        super().__init__()
        wide = inside * expand
        self.same = stride == 1 and inside == outside
        self.layers = nn.Sequential(
            nn.Conv2d(inside, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, outside, 1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        return x + y if self.same else y


def _mobilenet() -> Made:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(),
        Inverted(16, 24, 2), Inverted(24, 24, 1), Inverted(24, 32, 2), Inverted(32, 32, 1), Inverted(32, 64, 2),
        nn.Conv2d(64, 256, 1, bias=False), nn.BatchNorm2d(256), nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    return net, (torch.randn(16, 3, 56, 56),), torch.randint(0, 10, (16,))


def _resnet18() -> Made:
    """ResNet-18's layers, a quarter as wide, on small images: what counts here is the graph."""
    widths = (16, 32, 64, 128)
    blocks = [
        Residual(before if half == 0 else width, width, 2 if half == 0 and width > 16 else 1)
        for before, width in zip((16, *widths), widths)
        for half in range(2)
    ]
    net = nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    return net, (torch.randn(2, 3, 64, 64),), torch.randint(0, 10, (2,))


def _video() -> Made:
    """Three-dimensional convolutions with batch norms and residuals, as in networks for video."""

    def layer(inside: int, outside: int, stride: int) -> list[nn.Module]:
        return [nn.Conv3d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm3d(outside), nn.ReLU()]

    widths = (16, 16, 16, 32, 32, 64, 64, 128, 128)
    layers = [
        part
        for before, width in zip((3, *widths), widths)
        for part in layer(before, width, 1 if before == width else 2)
    ]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(128, 10))
    return net, (torch.randn(2, 3, 8, 32, 32),), torch.randint(0, 10, (2,))


class Encoder(nn.Module):
    """MiniLM's shape: 6 layers of width 384, 12 heads, 30,522 tokens."""

    def __init__(self, layers: int = 6) -> None:
        from transformers import BertConfig, BertForSequenceClassification

        super().__init__()
        self.bert = BertForSequenceClassification(
            BertConfig(
                hidden_size=384,
                num_hidden_layers=layers,
                num_attention_heads=12,
                intermediate_size=1536,
                num_labels=2,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                attn_implementation="eager",
            )
        )

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).logits


def _encoder(batch: int, length: int, layers: int = 6) -> Callable[[], Made]:
    def make() -> Made:
        ids = torch.randint(5, 30000, (batch, length))
        return Encoder(layers), (ids, torch.ones_like(ids)), torch.randint(0, 2, (batch,))

    return make


class Decoder(nn.Module):
    """GPT-2's shape, small: 6 layers of width 384, 6 heads, 8,192 tokens, next-token loss."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        self.gpt = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=8192,
                n_positions=256,
                n_embd=384,
                n_layer=6,
                n_head=6,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                attn_implementation="eager",
                use_cache=False,
            )
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.gpt(input_ids=input_ids).logits.reshape(-1, 8192)


def _decoder() -> Made:
    return Decoder(), (torch.randint(0, 8192, (4, 128)),), torch.randint(0, 8192, (512,))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def _lstm() -> Made:
    return Recurrent(), (torch.randn(32, 64, 64),), torch.randint(0, 10, (32,))


_IMAGES = {"x": {0: "batch"}}
_TOKENS = {0: "batch", 1: "sequence"}
MODELS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("mlp", _mlp, _IMAGES),
        Workload("resnet", _resnet, _IMAGES),
        Workload("mobilenet", _mobilenet, _IMAGES),
        Workload("encoder-2x32", _encoder(2, 32), {"input_ids": _TOKENS, "attention_mask": _TOKENS}),
        Workload("encoder-8x128", _encoder(8, 128), {"input_ids": _TOKENS, "attention_mask": _TOKENS}),
        Workload("decoder", _decoder, {"input_ids": _TOKENS}),
        Workload("lstm", _lstm, {"x": {0: "batch", 1: "sequence"}}),
    )
}
# Networks whose graphs are counted and not timed.
NETWORKS: dict[str, Workload] = {
    "resnet18": Workload("resnet18", _resnet18, _IMAGES),
    "video": Workload("video", _video, _IMAGES),
}


def sized_encoder(layers: int, batch: int) -> str:
    """The name of an encoder of some depth with a batch of sequences of 64, for `workload`."""
    return f"encoder-{layers}-layers-{batch}x64"


def workload(name: str) -> Workload:
    """A model by its name."""
    if name in MODELS or name in NETWORKS:
        return {**MODELS, **NETWORKS}[name]
    layers, batch = (int(number) for number in re.fullmatch(r"encoder-(\d+)-layers-(\d+)x64", name).groups())
    return Workload(name, _encoder(batch, 64, layers), {"input_ids": _TOKENS, "attention_mask": _TOKENS})
