"""The architectures of `benchmarks/models.py`: layers and networks of torch, Hugging Face types, and more.

Each is built with random weights and without dropout, so that a step can be compared with torch to the last digit.
Hugging Face models come from their own configuration classes with small sizes. torchvision's and timm's networks,
where those packages are installed, are as published but for the size of the pictures. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from export.architectures import ARCHITECTURES
from export.test_torch_check import CHANGES, NETWORKS

__all__ = ["CHANGES", "Entry", "depth_anything", "entries"]


@dataclass(frozen=True)
class Entry:
    """A model and example arguments, as tensors by the name of the parameter of `forward`."""

    name: str
    family: str
    build: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
    # whether changed graphs of it must be refused too
    changes: bool = False


class Call(nn.Module):
    """A linear layer before and after something."""

    def __init__(
        self, function: Callable[[Call, torch.Tensor], torch.Tensor], *parts: nn.Module, width: int = 8
    ):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)
        self.first, self.last = nn.Linear(width, width), nn.LazyLinear(3)

    def forward(self, x):
        return self.last(self.function(self, self.first(x)))


def _after(part: nn.Module) -> Callable[[], nn.Module]:
    return lambda: Call(lambda model, x: model.parts[0](x), part)


def _image(part: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), part(), nn.Flatten(), nn.LazyLinear(3))


class Codebook(nn.Module):
    """A vector-quantized autoencoder: nearest codes, gradients straight through, two detached terms."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 4), nn.Linear(4, 8)
        self.codes = nn.Parameter(torch.randn(10, 4))

    def forward(self, x):
        z = self.encode(x)
        near = torch.cdist(z.detach(), self.codes.detach()).argmin(-1)
        code = F.embedding(near, self.codes)
        apart = (code - z.detach()).pow(2).mean() + 0.25 * (code.detach() - z).pow(2).mean()
        return self.decode(z + (code - z).detach()) + apart


class Graph(nn.Module):
    """Two rounds of messages along edges, summed by scatter, as graph networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(8, 8), nn.GRUCell(8, 8)

    def forward(self, x, edges):
        for _ in range(2):
            sent = self.message(x)[edges[0]]
            gathered = torch.zeros_like(x).index_add(0, edges[1], sent)
            x = self.update(gathered, x)
        return x


class Mixture(nn.Module):
    """A soft mixture of experts, and the two best of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)
        )

    def forward(self, x):
        weights, places = self.gate(x).softmax(-1).topk(2, -1)
        every = torch.stack([expert(x) for expert in self.experts], -2)
        return (every.gather(-2, places[..., None].expand(*places.shape, 8)) * weights[..., None]).sum(-2)


class TwoTowers(nn.Module):
    """Embeddings of users and things, a dot product, and a bias of each."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.things = nn.Embedding(20, 8, padding_idx=0), nn.Embedding(30, 8, padding_idx=0)
        self.bias = nn.Embedding(30, 1)

    def forward(self, user, thing):
        return (self.users(user) * self.things(thing)).sum(-1, keepdim=True) + self.bias(thing)


class Attend(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x):
        return self.layer(x, x, x)[0]


class States(nn.Module):
    """A state-space model: a diagonal recurrence unrolled over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.inside, self.outside = (
            nn.Parameter(torch.randn(16)),
            nn.Linear(8, 16),
            nn.Linear(16, 3),
        )

    def forward(self, x):
        state, decay, steps = x.new_zeros(x.size(0), 16), torch.sigmoid(self.rate), []
        for step in self.inside(x).unbind(1):
            state = decay * state + (1 - decay) * step
            steps.append(state)
        return self.outside(torch.stack(steps, 1))


class Autoencoder(nn.Module):
    """Mean and spread, and the sample that dropout-free training gives: the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x):
        mean, spread = self.encode(x).chunk(2, -1)
        return self.decode(mean), (mean.pow(2) + spread.exp() - spread - 1).mean()


class Coupling(nn.Module):
    """A coupling layer of a normalizing flow, with its log determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x):
        a, b = x.chunk(2, -1)
        scale, shift = self.net(a).chunk(2, -1)
        return torch.cat([a, b * torch.exp(torch.tanh(scale)) + shift], -1), torch.tanh(scale).sum(-1)


