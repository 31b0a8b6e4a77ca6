"""Describes an exported Hugging Face model in plain data, for `onward.json` and for the file's own metadata.

Contains what `onward.load` needs to run without torch or transformers: labels, special tokens, pooling, image and
audio settings.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.data.preprocess import image
from onward.export.huggingface.folder import version
from onward.info.preprocessing import plain_settings

if TYPE_CHECKING:
    from onward.export.huggingface.find_model import Source
    from onward.export.huggingface.tasks import Axes

# three levels of 256 over the smallest usual spread: resizing by another library rounds otherwise
_SAME_PIXELS = 0.06
_PROCESSOR = (
    *("do_resize", "size", "resample", "do_center_crop", "crop_size", "size_divisor", "do_pad", "pad_size"),
    *("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "do_reduce_labels"),
    *("keep_aspect_ratio", "ensure_multiple_of", "image_processor_type", "do_flip_channel_order"),
    *("sampling_rate", "feature_extractor_type", "num_mel_bins", "feature_size", "n_fft", "hop_length"),
    *("chunk_length", "n_samples", "max_length", "mean", "std", "padding_value", "return_attention_mask"),
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
        "answer": source.task.answer,
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
    if source.task.wrapper in ("generation", "encoder-decoder"):
        card["generation"] = generation_settings(
            source.model.config, getattr(source.model, "generation_config", None)
        )
    if source.task.answer == "spell":
        card["spelling"] = _spelling(source)
    if source.processor is not None:
        card["processor"] = processor_settings(source.processor)
    if source.task.answer == "speak":
        card["sampling_rate"] = int(getattr(config, "sampling_rate", 16000))
    return card


def processor_settings(processor: Any) -> dict[str, Any]:
    """What `onward.load` needs of a processor of pictures or sound, or of its settings."""
    settings = processor if isinstance(processor, Mapping) else processor.to_dict()
    values = {name: _plain(value) for name, value in settings.items()}
    if "do_rescale" in values:  # what a processor of pictures does not set, it does not do
        values |= {name: bool(values.get(name)) for name in ("do_resize", "do_rescale", "do_normalize")}
    plain = plain_settings(values)
    selected = {name: plain[name] for name in _PROCESSOR if plain.get(name) is not None}
    _mark_other_pixels(processor, selected)
    return selected


def _mark_other_pixels(processor: Any, settings: dict[str, Any]) -> None:
    """Mark settings whose pictures are not those of the processor itself: `onward.load` then takes arrays only."""
    if isinstance(processor, Mapping) or "image_mean" not in settings:
        return
    # Not square, and noise: a swap of the sides or another filter would not show on a plain square.
    picture = np.random.default_rng(0).integers(0, 256, (90, 120, 3)).astype(np.uint8)
    try:
        expected = np.asarray(processor(picture, return_tensors="np")["pixel_values"][0])
    except Exception:  # it takes more than a picture, or needs a package that is not here
        return
    try:
        pixels = image(picture, settings)
    except ValueError:
        # no shape of any picture, so that it is marked
        pixels = np.zeros(0)
    if pixels.shape != expected.shape or np.abs(pixels - expected).max() > _SAME_PIXELS:
        settings["unknown"] = type(processor).__name__
        warnings.warn(
            f"{type(processor).__name__} prepares pictures in a way that onward.load does not know: give it arrays as "
            "the model takes them",
            stacklevel=2,
        )


def _tokenizer(source: Source) -> dict[str, Any]:
    tokenizer = source.tokenizer
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:  # decoders that classify find their last token by it
        pad = getattr(source.model.config, "pad_token_id", None)
    end = getattr(tokenizer, "eos_token_id", None)
    return {
        "special_ids": sorted(getattr(tokenizer, "all_special_ids", None) or ()),
        # The attention mask hides padding, so that any id does where there is none.
        "pad_id": pad if pad is not None else end if end is not None else 0,
        "padding_side": _padding_side(source),
        "max_length": source.max_length,
        "cls_id": getattr(tokenizer, "cls_token_id", None),
        "unk_id": getattr(tokenizer, "unk_token_id", None),
        "mask_id": getattr(tokenizer, "mask_token_id", None),
        "mask_token": getattr(tokenizer, "mask_token", None),
        "clean_up": _cleans_up(tokenizer),
    }


def _cleans_up(tokenizer: Any) -> bool:
    """Whether decoding removes the spaces before punctuation; transformers 5 leaves those of BPE tokenizers alone."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    always = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_bpe = backend is not None and type(backend.model).__name__ == "BPE"
    return not is_bpe or getattr(tokenizer, always, True)


def _padding_side(source: Source) -> str:
    """Left for texts that are continued; right for decoders that classify, where padding must not shift positions."""
    if source.task.name == "text-generation":
        return "left"
    if source.task.classifies and hasattr(source.model.config, "model_type"):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS

        if source.model.config.model_type in DECODERS and source.model.config.model_type != "xlnet":
            return "right"
    return getattr(source.tokenizer, "padding_side", "right")


def _spelling(source: Source) -> dict[str, Any]:
    """What turns the classes of a recogniser's frames into text: its tokens, and which of them are no letters."""
    tokenizer = source.tokenizer
    if tokenizer is None:
        return {"tokens": None, "blank_id": source.model.config.pad_token_id}
    count = int(source.model.config.vocab_size)
    tokens = tokenizer.convert_ids_to_tokens(list(range(min(count, len(tokenizer)))))
    return {
        "tokens": [str(token) for token in tokens],
        "blank_id": source.model.config.pad_token_id,
        "word_delimiter": getattr(tokenizer, "word_delimiter_token", None),
        "lower": bool(getattr(tokenizer, "do_lower_case", False)),
    }


_FORCED = (
    *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
    "bad_words_ids",
)
# each with the value that changes nothing
_PENALTIES = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "length_penalty": 1.0}


def generation_settings(config: Any, settings: Any) -> dict[str, Any]:
    """What `generate` of a model would do by default, from its configuration and its settings for generation."""

    def find(name: str) -> Any:
        value = getattr(settings, name, None)
        return value if value is not None else getattr(config, name, None)

    end = find("eos_token_id")
    start = find("decoder_start_token_id")
    forced = find("forced_decoder_ids")
    return {
        "eos_ids": [end] if isinstance(end, int) else list(end or ()),
        "start_id": find("bos_token_id") if start is None else start,
        "prefix": [int(token) for _, token in forced or () if token is not None],
        **{name: _plain(find(name)) for name in _FORCED if find(name) not in (None, [])},
        **{name: find(name) for name, none in _PENALTIES.items() if find(name) not in (None, none)},
        "forced_bos_id": find("forced_bos_token_id"),
        **_speech(settings),
    }


def _speech(settings: Any) -> dict[str, Any]:
    """Whisper's tokens for languages and tasks."""
    # only Whisper's settings have it
    quiet = getattr(settings, "no_timestamps_token_id", None)
    if quiet is None:
        return {}
    languages = getattr(settings, "lang_to_id", None) if getattr(settings, "is_multilingual", False) else None
    tasks = getattr(settings, "task_to_id", None)
    latest = getattr(settings, "max_initial_timestamp_index", None)
    return {
        "speech": {
            "languages": languages or {},
            "tasks": tasks or {},
            "no_timestamps_id": quiet,
            "max_initial_timestamp_index": latest,
        }
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
