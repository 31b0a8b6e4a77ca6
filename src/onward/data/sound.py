"""Audio: WAV files in one folder for each class, as waveforms of one sample rate and length."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.data.columns import EmbeddedFile
from onward.data.preprocess import sound
from onward.errors import DataError
from onward.info.preprocessing import Preprocessing
from onward.limits import require
from onward.reading import read_bytes
from onward.train.batches import Rows

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec

SOUNDS = frozenset({".wav"})
RATE = 16000


class Waves(Rows):
    """WAV files as an array of waves of one length."""

    def __init__(self, files: Sequence[Any], settings: Mapping[str, Any], *, dtype: Any = np.float32) -> None:
        self.files, self.settings, self.dtype = list(files), dict(settings), np.dtype(dtype)
        self.shape = (len(self.files), *self.read(np.asarray([0]))[0].shape)

    def read(self, rows: np.ndarray) -> np.ndarray:
        return np.stack([fit_wave(*read_wave(self.files[row]), self.settings) for row in rows]).astype(
            self.dtype
        )

    def part(self, rows: np.ndarray) -> Waves:
        return Waves([self.files[row] for row in rows], self.settings, dtype=self.dtype)


def read_sounds(
    files: Sequence[Any], inputs: Sequence[InputSpec], name: str | None, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], Preprocessing]:
    """WAV files for the model's input of waves, and what is done to them."""
    spec, layout, length = sound_input(inputs, name)
    used = {"sampling_rate": RATE, **settings, "layout": layout}
    if length is not None:
        used["length"] = length
    elif "length" not in used:
        used["length"] = max(len(fit_wave(*read_wave(file), {**used, "layout": "T"})) for file in files)
    return {spec.name: Waves(files, used, dtype=spec.dtype)}, Preprocessing("sound", spec.name, used)


def why_unreadable_sound(file: Any) -> str | None:
    """Why a sound cannot be read; None where it can."""
    try:
        read_wave(file)
    except DataError as error:
        return str(error).removeprefix(f"cannot read the sound '{file}': ")
    return None


def sound_input(inputs: Sequence[InputSpec], name: str | None) -> tuple[InputSpec, str, int | None]:
    """The input that takes waves, where its time is, and how long it must be."""
    for spec in inputs:
        if spec.dtype.kind != "f" or spec.dims is None or (name is not None and spec.name != name):
            continue
        if len(spec.dims) == 2:
            return spec, "T", spec.dims[1]
        if len(spec.dims) == 3 and spec.dims[1] == 1:
            return spec, "1T", spec.dims[2]
        if len(spec.dims) == 3 and spec.dims[2] == 1:
            return spec, "T1", spec.dims[1]
    raise DataError(
        "WAV files need a model with an input of waves: [batch, time], [batch, 1, time] or [batch, time, 1]",
        "make spectrograms or other features first, and give them as .npz",
    )


def read_wave(path: Any) -> tuple[np.ndarray, int]:
    """The samples of a WAV file from −1 to 1, all channels averaged, and their rate."""
    try:
        embedded = isinstance(path, EmbeddedFile)
        content = path.content if embedded else read_bytes(path, limit="unpacked_bytes")
    except OSError as error:
        why = error.strerror or error
        raise DataError(f"cannot read the sound '{path}': {why}", "is the path right?") from error
    try:
        kind, channels, rate, bits, data = _chunks(content)
        samples = _samples(data, kind, bits)
    except (ValueError, struct.error) as error:
        raise DataError(
            f"cannot read the sound '{path}': {error}", "WAV with whole numbers or floats is understood"
        ) from error
    # a file that was cut off may end between the channels of a frame
    samples = samples[: len(samples) // channels * channels]
    if not len(samples):
        raise DataError(f"'{path}' has no sound in it", "remove it")
    return samples.reshape(-1, channels).mean(axis=1), rate


def open_wave(item: Any, settings: Mapping[str, Any]) -> np.ndarray:
    """A sound as a model takes it: of a WAV file, of (samples, rate), or of samples at the model's rate."""
    if isinstance(item, str | os.PathLike | EmbeddedFile):
        return fit_wave(*read_wave(item), settings)
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], int):
        return fit_wave(np.asarray(item[0], np.float32), item[1], settings)
    if np.asarray(item).dtype.kind not in "iuf" or np.size(item) < 2:
        raise DataError(
            f"{type(item).__name__} is no sound", "give the path of a WAV file, or (samples, rate)"
        )
    return fit_wave(np.asarray(item, np.float32).reshape(-1), settings.get("sampling_rate", 1), settings)


