"""What reports show of samples: small pictures as PNG, texts, and tables of classes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.train.report import Figure

if TYPE_CHECKING:
    from onward.data.read import Data

# a report is read in a browser: twenty pictures of this side are some hundred kilobytes
LARGEST_SIDE = 320
WORST = 20


def encode_png(pixels: np.ndarray) -> bytes:
    """An image [height, width, 3] of bytes as a PNG file; Pillow is no dependency of a report.

    >>> encode_png(np.zeros((2, 2, 3), np.uint8))[1:4]
    b'PNG'
    """
    height, width, _ = pixels.shape
    # each line of a PNG begins with its filter: 0 is none
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"".join(
        [b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines.tobytes())),
         chunk(b"IEND", b"")]
    )  # fmt: skip


def to_pixels(array: np.ndarray, settings: Any) -> np.ndarray:
    """A model's input [channels, height, width] as an image of bytes, its normalization taken back."""
    planes = np.asarray(array, np.float32)
    if settings.get("layout") == "NHWC":
        planes = planes.transpose(2, 0, 1)
    if settings.get("do_normalize", True) and settings.get("image_mean") and settings.get("image_std"):
        mean, spread = (np.asarray(settings[key], np.float32) for key in ("image_mean", "image_std"))
        planes = planes * spread.reshape(-1, 1, 1) + mean.reshape(-1, 1, 1)
    if settings.get("do_rescale", True):
        planes = planes / float(settings.get("rescale_factor") or 1 / 255)
    if settings.get("do_flip_channel_order"):
        planes = planes[::-1]
    planes = np.repeat(planes[:1], 3, axis=0) if planes.shape[0] < 3 else planes[:3]
    pixels = np.clip(np.round(planes), 0, 255).astype(np.uint8).transpose(1, 2, 0)
    step = -(-max(pixels.shape[:2]) // LARGEST_SIDE)
    return pixels[::step, ::step]


def sample_figure(data: Data, row: int, title: str, caption: str) -> Figure:
    """One sample of the data: its picture or its text, or only its number where it is neither."""
    name = name_of_sample(data, row)
    caption = f"{name}: {caption}"
    done = data.preprocessing
    arrays = data.arrays
    if done is not None and done.kind == "image" and done.input in arrays:
        return Figure(title, caption, picture=encode_png(to_pixels(arrays[done.input][row], done.settings)))
    if data.tokenizer is not None and "input_ids" in arrays:
        from onward.data.text import read_tokenizer

        ids = [int(token) for token in arrays["input_ids"][row]]
        return Figure(title, caption, text=read_tokenizer(data.tokenizer).decode(ids)[:500])
    return Figure(title, caption)


def name_of_sample(data: Data, row: int) -> str:
    """The file of a sample, where samples are files; else its row."""
    for array in data.arrays.values():
        files = getattr(array, "files", None)
        if files:
            return str(getattr(files[row], "name", files[row]))
    return f"row {row}"


def class_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[Figure]:
    """Scores of classes as a table; nothing where there are none."""
    return [Figure(title, "", table=(tuple(columns), *map(tuple, rows)))] if rows else []
