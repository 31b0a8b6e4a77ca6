"""What a pipeline is called with, as the arrays that its model takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from onward.data import preprocess
from onward.data.images import read_picture
from onward.data.sound import fit_wave, read_wave
from onward.errors import ModelError

if TYPE_CHECKING:
    from onward.pipeline.load import Pipeline


class Described(Protocol):
    """A model with its card: one that is loaded, or the base of one to train."""

    @property
    def card(self) -> Mapping[str, Any]: ...


# samples a second of speech models that do not say
_RATE = 16000


def each(inputs: Any, answer: Callable[[Any], Any]) -> Any:
    """One input gives one result, a list gives a list."""
    return [answer(item) for item in inputs] if isinstance(inputs, list) else answer(inputs)


def in_batch(inputs: Any, answer: Callable[[list[Any]], Sequence[Any]]) -> Any:
    """The same where the model runs once for all inputs."""
    return list(answer(inputs)) if isinstance(inputs, list) else answer([inputs])[0]


def signal(pipeline: Described, item: Any) -> dict[str, np.ndarray]:
    """An image or a sound as the model's only input."""
    name = next(iter(pipeline.card["inputs"]))
    settings = pipeline.card.get("processor")
    if name == "pixel_values":
        return {name: pixels(pipeline, item)[None]}
    return {name: preprocess.sound(open_sound(pipeline, item), settings)[None]}


def pixels(pipeline: Described, item: Any) -> np.ndarray:
    """A picture as the model takes it."""
    settings = pipeline.card.get("processor")
    item = open_image(pipeline, item)
    return preprocess.image(item, None if settings and settings.get("unknown") else settings)


def open_image(pipeline: Described, item: Any) -> Any:
    """A picture upright and in colours, whatever its file or Pillow image has; an array as it is."""
    unknown = (pipeline.card.get("processor") or {}).get("unknown")
    if unknown and getattr(item, "dtype", None) != np.float32:
        raise ModelError(
            f"the model's {unknown} prepares pictures in a way that is not known here; give float32 arrays as the "
            "model takes them: [channels, height, width]"
        )
    if isinstance(item, str | os.PathLike) or hasattr(item, "convert"):
        return read_picture(item, channels=(pipeline.card.get("processor") or {}).get("channels"))
    return item


def open_sound(pipeline: Described, item: Any) -> np.ndarray:
    """A wave in the model's rate: a WAV file, an array, or `{"array" or "raw": wave, "sampling_rate": rate}`."""
    settings = pipeline.card.get("processor") or {}
    if isinstance(item, str | os.PathLike):
        return fit_wave(*read_wave(item), {"sampling_rate": settings.get("sampling_rate", _RATE)})
    if not isinstance(item, Mapping):
        return np.asarray(item, np.float32)
    wave = item.get("array", item.get("raw"))
    rate = item.get("sampling_rate")
    if wave is None or not isinstance(rate, int) or rate < 1:
        raise ValueError('a sound is an array, a WAV file or {"array": …, "sampling_rate": …}')
    samples = np.asarray(wave, np.float32)
    if samples.ndim == 2:  # channels first, as torchaudio has them
        samples = samples.mean(axis=0)
    return fit_wave(samples, rate, {"sampling_rate": settings.get("sampling_rate", _RATE)})


def for_each_image(make: Callable[..., Any]) -> Callable[..., Any]:
    """An answer for each picture, from the model's outputs, the picture's size and the pipeline's card."""

    def answers(pipeline: Pipeline, inputs: Any, **options: Any) -> Any:
        def answer(item: Any) -> Any:
            item = open_image(pipeline, item)
            outputs = {name: array[0] for name, array in pipeline.run(signal(pipeline, item)).items()}
            return make(outputs, preprocess.picture_size(item), pipeline.card, **options)

        return each(inputs, answer)

    return answers
