"""Preprocesses images and audio like a Hugging Face processor, in numpy only.

Reads the settings that image processors and feature extractors save. Resizing uses Pillow's filters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from onward.limits import require

_LARGEST_SIDE = 1 << 14


def image(picture: Any, settings: Mapping[str, Any] | None) -> np.ndarray:
    """Pixels as [channels, height, width] float32, from [height, width, channels] bytes or a Pillow image.

    Without settings the array is taken as the model's own input.
    """
    if settings is None:
        return np.asarray(picture, np.float32)
    channels = settings.get("channels", 3)
    if settings.get("letterbox"):
        picture, settings = _letterboxed(picture, settings), {**settings, "do_resize": False}
    if (
        settings.get("do_resize", True)
        and settings.get("size")
        and hasattr(picture, "resize")
        and not hasattr(picture, "dtype")
    ):
        # Pillow's own, which is faster
        height, width = _resized_shape((picture.height, picture.width), settings)
        picture = picture.resize((width, height), settings.get("resample", 2))
        settings = {**settings, "do_resize": False}
    pixels = np.asarray(picture)
    if pixels.ndim == 2:
        pixels = pixels[..., None] if channels == 1 else np.stack([pixels] * 3, axis=-1)
    if pixels.ndim != 3 or pixels.shape[-1] not in (1, 3, 4):
        raise ValueError(f"an image is [height, width, channels], got shape {list(pixels.shape)}")
    pixels = pixels[..., :3].astype(np.float32)
    if channels == 1 and pixels.shape[-1] == 3:
        # luma as Pillow computes it (ITU-R 601), rounded to whole numbers
        pixels = np.floor(pixels @ np.asarray([[0.299], [0.587], [0.114]], np.float32) + 0.5)
    elif channels == 3 and pixels.shape[-1] == 1:
        pixels = np.repeat(pixels, 3, axis=-1)
    if settings.get("do_resize", True) and settings.get("size"):
        pixels = _resize(pixels, _resized_shape(pixels.shape[:2], settings), settings.get("resample", 2))
    elif settings.get("do_resize", True) and settings.get("size_divisor") and not settings.get("do_pad"):
        divisor = int(settings["size_divisor"])
        sides = tuple(side // divisor * divisor for side in pixels.shape[:2])
        pixels = _resize(pixels, (sides[0], sides[1]), settings.get("resample", 2))
    if settings.get("do_center_crop") and settings.get("crop_size"):
        pixels = _crop(pixels, _within(pixels.shape[:2], settings["crop_size"]))
    if settings.get("do_flip_channel_order"):
        pixels = pixels[..., ::-1]
    if settings.get("do_rescale", True):
        pixels = pixels * np.float32(settings.get("rescale_factor", 1 / 255))
    # processors of transformers normalize unless they say otherwise
    if settings.get("do_normalize", True) and settings.get("image_mean"):
        mean, spread = (np.asarray(settings[key], np.float32) for key in ("image_mean", "image_std"))
        pixels = (pixels - mean) / spread
    if settings.get("do_pad") and settings.get("size_divisor"):
        pixels = _mirrored(pixels, int(settings["size_divisor"]))
    if settings.get("layout") == "NHWC":
        return np.ascontiguousarray(pixels)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def letterbox(size: tuple[int, int], settings: Mapping[str, Any]) -> tuple[float, float, int, int]:
    """How a picture of this height and width lies in the model's: its scale down and across, and its top and left.

    >>> letterbox((50, 100), {"size": {"height": 64, "width": 64}, "letterbox": "centre"})
    (0.64, 0.64, 16, 0)
    """
    height, width = _within(size, settings["size"])
    if not settings.get("letterbox"):
        return height / size[0], width / size[1], 0, 0
    scale = min(height / size[0], width / size[1])
    centred = settings["letterbox"] == "centre"
    top, left = (
        (side - round(scale * own)) // 2 if centred else 0 for side, own in zip((height, width), size)
    )
    return scale, scale, top, left


def _letterboxed(picture: Any, settings: Mapping[str, Any]) -> np.ndarray:
    """A picture as large as fits, and grey around it: what was square stays square."""
    height, width = _within(picture_size(picture), settings["size"])
    scale, _, top, left = letterbox(picture_size(picture), settings)
    tall, wide = (max(1, round(scale * side)) for side in picture_size(picture))
    resample = settings.get("resample", 2)
    if hasattr(picture, "resize") and not hasattr(picture, "dtype"):  # Pillow's own, which is faster
        pixels = np.asarray(picture.resize((wide, tall), resample))
    else:
        pixels = np.asarray(picture)
        pixels = _resize(pixels if pixels.ndim == 3 else pixels[..., None], (tall, wide), resample)
    pixels = pixels if pixels.ndim == 3 else pixels[..., None]
    boxed = np.full((height, width, pixels.shape[-1]), settings.get("pad_value", 114), np.uint8)
    boxed[top : top + tall, left : left + wide] = pixels
    return boxed


def picture_size(picture: Any) -> tuple[int, int]:
    """Height and width of a Pillow image, of [height, width, channels] or of [channels, height, width]."""
    if hasattr(picture, "height") and hasattr(picture, "width"):  # without its pixels
        return int(picture.height), int(picture.width)
    shape = np.shape(picture)
    if len(shape) == 3 and shape[0] in (1, 3) and shape[-1] not in (1, 3, 4):
        return int(shape[1]), int(shape[2])
    if len(shape) not in (2, 3):
        raise ValueError(f"an image is [height, width, channels], got shape {list(shape)}")
    return int(shape[0]), int(shape[1])


def _resized_shape(shape: tuple[int, ...], settings: Mapping[str, Any]) -> tuple[int, int]:
    size, multiple = settings["size"], int(settings.get("ensure_multiple_of") or 1)
    kind = str(settings.get("image_processor_type") or "")
    if kind.startswith("Yolos"):  # whole patches
        height, width = _within(shape, size)
        return max(16, height // 16 * 16), max(16, width // 16 * 16)
    if kind.startswith(("MaskFormer", "Mask2Former")) and settings.get("size_divisor"):
        divisor = int(settings["size_divisor"])
        height, width = _within(shape, size)
        return -(-height // divisor) * divisor, -(-width // divisor) * divisor
    if not settings.get("keep_aspect_ratio") or not isinstance(size, Mapping) or "height" not in size:
        return _within(shape, size)
    scales = [int(size["height"]) / shape[0], int(size["width"]) / shape[1]]
    # The side that changes least decides.
    scale = min(scales, key=lambda scale: abs(1 - scale))
    height, width = (int(round(scale * side / multiple) * multiple) for side in shape[:2])
    return height, width


def _mirrored(pixels: np.ndarray, divisor: int) -> np.ndarray:
    """Sides grown to the next multiple, by the picture's own mirror image."""
    more = [(side // divisor + 1) * divisor - side for side in pixels.shape[:2]]
    return np.pad(pixels, [(0, more[0]), (0, more[1]), (0, 0)], mode="symmetric")


def sound(wave: Any, settings: Mapping[str, Any] | None) -> np.ndarray:
    """A waveform as the model's processor makes it: scaled, or as a spectrum. Other arrays are taken as they are."""
    samples = np.asarray(wave, np.float32)
    if samples.ndim != 1 or settings is None:
        return samples
    kind = settings.get("feature_extractor_type")
    if kind == "WhisperFeatureExtractor":
        return _whisper(samples, settings)
    if kind in ("ASTFeatureExtractor", "Speech2TextFeatureExtractor", "SeamlessM4TFeatureExtractor"):
        return _kaldi(samples, settings, kind)
    if settings.get("do_normalize", False):
        # transformers' own epsilon, within the root
        return ((samples - samples.mean()) / np.sqrt(samples.var() + 1e-7)).astype(np.float32)
    return samples


def _whisper(samples: np.ndarray, settings: Mapping[str, Any]) -> np.ndarray:
    """[bins, frames]: the logarithm of a mel spectrum of exactly 30 seconds (or what the model was made for)."""
    rate, size, hop = int(settings["sampling_rate"]), int(settings["n_fft"]), int(settings["hop_length"])
    length = int(settings.get("n_samples") or rate * int(settings["chunk_length"]))
    require("unpacked_bytes", 16 * length, "the length of sounds in the preprocessing, in bytes,")
    fitted = np.zeros(length, np.float64)
    fitted[: min(length, len(samples))] = samples[:length]
    padded = np.pad(fitted, size // 2, mode="reflect")
    # periodic, as torch.hann_window makes it: numpy's own window ends where it began
    window = np.hanning(size + 1)[:-1]
    power = _power(padded, window, size, hop)[:-1]
    # Whisper's filters end at 8,000 Hz whatever the rate
    filters = _mel_filters(size // 2 + 1, int(settings["feature_size"]), 0.0, 8000.0, rate, slaney=True)
    logs = np.log10(np.maximum(power @ filters, 1e-10))
    # what is 80 decibels below the loudest is silence to Whisper
    logs = np.maximum(logs, logs.max() - 8.0)
    return ((logs + 4.0) / 4.0).T.astype(np.float32)


def _kaldi(samples: np.ndarray, settings: Mapping[str, Any], kind: str) -> np.ndarray:
    """[frames, bins]: Kaldi's filter bank, as AST, Speech2Text and SeamlessM4T want it."""
    rate, bins = int(settings.get("sampling_rate", 16000)), int(settings.get("num_mel_bins", 80))
    # Kaldi's numbers are those of 16-bit samples
    scaled = samples.astype(np.float64) * (1.0 if kind == "ASTFeatureExtractor" else 2.0**15)
    # Kaldi's own window is a Hann window to the power of 0.85
    window = np.hanning(400) if kind == "ASTFeatureExtractor" else np.hanning(400) ** 0.85
    power = _power(scaled, window, 512, 160, emphasis=0.97)
    filters = _mel_filters(257, bins, 20.0, rate / 2, rate, slaney=False)
    # silence has the smallest step of float32, so that its logarithm is finite
    logs = np.log(np.maximum(power @ filters, 1.192092955078125e-07))
    if kind == "ASTFeatureExtractor":
        longest = int(settings.get("max_length", 1024))
        require("unpacked_bytes", 8 * longest * bins, "the length of sounds in the preprocessing, in bytes,")
        frames = np.zeros((longest, bins))
        frames[: min(len(frames), len(logs))] = logs[: len(frames)]
        if settings.get("do_normalize", True):
            frames = (frames - settings.get("mean", -4.2677393)) / (2 * settings.get("std", 4.5689974))
        return frames.astype(np.float32)
    if kind == "Speech2TextFeatureExtractor":
        logs = logs - logs.mean(axis=0)
        return (logs / np.maximum(logs.std(axis=0), 1e-10)).astype(np.float32)
    # SeamlessM4T takes the sample's variance, Speech2Text the population's
    logs = (logs - logs.mean(axis=0)) / np.sqrt(logs.var(axis=0, ddof=1) + 1e-7)
    if len(logs) % 2:
        logs = np.concatenate([logs, np.full((1, bins), settings.get("padding_value") or 0.0)])
    return logs.reshape(-1, 2 * bins).astype(np.float32)


def _power(
    samples: np.ndarray, window: np.ndarray, size: int, hop: int, *, emphasis: float | None = None
) -> np.ndarray:
    """[frames, frequencies]: the squared spectrum of overlapping windows."""
    if len(samples) < len(window):
        raise ValueError(f"{len(samples)} samples are too few: one window takes {len(window)}")
    frames = np.lib.stride_tricks.sliding_window_view(samples, len(window))[::hop].astype(np.float64)
    if emphasis is not None:
        # Kaldi takes the mean of each window out, then makes high frequencies louder
        frames = frames - frames.mean(axis=1, keepdims=True)
        before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
        frames = frames - emphasis * before
    return np.abs(np.fft.rfft(frames * window, size)) ** 2


def _mel_filters(
    frequencies: int, bins: int, lowest: float, highest: float, rate: int, *, slaney: bool
) -> np.ndarray:
    """[frequencies, bins]: triangles that are evenly spread on the mel scale."""
    to_mel = _slaney_mel if slaney else _kaldi_mel
    edges = np.linspace(to_mel(np.asarray(lowest)), to_mel(np.asarray(highest)), bins + 2)
    if slaney:
        edges = _slaney_hertz(edges)
        grid = np.linspace(0, rate // 2, frequencies)
    else:
        # Triangles in mel, not in hertz.
        grid = to_mel(np.arange(frequencies) * rate / ((frequencies - 1) * 2))
    widths = np.diff(edges)
    slopes = edges[None] - grid[:, None]
    filters = np.maximum(0.0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    return filters * (2.0 / (edges[2:] - edges[:-2])) if slaney else filters


def _kaldi_mel(hertz: np.ndarray) -> np.ndarray:
    return 1127.0 * np.log(1.0 + hertz / 700.0)


def _slaney_mel(hertz: np.ndarray) -> np.ndarray:
    """Even steps up to 1000 Hz, even ratios above."""
    above = 15.0 + np.log(np.maximum(hertz, 1e-9) / 1000.0) * (27.0 / np.log(6.4))
    return np.where(hertz >= 1000.0, above, 3.0 * hertz / 200.0)


def _slaney_hertz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel >= 15.0, 1000.0 * np.exp((mel - 15.0) * (np.log(6.4) / 27.0)), 200.0 * mel / 3.0)


def _within(shape: tuple[int, ...], size: Any) -> tuple[int, int]:
    """The height and width that a setting asks for, which a file may have written: none that no one means."""
    try:
        height, width = _target(shape, size)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"the size {str(size)[:60]} of the preprocessing is not understood") from None
    if not (0 < height <= _LARGEST_SIDE and 0 < width <= _LARGEST_SIDE):
        raise ValueError(f"the preprocessing asks for images of {height} × {width} pixels")
    return height, width


def _target(shape: tuple[int, ...], size: Any) -> tuple[int, int]:
    height, width = shape[:2]
    if isinstance(size, int):
        return (size, size)
    if "height" in size:
        return (int(size["height"]), int(size["width"]))
    if "shortest_edge" not in size:
        scale = int(size["longest_edge"]) / max(height, width)
        return (round(height * scale), round(width * scale))
    edge = int(size["shortest_edge"])
    exact: float = edge
    if size.get("longest_edge"):
        # The longer side has a limit too: the shorter one then stays below its own.
        longest = int(size["longest_edge"])
        if max(height, width) / min(height, width) * edge > longest:
            exact = longest * min(height, width) / max(height, width)
            edge = round(exact)
        if min(height, width) == edge:
            return (height, width)
    if height <= width:
        return (edge, int(exact * width / height))
    return (int(exact * height / width), edge)


def _crop(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    top, left = ((pixels.shape[axis] - size[axis]) // 2 for axis in (0, 1))
    if top < 0 or left < 0:  # black around it
        more = [max(0, size[axis] - pixels.shape[axis]) for axis in (0, 1)]
        edges = [(n - n // 2, n // 2) for n in more]
        pixels = np.pad(pixels, [*edges, (0, 0)])
        top, left = ((pixels.shape[axis] - size[axis]) // 2 for axis in (0, 1))
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
    # 0, the nearest pixel, and filters that processors do not save
    if resample not in _FILTERS:
        rows = ((np.arange(size[0]) + 0.5) * pixels.shape[0] / size[0]).astype(int)
        columns = ((np.arange(size[1]) + 0.5) * pixels.shape[1] / size[1]).astype(int)
        return pixels[rows][:, columns]
    across = _weights(pixels.shape[1], size[1], *_FILTERS[resample])
    down = _weights(pixels.shape[0], size[0], *_FILTERS[resample])
    # sums of whole numbers times 2²² are exact in float64, and Pillow's are integers
    exact = pixels.astype(np.float64)
    # Across first, unless that makes more pixels and the other fewer: the order that Pillow has.
    if size[1] > pixels.shape[1] and size[0] < pixels.shape[0]:
        shorter = _whole(np.einsum("hwc,oh->owc", exact, down))
        return _whole(np.einsum("hwc,ow->hoc", shorter, across)).astype(np.float32)
    narrowed = _whole(np.einsum("hwc,ow->hoc", exact, across))
    return _whole(np.einsum("hwc,oh->owc", narrowed, down)).astype(np.float32)


_STEPS = 2.0**22
"""Pillow's weights are whole numbers of 1/2²²: with others, ties would round to the other side."""


def _weights(old: int, new: int, kernel: Callable[[np.ndarray], np.ndarray], support: float) -> np.ndarray:
    scale = max(old / new, 1.0)
    centres = (np.arange(new) + 0.5) * (old / new)
    distance = (np.arange(old)[None] + 0.5 - centres[:, None]) / scale
    weights = np.where(np.abs(distance) < support, kernel(distance), 0.0)
    steps = weights / weights.sum(axis=1, keepdims=True) * _STEPS
    return np.trunc(steps + np.where(steps < 0, -0.5, 0.5))


def _whole(sums: np.ndarray) -> np.ndarray:
    return np.clip(np.floor((sums + _STEPS / 2) / _STEPS), 0, 255)
