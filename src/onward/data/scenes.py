"""Pictures whose targets lie on them, masks or boxes: how large they are, and how they change in training.

A random window of a picture is brought back to its size: one inside it enlarges, one beyond it shrinks. Picture and
target take the same window and the same mirror. Where files lie, and what targets mean, is not known here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.data.augment import Augmentation, interpolate, normalization_of, parse_augmentations
from onward.data.images import picture_input, picture_settings, read_picture, why_unreadable_image
from onward.data.layouts import Samples, check_files
from onward.errors import DataError
from onward.info.preprocessing import Preprocessing, image_settings

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec
    from onward.info.model_info import ModelInfo

# the side of pictures for a model that takes any, where nobody says another: larger ones cost time and memory
_LARGEST_SIDE = 640
# networks halve pictures five times, and some need each half to be whole
_MULTIPLE = 32
# how far each goes where no number is given
STRENGTHS: Mapping[str, float] = {"flip": 0.5, "crop": 0.2, "scale": 0.5, "colour": 0.2, "mosaic": 0.5}


def scene_preprocessing(
    inputs: Sequence[InputSpec],
    info: ModelInfo,
    first: Path,
    *,
    normalize: str | None,
    size: int | None,
    defaults: Mapping[str, Any] | None = None,
) -> Preprocessing:
    """How pictures are made for the model's input: all one size, and nothing cut off that a target may lie on."""
    spec = picture_input(inputs, None)
    stated = info.input(spec.name)
    settings = (
        dict(stated.settings) if stated is not None and stated.kind == "image" else dict(defaults or {})
    )
    unknown = settings.pop("unknown", None)
    if unknown is not None and normalize is None:
        raise DataError(
            f"the model's {unknown} prepares pictures in a way that is not known here",
            "say what to do with the pixels: --normalize",
        )
    assert spec.dims is not None
    last = spec.dims[1] not in (1, 3) and spec.dims[3] in (1, 3)
    height, width = spec.dims[1:3] if last else spec.dims[2:4]
    if size is not None and {height, width} - {None, size}:
        raise DataError(
            f"the model takes pictures of {height} × {width}, and --size is {size}", "leave --size away"
        )
    if height is None or width is None:
        height, width = _chosen_sides(settings.get("size"), size, first)
    for key in ("do_center_crop", "crop_size", "size_divisor"):
        settings.pop(key, None)
    settings |= {**image_settings(normalize=normalize), "do_resize": True}
    settings["size"] = {"height": height, "width": width}
    return Preprocessing("image", spec.name, picture_settings(spec, settings))


def _chosen_sides(stated: Any, size: int | None, first: Path) -> tuple[int, int]:
    """The sides of pictures for a model that takes any."""
    if size is not None:
        return size, size
    if isinstance(stated, Mapping) and "height" in stated:
        return int(stated["height"]), int(stated["width"])
    if isinstance(stated, Mapping) and "shortest_edge" in stated:
        side = int(stated["shortest_edge"])
        return side, side
    picture = read_picture(first)
    shrink = min(1.0, _LARGEST_SIDE / max(picture.height, picture.width))

    def whole(side: int) -> int:
        return max(_MULTIPLE, round(side * shrink / _MULTIPLE) * _MULTIPLE)

    return whole(picture.height), whole(picture.width)


def require_readable(pictures: Sequence[Path]) -> None:
    """Refuse pictures that cannot be decoded, all of them at once."""
    check_files(Samples(list(pictures)), why_unreadable_image, "image", skip_bad=False)