_ROWS, _TIME, _PICTURE = (4, 8), (2, 6, 8), (2, 3, 8, 8)

_LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{
        f"nn.{type(part).__name__}": (_after(part), _ROWS)
        for part in (
            nn.ELU(), nn.SELU(), nn.CELU(), nn.GELU(), nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.PReLU(), nn.Softsign(),
            nn.LayerNorm(8), nn.RMSNorm(8), nn.BatchNorm1d(8), nn.GLU(), nn.LogSoftmax(-1), nn.RReLU(0.2, 0.2),
        )
    },
    **{
        f"nn.{name}": (_image(part), _PICTURE)
        for name, part in {
            "GroupNorm": lambda: nn.GroupNorm(2, 8), "InstanceNorm2d": lambda: nn.InstanceNorm2d(8, affine=True),
            "BatchNorm2d": lambda: nn.BatchNorm2d(8), "LocalResponseNorm": lambda: nn.LocalResponseNorm(3),
            "MaxPool2d": lambda: nn.MaxPool2d(3, 2, 1), "AvgPool2d": lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True),
            "LPPool2d": lambda: nn.LPPool2d(2, 2), "AdaptiveAvgPool2d": lambda: nn.AdaptiveAvgPool2d(4),
            "AdaptiveMaxPool2d": lambda: nn.AdaptiveMaxPool2d(2), "PixelShuffle": lambda: nn.PixelShuffle(2),
            "PixelUnshuffle": lambda: nn.PixelUnshuffle(2), "ChannelShuffle": lambda: nn.ChannelShuffle(2),
            "ConvTranspose2d": lambda: nn.ConvTranspose2d(8, 4, 3, 2, 1, output_padding=1),
            "Conv2d dilated": lambda: nn.Conv2d(8, 8, 3, dilation=2, padding=2, groups=4),
            "Upsample bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
            "Upsample bicubic": lambda: nn.Upsample(scale_factor=1.5, mode="bicubic"),
            "ReflectionPad2d": lambda: nn.ReflectionPad2d(2), "CircularPad2d": lambda: nn.CircularPad2d(1),
            "Unfold": lambda: nn.Unfold(3, padding=1),
        }.items()
    },
    "nn.MultiheadAttention": (Attend, _TIME),
    "nn.MultiheadAttention bias_kv": (lambda: Attend(add_bias_kv=True, add_zero_attn=True), _TIME),
    "nn.TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2), _TIME
    ),
    "nn.TransformerEncoder norm_first": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True), 2
        ), _TIME
    ),
    "nn.LSTM bidirectional": (lambda: nn.Sequential(nn.LSTM(8, 5, 2, batch_first=True, bidirectional=True)), _TIME),
    "nn.GRU": (lambda: nn.Sequential(nn.GRU(8, 5, 2, batch_first=True)), _TIME),
    "nn.RNN": (lambda: nn.Sequential(nn.RNN(8, 5, batch_first=True)), _TIME),
    "Conv1d over time": (lambda: nn.Sequential(nn.Conv1d(6, 4, 3, padding=1), nn.ReLU(), nn.Linear(8, 3)), _TIME),
    "Conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)), (2, 2, 4, 4, 4)),
    "state space": (States, _TIME),
    "soft mixture of experts": (Mixture, _TIME),
    "vector-quantized autoencoder": (Codebook, _ROWS),
    "variational autoencoder": (Autoencoder, _ROWS),
    "normalizing flow": (Coupling, _ROWS),
    "einsum": (lambda: Call(lambda model, x: torch.einsum("bi,bj->bij", x, x).flatten(1)), _ROWS),
    "cumulative sum": (lambda: Call(lambda model, x: x.cumsum(-1)), _ROWS),
    "sort": (lambda: Call(lambda model, x: x.sort(-1).values), _ROWS),
    "norms": (lambda: Call(lambda model, x: F.normalize(x) * x.norm(dim=-1, keepdim=True)), _ROWS),
    "rfft": (lambda: Call(lambda model, x: torch.fft.rfft(x).abs()), _ROWS),
    "logsumexp": (lambda: Call(lambda model, x: x.logsumexp(-1, keepdim=True) + x), _ROWS),
    "where and clamp": (lambda: Call(lambda model, x: torch.where(x > 0, x.clamp(max=1), 0.1 * x)), _ROWS),
}  # fmt: skip


