"""Speech: its words, written by a decoder or frame by frame, and texts as sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.language.decoding import EncoderDecoder, Options
from onward.tasks.generator import generate_ids
from onward.tasks.inputs import each, open_sound, signal

if TYPE_CHECKING:
    from onward.pipeline.load import Pipeline


def transcribe(
    pipeline: Pipeline, inputs: Any, *, language: str | None = None, translate: bool = False, **options: Any
) -> Any:
    """The words of speech, in its language or translated into English."""
    # Whisper's decoder has 448 positions, of which the first tokens take some
    chosen = Options.read(options, pipeline.card["generation"], max_new_tokens=440)
    speech = pipeline.card["generation"].get("speech")

    def text(wave: Any) -> dict[str, str]:
        parts = []
        for feed in _windows(pipeline, wave):
            start = None if speech is None else _spoken_start(pipeline, speech, feed, language, translate)
            ids = generate_ids(pipeline, feed, chosen, start)[0]
            parts.append(str(ids) if pipeline.tokenizer is None else pipeline.tokenizer.decode(ids))
        return {"text": "".join(parts)}

    return each(inputs, text)


def _windows(pipeline: Pipeline, wave: Any) -> list[dict[str, np.ndarray]]:
    """Sound longer than the model reads at once, in pieces."""
    samples = open_sound(pipeline, wave)
    limit = (pipeline.card.get("processor") or {}).get("n_samples")
    if samples.ndim != 1 or not limit or len(samples) <= limit:
        return [signal(pipeline, samples)]
    return [signal(pipeline, samples[start : start + limit]) for start in range(0, len(samples), limit)]


def _spoken_start(
    pipeline: Pipeline,
    speech: Mapping[str, Any],
    feed: Mapping[str, np.ndarray],
    language: str | None,
    translate: bool,
) -> list[int]:
    """Whisper's first tokens: the start, the language (heard, where none is named), what to do, no timestamps."""
    start = [int(pipeline.card["generation"]["start_id"])]
    languages = speech.get("languages") or {}
    if languages:
        if language is None:
            encoder, decoder = pipeline.sessions.values()
            scores = EncoderDecoder(encoder, decoder, feed, start).step(None, None)[0]
            start.append(max(languages.values(), key=lambda token: scores[token]))
        elif f"<|{language}|>" in languages:
            start.append(languages[f"<|{language}|>"])
        else:
            names = ", ".join(name.strip("<|>") for name in languages)
            raise ValueError(f"unknown language {language!r}. Known: {names}")
        start.append(speech["tasks"]["translate" if translate else "transcribe"])
    return [*start, speech["no_timestamps_id"]] if speech.get("no_timestamps_id") is not None else start


def spell(pipeline: Pipeline, inputs: Any) -> Any:
    """The words of speech, frame by frame."""
    spelling = pipeline.card["spelling"]

    def text(wave: Any) -> dict[str, str]:
        return {"text": _join_frames(pipeline.run(signal(pipeline, wave))["logits"][0], spelling)}

    return each(inputs, text)


def _join_frames(logits: np.ndarray, spelling: Mapping[str, Any]) -> str:
    """The text of a recogniser's frames: the best class of each, repetitions and blanks left out."""
    best = np.asarray(logits).argmax(axis=-1)
    changed = np.concatenate([[True], best[1:] != best[:-1]])
    ids = best[changed & (best != spelling["blank_id"])].tolist()
    tokens = spelling["tokens"]
    if tokens is None:
        return " ".join(map(str, ids))
    delimiter = spelling.get("word_delimiter")
    words = [tokens[index] if index < len(tokens) else "<unk>" for index in ids]
    text = "".join(" " if word == delimiter else word for word in words).strip()
    return text.lower() if spelling.get("lower") else text


def speak(pipeline: Pipeline, inputs: Any) -> Any:
    """A text as sound."""

    def answer(text: str) -> dict[str, Any]:
        feed, _ = pipeline.encode([text])
        return {"audio": pipeline.run(feed)["waveform"][0], "sampling_rate": pipeline.card["sampling_rate"]}

    return each(inputs, answer)
