"""Images: a folder with one folder for each class, or single files, read lazily."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.data.preprocess import image
from onward.data.preprocessing import Preprocessing
from onward.errors import DataError
from onward.escape import first_of
from onward.train.batches import Rows

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec

__all__ = [
    "PICTURES",
    "Images",
    "Pictures",
    "class_files",
    "number_classes",
    "open_picture",
    "picture_settings",
    "read_images",
    "read_picture",
]

PICTURES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
# so many bytes of decoded pictures are kept; the rest is decoded again in every epoch
_KEPT = 1 << 30


@dataclass
class Images:
    """Pictures and, where folders name classes and the model takes labels, their numbers."""

    arrays: dict[str, Any]
    classes: list[str] | None
    preprocessing: Preprocessing


class Pictures(Rows):
    """Pictures in files as an array of [samples, channels, height, width]."""

    def __init__(
        self, files: Sequence[Path], settings: Mapping[str, Any], *, dtype: Any = np.float32
    ) -> None:
        self.files, self.settings, self.dtype = list(files), dict(settings), np.dtype(dtype)
        self._kept: dict[Path, np.ndarray] = {}
        self._room = _KEPT
        first = self._read(self.files[0])
        self.shape = (len(self.files), *first.shape)

    def read(self, rows: np.ndarray) -> np.ndarray:
        files = [self.files[row] for row in rows]
        with ThreadPoolExecutor(4) as pool:  # decoding leaves Python's lock
            found = list(pool.map(self._read, files))
        strange = next((f for f, a in zip(files, found) if a.shape != self.shape[1:]), None)
        if strange is not None:
            raise DataError(
                f"'{strange}' has another size than '{self.files[0]}' and the model takes any",
                "give all one size: --resize 224 --crop 224",
            )
        return np.stack(found)

    def part(self, rows: np.ndarray) -> Pictures:
        return Pictures([self.files[row] for row in rows], self.settings, dtype=self.dtype)

    def _read(self, path: Path) -> np.ndarray:
        found = self._kept.get(path)
        if found is None:
            found = open_picture(path, self.settings).astype(self.dtype, copy=False)
            if self._room >= found.nbytes:
                self._room -= found.nbytes
                self._kept[path] = found
        return found


def read_images(
    folder: Path,
    inputs: Sequence[InputSpec],
    *,
    name: str | None = None,
    classes: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Images:
    """All pictures of a folder, or one file, for the model's input with four dimensions."""
    spec = picture_input(inputs, name)
    made = Preprocessing("image", spec.name, picture_settings(spec, settings or {}))
    found, labels, known = class_files(folder, inputs, PICTURES, "image", classes=classes)
    _require_readable(found)
    arrays: dict[str, Any] = {spec.name: Pictures(found, made.settings, dtype=spec.dtype)}
    if labels is not None:
        label, numbers = labels
        arrays[label] = numbers
    return Images(arrays, known, made)


def _require_readable(files: Sequence[Path]) -> None:
    """Look at the beginning of every file: one that is no picture is an error now, not in the middle of training."""
    from PIL import Image

    def problem(path: Path) -> str | None:
        try:
            with Image.open(path):
                return None
        except Exception as error:  # Pillow's readers raise whatever Python does over damaged bytes
            return str(error).removesuffix(f" {str(path)!r}")

    with ThreadPoolExecutor(4) as pool:
        bad = [(path, why) for path, why in zip(files, pool.map(problem, files)) if why is not None]
    if bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise DataError(f"cannot read the image '{bad[0][0]}'{more}: {bad[0][1]}", "remove it, or fix it")


def class_files(
    folder: Path,
    inputs: Sequence[InputSpec],
    endings: frozenset[str],
    what: str,
    *,
    classes: Sequence[str] | None,
) -> tuple[list[Path], tuple[str, np.ndarray] | None, list[str] | None]:
    """The files of a folder, in order; the label input with their class numbers; the names of the classes."""
    if folder.is_file():
        return [folder], None, None
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in endings and path.is_file())
    if not found:
        raise DataError(
            f"no {what} in '{folder}'", f"{what}s lie in one folder for each class: folder/cat/1.png"
        )
    label = next((other for other in inputs if other.is_integer), None)
    if label is None:
        return found, None, None
    folders = [path.relative_to(folder).parts[0] for path in found]
    if any((folder / first).is_file() for first in folders):
        raise DataError(
            f"'{folder}' has {what}s outside of class folders", "put each into a folder named as its class"
        )
    numbers, known = number_classes(folders, classes, str(folder))
    return found, (label.name, numbers), known


