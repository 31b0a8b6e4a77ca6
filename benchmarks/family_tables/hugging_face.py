"""Language models of transformers beyond plain attention: mixtures of experts, state spaces, linear attention."""

from __future__ import annotations

import torch
from torch import nn

# What each configuration calls its sizes differs: those that it has are set.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "attention_hidden_size"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "state_size"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "attention_probs_dropout_prob"), 0.0),
    "max_position_embeddings": 64,
    "vocab_size": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}  # fmt: skip


class NextToken(nn.Module):
    """The scores of a language model."""

    def __init__(self, kind, **own):
        super().__init__()
        import transformers

        transformers.logging.set_verbosity_error()
        config_class = transformers.CONFIG_MAPPING[kind]
        default = config_class()
        sizes = {name: value for name, value in SIZES.items() if getattr(default, name, None) is not None}
        config = config_class(**{**sizes, **own})
        # the grouped products that are the default have no kernel in float64, in which gradients are compared
        config._experts_implementation = "eager"
        self.model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in self.model.parameters():
            if (
                not parameter.any()
            ):  # a router of zeros sends tokens by ties, which each library breaks its own way
                nn.init.normal_(parameter, std=0.1)

    def forward(self, input_ids):
        return self.model(input_ids=input_ids).logits


def tokens(n):
    return (torch.randint(3, 40, (n, 6)),)


def family(kind, **own):
    return lambda: (NextToken(kind, **own), tokens)


FAMILIES = {
    "phimoe": family("phimoe", router_jitter_noise=0.0, input_jitter_noise=0.0),
    "cohere2_moe": family("cohere2_moe"),
    "ernie4_5_moe": family("ernie4_5_moe"),
    "mellum": family("mellum"),
    "qwen3_5_moe": family("qwen3_5_moe_text"),
    "qwen3_next": family("qwen3_next"),
    "mixtral": family("mixtral"),
    "granitemoehybrid": family(
        "granitemoehybrid", layer_types=["mamba", "attention"], mamba_n_heads=4, mamba_d_head=8
    ),
    "mamba_of_transformers": family("mamba", time_step_rank=4),
    "mamba2": family("mamba2", num_heads=4, head_dim=8, n_groups=1, chunk_size=4, state_size=8),
    "rwkv_of_transformers": family("rwkv"),
    "lfm2": family("lfm2", layer_types=["conv", "full_attention"]),
}
