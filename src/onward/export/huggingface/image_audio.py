"""Models of pictures, sound and time series as traceable modules: one array in, the task's tensors out.

Knows which sizes such models take; nothing of ONNX.
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
    TOKENS,
    Adapter,
    Traceable,
    call,
    encode,
    image_size,
    setting,
)
from onward.export.torch.replace import replaced

if TYPE_CHECKING:
    from onward.export.huggingface.find_model import Source
    from onward.export.huggingface.tasks import Axes

Shapes = Sequence[tuple[int, ...]]


def image(source: Source, model: Any) -> Traceable:
    """Pixels in, what the task wants out."""
    axes, shapes = image_example(source, model)
    return _continuous(source, model, "pixel_values", axes, shapes)


def image_example(source: Source, model: Any) -> tuple[Axes, Shapes]:
    """The axes of the pixels, and shapes to try: that of the export, then others to compare at."""
    height, width = image_size(source, model)
    channels = int(setting(model, "num_channels", 3))
    if source.task.sizes == "any":
        sizes = [(2, height, width), (1, height + 32, width), (2, height, width + 64)]
        axes: Axes = {0: "batch", 2: "height", 3: "width"}
        return axes, [(rows, channels, *size) for rows, *size in sizes]
    # Vision models with positions have no axis to vary but the batch, and a row takes its time.
    return {0: "batch"}, [(rows, channels, height, width) for rows in (2, 1)]


def audio(source: Source, model: Any) -> Traceable:
    """A waveform or its spectrum in, what the task wants out."""
    main = model.main_input_name
    axes, shapes = audio_example(source, model, main)
    return _continuous(source, model, main, axes, shapes)


def audio_example(source: Source, model: Any, main: str) -> tuple[Axes, Shapes]:
    """The axes of the sound, and shapes to try: that of the export, then others to compare at."""
    config = model.config
    # configurations of sound name it in three ways; 80 is what most extractors make
    bins = int(getattr(config, "num_mel_bins", None) or getattr(config, "feature_projection_input_dim", 80))
    if main == "input_features" and config.model_type == "whisper":
        # Whisper's encoder takes exactly this many frames.
        shape = (bins, 2 * int(getattr(config, "max_source_positions", 1500)))
        return {0: "batch"}, [(rows, *shape) for rows in (2, 1)]
    if main == "input_features":
        bins = int(getattr(config, "input_feat_per_channel", bins))
        # multiples of four, by which the convolutions in front shorten it
        return {0: "batch", 1: "time"}, [(2, 48, bins), (1, 64, bins), (3, 36, bins)]
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        shape = (int(config.max_length), int(config.num_mel_bins))
        return {0: "batch"}, [(rows, *shape) for rows in (2, 1)]
    # a few tenths of a second at 16 kHz: enough for the convolutions in front, which shorten it 320 times
    return {0: "batch", 1: "samples"}, [(2, 4800), (1, 6400), (3, 3600)]


def series(source: Source, model: Any) -> Traceable:
    """Past values [batch, time, channels] in, the forecast out."""
    config = model.config
    length = int(getattr(config, "context_length", 0) or getattr(config, "prediction_length", 32))
    channels = int(getattr(config, "num_input_channels", 1))
    return _continuous(
        source, model, "past_values", {0: "batch"}, [(rows, length, channels) for rows in (2, 1, 3)]
    )


def masked_image(source: Source, model: Any) -> Traceable:
    """Pixels and which patches are hidden in, pixels without gaps out."""
    axes, shapes = image_example(source, model)
    patches = _patches(source, model, shapes[0])
    random = torch.Generator().manual_seed(0)

    def case(shape: tuple[int, ...]) -> dict[str, Tensor]:
        hidden = torch.rand(shape[0], patches, generator=random) < 0.5
        return {"pixel_values": torch.randn(*shape, generator=random), "bool_masked_pos": hidden}

    return Traceable(
        module=Adapter(model, ["pixel_values", "bool_masked_pos"], call(source, model)),
        inputs={"pixel_values": axes, "bool_masked_pos": {0: "batch"}},
        outputs=source.task.outputs,
        example=case(shapes[0]),
        cases=[case(shape) for shape in shapes[1:]],
    )


def _patches(source: Source, model: Any, shape: tuple[int, ...]) -> int:
    size = model.config.patch_size
    size = (size, size) if isinstance(size, int) else tuple(size)
    return (shape[2] // size[0]) * (shape[3] // size[1])


def _continuous(source: Source, model: Any, name: str, axes: Axes, shapes: Shapes) -> Traceable:
    random = torch.Generator().manual_seed(0)
    batches = [{name: torch.randn(*shape, generator=random)} for shape in shapes]
    if "embeddings" in source.task.outputs and source.task.kind == "text":
        raise ExportError(f"{source.origin}: task {source.task.name!r} is for text models; use 'default'")
    # A sequence axis of hidden states follows only where the input has one.
    outputs = {
        output: {
            axis: "frames" if label in ("sequence", "frames") else label
            for axis, label in named.items()
            if axis == 0 or set(axes) - {0}
        }
        for output, named in source.task.outputs.items()
    }

    return Traceable(
        module=Adapter(model, [name], call(source, model)),
        inputs={name: axes},
        outputs=outputs,
        example=batches[0],
        cases=batches[1:],
    )


# --- Text to sound as a traceable module, without the noise that such models add: the likeliest speech.


def text_to_audio(source: Source, model: Any) -> Traceable:
    """Token ids in, samples out."""
    names = ("input_ids", "attention_mask")
    if not hasattr(model, "forward") or getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise ExportError(
            f"{source.origin}: {type(model).__name__} does not make sound from text in one pass"
        )

    # the likeliest speech: noise would be drawn anew by every runtime, and could not be compared
    silent = [(model, n, 0.0) for n in ("noise_scale", "noise_scale_duration") if hasattr(model, n)]

    def run(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        with replaced(*silent):
            return call(source, model)(batch)

    texts = [text for text in TEXTS if isinstance(text, str)]
    return Traceable(
        module=Adapter(model, list(names), run),
        inputs=dict.fromkeys(names, TOKENS),
        outputs=source.task.outputs,
        example=encode(source, texts[:1], names),
        cases=[encode(source, texts[1:2], names), encode(source, texts[3:4], names)],
    )


# --- Models that compare images with texts, such as CLIP, as one traceable module with both inputs.
#
# Knows their inputs and outputs. Images and texts have batches of their own, except in training, where they
# come in pairs.


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

    single = [text for text in TEXTS if isinstance(text, str)]
    tokens: Axes = {0: texts, 1: "sequence"}
    return Traceable(
        module=Adapter(model, [*words, "pixel_values"], call(source, model)),
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

    return Traceable(
        module=Adapter(model, [*words, "pixel_values"], call(source, model)),
        # The queries belong to one picture: a batch of pictures would want as many lists of them.
        inputs={**{name: {0: "queries", 1: "sequence"} for name in words}, "pixel_values": {}},
        outputs={"logits": {2: "queries"}, "pred_boxes": {}},
        example=case(single[:2]),
        cases=[case(single[:1]), case(single)],
    )
