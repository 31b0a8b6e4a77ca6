"""Prepare images and sound for a model as its processor would, in numpy alone.

Knows the settings that image processors and feature extractors save. Resizing filters as Pillow does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["image", "sound"]


def image(picture: Any, settings: Mapping[str, Any] | None) -> np.ndarray:
    """Pixels as [channels, height, width] float32, from [height, width, channels] bytes or a Pillow image.

    Without settings the array is taken as the model's own input.
    """
    if settings is None:
        return np.asarray(picture, np.float32)
    channels = settings.get("channels", 3)
    if (
        settings.get("do_resize", True)
        and settings.get("size")
        and hasattr(picture, "resize")
        and not hasattr(picture, "dtype")
    ):
        # Pillow's own, which is faster
        height, width = _target((picture.height, picture.width), settings["size"])
        picture = picture.resize((width, height), settings.get("resample", 2))
        settings = {**settings, "do_resize": False}
    pixels = np.asarray(picture)
    if pixels.ndim == 2:
        pixels = pixels[..., None] if channels == 1 else np.stack([pixels] * 3, axis=-1)
    if pixels.ndim != 3 or pixels.shape[-1] not in (1, 3, 4):
        raise ValueError(f"an image is [height, width, channels], got shape {list(pixels.shape)}")
    pixels = pixels[..., :3].astype(np.float32)
    if channels == 1 and pixels.shape[-1] == 3:
        pixels = np.floor(pixels @ np.asarray([[0.299], [0.587], [0.114]], np.float32) + 0.5)
    elif channels == 3 and pixels.shape[-1] == 1:
        pixels = np.repeat(pixels, 3, axis=-1)
    if settings.get("do_resize", True) and settings.get("size"):
        pixels = _resize(pixels, _target(pixels.shape[:2], settings["size"]), settings.get("resample", 2))
    if settings.get("do_center_crop") and settings.get("crop_size"):
        pixels = _crop(pixels, _target(pixels.shape[:2], settings["crop_size"]))
    if settings.get("do_rescale", True):
        pixels = pixels * np.float32(settings.get("rescale_factor", 1 / 255))
    if settings.get("do_normalize", True) and settings.get("image_mean"):
        mean, spread = (np.asarray(settings[key], np.float32) for key in ("image_mean", "image_std"))
        pixels = (pixels - mean) / spread
    if settings.get("layout") == "NHWC":
        return np.ascontiguousarray(pixels)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def sound(wave: Any, settings: Mapping[str, Any] | None) -> np.ndarray:
    """A waveform as float32, of mean 0 and variance 1 where the model wants it; other arrays as they are."""
    samples = np.asarray(wave, np.float32)
    if samples.ndim == 1 and settings is not None and settings.get("do_normalize", False):
        samples = (samples - samples.mean()) / np.sqrt(samples.var() + 1e-7)
    return samples


def _target(shape: tuple[int, ...], size: Any) -> tuple[int, int]:
    height, width = shape[:2]
    if isinstance(size, int):
        return (size, size)
    if "height" in size:
        return (int(size["height"]), int(size["width"]))
    edge = int(size["shortest_edge"])
    if height <= width:
        return (edge, int(edge * width / height))
    return (int(edge * height / width), edge)


def _crop(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    top, left = ((pixels.shape[axis] - size[axis]) // 2 for axis in (0, 1))
    if top < 0 or left < 0:
        raise ValueError(f"an image of {list(pixels.shape[:2])} is smaller than its crop {list(size)}")
    return pixels[top : top + size[0], left : left + size[1]]


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.clip(1.0 - np.abs(x), 0.0, None)


def _cubic(x: np.ndarray) -> np.ndarray:
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3.0, np.sinc(x) * np.sinc(x / 3.0), 0.0)


# Pillow's numbers for its filters, which processors save.
_FILTERS: Mapping[int, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    1: (_lanczos, 3.0),
    2: (_triangle, 1.0),
    3: (_cubic, 2.0),
}


def _resize(pixels: np.ndarray, size: tuple[int, int], resample: int) -> np.ndarray:
    """Resize both axes; shrinking widens the filter, so that no pixel is skipped. Results are whole."""
    if tuple(pixels.shape[:2]) == size:
        return pixels
    if resample not in _FILTERS:
        rows = ((np.arange(size[0]) + 0.5) * pixels.shape[0] / size[0]).astype(int)
        columns = ((np.arange(size[1]) + 0.5) * pixels.shape[1] / size[1]).astype(int)
        return pixels[rows][:, columns]
    across = _weights(pixels.shape[1], size[1], *_FILTERS[resample])
    down = _weights(pixels.shape[0], size[0], *_FILTERS[resample])
    narrowed = _whole(np.einsum("hwc,ow->hoc", pixels, across))
    return _whole(np.einsum("hwc,oh->owc", narrowed, down))


def _weights(old: int, new: int, kernel: Callable[[np.ndarray], np.ndarray], support: float) -> np.ndarray:
    scale = max(old / new, 1.0)
    centres = (np.arange(new) + 0.5) * old / new
    distance = (np.arange(old)[None] + 0.5 - centres[:, None]) / scale
    weights = np.where(np.abs(distance) < support, kernel(distance), 0.0)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def _whole(pixels: np.ndarray) -> np.ndarray:
    return np.clip(np.floor(pixels + 0.5), 0, 255).astype(np.float32)
