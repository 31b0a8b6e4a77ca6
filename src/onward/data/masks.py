"""Pictures with masks of class numbers, as PNG: where they lie, what they hold, and what is wrong with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from onward.data.images import PICTURES, decoding, upright_size
from onward.data.labels import numbered_classes
from onward.data.layouts import files_in, read_yaml, split_folders
from onward.data.preprocess import image
from onward.data.scenes import require_readable
from onward.errors import DataError
from onward.escape import first_of
from onward.reading import read_text
from onward.train.batches import Rows

# pixels that nobody has named: they are in no loss and in no score
IGNORED = 255
_PICTURE_FOLDERS = ("images", "JPEGImages", "imgs")
_MASK_FOLDERS = ("masks", "annotations", "SegmentationClass", "labels")
_NAME_FILES = ("classes.txt", "labels.txt")
# modes of Pillow whose pixels are single whole numbers
_NUMBER_MODES = ("1", "L", "P", "I", "I;16")
_SHOWN = 20


class Masks(Rows):
    """Masks in files as [samples, height, width] of class numbers, brought to the size of the model's pictures."""

    def __init__(self, files: Sequence[Path], size: Mapping[str, int], *, binary: bool) -> None:
        self.files, self.size, self.binary = list(files), dict(size), binary
        self.shape = (len(self.files), size["height"], size["width"])
        self.dtype = np.dtype(np.uint8)
        self._decoded: dict[Path, np.ndarray] = {}

    def read(self, rows: np.ndarray) -> np.ndarray:
        return np.stack([self._read(self.files[row]) for row in rows])

    def part(self, rows: np.ndarray) -> Masks:
        return Masks([self.files[row] for row in rows], self.size, binary=self.binary)

    def _read(self, file: Path) -> np.ndarray:
        # decoded once: masks of class numbers are small, and every epoch reads them all
        mask = self._decoded.get(file)
        if mask is None:
            numbers = read_numbers(file)
            settings = {
                "size": self.size,
                "channels": 1,
                # nearest: between two classes lies no third
                "resample": 0,
                "do_rescale": False,
                "do_normalize": False,
            }
            mask = image(numbers[..., None], settings)[0].astype(np.uint8)
            self._decoded[file] = mask = (mask == IGNORED).astype(np.uint8) if self.binary else mask
        return mask


@dataclasses.dataclass(frozen=True)
class MaskedPictures:
    """Pictures and the mask of each, the part each is in, and the names of the classes."""

    pictures: list[Path]
    masks: list[Path]
    splits: np.ndarray | None
    classes: list[str]
    # whether masks have 0 and 255 only, which then is the one class
    binary: bool
    notes: list[str]


def has_masks(path: Path) -> bool:
    """Whether a folder has pictures and masks beside them."""
    if not path.is_dir():
        return False
    folders = [path, *split_folders(path).values()]
    return any(_pair_of_folders(folder) is not None for folder in folders) or bool(
        next(path.rglob("*_mask.png"), None)
    )


def find_masked_pictures(path: Path, classes: Sequence[str] | None) -> MaskedPictures:
    """The pictures of a folder with their masks, all looked at: what is wrong is found before training.

    `classes` are names in the order of the numbers; by default those of `classes.txt` or `data.yaml`, else numbers.
    """
    if not path.is_dir():
        raise DataError(f"no folder '{path}'", "it has images/ and masks/, with the same names in both")
    pairs = [(name, *pair) for name, folders in _folders(path) for pair in _pairs(*folders)]
    if not pairs:
        raise DataError(
            f"no image with a mask in '{path}'",
            "pictures lie in images/, and a PNG of class numbers for each in masks/, under the same name",
        )
    pictures, masks = [picture for _, picture, _ in pairs], [mask for _, _, mask in pairs]
    missing = [str(picture) for picture, mask in zip(pictures, masks) if not mask.is_file()]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(pictures)} images of '{path}' have no mask: {first_of(missing, _SHOWN)}; "
            f"the first would be '{next(mask for mask in masks if not mask.is_file())}'",
            "add the masks, or remove the images",
        )
    require_readable(pictures)
    with ThreadPoolExecutor(4) as pool:  # decoding leaves Python's lock
        values = list(pool.map(_values_of, pictures, masks))
    seen = np.unique(np.concatenate(values))
    binary = set(seen.tolist()) <= {0, IGNORED} and IGNORED in seen
    stated, where = (list(classes), "the classes") if classes is not None else _stated_names(path)
    most = 1 if binary else int(max([number for number in seen if number != IGNORED], default=0))
    names = stated or numbered_classes(most + 1) or []
    if len(names) < 2:
        raise DataError(
            f"the masks of '{path}' have one class only: there is nothing to tell apart",
            "is it the right folder?",
        )
    if not binary:
        _check_numbers(masks, values, names, where)
    return MaskedPictures(
        pictures,
        masks,
        np.asarray([name for name, _, _ in pairs]) if pairs[0][0] is not None else None,
        names,
        binary,
        ["masks have 0 and 255 only: 255 is class 1"] if binary else [],
    )


