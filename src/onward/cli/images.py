"""A folder of images as arrays: `folder/class/picture.png`, sized and coloured as the model wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onward.cli.command import CommandError
from onward.cli.match_inputs import InputSpec

__all__ = ["Images", "read_images"]

_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


@dataclass
class Images:
    """Pixels from 0 to 1 and, where folders name classes and the model takes labels, their numbers."""

    arrays: dict[str, np.ndarray]
    classes: list[str] | None


def read_images(
    folder: Path,
    inputs: Sequence[InputSpec],
    *,
    name: str | None = None,
    classes: Sequence[str] | None = None,
) -> Images:
    """Read all images of a folder for the model's input with four dimensions."""
    from PIL import Image, UnidentifiedImageError

    spec = _picture_input(inputs, name)
    assert spec.dims is not None
    _, channels, height, width = spec.dims
    if height is None or width is None:
        height, width = height or 224, width or 224
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _ENDINGS)
    if not found:
        raise CommandError(
            f"no image in '{folder}'", "images lie in one folder for each class: folder/cat/1.png"
        )
    pixels = []
    for path in found:
        try:
            with Image.open(path) as image:
                sized = image.convert("L" if channels == 1 else "RGB").resize((width, height))
        except (UnidentifiedImageError, OSError) as error:
            raise CommandError(f"cannot read the image '{path}': {error}", "remove it, or mend it") from error
        array = np.asarray(sized, np.float32) / 255
        pixels.append(array[None] if array.ndim == 2 else array.transpose(2, 0, 1))
    arrays = {spec.name: np.stack(pixels)}
    label = next((other for other in inputs if other.is_integer), None)
    if label is None:
        return Images(arrays, None)
    folders = [path.relative_to(folder).parts[0] for path in found]
    if any((folder / first).is_file() for first in folders):
        raise CommandError(
            f"'{folder}' has images outside of class folders", "put each into a folder named as its class"
        )
    known = list(classes) if classes is not None else sorted(set(folders))
    strangers = sorted(set(folders) - set(known))
    if strangers:
        raise CommandError(
            f"'{folder}' has the class '{strangers[0]}', which the training data had not",
            f"it had {', '.join(known)}",
        )
    arrays[label.name] = np.asarray([known.index(first) for first in folders], np.int64)
    return Images(arrays, known)


def _picture_input(inputs: Sequence[InputSpec], name: str | None) -> InputSpec:
    fitting = [spec for spec in inputs if spec.dims is not None and len(spec.dims) == 4]
    fitting = [spec for spec in fitting if name is None or spec.name == name]
    if len(fitting) != 1:
        raise CommandError(
            "a folder of images needs a model with one input of four dimensions (batch, channels, height, width)",
            "name the input with --data INPUT=FOLDER if there are several",
        )
    if fitting[0].dims is not None and fitting[0].dims[1] not in (1, 3, None):
        raise CommandError(f"'{fitting[0].name}' takes {fitting[0]}: images have 1 or 3 channels")
    return fitting[0]
