"""Whisper's times and long sound in pieces: the tokens, the joined texts and their times are those of transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.models.whisper import tokenization_whisper

from export.huggingface_types import tiny_of
from export.tiny_tokenizers import tokenizer_of
from onward.export import from_transformers
from onward.pipeline.load import load
from onward.tasks import speech

RATE, TIMES = 16000, 51
TASK = "automatic-speech-recognition"
WRITTEN = 14


class Heard:
    """A tiny Whisper that reads one second at a time, in transformers and as a folder."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = tokenizer_of("bytes (GPT-2)")
        self.tokenizer.add_special_tokens(
            {"additional_special_tokens": ["<|startoftranscript|>", "<|notimestamps|>"]}
        )
        self.first = len(self.tokenizer)
        self.tokenizer.add_tokens([f"<|{number * 0.02:.2f}|>" for number in range(TIMES)])
        start, quiet = self.first - 2, self.first - 1
        ends = {"eos_token_id": 3, "bos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": start}
        self.model, _ = tiny_of(
            "whisper", TASK, vocab_size=len(self.tokenizer), begin_suppress_tokens=None, **ends
        )  # fmt: skip
        settings = self.model.generation_config
        more = {"begin_suppress_tokens": None, "is_multilingual": False, "_from_model_config": False}
        times = {"no_timestamps_token_id": quiet, "max_initial_timestamp_index": 20}
        for name, value in {**ends, **more, **times}.items():
            setattr(settings, name, value)
        self.extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
        for part in (self.model, self.tokenizer, self.extractor):
            part.save_pretrained(folder / "torch")
        from_transformers(str(folder / "torch"), TASK, folder / "ours", check=False)
        self.ours: Any = load(folder / "ours")

    def tokens(self, wave: np.ndarray, *, times: bool) -> list[int]:
        """What transformers writes for a piece."""
        features = self.extractor(wave, sampling_rate=RATE, return_tensors="pt")["input_features"]
        # one pass, as here: by default transformers reads again from the last whole segment on
        once = {"force_unique_generate_call": True, "return_dict_in_generate": True}
        written = self.model.generate(
            features, return_timestamps=times, do_sample=False, max_new_tokens=WRITTEN, **once
        )
        ids = written.sequences[0].tolist()
        return [token for token in ids if token not in (0, 3, self.first - 2, self.first - 1)]

    def joined(self, pieces: list[tuple[list[int], tuple[float, float, float]]], *, times: bool) -> Any:
        """The answer of transformers' pipeline for what was written."""
        if not times:
            whole = tokenization_whisper._find_longest_common_sequence([ids for ids, _ in pieces])
            return {"text": self.tokenizer.decode(whole)}
        names = {"<|notimestamps|>": self.first - 1, "<|startofprev|>": -1, "<|startoftranscript|>": -2}
        reader = SimpleNamespace(
            convert_tokens_to_ids=names.__getitem__, all_special_ids=[], decode=self.tokenizer.decode,
            _strip_prompt=lambda ids, prompt, start: ids,
        )  # fmt: skip
        outputs = [{"tokens": np.asarray([ids]), "stride": edges} for ids, edges in pieces]
        text, more = tokenization_whisper._decode_asr(
            reader, outputs, return_timestamps=True, return_language=None, time_precision=0.02
        )
        return {"text": text, "chunks": more["chunks"]}


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Heard:
    return Heard(tmp_path_factory.mktemp("whisper"))


def sound(seconds: float, seed: int) -> np.ndarray:
    """Noise whose loudness and colour change."""
    random = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    tone = np.sin(2 * np.pi * (200 + 900 * random.random()) * time * (1 + time))
    return (tone * (0.2 + random.random()) + random.normal(size=len(time)) * 0.2).astype(np.float32)


def pieces_of(
    wave: np.ndarray, length: float, stride: float
) -> list[tuple[np.ndarray, tuple[float, float, float]]]:
    """As transformers' `chunk_iter` cuts sound."""
    size, shared = round(length * RATE), round(stride * RATE)
    pieces = []
    for start in range(0, len(wave), size - 2 * shared):
        piece, last = wave[start : start + size], start + size >= len(wave)
        pieces.append(
            (piece, (len(piece) / RATE, shared / RATE if start else 0, 0 if last else shared / RATE))
        )
        if last:
            break
    return pieces


@pytest.mark.parametrize("seed", range(3))
def test_times_are_written_as_by_transformers(heard: Heard, seed: int) -> None:
    wave = sound(0.9, seed)
    ids = heard.tokens(wave, times=True)
    assert any(token >= heard.first for token in ids)
    expected = heard.joined([(ids, (0.9, 0.0, 0.0))], times=True)
    assert heard.ours(wave, return_timestamps=True, max_new_tokens=WRITTEN) == expected
    plain = heard.tokens(wave, times=False)
    assert heard.ours(wave, max_new_tokens=WRITTEN)["text"] == heard.tokenizer.decode(plain)


@pytest.mark.parametrize("times", [False, True])
@pytest.mark.parametrize(("length", "stride"), [(0.9, 0.15), (0.5, 0.1)])
def test_long_sound_is_read_in_pieces_that_overlap(
    heard: Heard, length: float, stride: float, times: bool
) -> None:
    wave = sound(2.3, 4)
    pieces = [(heard.tokens(piece, times=times), edges) for piece, edges in pieces_of(wave, length, stride)]
    got = heard.ours(
        wave, chunk_length_s=length, stride_length_s=stride, return_timestamps=times, max_new_tokens=WRITTEN
    )
    assert got == heard.joined(pieces, times=times)


def test_pieces_are_joined_and_timed_as_by_transformers(heard: Heard) -> None:
    """Made up tokens, of which neighbours share some, and times inside and outside of what they share."""
    random = np.random.default_rng(0)
    for case in range(40):
        words = random.integers(100, 104 + 5 * case, 24).tolist()
        pieces = []
        for number, start in enumerate((0, 6, 12)):
            edges = (1.0, 0.2 if number else 0.0, 0.2 if number < 2 else 0.0)
            marks = np.sort(random.integers(0, TIMES, 4)) + heard.first
            ids = words[start : start + 12]
            ids = [marks[0], *ids[:5], marks[1], marks[1] if case % 2 else marks[2], *ids[5:], marks[3]]
            pieces.append((list(map(int, ids[: 12 + case % 4])), edges))
        spoken = [[token for token in ids if token < heard.first] for ids, _ in pieces]
        assert speech._merge(spoken) == tokenization_whisper._find_longest_common_sequence(spoken)
        expected = heard.joined(pieces, times=True)
        assert speech._timed_chunks(heard.ours, pieces, heard.first) == expected["chunks"]


def test_what_cannot_be_timed_or_cut_is_said(heard: Heard) -> None:
    wave = sound(0.5, 0)
    for options, message in (
        ({"return_timestamps": "word"}, "choose True"),
        ({"chunk_length_s": 2.0}, "reads 1 seconds at once"),
        ({"chunk_length_s": 0.5, "stride_length_s": 0.3}, "more than what pieces share"),
    ):
        with pytest.raises(ValueError, match=message):
            heard.ours(wave, **options)
