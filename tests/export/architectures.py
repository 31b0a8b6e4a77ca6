"""Small versions of common architectures, one row each, for tests of export and training.

`ARCHITECTURES[name].module()` builds it with random weights from a fixed seed and every kind of dropout it has
switched on; `.args()` gives positional and keyword example arguments; `.axes` the names of the dynamic axes that
an export should find.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["ARCHITECTURES", "Architecture"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    name: str
    factory: Callable[[], nn.Module]
    example: Callable[[], Arguments]
    axes: frozenset[str]
    transformers: bool = False

    def module(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.factory()

    def args(self, seed: int = 1) -> Arguments:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.example()

    def __str__(self) -> str:
        return self.name


class Residual(nn.Module):
    """conv-bn-relu-conv-bn plus a shortcut, as in ResNet."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential(
            nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
        )

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        Residual(8, 8, 1),
        Residual(8, 16, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


class InvertedResidual(nn.Module):
    """Expand, depthwise, project, as in MobileNetV2; squeeze-and-excite as in V3."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = channels * 4
        self.expand = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.Hardswish()
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 8, 1), nn.ReLU(), nn.Conv2d(8, wide, 1), nn.Hardsigmoid()
        )
        self.project = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x):
        y = self.depthwise(self.expand(x))
        return x + self.project(y * self.squeeze(y))


def mobilenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
        InvertedResidual(8),
        InvertedResidual(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8, 10),
    )


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, layer norm over channels, inverted bottleneck, layer scale, stochastic depth."""

    def __init__(self, channels: int, rate: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.grow = nn.Linear(channels, 4 * channels)
        self.shrink = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.1))
        self.rate = rate

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = (self.scale * self.shrink(F.gelu(self.grow(y)))).permute(0, 3, 1, 2)
        if self.training:
            keep = 1 - self.rate
            y = (
                y
                / keep
                * torch.floor(keep + torch.rand((x.shape[0], 1, 1, 1), dtype=x.dtype, device=x.device))
            )
        return x + y


def convnext() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 4),
        ConvNeXtBlock(8, 0.1),
        ConvNeXtBlock(8, 0.3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(8),
        nn.Linear(8, 10),
    )


class UNet(nn.Module):
    """Down, up by transposed convolution, up by interpolation, skips joined by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = self.block(3, 8)
        self.down = self.block(8, 16)
        self.deep = self.block(16, 16)
        self.up = nn.ConvTranspose2d(16, 16, 2, 2)
        self.middle = self.block(32, 8)
        self.leave = self.block(16, 8)
        self.head = nn.Conv2d(8, 2, 1)

    @staticmethod
    def block(inside: int, outside: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU())

    def forward(self, image):
        a = self.enter(image)
        b = self.down(F.max_pool2d(a, 2))
        c = self.deep(F.max_pool2d(b, 2))
        b = self.middle(torch.cat([self.up(c), b], 1))
        b = F.interpolate(b, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.leave(torch.cat([b, a], 1)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], *, bidirectional: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 12)
        self.rnn = kind(12, 8, num_layers=2, batch_first=True, dropout=0.3, bidirectional=bidirectional)
        self.head = nn.Linear(16 if bidirectional else 8, 5)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 3),
    )


def _images(size: int = 32) -> Callable[[], Arguments]:
    return lambda: ((torch.randn(2, 3, size, size),), {})


def _tokens(*names: str, length: int = 8) -> Callable[[], Arguments]:
    def example() -> Arguments:
        found: dict[str, torch.Tensor] = {}
        for name in names:
            mask = torch.ones(2, length, dtype=torch.long)
            if name == "attention_mask":
                mask[1, -3:] = 0
                found[name] = mask
            elif name == "decoder_input_ids":
                found[name] = torch.randint(5, 60, (2, length - 2))
            else:
                found[name] = torch.randint(5, 60, (2, length))
        return (), found

    return example


SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SMALL))


def _roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    return RobertaForSequenceClassification(RobertaConfig(**SMALL, num_labels=3, pad_token_id=1))


def _distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        vocab_size=64, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=40, num_labels=3
    )
    return DistilBertForSequenceClassification(config)


def _deberta() -> nn.Module:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    config = DebertaV2Config(
        **SMALL,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        position_biased_input=False,
        num_labels=3,
    )
    return DebertaV2ForSequenceClassification(config)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=40))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, attention_dropout=0.1))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=3,
    )
    return ViTForImageClassification(config)


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=64,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=12,
        max_target_positions=20,
        dropout=0.1,
        attention_dropout=0.1,
        activation_dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return WhisperForConditionalGeneration(config)


def _whisper_example() -> Arguments:
    return (), {"input_features": torch.randn(2, 8, 24), "decoder_input_ids": torch.randint(5, 60, (2, 6))}


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {**SMALL, "attention_dropout": 0.1, "eos_token_id": 63, "bos_token_id": 62, "pad_token_id": 0}
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 16,
        "patch_size": 8,
        "attention_dropout": 0.1,
    }
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def _clip_example() -> Arguments:
    tokens = torch.randint(5, 60, (2, 8))
    tokens[:, -1] = 63
    return (), {
        "input_ids": tokens,
        "pixel_values": torch.randn(2, 3, 16, 16),
        "attention_mask": torch.ones_like(tokens),
    }


def _row(
    name: str,
    factory: Callable[[], nn.Module],
    example: Callable[[], Arguments],
    *axes: str,
    hf: bool = False,
):
    return name, Architecture(name, factory, example, frozenset(axes), hf)


TEXT = ("input_ids", "attention_mask")

ARCHITECTURES: dict[str, Architecture] = dict(
    [
        _row("mlp", _mlp, lambda: ((torch.randn(4, 8),), {}), "batch"),
        _row("resnet", resnet, _images(), "batch", "height", "width"),
        _row("mobilenet", mobilenet, _images(), "batch", "height", "width"),
        _row("convnext", convnext, _images(), "batch", "height", "width"),
        _row("unet", UNet, _images(16), "batch", "height", "width"),
        _row("lstm", lambda: Recurrent(nn.LSTM, bidirectional=True), _tokens("tokens"), "batch", "sequence"),
        _row("gru", lambda: Recurrent(nn.GRU, bidirectional=False), _tokens("tokens"), "batch", "sequence"),
        _row("bert", _bert, _tokens(*TEXT), "batch", "sequence", hf=True),
        _row("roberta", _roberta, _tokens(*TEXT), "batch", "sequence", hf=True),
        _row("distilbert", _distilbert, _tokens(*TEXT), "batch", "sequence", hf=True),
        _row("deberta", _deberta, _tokens(*TEXT), "batch", "sequence", hf=True),
        _row("gpt2", _gpt2, _tokens(*TEXT), "batch", "sequence", hf=True),
        _row(
            "t5",
            _t5,
            _tokens(*TEXT, "decoder_input_ids"),
            "batch",
            "sequence",
            "decoder_input_ids_dim1",
            hf=True,
        ),
        _row("llama", _llama, _tokens(*TEXT), "batch", "sequence", hf=True),
        _row("vit", _vit, lambda: ((), {"pixel_values": torch.randn(2, 3, 16, 16)}), "batch", hf=True),
        _row("whisper", _whisper, _whisper_example, "batch", "sequence", hf=True),
        _row("clip", _clip, _clip_example, "batch", "sequence", hf=True),
    ]
)
