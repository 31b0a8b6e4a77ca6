"""Text to sound as a traceable module, without the noise that such models add: the likeliest speech."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from onward.errors import ExportError
from onward.export.huggingface.traceable import TEXTS, TOKENS, Adapter, Traceable, encode, output_of

if TYPE_CHECKING:
    from onward.export.huggingface.find_model import Source

__all__ = ["text_to_audio"]


def text_to_audio(source: Source, model: Any) -> Traceable:
    """Token ids in, samples out."""
    names = ("input_ids", "attention_mask")
    if not hasattr(model, "forward") or getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise ExportError(
            f"{source.origin}: {type(model).__name__} does not make sound from text in one pass"
        )

    def run(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        with _without_noise(model):
            answer = model(**batch, return_dict=True)
        return tuple(output_of(source, answer, name) for name in source.task.outputs)

    texts = [text for text in TEXTS if isinstance(text, str)]
    return Traceable(
        module=Adapter(model, list(names), run),
        inputs=dict.fromkeys(names, TOKENS),
        outputs=source.task.outputs,
        example=encode(source, texts[:1], names),
        cases=[encode(source, texts[1:2], names), encode(source, texts[3:4], names)],
    )


@contextmanager
def _without_noise(model: Any) -> Iterator[None]:
    """The likeliest speech: noise would be drawn anew by every runtime, and could not be compared."""
    scales = {n: getattr(model, n) for n in ("noise_scale", "noise_scale_duration") if hasattr(model, n)}
    for name in scales:
        setattr(model, name, 0.0)
    try:
        yield
    finally:
        for name, value in scales.items():
            setattr(model, name, value)
