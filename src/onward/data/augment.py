"""Image augmentation: random in every epoch, and reproducible in a resumed run.

Works on batches of [samples, channels, height, width] (or channels last), after normalization, and only in training.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.data.layouts import find_samples
from onward.data.preprocess import sound
from onward.data.sound import SOUNDS, fit_wave, read_wave
from onward.errors import DataError
from onward.limits import require

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec
    from onward.data.read import Data

__all__ = ["AUGMENTATIONS", "Augmentation", "make_augmentation", "parse_augmentations"]

# how far each goes where no number is given
AUGMENTATIONS: Mapping[str, float] = {"flip": 0.5, "crop": 0.1, "colour": 0.2, "mixup": 0.2}
_SPELLINGS = {"color": "colour", "colors": "colour"}


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """A function of a batch and a random generator, for `Trainer.fit(transform=…)`.

    `flip` is the fraction of images that are mirrored; `crop` how far an image is moved and enlarged, as a fraction
    of its size; `colour` how far brightness and contrast change. `mixup` is the α of mixup: pictures
    are mixed by λ from Beta(α, α), and the label is drawn from the two by λ, which gives the gradient of mixup's
    loss on average and needs no other loss.

    >>> batch = [np.zeros((2, 3, 8, 8), np.float32), np.array([0, 1])]
    >>> [a.shape for a in Augmentation(picture=0, label=1, flip=0.5, crop=0.1)(batch, np.random.default_rng(0))]
    [(2, 3, 8, 8), (2,)]
    """

    picture: int
    label: int | None = None
    flip: float = 0.0
    crop: float = 0.0
    colour: float = 0.0
    mixup: float = 0.0
    channels_last: bool = False
    mean: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()

    def __call__(self, batch: Sequence[Any], rng: np.random.Generator) -> list[Any]:
        arrays = list(batch)
        pixels = np.array(arrays[self.picture])
        if pixels.ndim != 4:
            raise DataError(f"augmentation needs pictures, and the input has shape {list(pixels.shape)}")
        if self.channels_last:
            pixels = pixels.transpose(0, 3, 1, 2)
        if self.flip:
            chosen = rng.random(len(pixels)) < self.flip
            pixels[chosen] = pixels[chosen, :, :, ::-1]
        if self.crop:
            pixels = np.stack([_moved(one, self.crop, rng) for one in pixels])
        if self.colour:
            pixels = self._coloured(pixels, rng)
        if self.mixup:
            if self.label is None:
                raise DataError("mixup needs a model that takes labels", "leave it away")
            share = rng.beta(self.mixup, self.mixup, len(pixels)).astype(pixels.dtype)
            other = rng.permutation(len(pixels))
            labels = np.asarray(arrays[self.label])
            pixels = share[:, None, None, None] * pixels + (1 - share)[:, None, None, None] * pixels[other]
            # drawn, not mixed: a class index has no value between two
            own = rng.random(len(labels)) < share
            arrays[self.label] = np.where(own.reshape(-1, *(1,) * (labels.ndim - 1)), labels, labels[other])
        arrays[self.picture] = np.ascontiguousarray(
            pixels.transpose(0, 2, 3, 1) if self.channels_last else pixels
        )
        return arrays

    def _coloured(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Brightness, contrast and colour, in units of the picture before it was normalised."""
        mean = np.asarray(self.mean or (0.0,), np.float32)[:, None, None]
        spread = np.asarray(self.spread or (1.0,), np.float32)[:, None, None]
        # brightness is a factor of light: it means nothing on pixels around 0
        plain = pixels * spread + mean
        low, high = 1 - self.colour, 1 + self.colour
        brightness, contrast, saturation = (
            rng.uniform(low, high, (len(pixels), 1, 1, 1)).astype(np.float32) for _ in range(3)
        )
        plain = plain * brightness
        grey = plain.mean(axis=(1, 2, 3), keepdims=True)
        plain = (plain - grey) * contrast + grey
        grey = plain.mean(axis=1, keepdims=True)
        plain = (plain - grey) * saturation + grey
        return ((plain - mean) / spread).astype(pixels.dtype)


def make_augmentation(names: Sequence[str], inputs: Sequence[InputSpec], data: Data) -> Augmentation:
    """What is asked for, for data that was read: it knows which array has the pictures and how they were normalised."""
    strengths = parse_augmentations(names)
    arrays = data.arrays
    pictures = [i for i, spec in enumerate(inputs) if len(getattr(arrays.get(spec.name), "shape", ())) == 4]
    if len(pictures) != 1:
        raise DataError("augmentation needs data with one array of pictures", "leave it away")
    # what the data calls otherwise is the target: truth values of labels, which the loss takes as numbers
    labels = [i for i, spec in enumerate(inputs) if spec.is_integer or spec.name not in arrays]
    mean, spread = normalization_of(data.settings)
    return Augmentation(
        picture=pictures[0],
        label=labels[0] if labels else None,
        channels_last=data.settings.get("layout") == "NHWC",
        mean=mean,
        spread=spread,
        **strengths,
    )