def _pair_of_folders(folder: Path) -> tuple[Path, Path] | None:
    pictures = next((folder / name for name in _PICTURE_FOLDERS if (folder / name).is_dir()), None)
    masks = [folder / name for name in _MASK_FOLDERS if (folder / name).is_dir()]
    # a folder of texts is that of another task
    masks = [one for one in masks if next(one.rglob("*.png"), None) is not None]
    return None if pictures is None or not masks else (pictures, masks[0])


def _folders(path: Path) -> list[tuple[str | None, tuple[Path, Path]]]:
    """The folders of pictures and of masks, of each part: train/images, images/train, or images alone."""
    above = _pair_of_folders(path)
    if above is not None:
        parts = split_folders(above[0])
        return [(name, (part, above[1] / part.name)) for name, part in parts.items()] or [(None, above)]
    folders: list[tuple[str | None, Path]] = [*split_folders(path).items()] or [(None, path)]
    return [(name, _pair_of_folders(folder) or (folder, folder)) for name, folder in folders]


def _pairs(pictures: Path, masks: Path) -> list[tuple[Path, Path]]:
    """Each picture of a folder with the path where its mask should be."""
    files = files_in(pictures, PICTURES)
    if pictures == masks:
        files = [file for file in files if not file.stem.endswith("_mask")]
        return [(file, file.with_name(f"{file.stem}_mask.png")) for file in files]
    pairs = []
    for file in files:
        inside = masks / file.relative_to(pictures)
        options = (inside.with_suffix(".png"), inside.with_name(f"{file.stem}_mask.png"))
        pairs.append((file, next((mask for mask in options if mask.is_file()), options[0])))
    return pairs


def read_numbers(mask: Path) -> np.ndarray:
    """The class numbers of a mask."""
    from PIL import Image

    try:
        with Image.open(mask, formats=("PNG",)) as file:
            if file.mode not in _NUMBER_MODES:
                raise DataError(
                    f"the mask '{mask}' has colours ({file.mode})",
                    "its pixels are class numbers: save it as a grey or palette PNG",
                )
            with decoding(file):
                numbers = np.asarray(file)
                file.close()
    except DataError:
        raise
    except Exception as error:  # Pillow's readers raise whatever Python does over damaged bytes
        raise DataError(f"cannot read the mask '{mask}': {error}", "remove it, or fix it") from error
    if numbers.max(initial=0) > IGNORED or numbers.min(initial=0) < 0:
        raise DataError(
            f"the mask '{mask}' has the number {int(numbers.max())}",
            f"classes are 0 to {IGNORED - 1}, and 255 is none",
        )
    return numbers.astype(np.uint8)


def _values_of(picture: Path, mask: Path) -> np.ndarray:
    """The numbers that are in a mask, which must be as large as its picture."""
    from PIL import Image

    numbers, sides = read_numbers(mask), upright_size(picture)
    if numbers.shape != sides:
        raise DataError(
            f"the mask '{mask}' has {numbers.shape[0]} × {numbers.shape[1]} pixels, and its image '{picture}' "
            f"{sides[0]} × {sides[1]}",
            "a mask has one number for each pixel of its image",
        )
    # as np.unique, which sorts a copy of all pixels
    return np.flatnonzero(Image.fromarray(numbers).histogram())


def _check_numbers(
    masks: Sequence[Path], values: Sequence[np.ndarray], names: Sequence[str], where: str
) -> None:
    for mask, present in zip(masks, values):
        wrong = [int(number) for number in present if len(names) <= number != IGNORED]
        if wrong:
            numbers = read_numbers(mask)
            row, column = np.unravel_index(np.argmax(numbers == wrong[0]), numbers.shape)
            raise DataError(
                f"the mask '{mask}' has class {wrong[0]} (row {row}, column {column}), and {where} has {len(names)}: "
                f"{first_of(names)}",
                f"numbers are 0 to {len(names) - 1}, and {IGNORED} is no class",
            )


def _stated_names(path: Path) -> tuple[list[str], str]:
    for name in _NAME_FILES:
        if (path / name).is_file():
            lines = [line.strip() for line in read_text(path / name).splitlines()]
            return [line for line in lines if line], f"'{path / name}'"
    if (path / "data.yaml").is_file():
        return list(read_yaml(path)[1] or ()), f"'{path / 'data.yaml'}'"
    return [], "the data"
