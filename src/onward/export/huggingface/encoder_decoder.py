"""Encoder-decoders (text to text, speech to text, image to text) as traceable modules, whole or in two parts.

The whole takes the decoder's tokens and returns logits; it is used for training and single files. The parts are
faster in inference: the encoder runs once and returns the keys and values for cross-attention, the decoder takes
them with those of the tokens generated so far, and returns logits for the new ones only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Read:
    """What the encoder reads: its inputs with their axes, and a batch of examples for each of four sizes."""

    axes: Mapping[str, Axes]
    example: Callable[[int], dict[str, Tensor]]

    @property
    def fixed(self) -> bool:
        """Whether the encoder's output has one length only, as that of pictures and of Whisper's frames."""
        return all(set(axes) == {0} for axes in self.axes.values())

    @property
    def masks(self) -> list[str]:
        """Which part of the input is padding matters to the decoder too, where the input has padding."""
        return [name for name in self.axes if name == "attention_mask"]


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
    # Some decoders begin with padding, some with their own first token: the configuration says which.
    start = next((value for value in ids if isinstance(value, int)), 0)
    # from 6 on: the first few are special in most vocabularies, and an end token would hide what follows
    following = torch.arange(rows * (width - 1)).reshape(rows, width - 1) % max(2, config.vocab_size - 7) + 6
    return torch.cat([torch.full((rows, 1), start), following % config.vocab_size], dim=1).to(torch.int64)


@dataclass(frozen=True)
class _Cache:
    """The shapes of keys and values by name: of the decoder's own tokens, and of what the encoder read."""

    past: Mapping[str, tuple[int, ...]]
    crossed: Mapping[str, tuple[int, ...]]
    # of the encoder's states
    width: int


def _parts(source: Source, model: Any, read: _Read) -> Mapping[str, Traceable]:
    cache = _probe_cache(source, model, read)
    length = "sequence" if 1 in next(iter(read.axes.values())) and read.masks else "encoder_sequence"
    crossed: Axes = {0: "batch"} if read.fixed else {0: "batch", 2: length}

    def look(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        # One decoder step, of which only the keys and values of the encoder's output are kept.
        rows = next(iter(batch.values())).shape[0]
        first = _tokens(model, 1, 1).expand(rows, 1)
        # transformers computes keys and values for cross-attention in the decoder alone, at its first step.
        answer = model(**batch, decoder_input_ids=first, use_cache=True, return_dict=True)
        return flat_cache(answer["past_key_values"].cross_attention_cache)

    encoder = Traceable(
        module=Adapter(model, list(read.axes), look),
        inputs=read.axes,
        outputs=dict.fromkeys(cache.crossed, crossed),
        example=read.example(0),
        cases=[read.example(2)] if read.fixed else [read.example(1), read.example(2)],
    )
    return {ENCODER: encoder, DECODER: _decoder(model, read, cache, crossed, look)}


def _probe_cache(source: Source, model: Any, read: _Read) -> _Cache:
    with torch.no_grad():
        probe = model(
            **read.example(2), decoder_input_ids=_tokens(model, 1, 1), use_cache=True, return_dict=True
        )
    cache = probe.get("past_key_values")
    own, crossed = getattr(cache, "self_attention_cache", None), getattr(cache, "cross_attention_cache", None)
    return _Cache(
        {f"past_key_values.{slot}": shape for slot, shape in cache_slots(own, source, model).items()},
        {f"encoder.{slot}": shape for slot, shape in cache_slots(crossed, source, model).items()},
        probe["encoder_last_hidden_state"].shape[-1],
    )


def _decoder(
    model: Any,
    read: _Read,
    cache: _Cache,
    crossed: Axes,
    look: Callable[[dict[str, Tensor]], Sequence[Tensor]],
) -> Traceable:
    """New tokens, with the keys and values of all before them and of the encoder's output, which `look` gives."""
    from transformers.modeling_outputs import BaseModelOutput

    random = torch.Generator().manual_seed(1)

    def write(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        keys = batch[next(iter(cache.crossed))]
        # Never read, as the cache is full; transformers asks for its shape.
        hidden = torch.zeros(keys.shape[0], keys.shape[2], cache.width)
        answer = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),  # type: ignore[arg-type]
            decoder_input_ids=batch["decoder_input_ids"],
            past_key_values=filled_cache(batch, list(cache.past), list(cache.crossed)),
            use_cache=True,
            return_dict=True,
            **{name: batch[name] for name in read.masks},
        )
        return (answer["logits"], *flat_cache(answer["past_key_values"].self_attention_cache))

    def step(index: int, width: int, before: int) -> dict[str, Tensor]:
        batch = read.example(index)
        rows = next(iter(batch.values())).shape[0]
        if read.fixed:  # of one size, and large: any numbers do
            rows = (2, 3, 1)[index]
            seen = {n: torch.randn(rows, *s[1:], generator=random) for n, s in cache.crossed.items()}
        else:
            with torch.no_grad():
                seen = dict(zip(cache.crossed, look(batch)))
        past = {n: torch.randn(rows, s[1], before, s[3], generator=random) for n, s in cache.past.items()}
        masks = {name: batch[name] for name in read.masks}
        return {"decoder_input_ids": _tokens(model, rows, width), **masks, **past, **seen}

    inputs = {
        "decoder_input_ids": _WRITTEN,
        **dict.fromkeys(read.masks, TOKENS),
        **{name: {0: "batch", 2: "past_sequence"} for name in cache.past},
        **dict.fromkeys(cache.crossed, crossed),
    }
    present = [name.replace("past_key_values", "present", 1) for name in cache.past]
    return Traceable(
        module=Adapter(model, list(inputs), write),
        inputs=inputs,
        outputs={"logits": _WRITTEN, **{name: {0: "batch", 2: "total_sequence"} for name in present}},
        # no size of one and no two alike, which a trace would take for constants or for each other
        example=step(0, 3, 2),
        cases=[step(1, 5, 0), step(0, 1, 6), step(2, 2, 3)],
    )
