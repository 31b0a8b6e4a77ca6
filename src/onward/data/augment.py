"""Image augmentation: random in every epoch, and reproducible in a resumed run.

Works on batches of [samples, channels, height, width] (or channels last), after normalization, and only in training.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.errors import DataError

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
        made = list(batch)
        pixels = np.array(made[self.picture])
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
            labels = np.asarray(made[self.label])
            pixels = share[:, None, None, None] * pixels + (1 - share)[:, None, None, None] * pixels[other]
            own = rng.random(len(labels)) < share
            made[self.label] = np.where(own.reshape(-1, *(1,) * (labels.ndim - 1)), labels, labels[other])
        made[self.picture] = np.ascontiguousarray(
            pixels.transpose(0, 2, 3, 1) if self.channels_last else pixels
        )
        return made

    def _coloured(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Brightness, contrast and colour, in units of the picture before it was normalised."""
        mean = np.asarray(self.mean or (0.0,), np.float32)[:, None, None]
        spread = np.asarray(self.spread or (1.0,), np.float32)[:, None, None]
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


def make_augmentation(wanted: Sequence[str], inputs: Sequence[InputSpec], data: Data) -> Augmentation:
    """What is asked for, for data that was read: it knows which array has the pictures and how they were normalised."""
    strengths = parse_augmentations(wanted)
    arrays = data.arrays or {}
    pictures = [i for i, spec in enumerate(inputs) if len(getattr(arrays.get(spec.name), "shape", ())) == 4]
    if len(pictures) != 1:
        raise DataError("augmentation needs data with one array of pictures", "leave it away")
    labels = [i for i, spec in enumerate(inputs) if spec.is_integer]
    done = data.preprocessing.settings if data.preprocessing is not None else {}
    return Augmentation(
        picture=pictures[0],
        label=labels[0] if labels else None,
        channels_last=done.get("layout") == "NHWC",
        mean=tuple(done.get("image_mean") or ()) if done.get("do_normalize", True) else (),
        spread=tuple(done.get("image_std") or ()) if done.get("do_normalize", True) else (),
        **strengths,
    )


def parse_augmentations(wanted: Sequence[str]) -> dict[str, float]:
    """`flip`, `crop=0.2` and so on as strengths; an error for what there is not.

    >>> parse_augmentations(["flip", "crop=0.2"])
    {'flip': 0.5, 'crop': 0.2}
    """
    found: dict[str, float] = {}
    for text in [part for item in wanted for part in item.split(",") if part.strip()]:
        name, equals, number = (part.strip().lower() for part in text.partition("="))
        name = _SPELLINGS.get(name, name)
        if name not in AUGMENTATIONS:
            near = difflib.get_close_matches(name, AUGMENTATIONS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(AUGMENTATIONS)}"
            raise DataError(f"no augmentation is called '{name}'", hint)
        try:
            strength = float(number) if equals else AUGMENTATIONS[name]
        except ValueError:
            strength = -1.0
        most = 10.0 if name == "mixup" else 1.0 if name == "flip" else 0.9
        if not 0 <= strength <= most:
            raise DataError(
                f"'{text.strip()}': it is a number from 0 to {most:g}",
                f"for example {name}={AUGMENTATIONS[name]}",
            )
        found[name] = strength
    return found


def _moved(pixels: np.ndarray, reach: float, rng: np.random.Generator) -> np.ndarray:
    """A picture cut by up to `reach` of its size anywhere, and brought back to its size."""
    height, width = pixels.shape[1:]
    scale = 1 - rng.uniform(0, reach)
    tall, wide = max(1, round(height * scale)), max(1, round(width * scale))
    top, left = rng.integers(0, height - tall + 1), rng.integers(0, width - wide + 1)
    rows = top + np.linspace(0, tall - 1, height)
    columns = left + np.linspace(0, wide - 1, width)
    return _sample(_sample(pixels, rows, 1), columns, 2)


def _sample(pixels: np.ndarray, places: np.ndarray, axis: int) -> np.ndarray:
    """Linear interpolation along one axis."""
    below = np.floor(places).astype(int)
    above = np.minimum(below + 1, pixels.shape[axis] - 1)
    shape = [1, 1, 1]
    shape[axis] = len(places)
    share = (places - below).astype(pixels.dtype).reshape(shape)
    return np.take(pixels, below, axis) * (1 - share) + np.take(pixels, above, axis) * share
