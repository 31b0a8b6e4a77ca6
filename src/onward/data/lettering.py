"""Pictures or sounds with what they say: `path<TAB>text` as PaddleOCR has it, tables, folders with either.

Pictures are scaled to a model's height and padded to the width of the widest in a batch, in steps; sounds are brought
to a model's rate and followed by silence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.columns import TABLES, read_table, row_of
from onward.data.images import PICTURES, read_picture, upright_size, why_unreadable_image
from onward.data.layouts import is_inside
from onward.data.sound import SOUNDS, open_wave
from onward.errors import DataError
from onward.reading import read_text

_LISTS = ("rec_gt.txt", "labels.txt", "gt.txt", "metadata.csv", "metadata.jsonl", "labels.csv")
_FILES = ("file_name", "filename", "path", "image", "audio", "file")
_TEXTS = ("text", "label", "transcription", "words", "sentence")
# widths are multiples of it: few shapes to plan memory for, and no more than this much padding
STEP = 32
_HINT = "a line is PATH<TAB>TEXT, or a table has the columns file_name and text"


@dataclass(frozen=True)
class Line:
    """A picture or sound and its text, and where the data says so; and its width or samples as the model takes it."""

    file: Path
    text: str
    where: str
    width: int = 0


def is_lettering(path: Path) -> bool:
    """Whether data are pictures or sounds with texts: a list with tabs, or a folder that has one."""
    if path.is_dir():
        return any(is_lettering(path / name) for name in _LISTS if name.endswith(".txt"))
    if path.suffix.lower() != ".txt" or not path.is_file():
        return False
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        name, tab, _ = file.readline(1 << 16).partition("\t")
    return bool(tab) and Path(name).suffix.lower() in PICTURES | SOUNDS


def read_lines(data: Any, *, text_column: str | None = None) -> list[Line]:
    """The files and texts of a list, a table or a folder with one, or of (picture, text) in memory."""
    if not isinstance(data, str | os.PathLike):
        pairs = enumerate(data)
        return [
            Line(Path(file), str(text), f"the data, sample {row} (from 0)") for row, (file, text) in pairs
        ]
    path = Path(data)
    if path.is_dir():
        named = next((path / name for name in _LISTS if (path / name).is_file()), None)
        if named is None:
            raise DataError(f"'{path}' has no list of texts: {', '.join(_LISTS[:3])} or metadata.csv", _HINT)
        path = named
    if not path.is_file():
        raise DataError(f"no data at '{path}'", "is the path right?")
    if path.suffix.lower() in TABLES - {".tsv"}:
        lines = _from_table(path, text_column)
    else:
        lines = _from_list(path)
    if not lines:
        raise DataError(f"'{path}' has no line", _HINT)
    base = path.parent
    resolved = []
    for line in lines:
        files = (base / line.file, base / "images" / line.file) if is_inside(line.file) else ()
        file = next((file for file in files if os.path.isfile(file)), None)
        if file is None:
            raise DataError(
                f"{line.where}: no file '{line.file}' in '{base}'",
                "correct the path, which begins in that folder, or remove the line",
            )
        if not line.text:
            raise DataError(f"{line.where}: '{line.file}' has no text", "fill it, or remove the line")
        resolved.append(replace(line, file=file))
    return resolved


def _from_list(path: Path) -> list[Line]:
    lines = []
    for number, line in enumerate(read_text(path).removeprefix("\ufeff").split("\n"), start=1):
        line = line.rstrip("\r")
        if not line.strip():
            continue
        name, tab, text = line.partition("\t")
        if not tab:
            raise DataError(f"'{path}', line {number}: there is no tab between path and text", _HINT)
        lines.append(Line(Path(name), text, f"'{path}', line {number}"))
    return lines


def _from_table(path: Path, text_column: str | None) -> list[Line]:
    columns = read_table(path)
    file = next((name for name in _FILES if name in columns), None)
    text = text_column or next((name for name in _TEXTS if name in columns), None)
    if file is None or text is None or text not in columns:
        missing = f"no column '{text_column}'" if text_column else "no columns file_name and text"
        raise DataError(f"'{path}' has {missing}", f"it has {', '.join(columns)}")
    # numbers in a table are texts here
    pairs = zip(columns[file].tolist(), columns[text].tolist())
    return [
        Line(Path(str(name)), str(words), row_of(str(path), row)) for row, (name, words) in enumerate(pairs)
    ]


def measure_lines(lines: Sequence[Line], settings: Mapping[str, Any]) -> list[Line]:
    """Lines with the widths that pictures have at the model's height, or the samples that sounds have at its rate."""

    def measure(line: Line) -> Line:
        try:
            if is_sound(settings):
                return replace(line, width=open_wave(line.file, settings).size)
        except DataError as error:
            raise DataError(f"{line.where}: {error}", "remove it, or fix it") from error
        if why := why_unreadable_image(line.file):
            raise DataError(
                f"{line.where}: cannot read the image '{line.file}': {why}", "remove it, or fix it"
            )
        height, width = upright_size(line.file)
        return replace(line, width=scaled_width(width, height, settings))

    with ThreadPoolExecutor(4) as pool:  # decoding leaves Python's lock
        return list(pool.map(measure, lines))


