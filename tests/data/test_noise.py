"""Noise in training waves: how loud it is, that the same numbers are drawn again, and wrong folders."""

from __future__ import annotations

import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onward
from cli.test_finetune import published
from onward.data.augment import FAINTEST, LOUDEST, NoiseMix
from onward.errors import DataError
from onward.train.callbacks import Callback

TONE = np.sin(np.arange(4000) / 3).astype(np.float32)
HISS = np.random.default_rng(1).normal(size=1500).astype(np.float32)


def write_wave(path: Path, samples: np.ndarray, rate: int = 8000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 20000).clip(-32768, 32767).astype("<i2").tobytes())


def decibels(one: np.ndarray, other: np.ndarray) -> float:
    return 20 * float(np.log10(np.std(one) / np.std(other)))


@pytest.mark.parametrize("shape", [(4000,), (1, 4000), (4000, 1)])
def test_noise_is_as_faint_as_drawn_and_differs_in_every_batch(shape: tuple[int, ...]) -> None:
    mix, labels = NoiseMix(0, [HISS]), np.arange(40)
    waves = np.broadcast_to(TONE.reshape(shape), (40, *shape))
    mixed, same = mix([waves, labels], np.random.default_rng([0, 1]))
    assert mixed.shape == waves.shape and mixed.dtype == waves.dtype and same is labels
    ratios = [decibels(one, two) for one, two in zip(waves, mixed - waves)]
    # a part of the noise is measured with its mean here and without in the mixture
    assert min(ratios) > LOUDEST - 0.1 and max(ratios) < FAINTEST + 0.1
    assert min(ratios) < LOUDEST + 8 and max(ratios) > FAINTEST - 8
    again = mix([waves, labels], np.random.default_rng([0, 1]))[0]
    other = mix([waves, labels], np.random.default_rng([0, 2]))[0]
    assert np.array_equal(again, mixed) and not np.array_equal(other, mixed)


def test_silence_gets_noise_and_silent_noise_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    silence = np.zeros((1, 4000), np.float32)
    assert 0 < np.std(NoiseMix(0, [HISS])([silence], rng)[0]) <= np.std(HISS) * 1.1
    assert np.array_equal(NoiseMix(0, [np.zeros(10, np.float32)])([TONE[None]], rng)[0][0], TONE)


def test_a_normalized_wave_stays_normalized() -> None:
    mixed = NoiseMix(0, [HISS], normalized=True)([TONE[None] + 1], np.random.default_rng(0))[0]
    assert mixed.mean() == pytest.approx(0, abs=1e-6) and mixed.std() == pytest.approx(1, abs=1e-5)


@pytest.fixture
def keywords(tmp_path: Path) -> Path:
    """A model of waves, low and high tones of 8000 samples a second, and noise of another rate."""
    onnx.save(published("sound"), tmp_path / "model.onnx")
    time = np.arange(600) / 8000
    for name, pitch in {"high": 2000, "low": 200}.items():
        for index in range(10):
            write_wave(tmp_path / f"words/{name}/{index}.wav", 0.5 * np.sin(6.28 * pitch * time + index))
    write_wave(tmp_path / "noise/street/hiss.wav", 0.1 * HISS, rate=16000)
    return tmp_path


class StopAfter(Callback):
    """Ctrl-C after an update."""

    def on_step(self, trainer: onward.Trainer, row: dict[str, Any]) -> bool:
        if row["step"] == 3:
            raise KeyboardInterrupt
        return False


def test_a_stopped_run_with_noise_is_the_run_that_never_stopped(keywords: Path) -> None:
    settings: dict[str, Any] = {
        "epochs": 2, "batch_size": 8, "sampling_rate": 8000, "learning_rate": 0.05, "progress": False,
    }  # fmt: skip

    def train(folder: str, **options: Any) -> list[float]:
        result = onward.finetune(
            keywords / "model.onnx",
            keywords / "words",
            output_directory=keywords / folder,
            **settings,
            **options,
        )
        assert result.task == "audio-classification" and result.info.origin.settings.get("noise") is None
        return [epoch["loss"] for epoch in result.history.epochs]

    noise = keywords / "noise"
    whole = train("whole", noise=noise)
    with pytest.raises(KeyboardInterrupt):
        train("parts", noise=noise, callbacks=[StopAfter()])
    assert train("parts", noise=noise, resume=True) == whole
    assert train("plain") != whole


def test_events_that_sound_together_are_labels_of_one_wave(keywords: Path) -> None:
    time = np.arange(600) / 8000
    pitches, lines = {"high": 2000, "low": 200}, ["file_name,label"]
    for index in range(24):
        label = ("high", "low", "low|high")[index % 3]
        parts = [np.sin(6.28 * pitches[name] * time + index) for name in label.split("|")]
        write_wave(keywords / f"events/{index}.wav", 0.4 * np.sum(parts, axis=0))
        lines.append(f"{index}.wav,{label}")
    (keywords / "events" / "metadata.csv").write_text("\n".join(lines))
    result = onward.finetune(
        keywords / "model.onnx", keywords / "events", epochs=20, batch_size=8, learning_rate=0.05,
        sampling_rate=8000, noise=keywords / "noise", progress=False,
    )  # fmt: skip
    assert result.task == "audio-multi-label" and result.metrics["f1_micro"] > 0.8
    assert len(result.predict(keywords / "events" / "2.wav")) == 2


def _empty(folder: Path) -> None:
    folder.mkdir()


def _silent(folder: Path) -> None:
    write_wave(folder / "a.wav", np.zeros(100))


def _broken(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.wav").write_bytes(b"RIFF")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "no folder there"),
        (_empty, "no sound in"),
        (_silent, "has silence only"),
        (_broken, "a.wav': it is no WAV file"),
    ],
)
def test_a_folder_without_noise_is_refused(
    keywords: Path, prepare: Callable[[Path], None], message: str
) -> None:
    prepare(keywords / "other")
    with pytest.raises(DataError, match=message):
        onward.finetune(keywords / "model.onnx", keywords / "words", noise=keywords / "other", progress=False)


def test_noise_needs_wav_files() -> None:
    waves = np.zeros((8, 400), np.float32)
    with pytest.raises(DataError, match="--noise is for WAV files"):
        onward.finetune(
            published("sound"),
            (waves, ["a", "b"] * 4),
            task="audio-classification",
            noise="here",
            progress=False,
        )
