"""Describe an exported Hugging Face model in plain data, for `onward.json` and for the file's own metadata.

Knows what the pipelines of `onward.load` need to answer without torch or transformers: labels, special
tokens, pooling, image and audio settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onward.export.huggingface.find_model import Source
from onward.export.huggingface.folder import version
from onward.export.huggingface.tasks import Axes

__all__ = ["describe"]

_PROCESSOR = (
    *("do_resize", "size", "resample", "do_center_crop", "crop_size"),
    *("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"),
    *("sampling_rate", "feature_extractor_type", "num_mel_bins", "feature_size"),
)


def describe(
    source: Source,
    inputs: Mapping[str, Axes],
    outputs: Mapping[str, Axes],
    *,
    opset: int,
) -> dict[str, Any]:
    """The card, without figures: two exports of one model give the same."""
    config = source.model.config
    card: dict[str, Any] = {
        "format": 1,
        "onward": version(),
        "task": source.called,
        "architecture": type(source.model).__name__,
        "opset": opset,
        "inputs": _axes(inputs),
        "outputs": _axes(outputs),
    }
    if source.task.name == "pooling":
        card["pooling"] = {"modes": list(source.pooling.modes), "normalize": source.pooling.normalize}
    if source.task.classifies:
        labels = getattr(config, "id2label", None) or {}
        card["labels"] = list(source.labels or (str(labels[index]) for index in sorted(labels)))
        card["problem_type"] = getattr(config, "problem_type", None)
    if source.tokenizer is not None:
        card["tokenizer"] = _tokenizer(source)
    if source.task.name in ("text-generation", "text2text"):
        card["generation"] = _generation(source)
    if source.processor is not None:
        settings = source.processor if isinstance(source.processor, Mapping) else source.processor.to_dict()
        kept = {name: _plain(settings[name]) for name in _PROCESSOR if name in settings}
        card["processor"] = kept
    return card


def _tokenizer(source: Source) -> dict[str, Any]:
    tokenizer = source.tokenizer
    pad = getattr(tokenizer, "pad_token_id", None)
    end = getattr(tokenizer, "eos_token_id", None)
    return {
        "pad_id": pad if pad is not None else end if end is not None else 0,
        "padding_side": "left"
        if source.task.name == "text-generation"
        else getattr(tokenizer, "padding_side", "right"),
        "max_length": source.max_length,
        "mask_id": getattr(tokenizer, "mask_token_id", None),
        "mask_token": getattr(tokenizer, "mask_token", None),
    }


def _generation(source: Source) -> dict[str, Any]:
    config = source.model.config
    settings = getattr(source.model, "generation_config", None)

    def find(name: str) -> Any:
        value = getattr(settings, name, None)
        return value if value is not None else getattr(config, name, None)

    end = find("eos_token_id")
    return {
        "eos_ids": [end] if isinstance(end, int) else list(end or ()),
        "start_id": find("decoder_start_token_id"),
        "forced_bos_id": find("forced_bos_token_id"),
    }


def _axes(ports: Mapping[str, Axes]) -> dict[str, dict[str, str]]:
    return {name: {str(index): axis for index, axis in axes.items()} for name, axes in ports.items()}


def _plain(value: Any) -> Any:
    """Only what JSON can hold: processors keep enumerations and size objects among their settings."""
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    return value if isinstance(value, (float, str)) else str(value)
