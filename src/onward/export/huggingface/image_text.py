"""Models that compare images with texts, such as CLIP, as one traceable module with both inputs.

Knows their inputs and outputs. Images and texts have batches of their own, except in training,
where they come in pairs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onward.errors import ExportError
from onward.export.huggingface.traceable import (
    TEXTS,
    Adapter,
    Traceable,
    encode,
    image_size,
    output_of,
    setting,
)

if TYPE_CHECKING:
    from onward.export.huggingface.find_model import Source
    from onward.export.huggingface.tasks import Axes

__all__ = ["image_and_text", "queries"]


def image_and_text(source: Source, model: Any, *, training: bool) -> Traceable:
    """Token ids and pixels in; similarities and both kinds of embeddings out."""
    accepted = inspect.signature(model.forward).parameters
    words = [name for name in ("input_ids", "attention_mask") if name in accepted]
    missing = [name for name in ("input_ids", "pixel_values") if name not in accepted]
    if missing:
        raise ExportError(f"{source.origin}: {type(model).__name__} does not take {' and '.join(missing)}")
    images, texts = ("batch", "batch") if training else ("image_batch", "text_batch")
    shape = (int(setting(model, "num_channels", 3)), *image_size(source, model))
    random = torch.Generator().manual_seed(0)

    def case(chosen: Sequence[Any], pictures: int) -> dict[str, Tensor]:
        return {
            **encode(source, chosen, words),
            "pixel_values": torch.randn(pictures, *shape, generator=random),
        }

    def run(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        answer = model(**batch, return_dict=True)
        return tuple(answer[name] for name in source.task.outputs)

    single = [text for text in TEXTS if isinstance(text, str)]
    tokens: Axes = {0: texts, 1: "sequence"}
    return Traceable(
        module=Adapter(model, [*words, "pixel_values"], run),
        inputs={**dict.fromkeys(words, tokens), "pixel_values": {0: images}},
        outputs={
            "logits_per_image": {0: images, 1: texts},
            "text_embeds": {0: texts},
            "image_embeds": {0: images},
        },
        example=case(single[:2], 2 if training else 3),
        cases=[case(single[:1], 1), case(single, 2)],
    )


def queries(source: Source, model: Any) -> Traceable:
    """Texts to look for and one picture in; for every box a score for each text, and the box, out."""
    shape = (int(setting(model, "num_channels", 3)), *image_size(source, model))
    random = torch.Generator().manual_seed(0)
    words = ("input_ids", "attention_mask")
    single = [text for text in TEXTS if isinstance(text, str)]

    def case(texts: Sequence[Any]) -> dict[str, Tensor]:
        return {**encode(source, texts, words), "pixel_values": torch.randn(1, *shape, generator=random)}

    def run(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        answer = model(**batch, return_dict=True)
        return tuple(output_of(source, answer, name) for name in source.task.outputs)

    return Traceable(
        module=Adapter(model, [*words, "pixel_values"], run),
        inputs={**{name: {0: "queries", 1: "sequence"} for name in words}, "pixel_values": {}},
        outputs={"logits": {2: "queries"}, "pred_boxes": {}},
        example=case(single[:2]),
        cases=[case(single[:1]), case(single)],
    )
