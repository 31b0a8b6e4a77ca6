"""Decoders that write text, as traceable modules with their keys and values as inputs and outputs.

Knows transformers' caches; nothing of tasks or ONNX.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onward.errors import ExportError
from onward.export.huggingface.traceable import TEXTS, TOKENS, Adapter, Traceable, encode

if TYPE_CHECKING:
    from onward.export.huggingface.find_model import Source
    from onward.export.huggingface.tasks import Axes


def cache_slots(cache: Any, source: Source, model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a cache's tensors by slot, "0.key", "0.value" and so on."""
    layers = getattr(cache, "layers", None)
    if not layers or not all(isinstance(getattr(layer, "keys", None), Tensor) for layer in layers):
        raise ExportError(
            f"{source.origin}: {type(model).__name__} keeps no key-value cache that can be exported"
        )
    return {
        f"{index}.{part}": tuple(tensor.shape)
        for index, layer in enumerate(layers)
        for part, tensor in (("key", layer.keys), ("value", layer.values))
    }


def filled_cache(batch: Mapping[str, Tensor], past: Sequence[str], seen: Sequence[str] = ()) -> Any:
    """A cache that holds these tensors of the batch: of the decoder's own tokens, and of what the encoder read."""
    from transformers import DynamicCache, EncoderDecoderCache

    own = DynamicCache()
    for index in range(len(past) // 2):
        own.update(batch[past[2 * index]], batch[past[2 * index + 1]], index)
    if not seen:
        return own
    crossed = DynamicCache()
    for index in range(len(seen) // 2):
        crossed.update(batch[seen[2 * index]], batch[seen[2 * index + 1]], index)
    both = EncoderDecoderCache(own, crossed)
    for index in range(len(seen) // 2):
        # else the decoder would compute them anew from the encoder's states, which are not there
        both.is_updated[index] = True
    return both


def flat_cache(cache: Any) -> tuple[Tensor, ...]:
    """A cache's tensors in the order of its slots."""
    return tuple(part for layer in cache.layers for part in (layer.keys, layer.values))


def generation(source: Source, model: Any) -> Traceable:
    """Tokens, a mask over all tokens so far and their keys and values in; scores and the grown cache out."""
    parameters = inspect.signature(model.forward).parameters
    # Only a run tells how many heads a cache has: configurations name them in many ways.
    probe = encode(source, ["Hello there, friend"], ("input_ids", "attention_mask"))
    with torch.no_grad():
        cache = model(**probe, use_cache=True, return_dict=True).get("past_key_values")
    slots = cache_slots(cache, source, model)
    past = [f"past_key_values.{slot}" for slot in slots]

    def run(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        extra: dict[str, Any] = {}
        if "position_ids" in parameters:
            # From the mask and not from the cache's length, which tracing would freeze; right with padding.
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            extra["position_ids"] = positions[:, -ids.shape[1] :]
        answer = model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=filled_cache(batch, past),
            use_cache=True,
            return_dict=True,
            **extra,
        )
        return (answer["logits"], *flat_cache(answer["past_key_values"]))

    random = torch.Generator().manual_seed(0)

    def case(texts: Sequence[str | tuple[str, str]], width: int, seen: int) -> dict[str, Tensor]:
        batch = encode(source, texts, ("input_ids", "attention_mask"), side="left")
        # the last ones, as padding is on the left
        batch = {name: value[:, -width:] for name, value in batch.items()}
        rows = len(texts)
        mask = torch.ones(rows, seen, dtype=torch.int64)
        # Padding is on the left of everything seen so far: hide the first column of the first row.
        if seen:
            mask[0, 0] = 0
            batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
        batch["attention_mask"] = torch.cat([mask, batch["attention_mask"]], dim=1)
        for name, shape in zip(past, slots.values()):
            batch[name] = torch.randn(rows, shape[1], seen, shape[3], generator=random)
        return batch

    everything: Axes = {0: "batch", 1: "total_sequence"}
    texts = [text for text in TEXTS if isinstance(text, str)]
    return Traceable(
        module=Adapter(model, ["input_ids", "attention_mask", *past], run),
        inputs={
            "input_ids": TOKENS,
            "attention_mask": everything,
            **{name: {0: "batch", 2: "past_sequence"} for name in past},
        },
        outputs={
            "logits": TOKENS,
            **{f"present.{slot}": {0: "batch", 2: "total_sequence"} for slot in slots},
        },
        example=case(texts[:2], 6, 5),
        cases=[case(texts[:3], 9, 0), case(texts[:2], 1, 7), case(texts[:1], 4, 3)],
    )