def _layers() -> Iterator[Entry]:
    for name, (make, shape) in _LAYERS.items():

        def build(make=make, shape=shape):
            model, x = make(), torch.randn(*shape)
            model(x)  # lazy layers learn their sizes
            return model, (x,), {}

        yield Entry(name, "torch", build)
    yield Entry("graph network", "torch", lambda: (
        Graph(), (torch.randn(5, 8), torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])), {}
    ))  # fmt: skip
    yield Entry("two towers", "torch", lambda: (
        TwoTowers(), (torch.tensor([1, 5, 0, 7]), torch.tensor([3, 0, 8, 9])), {}
    ))  # fmt: skip
    yield Entry(
        "nn.Bilinear", "torch", lambda: (nn.Bilinear(8, 6, 3), (torch.randn(4, 8), torch.randn(4, 6)), {})
    )
    yield Entry("nn.EmbeddingBag", "torch", lambda: (
        nn.EmbeddingBag(12, 4, mode="mean"), (torch.randint(12, (3, 5)),), {}
    ))  # fmt: skip
    yield Entry("nn.Transformer", "torch", lambda: (
        nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True), (torch.randn(2, 5, 8), torch.randn(2, 4, 8)), {}
    ))  # fmt: skip
    for name in ("mlp", "resnet", "mobilenet", "convnext", "unet", "lstm", "gru"):

        def from_table(name=name):
            row = ARCHITECTURES[name]
            return _without_dropout(row.module()), *row.args()

        yield Entry(name, "torch", from_table)
    for name in NETWORKS:

        def deep(name=name):
            return NETWORKS[name](), (torch.randn(3, 3, 4, 4),), {}

        yield Entry(f"{name}, deep", "torch", deep)


def _without_dropout(model: nn.Module) -> nn.Module:
    for part in model.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        if isinstance(part, nn.RNNBase):
            part.dropout = 0.0
        for rate in ("drop_prob", "rate"):  # layers skipped at random
            if isinstance(getattr(part, rate, None), float):
                setattr(part, rate, 0.0)
    return model


# ---- Hugging Face ----------------------------------------------------------------------------------

