"""Speech: its words, written by a decoder or frame by frame, and texts as sound."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.language.decoding import EncoderDecoder, Options, Timestamps
from onward.tasks.generator import generate_ids
from onward.tasks.inputs import each, open_sound, signal

if TYPE_CHECKING:
    from onward.pipeline.load import Pipeline


def transcribe(
    pipeline: Pipeline,
    inputs: Any,
    *,
    language: str | None = None,
    translate: bool = False,
    return_timestamps: bool = False,
    chunk_length_s: float | None = None,
    stride_length_s: float | tuple[float, float] | None = None,
    **options: Any,
) -> Any:
    """The words of speech, in its language or translated into English.

    With `return_timestamps` the answer has `chunks` besides, each with its text and when it begins and ends, in
    seconds. `chunk_length_s` reads long sound in pieces that overlap by `stride_length_s` on either side (a sixth of
    their length), so that no word is cut; without it the pieces are as long as the model reads, and do not overlap.
    """
    # Whisper's decoder has 448 positions, of which the first tokens take some
    chosen = Options.read(options, pipeline.card["generation"], max_new_tokens=440)
    speech = pipeline.card["generation"].get("speech")
    if return_timestamps:
        if return_timestamps is not True:
            raise ValueError(
                f"return_timestamps is {return_timestamps!r}: times of words are not known, choose True"
            )
        if speech is None or speech.get("no_timestamps_id") is None:
            raise ValueError("return_timestamps: this model writes no times, as Whisper does")
        chosen = dataclasses.replace(chosen, timestamps=_timestamps(speech, chosen))

    def text(wave: Any) -> dict[str, Any]:
        parts = []
        for feed, edges in _windows(pipeline, wave, chunk_length_s, stride_length_s):
            start = None
            if speech is not None:
                start = _spoken_start(pipeline, speech, feed, language, translate)
                if return_timestamps:
                    start = start[:-1]
            parts.append((generate_ids(pipeline, feed, chosen, start)[0], edges))
        if pipeline.tokenizer is None:
            return {"text": "".join(str(ids) for ids, _ in parts)}
        if chosen.timestamps is not None:
            chunks = _timed_chunks(pipeline, parts, chosen.timestamps.first)
            return {"text": "".join(chunk["text"] for chunk in chunks), "chunks": chunks}
        if chunk_length_s:
            return {"text": pipeline.tokenizer.decode(_merge([ids for ids, _ in parts]))}
        return {"text": "".join(pipeline.tokenizer.decode(ids) for ids, _ in parts)}

    return each(inputs, text)


# seconds of a piece of sound, and of these those that the pieces before and after it have too
_Edges = tuple[float, float, float]


def _windows(
    pipeline: Pipeline, wave: Any, length: float | None, stride: float | tuple[float, float] | None
) -> list[tuple[dict[str, np.ndarray], _Edges]]:
    """Sound in pieces that the model reads at once."""
    samples = open_sound(pipeline, wave)
    processor = pipeline.card.get("processor") or {}
    limit, rate = processor.get("n_samples"), processor.get("sampling_rate") or 16000
    if not length and (samples.ndim != 1 or not limit or len(samples) <= limit):
        return [(signal(pipeline, samples), (len(samples) / rate, 0.0, 0.0))]
    seconds: float = length or (limit or len(samples)) / rate
    if stride is None:
        stride = seconds / 6 if length else 0.0
    left, right = (stride, stride) if isinstance(stride, int | float) else stride
    size, before, after = (round(part * rate) for part in (seconds, left, right))
    if size <= before + after:
        raise ValueError(
            f"chunk_length_s is {seconds:g}: it must be more than what pieces share, {left + right:g}"
        )
    if limit and size > limit:
        raise ValueError(f"chunk_length_s is {seconds:g}: the model reads {limit / rate:g} seconds at once")
    windows = []
    for start in range(0, len(samples), size - before - after):
        piece, is_last = samples[start : start + size], start + size >= len(samples)
        shared = before if start else 0
        if len(piece) > shared:
            edges = len(piece) / rate, shared / rate, 0.0 if is_last else after / rate
            windows.append((signal(pipeline, piece), edges))
        if is_last:
            break
    return windows


def _timestamps(speech: Mapping[str, Any], options: Options) -> Timestamps:
    first = int(speech["no_timestamps_id"]) + 1
    latest = speech.get("max_initial_timestamp_index")
    return Timestamps(first, min(options.ends, default=first - 1), None if latest is None else first + latest)


def _merge(parts: Sequence[Sequence[int]]) -> list[int]:
    """The tokens of pieces that overlap, joined in the middle of what two neighbours have in common.

    As transformers: of all ways to lay the second over the end of the first, the one with the largest share of equal
    tokens, the longer of two alike; a single equal token is chance.
    """
    whole: list[int] = []
    left = np.asarray(parts[0], np.int64)
    for part in parts[1:]:
        right = np.asarray(part, np.int64)
        best, cut, begin = 0.0, len(left), 0
        for shift in range(1, len(left) + len(right)):
            a, b = max(0, len(left) - shift), min(len(left), len(left) + len(right) - shift)
            c, d = max(0, shift - len(left)), min(len(right), shift)
            matches = int((left[a:b] == right[c:d]).sum())
            # transformers' own weight, which lets the longer of two equal shares win
            share = matches / shift + shift / 10000.0
            if matches > 1 and share > best:
                best, cut, begin = share, (a + b) // 2, (c + d) // 2
        whole += left[:cut].tolist()
        left = right[begin:]
    return whole + left.tolist()


def _timed_chunks(
    pipeline: Pipeline, parts: Sequence[tuple[Sequence[int], _Edges]], first: int
) -> list[dict[str, Any]]:
    """Texts with when they begin and end; the times inside of what two pieces share are left out."""
    processor = pipeline.card.get("processor") or {}
    # the encoder halves the frames: a time for every second one
    precision = 2 * processor.get("hop_length", 160) / (processor.get("sampling_rate") or 16000)
    chunks: list[dict[str, Any]] = []
    pieces: list[list[int]] = []
    begin: float | None = None
    offset, skipping = 0.0, False

    def close(end: float | None) -> None:
        text = pipeline.tokenizer.decode(_merge(pieces))
        chunks.append({"timestamp": (begin, end), "text": text})

    for ids, (length, left, right) in parts:
        offset -= left
        earliest, held = first + left / precision, _first_shared(ids, first, precision, length - right, right)
        current: list[int] = []
        for token in ids:
            if token < first:
                current.append(token)
                continue
            time = round((token - first) * precision + offset, 2)
            if held is not None and token >= held:
                skipping = True  # and the next one, since they come in pairs
            elif skipping or (pieces and token < earliest):
                skipping = False
            elif begin is None:
                begin = time
            elif time != begin:
                pieces.append(current)
                close(time)
                pieces, current, begin = [], [], None
        offset += length - right
        if current:
            pieces.append(current)
        elif not pieces:
            begin = None
    if pieces:
        close(None)
    return chunks


def _first_shared(ids: Sequence[int], first: int, precision: float, start: float, right: float) -> int | None:
    """The first time token after `start`, from where on the next piece is read too; at least the last of all."""
    held = None
    for token in reversed(ids) if right else ():
        if token >= first:
            if held is not None and (token - first) * precision < start:
                break
            held = token
    return held


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
            # as Whisper: the language token that the decoder finds likeliest after the start
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
    # CTC: a character lasts several frames, and a blank stands between two equal ones
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