def number_classes(
    words: Sequence[str], classes: Sequence[str] | None, where: str
) -> tuple[np.ndarray, list[str]]:
    """Class names as numbers: in the order of `classes`, or of the alphabet; and the names."""
    known = list(classes) if classes is not None else sorted(set(words))
    strangers = sorted(set(words) - set(known))
    if strangers:
        raise DataError(
            f"'{where}' has the class '{strangers[0]}', which the model has not",
            f"it has {first_of(known, 12)}; a model for other classes begins with: "
            "onward artifacts MODEL --classes …",
        )
    place = {name: index for index, name in enumerate(known)}
    return np.asarray([place[word] for word in words], np.int64), known


def read_picture(path: Any, *, channels: int | None = 3) -> Any:
    """A Pillow image from a file, a file object or another image: upright, in colours or grey."""
    from PIL import Image, ImageOps

    try:
        # an image that was given stays open: it is its owner's
        with contextlib.nullcontext(path) if isinstance(path, Image.Image) else Image.open(path) as file:
            return ImageOps.exif_transpose(file).convert("L" if channels == 1 else "RGB")
    except Exception as error:  # Pillow's readers raise whatever Python does over damaged bytes
        raise DataError(f"cannot read the image '{path}': {error}", "remove it, or fix it") from error


def open_picture(path: Any, settings: Mapping[str, Any]) -> np.ndarray:
    """One picture, from a file or a file object, as the model takes it."""
    picture = read_picture(path, channels=settings.get("channels"))
    try:
        return image(picture, settings)
    except ValueError as error:
        raise DataError(f"'{path}': {error}", "choose other sizes: --resize, --crop") from error


def picture_input(inputs: Sequence[InputSpec], name: str | None) -> InputSpec:
    """The input that takes pictures: the only one with four dimensions, or the one named."""
    fitting = [spec for spec in inputs if spec.dims is not None and len(spec.dims) == 4]
    fitting = [spec for spec in fitting if name is None or spec.name == name]
    if len(fitting) != 1:
        raise DataError(
            "a folder of images needs a model with one input of four dimensions (batch, channels, height, width)",
            "name the input with --data INPUT=FOLDER if there are several",
        )
    return fitting[0]


def picture_settings(spec: InputSpec, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What to do to pictures so that an input can take them: its own size, what is wanted, and 0 to 1 otherwise."""
    assert spec.dims is not None
    last = spec.dims[1] not in (1, 3) and spec.dims[3] in (1, 3)
    channels, height, width = (spec.dims[3], *spec.dims[1:3]) if last else spec.dims[1:]
    if channels not in (1, 3, None):
        raise DataError(f"'{spec.name}' takes {spec}: images have 1 or 3 channels")
    settings: dict[str, Any] = {"do_resize": True, "resample": 3, "do_rescale": True, **wanted}
    settings |= {"channels": channels or 3, "layout": "NHWC" if last else "NCHW"}
    if spec.dtype == np.uint8:
        settings |= {"do_rescale": False, "do_normalize": False}
    fixed = {"height": height or width or 224, "width": width or height or 224}
    if height is None and width is None and ("crop_size" in wanted or "size" in wanted):
        if "crop_size" not in settings and "shortest_edge" in settings["size"]:
            edge = settings["size"]["shortest_edge"]  # any size will do, but all one
            settings |= {"do_center_crop": True, "crop_size": {"height": edge, "width": edge}}
    elif (settings.get("do_center_crop") and "crop_size" in settings) or "shortest_edge" in settings.get(
        "size", {}
    ):
        settings |= {"do_center_crop": True, "crop_size": fixed}
        size = settings.get("size")
        if isinstance(size, dict) and size.get("shortest_edge", 1 << 20) < max(fixed.values()):
            raise DataError(
                f"--resize {size['shortest_edge']} is smaller than the {fixed['height']} × {fixed['width']} pixels "
                f"that '{spec.name}' takes",
                "choose a larger one",
            )
        settings.setdefault("size", {"shortest_edge": max(fixed.values())})
    else:
        settings["size"] = fixed
    if settings["channels"] == 1 and len(settings.get("image_mean", [])) == 3:
        settings |= {key: [float(np.mean(settings[key]))] for key in ("image_mean", "image_std")}
    return settings