def normalization_of(settings: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and deviation that pictures were brought to; empty where they were not."""
    if not settings.get("do_normalize", True):
        return (), ()
    return tuple(settings.get("image_mean") or ()), tuple(settings.get("image_std") or ())


def parse_augmentations(
    names: Sequence[str], defaults: Mapping[str, float] = AUGMENTATIONS
) -> dict[str, float]:
    """`flip`, `crop=0.2` and so on as strengths; an error for what there is not.

    `defaults` are those that there are, with the strength of each where no number is given.

    >>> parse_augmentations(["flip", "crop=0.2"])
    {'flip': 0.5, 'crop': 0.2}
    """
    strengths: dict[str, float] = {}
    for text in [part for item in names for part in item.split(",") if part.strip()]:
        name, equals, number = (part.strip().lower() for part in text.partition("="))
        name = _SPELLINGS.get(name, name)
        if name not in defaults:
            near = difflib.get_close_matches(name, defaults, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(defaults)}"
            raise DataError(f"no augmentation is called '{name}'", hint)
        try:
            strength = float(number) if equals else defaults[name]
        except ValueError:
            strength = -1.0
        # mixup's is the α of a Beta distribution, flip's and mosaic's a share; of others 1 would leave nothing
        most = 10.0 if name == "mixup" else 1.0 if name in ("flip", "mosaic") else 0.9
        if not 0 <= strength <= most:
            raise DataError(
                f"'{text.strip()}': it is a number from 0 to {most:g}",
                f"for example {name}={defaults[name]}",
            )
        strengths[name] = strength
    return strengths


def _moved(pixels: np.ndarray, reach: float, rng: np.random.Generator) -> np.ndarray:
    """A picture cut by up to `reach` of its size anywhere, and brought back to its size."""
    height, width = pixels.shape[1:]
    scale = 1 - rng.uniform(0, reach)
    tall, wide = max(1, round(height * scale)), max(1, round(width * scale))
    top, left = rng.integers(0, height - tall + 1), rng.integers(0, width - wide + 1)
    rows = top + np.linspace(0, tall - 1, height)
    columns = left + np.linspace(0, wide - 1, width)
    return interpolate(interpolate(pixels, rows, -2), columns, -1)


def interpolate(planes: np.ndarray, positions: np.ndarray, axis: int) -> np.ndarray:
    """Rows or columns (axis −2 or −1) at these positions, each between two pixels."""
    positions = np.clip(positions, 0, planes.shape[axis] - 1)
    below = np.floor(positions).astype(int)
    above = np.minimum(below + 1, planes.shape[axis] - 1)
    share = (positions - below).astype(planes.dtype)
    share = share[:, None] if axis == -2 else share
    return np.take(planes, below, axis) * (1 - share) + np.take(planes, above, axis) * share


# --- Noise in training waves: recordings of a folder, mixed in at random loudness.
#
# Works on batches of waves as the model takes them, and only in training. All draws are from the generator of
# the batch, so that a resumed run and one on several processes hear the same.


# decibels by which the wave is louder than the noise: from as loud as the noise to where nobody hears it
LOUDEST, FAINTEST = 0.0, 40.0


@dataclasses.dataclass(frozen=True)
class NoiseMix:
    """A function of a batch and a random generator, for `Trainer.fit(transform=…)`.

    `wave` is the place of the waves among the inputs. Each gets a random part of one of `recordings`, which are of the
    model's rate, at a signal-to-noise ratio from `LOUDEST` to `FAINTEST` decibels; silence gets the noise's own
    loudness, reduced by as much. `normalized` waves are brought to mean 0 and deviation 1 again.
    """

    wave: int
    recordings: Sequence[np.ndarray]
    normalized: bool = False

    def __call__(self, batch: Sequence[Any], rng: np.random.Generator) -> list[Any]:
        """The batch with noise in its waves."""
        waves = np.asarray(batch[self.wave])
        mixed = [self._mix(wave.reshape(-1), rng).reshape(wave.shape) for wave in waves]
        arrays = list(batch)
        arrays[self.wave] = np.stack(mixed).astype(waves.dtype)
        return arrays

    def _mix(self, wave: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        recording = self.recordings[int(rng.integers(len(self.recordings)))]
        start = rng.integers(len(recording))
        # from the end of a recording on it begins again
        noise = np.take(recording, np.arange(start, start + len(wave)), mode="wrap").astype(np.float64)
        ratio = 10 ** (-rng.uniform(LOUDEST, FAINTEST) / 20)
        loudness, noise_loudness = (float(np.sqrt(np.mean(np.square(part)))) for part in (wave, noise))
        # a stretch of silence in a recording has no loudness to be brought to another
        if noise_loudness == 0:
            return wave
        mixed = wave + noise * (ratio * (loudness or noise_loudness) / noise_loudness)
        return sound(mixed.astype(np.float32), {"do_normalize": True}) if self.normalized else mixed


def make_noise(folder: Path, inputs: Sequence[InputSpec], data: Data) -> NoiseMix:
    """The recordings of a folder for data that was read from WAV files: it knows the model's input and its rate."""
    done = data.preprocessing
    wave = next((i for i, spec in enumerate(inputs) if done is not None and spec.name == done.input), None)
    if done is None or done.kind != "sound" or wave is None:
        raise DataError("--noise is for WAV files, and the data has none", "leave it away")
    if not folder.is_dir():
        raise DataError(f"--noise {folder}: no folder there", "name a folder of WAV files")
    files = find_samples(folder, SOUNDS, "sound", labelled=False).files
    recordings, size = [], 0
    for file in files:
        recordings.append(fit_wave(*read_wave(file), {"sampling_rate": done.settings["sampling_rate"]}))
        size += recordings[-1].nbytes
        require("unpacked_bytes", size, f"'{folder}': what its recordings take in memory, in bytes,")
    if not any(recording.any() for recording in recordings):
        raise DataError(f"'{folder}' has silence only", "give recordings of noise")
    return NoiseMix(wave, recordings, bool(done.settings.get("do_normalize")))