@dataclasses.dataclass(frozen=True)
class Window:
    """A part of a picture, in shares of its sides; it may reach beyond them. `mirrored` is it seen from behind."""

    top: float = 0.0
    left: float = 0.0
    height: float = 1.0
    width: float = 1.0
    mirrored: bool = False

    def cut(self, planes: np.ndarray, fill: Any, *, linear: bool) -> np.ndarray:
        """[…, height, width] as this window shows it, at the same size; `fill` is what lies beyond."""
        if self == Window():
            return planes
        sides = planes.shape[-2:]
        # a pixel is an area: its centre lies half a pixel in
        rows = (self.top + (np.arange(sides[0]) + 0.5) / sides[0] * self.height) * sides[0] - 0.5
        columns = (self.left + (np.arange(sides[1]) + 0.5) / sides[1] * self.width) * sides[1] - 0.5
        if self.mirrored:
            columns = columns[::-1]
        cut = _sampled(_sampled(planes, rows, -2, linear=linear), columns, -1, linear=linear)
        beyond = _is_beyond(rows, sides[0])[:, None] | _is_beyond(columns, sides[1])[None]
        return np.where(beyond, np.asarray(fill, planes.dtype), cut) if beyond.any() else cut


def _is_beyond(positions: np.ndarray, side: int) -> np.ndarray:
    return (positions < -0.5) | (positions > side - 0.5)


def _sampled(planes: np.ndarray, positions: np.ndarray, axis: int, *, linear: bool) -> np.ndarray:
    """Rows or columns at these positions: between two pixels for pictures, the nearest one for class numbers."""
    if linear:
        return interpolate(planes, positions, axis)
    return np.take(planes, np.clip(np.round(positions), 0, planes.shape[axis] - 1).astype(int), axis)


# changes a target as a window changes its picture
ChangeTarget = Callable[[Any, Window], Any]


@dataclasses.dataclass(frozen=True)
class SceneAugmentation:
    """A function of a batch of (pictures, targets) and a random generator, for `make_batches(transform=…)`.

    `flip` is the share of pictures that are mirrored, `crop` how much smaller than the picture a window may be,
    `scale` how much larger or smaller, `colour` how far brightness and contrast change.
    """

    pictures: int
    targets: int
    change: ChangeTarget
    settings: Mapping[str, Any]
    strengths: Mapping[str, float]

    def __call__(self, batch: Sequence[Any], rng: np.random.Generator) -> list[Any]:
        changed = list(batch)
        pixels = np.asarray(changed[self.pictures])
        last = self.settings.get("layout") == "NHWC"
        planes = pixels.transpose(0, 3, 1, 2) if last else pixels
        windows = [self.window(rng) for _ in planes]
        planes = np.stack(
            [
                window.cut(one, one.mean(axis=(1, 2), keepdims=True), linear=True)
                for one, window in zip(planes, windows)
            ]
        )
        changed[self.targets] = np.stack(
            [self.change(one, window) for one, window in zip(changed[self.targets], windows)]
        )
        if self.strengths.get("colour"):
            mean, spread = normalization_of(self.settings)
            colour = Augmentation(picture=0, colour=self.strengths["colour"], mean=mean, spread=spread)
            (planes,) = colour([planes], rng)
        changed[self.pictures] = np.ascontiguousarray(planes.transpose(0, 2, 3, 1) if last else planes)
        return changed

    def window(self, rng: np.random.Generator) -> Window:
        """A random window; a resumed run draws the same ones."""
        flip, crop, scale = (self.strengths.get(name, 0.0) for name in ("flip", "crop", "scale"))
        mirrored = bool(rng.random() < flip)
        side = 1 - rng.uniform(0, crop)
        if scale:
            side /= rng.uniform(1 - scale, 1 + scale)
        # where it is smaller it lies anywhere in the picture; where it is larger, the picture anywhere in it
        top, left = rng.uniform(min(0, 1 - side), max(0, 1 - side), 2)
        return Window(float(top), float(left), float(side), float(side), mirrored)


def scene_strengths(names: Sequence[str], allowed: Sequence[str]) -> dict[str, float]:
    """The augmentations that a task has, as strengths; an error for others."""
    return parse_augmentations(names, {name: STRENGTHS[name] for name in allowed})
