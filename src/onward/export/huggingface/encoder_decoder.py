"""Encoder-decoders (text to text, speech to text, image to text) as traceable modules, whole or in two parts.

The whole takes the decoder's tokens and returns logits; it is used for training and single files. The parts are
faster in inference: the encoder runs once and returns the keys and values for cross-attention, the decoder takes
them with those of the tokens generated so far, and returns logits for the new ones only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onward.errors import ExportError
from onward.export.huggingface.generation import cache_slots, filled_cache, flat_cache
from onward.export.huggingface.image_audio import audio_example, image_example
from onward.export.huggingface.traceable import TEXTS, TOKENS, Adapter, Traceable, encode

if TYPE_CHECKING:
    from onward.export.huggingface.find_model import Source
    from onward.export.huggingface.tasks import Axes

__all__ = ["DECODER", "ENCODER", "encoder_decoder"]

ENCODER, DECODER = "encoder_model.onnx", "decoder_model.onnx"
_WRITTEN: Axes = {0: "batch", 1: "decoder_sequence"}


def encoder_decoder(source: Source, model: Any) -> Traceable:
    """Encoder inputs and `decoder_input_ids` in, scores of every decoder position out; `parts` are the two halves."""
    read = _inputs(source, model)
    names = [*read.axes, "decoder_input_ids"]

    def run(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        return (model(**batch, use_cache=False, return_dict=True)["logits"],)

    def case(index: int, width: int) -> dict[str, Tensor]:
        batch = read.example(index)
        return {**batch, "decoder_input_ids": _tokens(model, len(next(iter(batch.values()))), width)}

    return Traceable(
        module=Adapter(model, names, run),
        inputs={**read.axes, "decoder_input_ids": _WRITTEN},
        outputs=source.task.outputs,
        example=case(0, 4),
        cases=[case(1, 7), case(2, 1), case(3, 3)],
        parts=lambda: _parts(source, model, read),
    )


class _Read:
    """What the encoder reads: its inputs with their axes, and a batch of examples for each of four sizes."""

    def __init__(self, axes: Mapping[str, Axes], example: Callable[[int], dict[str, Tensor]]) -> None:
        self.axes = axes
        self.example = example


def _inputs(source: Source, model: Any) -> _Read:
    main = getattr(model, "main_input_name", "input_ids")
    if main == "input_ids":
        if source.task.kind != "text":
            raise ExportError(
                f"{source.origin}: {type(model).__name__} takes text, and task {source.task.name!r} is for "
                f"{source.task.kind}s"
            )
        names = ("input_ids", "attention_mask")
        texts = [TEXTS[:2], TEXTS, TEXTS[:1], TEXTS[2:4]]
        return _Read(dict.fromkeys(names, TOKENS), lambda index: encode(source, texts[index], names))
    if main == "pixel_values":
        axes, shapes = image_example(source, model)
    else:
        axes, shapes = audio_example(source, model, main)
    random = torch.Generator().manual_seed(0)
    sizes = [shapes[0], shapes[-1], shapes[1], shapes[0]]
    return _Read({main: axes}, lambda index: {main: torch.randn(*sizes[index], generator=random)})


def _tokens(model: Any, rows: int, width: int) -> Tensor:
    """A start token and others after it, none of which ends the text."""
    config = (
        model.config.get_text_config(decoder=True)
        if hasattr(model.config, "get_text_config")
        else model.config
    )
    ids = (getattr(model.config, "decoder_start_token_id", None), getattr(config, "bos_token_id", None))
    start = next((value for value in ids if isinstance(value, int)), 0)
    following = torch.arange(rows * (width - 1)).reshape(rows, width - 1) % max(2, config.vocab_size - 7) + 6
    return torch.cat([torch.full((rows, 1), start), following % config.vocab_size], dim=1).to(torch.int64)


def _parts(source: Source, model: Any, read: _Read) -> Mapping[str, Traceable]:
    from transformers.modeling_outputs import BaseModelOutput

    with torch.no_grad():
        probe = model(
            **read.example(2), decoder_input_ids=_tokens(model, 1, 1), use_cache=True, return_dict=True
        )
    cache = probe.get("past_key_values")
    own, crossed = getattr(cache, "self_attention_cache", None), getattr(cache, "cross_attention_cache", None)
    if own is None or crossed is None or not crossed.layers:
        raise ExportError(
            f"{source.origin}: {type(model).__name__} keeps no key-value cache that can be exported"
        )
    width = probe["encoder_last_hidden_state"].shape[-1]
    crossed_length = crossed.layers[0].keys.shape[2]
    own_slots, crossed_slots = cache_slots(own, source, model), cache_slots(crossed, source, model)
    past = {f"past_key_values.{slot}": shape for slot, shape in own_slots.items()}
    seen = {f"encoder.{slot}": shape for slot, shape in crossed_slots.items()}
    # Which part of the input is padding matters to the decoder too, where the input has padding.
    masks = [name for name in read.axes if name == "attention_mask"]

    def look(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        # One decoder step, of which only the keys and values of the encoder's output are kept.
        rows = next(iter(batch.values())).shape[0]
        first = _tokens(model, 1, 1).expand(rows, 1)
        answer = model(**batch, decoder_input_ids=first, use_cache=True, return_dict=True)
        return flat_cache(answer["past_key_values"].cross_attention_cache)

    def write(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        cache = filled_cache(batch, list(past), list(seen))
        keys = batch[next(iter(seen))]
        hidden = torch.zeros(keys.shape[0], keys.shape[2], width)
        answer = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),  # type: ignore[arg-type]
            decoder_input_ids=batch["decoder_input_ids"],
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
            **{name: batch[name] for name in masks},
        )
        return (answer["logits"], *flat_cache(answer["past_key_values"].self_attention_cache))

    random = torch.Generator().manual_seed(1)

    def step(index: int, width: int, before: int) -> dict[str, Tensor]:
        batch = read.example(index)
        rows = next(iter(batch.values())).shape[0]
        if _fixed(read):  # of one size, and large: any numbers do
            rows = (2, 3, 1)[index]
            sizes = {name: (rows, s[1], crossed_length, s[3]) for name, s in seen.items()}
            found = {name: torch.randn(*size, generator=random) for name, size in sizes.items()}
        else:
            with torch.no_grad():
                found = dict(zip(seen, look(batch)))
        old = {n: torch.randn(rows, s[1], before, s[3], generator=random) for n, s in past.items()}
        return {
            "decoder_input_ids": _tokens(model, rows, width),
            **{name: batch[name] for name in masks},
            **old,
            **found,
        }

    length = "sequence" if 1 in next(iter(read.axes.values())) and masks else "encoder_sequence"
    crossed_axes: Axes = {0: "batch"} if _fixed(read) else {0: "batch", 2: length}
    encoder = Traceable(
        module=Adapter(model, list(read.axes), look),
        inputs=read.axes,
        outputs=dict.fromkeys(seen, crossed_axes),
        example=read.example(0),
        cases=[read.example(2)] if _fixed(read) else [read.example(1), read.example(2)],
    )
    decoder = Traceable(
        module=Adapter(model, ["decoder_input_ids", *masks, *past, *seen], write),
        inputs={
            "decoder_input_ids": _WRITTEN,
            **dict.fromkeys(masks, TOKENS),
            **{name: {0: "batch", 2: "past_sequence"} for name in past},
            **dict.fromkeys(seen, crossed_axes),
        },
        outputs={
            "logits": _WRITTEN,
            **{f"present.{slot}": {0: "batch", 2: "total_sequence"} for slot in own_slots},
        },
        example=step(0, 3, 2),
        cases=[step(1, 5, 0), step(0, 1, 6), step(2, 2, 3)],
    )
    return {ENCODER: encoder, DECODER: decoder}


def _fixed(read: _Read) -> bool:
    """Whether the encoder's output has one length only, as that of pictures and of Whisper's frames."""
    return all(set(axes) == {0} for axes in read.axes.values())