_SMALL = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim", "embed_dim"), 16
    ),
    **dict.fromkeys(("word_embed_proj_dim", "moe_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(
        ("decoder_attention_heads", "num_key_value_heads", "num_experts_per_tok", "type_vocab_size"), 2
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"), 32
    ),
    **dict.fromkeys(("hidden_dim", "image_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("d_kv", "head_dim", "patch_size"), 8),
    **dict.fromkeys(
        ("encoder_layerdrop", "decoder_layerdrop", "layerdrop", "hidden_dropout_prob", "dropout"), 0.0
    ),
    **dict.fromkeys(("attention_probs_dropout_prob", "attention_dropout", "resid_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(("attn_pdrop", "dropout_rate", "activation_dropout", "hidden_dropout"), 0.0),
    "vocab_size": 60,
    "decoder_start_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": False,
}

_TEXT = [
    "albert",
    "bert",
    "bert-generation",
    "big_bird",
    "biogpt",
    "bloom",
    "camembert",
    "canine",
    "codegen",
    "cohere",
    "convbert",
    "cpmant",
    "ctrl",
    "data2vec-text",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "ernie",
    "esm",
    "eurobert",
    "flaubert",
    "fnet",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_neox_japanese",
    "granite",
    "granitemoe",
    "helium",
    "ibert",
    "jetmoe",
    "layoutlm",
    "llama",
    "longformer",
    "mamba",
    "megatron-bert",
    "mistral",
    "mixtral",
    "mobilebert",
    "modernbert",
    "mpnet",
    "mpt",
    "mra",
    "nomic_bert",
    "nystromformer",
    "olmo",
    "olmo2",
    "olmoe",
    "openai-gpt",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roformer",
    "rwkv",
    "smollm3",
    "splinter",
    "squeezebert",
    "stablelm",
    "starcoder2",
    "tapas",
    "visual_bert",
    "xglm",
    "xlm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xlstm",
    "yoso",
]
_PAIRS = [
    "bart",
    "blenderbot",
    "blenderbot-small",
    "led",
    "longt5",
    "m2m_100",
    "marian",
    "mbart",
    "mt5",
    "mvp",
    "pegasus",
    "pegasus_x",
    "plbart",
    "switch_transformers",
    "t5",
    "umt5",
]
_IMAGES = [
    "beit",
    "data2vec-vision",
    "deit",
    "dinov2",
    "dinov2_with_registers",
    "dinov3_vit",
    "dpt",
    "ijepa",
    "siglip_vision_model",
    "clip_vision_model",
    "vit",
    "vit_msn",
    "mobilenet_v1",
    "mobilenet_v2",
    "mobilevit",
    "swiftformer",
    "bit",
    "detr",
    "resnet",
    "regnet",
    "convnext",
    "convnextv2",
    "swin",
    "segformer",
    "poolformer",
    "focalnet",
    "cvt",
]
# Networks whose changed graphs must be refused too.
_CHANGED = frozenset({"mobilenet_v1", "mobilenet_v2", "bit", "detr"})


# Sizes that a type needs otherwise.
_OWN: dict[str, dict[str, Any]] = {
    "codegen": {"num_attention_heads": 4, "n_head": 4, "hidden_size": 64, "n_embd": 64, "rotary_dim": 8},
    "esm": {"vocab_size": 60, "pad_token_id": 0, "mask_token_id": 59},
    # positions are rescaled at random in training
    "bit": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_groups": 4},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    **{
        kind: {"depths": [1] * 4, "hidden_sizes": [8, 8, 16, 16], "drop_path_rate": 0.0, "patch_size": 4}
        for kind in ("convnext", "convnextv2", "segformer", "poolformer")
    },
    "swin": {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "drop_path_rate": 0.0},
    "focalnet": {
        "embed_dim": 8,
        "depths": [1, 1],
        "hidden_sizes": [8, 16],
        "focal_levels": [1, 1],
        "focal_windows": [3, 3],
        "patch_size": 4,
        "drop_path_rate": 0.0,
    },
    "cvt": {
        "embed_dim": [8, 16, 16],
        "num_heads": [1, 2, 2],
        "depth": [1, 2, 3],
        "drop_path_rate": [0.0] * 3,
    },
    "dinov3_vit": {"pos_embed_rescale": None, "pos_embed_shift": None, "pos_embed_jitter": None},
}


# Types that share most of their code with another one: the last to be run.
_LIKE_ANOTHER = frozenset(
    """blenderbot-small clip_vision_model data2vec-text data2vec-vision dinov2_with_registers ernie glm4
    gpt_neox_japanese helium ijepa jetmoe megatron-bert mra mt5 mvp olmo2 pegasus persimmon phimoe plbart qwen3_moe
    rembert roberta-prelayernorm smollm3 splinter starcoder2 tapas umt5 xlm-roberta xlm-roberta-xl""".split()  # noqa: SIM905
)


def _transformer(kind: str, inputs: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    if find_spec("torchvision") is not None:
        _load_torchvision()  # some types import it where it is
    import transformers

    transformers.logging.set_verbosity_error()
    cls = transformers.CONFIG_MAPPING[kind]
    default = cls()
    sizes = {
        name: value
        for name, value in _SMALL.items()
        if getattr(default, name, None) is not None and not isinstance(getattr(default, name), (list, tuple))
    }
    own = dict(_OWN.get(kind, {}))
    if kind == "detr":
        backbone = transformers.ResNetConfig(**_OWN["resnet"], out_features=["stage2"])
        own |= {"use_timm_backbone": False, "backbone": None, "backbone_config": backbone, "num_queries": 5}
    config = cls(**{**sizes, **own})
    model = _without_dropout(transformers.AutoModel.from_config(config))
    if kind in _CHANGED:
        model = _certain(model)
    ids = torch.randint(3, 50, (2, 8))
    if inputs == "pictures":
        return model, (), {"pixel_values": torch.randn(2, 3, 32, 32)}
    if inputs == "pairs":
        return model, (), {"input_ids": ids, "decoder_input_ids": torch.randint(3, 50, (2, 6))}
    return model, (), {"input_ids": ids}


def depth_anything() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Features of two depths of a vision transformer, resized to each other and to the picture."""
    import transformers

    backbone = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=28, patch_size=14,
        out_indices=[1, 2], reshape_hidden_states=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config = transformers.DepthAnythingConfig(
        backbone_config=backbone, reassemble_hidden_size=16, neck_hidden_sizes=[8, 8], reassemble_factors=[2, 1],
        fusion_hidden_size=8, head_hidden_size=4, patch_size=14,
    )  # fmt: skip
    model = transformers.DepthAnythingForDepthEstimation(config)
    return model, (), {"pixel_values": torch.randn(2, 3, 28, 28)}


# ---- torchvision and timm, where they are installed ---------------------------------------------------

# Published networks whose training mode amplifies rounding: a changed graph must be refused all the same.
_TORCHVISION = (
    "mobilenet_v2", "regnet_x_400mf", "googlenet", "mnasnet0_5", "shufflenet_v2_x0_5", "efficientnet_v2_s",
    "resnext50_32x4d", "fcn_resnet50", "resnet18", "mobilenet_v3_small", "efficientnet_b0", "densenet121",
    "squeezenet1_1", "convnext_tiny", "swin_t", "vgg11_bn",
)  # fmt: skip
_TIMM = (
    "dla46_c", "mobilenetv4_conv_small_050", "repvgg_a0", "gernet_s", "levit_128s", "resnet10t", "convnext_atto",
    "efficientvit_b0", "ghostnet_050", "lcnet_050", "mobileone_s0", "regnetx_002", "tinynet_e", "vit_tiny_patch16_224",
    "xcit_nano_12_p16_224", "hardcorenas_a",
)  # fmt: skip


def _torchvision(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    _load_torchvision()
    import torchvision

    own = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    if name == "fcn_resnet50":
        own = {"weights_backbone": None, "aux_loss": False}
    model = torchvision.models.get_model(name, weights=None, num_classes=5, **own)
    return _certain(model), (torch.randn(4, 3, 64, 64),), {}


def _timm(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    _load_torchvision()  # timm imports it
    import timm

    fixed = name.endswith("_224") or name.startswith("levit")
    own = {"img_size": 64} if fixed and not name.startswith("levit") else {}
    size = 224 if name.startswith("levit") else 64
    model = timm.create_model(name, pretrained=False, num_classes=5, **own)
    return _certain(model), (torch.randn(4, 3, size, size),), {}


def _certain(model: nn.Module) -> nn.Module:
    """Without dropout of elements or of paths, no bias at zero, where it would make no difference, and no scale of a
    block at 1e-6, as fresh networks have it, where nothing in the block would."""
    model = _without_dropout(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and not parameter.any():
                parameter.normal_(std=0.1)
            elif 0 < parameter.abs().max() < 1e-4:
                parameter.fill_(0.5)
    for part in model.modules():
        if type(part).__name__ in ("StochasticDepth", "DropPath"):
            part.p = part.drop_prob = 0.0  # type: ignore[assignment]
    return model


def _load_torchvision() -> None:
    """Its own kernels are built for one build of torch; no network here needs them, but its import does."""
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):
            torch.library.define(
                f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
    importlib.import_module("torchvision")


def entries() -> list[Entry]:
    """Every architecture of the page."""
    found = list(_layers())
    for kinds, inputs in ((_TEXT, "text"), (_PAIRS, "pairs"), (_IMAGES, "pictures")):
        for kind in kinds:
            found.append(
                Entry(
                    kind,
                    "transformers",
                    lambda kind=kind, inputs=inputs: _transformer(kind, inputs),
                    changes=kind in _CHANGED,
                )
            )
    found.append(Entry("depth_anything", "transformers", depth_anything))
    found.sort(key=lambda entry: entry.name in _LIKE_ANOTHER)
    for package, names, make in (("torchvision", _TORCHVISION, _torchvision), ("timm", _TIMM, _timm)):
        found += [
            Entry(f"{package}/{n}", package, lambda n=n, make=make: make(n), changes=True) for n in names
        ]
    return found