def is_sound(settings: Mapping[str, Any]) -> bool:
    """Whether these settings prepare sounds; others prepare pictures."""
    return "sampling_rate" in settings


def scaled_width(width: int, height: int, settings: Mapping[str, Any]) -> int:
    """The width of a picture at the model's height; no wider than the model takes."""
    size = settings["size"]
    own = max(1, -(-int(size["shortest_edge" if "shortest_edge" in size else "height"]) * width // height))
    # a picture of one row of pixels would become endlessly wide
    return min(own, size["width"]) if "width" in size else min(own, 1 << 13)


def read_batch(files: Sequence[Any], settings: Mapping[str, Any]) -> np.ndarray:
    """Pictures as [batch, channels, height, width] or sounds as [batch, samples], zeros behind the shorter ones."""
    if is_sound(settings):
        return _read_sounds(files, settings)
    size = settings["size"]
    height = int(size["shortest_edge" if "shortest_edge" in size else "height"])
    planes = [_read_line(file, height, settings) for file in files]
    widest = max(plane.shape[2] for plane in planes)
    width = size["width"] if "width" in size else -(-widest // STEP) * STEP
    # zeros behind a line are grey, as PaddleOCR pads
    batch = np.zeros((len(planes), planes[0].shape[0], height, width), np.float32)
    for row, plane in enumerate(planes):
        batch[row, :, :, : plane.shape[2]] = plane
    return batch


def _read_sounds(files: Sequence[Any], settings: Mapping[str, Any]) -> np.ndarray:
    waves = [open_wave(file, settings) for file in files]
    axis = 0 if settings.get("layout") == "T1" else -1
    longest = max(wave.shape[axis] for wave in waves)
    # no steps as pictures have: silence that is not there would change how a model that normalizes over time hears
    spans = [[(0, 0)] * wave.ndim for wave in waves]
    for span, wave in zip(spans, waves):
        span[axis] = (0, longest - wave.shape[axis])
    return np.stack([np.pad(wave, span) for wave, span in zip(waves, spans)])


def _read_line(source: Any, height: int, settings: Mapping[str, Any]) -> np.ndarray:
    picture = read_picture(source, channels=settings.get("channels", 3))
    width = scaled_width(picture.width, picture.height, settings)
    # 2 is bilinear, as OpenCV resizes for PaddleOCR
    pixels = np.asarray(picture.resize((width, height), 2), np.float32)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if settings.get("do_flip_channel_order"):
        pixels = pixels[..., ::-1]
    mean, spread = (np.asarray(settings.get(key, [0.5]), np.float32) for key in ("image_mean", "image_std"))
    return ((pixels / 255 - mean) / spread).transpose(2, 0, 1)
