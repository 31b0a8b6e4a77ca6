"""Tiny Hugging Face models with random weights, and a word tokenizer for them: nothing is downloaded."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

_CORPUS = """The ferry leaves at noon. Nobody expected a small library to train a network on the phone. Where does
the path end? The path follows the river for two miles and ends at a bridge. Why? Prices rose by March, economists
had said. Hello there, friend. This example is sport or politics."""
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>"]
_WORDS = sorted(set(re.findall(r"\w+", _CORPUS)) | set(re.findall(r"\w+", _CORPUS.lower())))
VOCABULARY = {word: index for index, word in enumerate([*_SPECIAL, *_WORDS])}

_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_TEXT = {**_SIZES, "vocab_size": len(VOCABULARY), "max_position_embeddings": 64}
_ENDS = {"bos_token_id": 5, "eos_token_id": 5}
_DECODER = {"vocab_size": len(VOCABULARY), "pad_token_id": 0, "eos_token_id": 5, "decoder_start_token_id": 0}
_LAYERS = {
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")},
}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}

# Wide initial weights: with the usual small ones attention is nearly uniform and mistakes hide in it.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", _TEXT),
    "roberta": ("RobertaConfig", {**_TEXT, "pad_token_id": 0}),
    "distilbert": (
        "DistilBertConfig",
        {"vocab_size": len(VOCABULARY), "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    ),
    "deberta": ("DebertaV2Config", {**_TEXT, **_DEBERTA, "position_buckets": 8}),
    "gpt2": ("GPT2Config", {"vocab_size": len(VOCABULARY), "n_embd": 16, "n_layer": 2, "n_head": 2, **_ENDS}),
    "llama": ("LlamaConfig", {**_TEXT, "num_key_value_heads": 1, **_ENDS}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_TEXT,
            **_ENDS,
            "num_key_value_heads": 1,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "opt": ("OPTConfig", {**_TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16, "layerdrop": 0.5, **_ENDS}),
    "t5": ("T5Config", {**_DECODER, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}),
    "bart": ("BartConfig", {**_DECODER, **_LAYERS, "d_model": 16, "max_position_embeddings": 64}),
    "clip": (
        "CLIPConfig",
        {
            "text_config": {**_TEXT, **_ENDS, "pad_token_id": 0, "projection_dim": 8},
            "vision_config": {**_SIZES, "image_size": 16, "patch_size": 4, "projection_dim": 8},
            "projection_dim": 8,
        },
    ),
    "vit": ("ViTConfig", {**_SIZES, "image_size": 16, "patch_size": 4}),
    "resnet": (
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "image_size": 32},
    ),
    "wav2vec2": (
        "Wav2Vec2Config",
        {
            **_SIZES,
            "conv_dim": [8, 8],
            "conv_kernel": [10, 8],
            "conv_stride": [5, 4],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
        },
    ),
    "whisper": (
        "WhisperConfig",
        {
            **_DECODER,
            **_LAYERS,
            "d_model": 16,
            "max_source_positions": 50,
            "num_mel_bins": 8,
            "bos_token_id": 1,
        },
    ),
}

CLASSES = {
    "default": "AutoModel",
    "pooling": "AutoModel",
    "feature-extraction": "AutoModel",
    "question-answering": "AutoModelForQuestionAnswering",
    "text-classification": "AutoModelForSequenceClassification",
    "zero-shot-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "fill-mask": "AutoModelForMaskedLM",
    "text-generation": "AutoModelForCausalLM",
    "text2text": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "audio-classification": "AutoModelForAudioClassification",
    "zero-shot-image-classification": "AutoModelForZeroShotImageClassification",
}


def tiny_tokenizer(*, generator: bool = False, ends: bool = False) -> Any:
    """A tokenizer of words; a generator's, as GPT-2's, has no special tokens around text and no padding.

    With `ends` it closes every text with its end token, which is also its padding, as CLIP's does.
    """
    inner = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if ends:
        inner.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", VOCABULARY["</s>"])]
        )
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=inner,
            unk_token="[UNK]",
            eos_token="</s>",
            pad_token="</s>",
            model_max_length=64,
            model_input_names=["input_ids", "attention_mask"],
        )
    if generator:
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=inner,
            unk_token="[UNK]",
            eos_token="</s>",
            model_max_length=64,
            model_input_names=["input_ids", "attention_mask"],
        )
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", VOCABULARY["[CLS]"]), ("[SEP]", VOCABULARY["[SEP]"])],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=60,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def tiny_model(architecture: str, task: str, **settings: Any) -> Any:
    """A model with random weights, the same at every call."""
    name, arguments = CONFIGS[architecture]
    config = getattr(transformers, name)(**{**arguments, **settings})
    torch.manual_seed(0)
    model = getattr(transformers, CLASSES[task]).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model.eval()


def tiny_pair(architecture: str, task: str, **settings: Any) -> tuple[Any, Any]:
    """A (model, tokenizer) tuple; images and sound have no tokenizer."""
    if architecture in ("vit", "resnet", "wav2vec2", "whisper"):
        return tiny_model(architecture, task, **settings), None
    if architecture == "clip":
        return tiny_model(architecture, task, **settings), tiny_tokenizer(ends=True)
    generator = architecture in ("gpt2", "llama", "qwen3_moe", "opt", "t5", "bart")
    return tiny_model(architecture, task, **settings), tiny_tokenizer(generator=generator)
