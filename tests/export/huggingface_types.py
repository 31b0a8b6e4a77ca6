"""A tiny random model of every Hugging Face type that is tried, and the tasks it is tried with.

One row a type. The page of supported types is generated from it, and the tests take a slice of it.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from export.tiny_transformers import VOCABULARY, tiny_tokenizer

_WORDS = len(VOCABULARY)
_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_TEXT = {**_SIZES, "vocab_size": _WORDS, "max_position_embeddings": 64, "pad_token_id": 0}
_ENDS = {"bos_token_id": 5, "eos_token_id": 5}
_LLM = {**_TEXT, **_ENDS, "num_key_value_heads": 1, "head_dim": 8}
_MOE = {**_LLM, "moe_intermediate_size": 16}
_WRITER = {
    "vocab_size": _WORDS,
    "pad_token_id": 0,
    "eos_token_id": 5,
    "bos_token_id": 5,
    "decoder_start_token_id": 0,
}
_LAYERS = {
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")},
}
_BART = {**_WRITER, **_LAYERS, "d_model": 16, "max_position_embeddings": 64, "forced_eos_token_id": None}
_T5 = {**_WRITER, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
_VIT = {**_SIZES, "image_size": 16, "patch_size": 4, "encoder_stride": 4}
_SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [1, 2],
    "window_size": 4,
    "encoder_stride": 8,
}
_WAVE = {
    **_SIZES,
    "vocab_size": _WORDS,
    "pad_token_id": 0,
    "conv_dim": [8, 8],
    "conv_kernel": [10, 8],
    "conv_stride": [5, 4],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "tdnn_dim": [8, 8],
    "tdnn_kernel": [3, 1],
    "tdnn_dilation": [1, 1],
    "xvector_output_dim": 8,
    "classifier_proj_size": 8,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
}
_RESNET = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "image_size": 32,
    "out_features": ["stage2"],
    "layer_type": "basic",
}
_DETR = {
    "d_model": 16,
    **_LAYERS,
    "num_queries": 5,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "num_labels": 4,
    "auxiliary_loss": False,
    "attention_dropout": 0.0,
    "dropout": 0.0,
}

ENCODER = ("default", "text-classification", "token-classification", "question-answering", "fill-mask")
CHOICES = (*ENCODER, "multiple-choice")
DECODER = ("text-generation",)
SEQ2SEQ = ("text2text",)
VISION = ("default", "image-classification")
SPEECH = ("automatic-speech-recognition", "audio-classification")
SPEAKERS = (*SPEECH, "audio-frame-classification", "audio-xvector")

# type: its configuration, its tasks
TYPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    # ---- encoders of text
    "albert": ({**_TEXT, "embedding_size": 8}, CHOICES),
    "bert": (_TEXT, (*CHOICES, "pooling", "sentence-similarity", "text-generation")),
    "camembert": (_TEXT, CHOICES),
    "convbert": ({**_TEXT, "embedding_size": 16, "num_groups": 1, "head_ratio": 1}, CHOICES),
    "data2vec-text": (_TEXT, CHOICES),
    "deberta": ({**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, ENCODER),
    "deberta-v2": (
        {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        CHOICES,
    ),
    "distilbert": (
        {
            "vocab_size": _WORDS,
            "dim": 16,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 32,
            "max_position_embeddings": 64,
        },
        CHOICES,
    ),
    "electra": ({**_TEXT, "embedding_size": 16}, CHOICES),
    "ernie": (_TEXT, CHOICES),
    "ibert": ({**_TEXT, "quant_mode": False}, CHOICES),
    "megatron-bert": (_TEXT, CHOICES),
    "mobilebert": (
        {
            **_TEXT,
            "embedding_size": 16,
            "intra_bottleneck_size": 16,
            "true_hidden_size": 16,
            "num_feedforward_networks": 1,
        },
        CHOICES,
    ),
    "modernbert": (
        {
            **_TEXT,
            "global_attn_every_n_layers": 2,
            "local_attention": 8,
            "cls_token_id": 2,
            "sep_token_id": 3,
            **_ENDS,
        },
        CHOICES,
    ),
    "mpnet": ({**_TEXT, "pad_token_id": 1}, CHOICES),
    "nystromformer": ({**_TEXT, "segment_means_seq_len": 64, "num_landmarks": 64}, CHOICES),
    "rembert": ({**_TEXT, "input_embedding_size": 16, "output_embedding_size": 16}, CHOICES),
    "roberta": (_TEXT, CHOICES),
    "roberta-prelayernorm": (_TEXT, CHOICES),
    "roformer": ({**_TEXT, "embedding_size": 16}, CHOICES),
    "squeezebert": (
        {
            **_TEXT,
            "embedding_size": 16,
            **{f"{part}_groups": 1 for part in ("q", "k", "v", "post_attention", "intermediate", "output")},
        },
        CHOICES,
    ),
    "xlm-roberta": (_TEXT, CHOICES),
    "xlm": (
        {
            "vocab_size": _WORDS,
            "emb_dim": 16,
            "n_layers": 2,
            "n_heads": 2,
            "max_position_embeddings": 64,
            "pad_index": 0,
        },
        ("default", "text-classification", "token-classification"),
    ),
    # ---- decoders
    "bloom": ({"vocab_size": _WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 2, **_ENDS}, DECODER),
    "codegen": (
        {
            "vocab_size": _WORDS,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "rotary_dim": 4,
            **_ENDS,
        },
        DECODER,
    ),
    "cohere": (_LLM, DECODER),
    "falcon": (
        {"vocab_size": _WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, **_ENDS},
        DECODER,
    ),
    "gemma": (_LLM, DECODER),
    "gemma2": ({**_LLM, "query_pre_attn_scalar": 8, "sliding_window": 64}, DECODER),
    "gemma3_text": ({**_LLM, "query_pre_attn_scalar": 8, "sliding_window": 64}, DECODER),
    "glm": ({**_LLM, "partial_rotary_factor": 0.5}, DECODER),
    "gpt2": (
        {
            "vocab_size": _WORDS,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 64,
            "pad_token_id": 0,
            **_ENDS,
        },
        (*DECODER, "default", "text-classification", "token-classification"),
    ),
    "gpt_bigcode": (
        {"vocab_size": _WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, **_ENDS},
        DECODER,
    ),
    "gpt_neo": (
        {
            "vocab_size": _WORDS,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
            "window_size": 64,
            **_ENDS,
        },
        DECODER,
    ),
    "gpt_neox": ({**_TEXT, **_ENDS}, DECODER),
    "gptj": (
        {
            "vocab_size": _WORDS,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 64,
            "rotary_dim": 4,
            **_ENDS,
        },
        DECODER,
    ),
    "granite": (_LLM, DECODER),
    "llama": (_LLM, (*DECODER, "default", "text-classification")),
    "mistral": ({**_LLM, "sliding_window": None}, DECODER),
    "mixtral": ({**_LLM, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}, DECODER),
    "olmo": (_LLM, DECODER),
    "olmo2": (_LLM, DECODER),
    "olmoe": ({**_LLM, "num_experts": 4, "num_experts_per_tok": 2}, DECODER),
    "opt": ({**_TEXT, **_ENDS, "ffn_dim": 32, "word_embed_proj_dim": 16}, DECODER),
    "phi": ({**_LLM, "partial_rotary_factor": 0.5}, DECODER),
    "phi3": ({**_LLM, "original_max_position_embeddings": 64}, DECODER),
    "qwen2": ({**_LLM, "use_sliding_window": False}, DECODER),
    "qwen2_moe": (
        {
            **_MOE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 16,
            "decoder_sparse_step": 1,
        },
        DECODER,
    ),
    "qwen3": ({**_LLM, "use_sliding_window": False}, DECODER),
    "qwen3_moe": ({**_MOE, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}, DECODER),
    "smollm3": ({**_LLM, "use_sliding_window": False}, DECODER),
    "stablelm": ({**_LLM, "partial_rotary_factor": 0.5}, DECODER),
    "starcoder2": ({**_LLM, "sliding_window": None}, DECODER),
    # ---- text to text
    "bart": (_BART, (*SEQ2SEQ, "default", "question-answering")),
    "blenderbot": (_BART, SEQ2SEQ),
    "blenderbot-small": (_BART, SEQ2SEQ),
    "m2m_100": (_BART, SEQ2SEQ),
    "marian": (_BART, SEQ2SEQ),
    "mbart": (_BART, SEQ2SEQ),
    "mt5": (_T5, (*SEQ2SEQ, "default")),
    "pegasus": (_BART, SEQ2SEQ),
    "plbart": (_BART, SEQ2SEQ),
    "t5": (_T5, (*SEQ2SEQ, "default")),
    "umt5": (_T5, SEQ2SEQ),
    # ---- pictures
    "beit": (_VIT, VISION),
    "convnext": ({"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32}, VISION),
    "convnextv2": ({"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32}, VISION),
    "data2vec-vision": (_VIT, VISION),
    "deit": (_VIT, (*VISION, "masked-image-modeling")),
    "dinov2": (_VIT, VISION),
    "mobilenet_v1": ({"image_size": 32, "depth_multiplier": 0.25, "min_depth": 8}, VISION),
    "mobilenet_v2": (
        {"image_size": 32, "depth_multiplier": 0.25, "min_depth": 8},
        ("image-classification", "semantic-segmentation"),
    ),
    "mobilevit": (
        {
            "image_size": 32,
            "hidden_sizes": [8, 8, 8],
            "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
            "num_attention_heads": 2,
            "aspp_out_channels": 8,
            "atrous_rates": [1, 1, 1],
        },
        ("image-classification", "semantic-segmentation"),
    ),
    "poolformer": (
        {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "image_size": 32},
        ("image-classification",),
    ),
    "regnet": (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8, "image_size": 32},
        VISION,
    ),
    "resnet": (_RESNET, VISION),
    "segformer": (
        {
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16,
            "image_size": 32,
        },
        ("image-classification", "semantic-segmentation"),
    ),
    "swin": (_SWIN, (*VISION, "masked-image-modeling")),
    "swinv2": (_SWIN, VISION),
    "vit": (_VIT, (*VISION, "masked-image-modeling")),
    "swin2sr": (
        {**_SWIN, "image_size": 16, "patch_size": 1, "upscale": 2, "upsampler": "pixelshuffledirect"},
        ("image-to-image",),
    ),
    "dpt": (
        {
            **_VIT,
            "num_hidden_layers": 4,
            "image_size": 32,
            "patch_size": 8,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 8, 8],
            "fusion_hidden_size": 8,
            "is_hybrid": False,
        },
        ("depth-estimation", "semantic-segmentation"),
    ),
    "glpn": (
        {
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 8,
            "image_size": 32,
        },
        ("depth-estimation",),
    ),
    "detr": (_DETR, ("object-detection",)),
    "conditional_detr": (_DETR, ("object-detection",)),
    "table-transformer": (_DETR, ("object-detection",)),
    "rt_detr": (
        {
            "d_model": 16,
            "encoder_hidden_dim": 16,
            "encoder_in_channels": [16, 24, 32],
            "decoder_in_channels": [16, 16, 16],
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "num_queries": 6,
            "num_labels": 4,
            "num_denoising": 0,
            "anchor_image_size": None,
            "image_size": 64,
        },
        ("object-detection",),
    ),
    "dab-detr": ({**_DETR, "hidden_size": 16}, ("object-detection",)),
    "deformable_detr": (
        {
            **_DETR,
            "d_model": 32,
            "num_feature_levels": 2,
            "encoder_n_points": 2,
            "decoder_n_points": 2,
            "disable_custom_kernels": True,
        },
        ("object-detection",),
    ),
    "yolos": (
        {**_SIZES, "image_size": [32, 32], "patch_size": 8, "num_detection_tokens": 5, "num_labels": 4},
        ("object-detection",),
    ),
    "maskformer": ({}, ("instance-segmentation",)),
    "upernet": ({}, ("semantic-segmentation",)),
    "depth_anything": ({}, ("depth-estimation",)),
    "vitpose": ({}, ("keypoint-detection",)),
    # ---- pictures and text
    "clip": (
        {
            "text_config": {**_TEXT, **_ENDS, "projection_dim": 8},
            "vision_config": {**_VIT, "projection_dim": 8},
            "projection_dim": 8,
        },
        ("zero-shot-image-classification",),
    ),
    "siglip": (
        {"text_config": {**_TEXT, **_ENDS}, "vision_config": _VIT},
        ("zero-shot-image-classification",),
    ),
    "owlvit": (
        {
            "text_config": {**_TEXT, **_ENDS},
            "vision_config": {**_VIT, "image_size": 32, "patch_size": 8},
            "projection_dim": 16,
        },
        ("zero-shot-object-detection",),
    ),
    "owlv2": (
        {
            "text_config": {**_TEXT, **_ENDS},
            "vision_config": {**_VIT, "image_size": 32, "patch_size": 8},
            "projection_dim": 16,
        },
        ("zero-shot-object-detection",),
    ),
    "vision-encoder-decoder": ({}, ("image-to-text",)),
    # ---- sound
    "audio-spectrogram-transformer": (
        {
            **_SIZES,
            "patch_size": 4,
            "num_mel_bins": 16,
            "max_length": 32,
            "frequency_stride": 4,
            "time_stride": 4,
        },
        ("audio-classification", "default"),
    ),
    "data2vec-audio": ({**_WAVE, "conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2}, SPEAKERS),
    "hubert": (_WAVE, SPEECH),
    "sew": ({**_WAVE, "squeeze_factor": 2}, SPEECH),
    "unispeech": (_WAVE, SPEECH),
    "unispeech-sat": (_WAVE, SPEAKERS),
    "wav2vec2": (_WAVE, SPEAKERS),
    "wav2vec2-conformer": ({**_WAVE, "conv_depthwise_kernel_size": 3}, SPEAKERS),
    "wav2vec2-bert": (
        {
            **_WAVE,
            "feature_projection_input_dim": 8,
            "conv_depthwise_kernel_size": 3,
            "left_max_position_embeddings": 8,
        },
        SPEAKERS,
    ),
    "wavlm": ({**_WAVE, "num_buckets": 8, "max_bucket_distance": 16}, SPEAKERS),
    "whisper": (
        {
            **_WRITER,
            **_LAYERS,
            "d_model": 16,
            "max_source_positions": 50,
            "max_target_positions": 64,
            "num_mel_bins": 8,
        },
        ("automatic-speech-recognition", "audio-classification"),
    ),
    "speech_to_text": (
        {
            **_WRITER,
            **_LAYERS,
            "d_model": 16,
            "max_source_positions": 64,
            "max_target_positions": 64,
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "num_conv_layers": 2,
        },
        ("automatic-speech-recognition",),
    ),
    "vits": (
        {
            **_SIZES,
            "vocab_size": _WORDS,
            "ffn_dim": 32,
            "flow_size": 16,
            "spectrogram_bins": 9,
            "duration_predictor_filter_channels": 16,
            "upsample_initial_channel": 16,
            "upsample_rates": [2, 2],
            "upsample_kernel_sizes": [4, 4],
            "resblock_kernel_sizes": [3],
            "resblock_dilation_sizes": [[1, 3]],
            "prior_encoder_num_wavenet_layers": 2,
            "use_stochastic_duration_prediction": False,
        },
        ("text-to-audio",),
    ),
    # ---- time series
    "patchtst": (
        {
            "num_input_channels": 2,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "prediction_length": 4,
            "d_model": 16,
            "num_attention_heads": 2,
            "ffn_dim": 32,
            "num_hidden_layers": 2,
        },
        ("time-series-forecasting",),
    ),
    "patchtsmixer": (
        {
            "num_input_channels": 2,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "prediction_length": 4,
            "d_model": 8,
            "num_layers": 2,
        },
        ("time-series-forecasting",),
    ),
}


def _composed(kind: str) -> Any:
    """Configurations that are made of others."""
    resnet = transformers.ResNetConfig(**_RESNET)
    if kind == "maskformer":
        swin = transformers.SwinConfig(
            **{
                **_SWIN,
                "depths": [1, 1, 1, 1],
                "num_heads": [1, 1, 2, 2],
                "window_size": 2,
                "image_size": 64,
            },
            out_features=["stage1", "stage2", "stage3", "stage4"],
        )
        detr = transformers.DetrConfig(**{**_DETR, "backbone_config": resnet})
        return transformers.MaskFormerConfig(
            backbone_config=swin, decoder_config=detr, fpn_feature_size=32, mask_feature_size=32, num_labels=4
        )
    if kind == "upernet":
        backbone = transformers.ConvNextConfig(
            hidden_sizes=[8, 8, 16, 16],
            depths=[1, 1, 1, 1],
            image_size=64,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        )
        return transformers.UperNetConfig(
            backbone_config=backbone,
            hidden_size=16,
            use_auxiliary_head=False,
            pool_scales=[1, 2],
            num_labels=4,
        )
    if kind == "depth_anything":
        backbone = transformers.Dinov2Config(
            **{**_VIT, "image_size": 16, "num_hidden_layers": 4},
            out_features=["stage1", "stage2", "stage3", "stage4"],
            reshape_hidden_states=False,
        )
        return transformers.DepthAnythingConfig(
            backbone_config=backbone,
            patch_size=4,
            reassemble_hidden_size=16,
            neck_hidden_sizes=[8, 8, 8, 8],
            fusion_hidden_size=8,
            head_hidden_size=8,
        )
    if kind == "vitpose":
        backbone = transformers.VitPoseBackboneConfig(
            **{**_SIZES, "image_size": [64, 48], "patch_size": [16, 16]}, out_features=["stage2"]
        )
        return transformers.VitPoseConfig(
            backbone_config=backbone, num_labels=5, scale_factor=2, use_simple_decoder=True
        )
    if kind == "vision-encoder-decoder":
        writer = transformers.GPT2Config(**TYPES["gpt2"][0], is_decoder=True, add_cross_attention=True)
        config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            transformers.ViTConfig(**_VIT), writer
        )
        config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 0, 0, 5
        return config
    settings = dict(TYPES[kind][0])
    if kind in ("detr", "conditional_detr", "table-transformer", "dab-detr"):
        settings["backbone_config"] = resnet
    if kind == "deformable_detr":
        settings["backbone_config"] = transformers.ResNetConfig(
            **{**_RESNET, "out_features": ["stage1", "stage2"]}
        )
    if kind == "rt_detr":
        settings["backbone_config"] = transformers.RTDetrResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 16, 24, 32],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            out_features=["stage2", "stage3", "stage4"],
        )
    return transformers.AutoConfig.for_model(kind, **settings)


def tiny_of(kind: str, task: str, **settings: Any) -> tuple[Any, Any]:
    """A (model, tokenizer) pair of a type with random weights, the same at every call."""
    from onward.export.huggingface.tasks import task_for

    config = _composed(kind)
    for name, value in settings.items():
        setattr(config, name, value)
    if task == "text-generation" and kind == "bert":
        config.is_decoder = True
    row = task_for(task, kind)
    torch.manual_seed(0)
    known = [
        name
        for name in row.loaders
        if type(config) in getattr(getattr(transformers, name), "_model_mapping", ())
    ]
    loader = getattr(transformers, (known or row.loaders)[0])
    make = getattr(loader, "from_config", None) if loader.__name__.startswith("Auto") else loader
    assert make is not None
    if loader.__name__.startswith("Auto"):
        classes = loader._model_mapping[type(config)]
        config.architectures = [(classes[0] if isinstance(classes, tuple) else classes).__name__]
        model = make(config, attn_implementation="eager")
    else:
        model = make(config)
    with torch.no_grad():
        # Wide weights: with the usual small ones attention is nearly uniform, and mistakes hide in it.
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "parametrizations" not in name:
                parameter.normal_(std=0.2)
            elif kind == "rt_detr":  # it ranks places by their features, which must not be all the same
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval(), _companion(model, kind, task)


def _companion(model: Any, kind: str, task: str) -> Any:
    writes = task in (
        "text-generation",
        "text2text",
        "text-to-audio",
        "image-to-text",
        "automatic-speech-recognition",
    )
    if task in ("zero-shot-image-classification", "zero-shot-object-detection"):
        return tiny_tokenizer(ends=True)
    if writes or kind in ("gpt2", "llama", "t5", "bart", "mt5"):
        return tiny_tokenizer(generator=True)
    return tiny_tokenizer() if getattr(model, "main_input_name", "") == "input_ids" else None


PAIRS = [(kind, task) for kind, (_, tasks) in TYPES.items() for task in tasks]