def _chunks(content: bytes) -> tuple[int, int, int, int, bytes]:
    """Format, channels, rate, bits of a sample and the data of a WAV file."""
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise ValueError("it is no WAV file")
    offset, sound_format = 12, None
    while offset + 8 <= len(content):
        name, size = content[offset : offset + 4], struct.unpack_from("<I", content, offset + 4)[0]
        body = content[offset + 8 : offset + 8 + size]
        if name == b"fmt ":
            kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", body)
            if kind == 0xFFFE and len(body) >= 26:  # extensible: the format is in its own place
                kind = struct.unpack_from("<H", body, 24)[0]
            if not channels or not rate:
                raise ValueError(f"it has {channels} channels and a rate of {rate}")
            sound_format = kind, channels, rate, bits
        elif name == b"data":
            if sound_format is None:
                break
            return (*sound_format, body)
        # chunks begin at even bytes
        offset += 8 + size + size % 2
    raise ValueError("it has no sound in it, or is cut off")


def _samples(data: bytes, kind: int, bits: int) -> np.ndarray:
    whole = data[: len(data) // max(bits // 8, 1) * max(bits // 8, 1)]
    # WAV's 8 bits have no sign, all others have
    if (kind, bits) == (1, 8):
        return (np.frombuffer(whole, np.uint8).astype(np.float32) - 128) / 128
    if (kind, bits) == (1, 16):
        return np.frombuffer(whole, "<i2").astype(np.float32) / 2**15
    if (kind, bits) == (1, 24):
        # numpy has no type of three bytes; from the top of 32 bits the shift brings the sign down
        parts = np.frombuffer(whole, np.uint8).reshape(-1, 3).astype(np.int32)
        numbers = (parts[:, 0] << 8 | parts[:, 1] << 16 | parts[:, 2] << 24) >> 8
        return numbers.astype(np.float32) / 2**23
    if (kind, bits) == (1, 32):
        return np.frombuffer(whole, "<i4").astype(np.float32) / 2**31
    if kind == 3 and bits in (32, 64):
        return np.frombuffer(whole, f"<f{bits // 8}").astype(np.float32)
    raise ValueError(f"format {kind} with {bits} bits is not known here")


def fit_wave(samples: np.ndarray, rate: int, settings: Mapping[str, Any]) -> np.ndarray:
    """A wave in the rate and length of a model: resampled, cut in the middle or followed by silence."""
    target_rate = settings.get("sampling_rate", rate)
    if rate != target_rate:
        samples = _resample(samples, rate, target_rate)
    if settings.get("do_normalize"):  # before silence is added, as Hugging Face's feature extractors do
        samples = sound(samples, {"do_normalize": True})
    length = settings.get("length")
    if length:
        start = max(0, (len(samples) - length) // 2)
        samples = samples[start : start + length]
        samples = np.pad(samples, (0, length - len(samples)))
    layout = settings.get("layout", "T")
    samples = samples.astype(np.float32)
    return samples[None] if layout == "1T" else samples[:, None] if layout == "T1" else samples


def _resample(samples: np.ndarray, rate: int, target_rate: int) -> np.ndarray:
    """Another rate through the spectrum: what the new rate cannot hold is left out, so that nothing aliases."""
    count = max(1, round(len(samples) * target_rate / rate))
    require(
        "unpacked_bytes",
        16 * count,
        f"a sound at {rate} samples a second brought to {target_rate}, in bytes,",
    )
    spectrum = np.fft.rfft(samples)
    count_kept = min(len(spectrum), count // 2 + 1)
    resampled = np.zeros(count // 2 + 1, spectrum.dtype)
    resampled[:count_kept] = spectrum[:count_kept]
    return (np.fft.irfft(resampled, count) * (count / len(samples))).astype(np.float32)
