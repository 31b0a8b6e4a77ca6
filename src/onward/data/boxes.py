"""Pictures with boxes: YOLO's text files, COCO's JSON and Pascal VOC's XML, each with its own mistakes.

Boxes are corners in pixels of the upright picture. What is wrong is an error that names the file and the line, or the
number of the annotation in JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.images import PICTURES, upright_size
from onward.data.layouts import SPLITS, YAML, files_in, read_yaml, split_folders
from onward.data.scenes import require_readable
from onward.errors import DataError
from onward.escape import first_of
from onward.reading import parse_json, read_text

# rounding of programs that draw boxes: a share of the picture's side
_TOLERANCE = 0.01
# bytes at each end of a file that are looked at
_END = 1 << 16
# a number alone would make as many names as it says
_MOST_CLASSES = 1 << 16
_NAME_FILES = ("classes.txt", "labels.txt")
_LAYOUTS = "images/ and labels/*.txt (YOLO), a JSON file as COCO has it, or Annotations/*.xml (Pascal VOC)"


@dataclasses.dataclass(frozen=True)
class BoxedPicture:
    """A picture, its height and width, and its boxes: [objects, 5] with class and corners in pixels."""

    file: Path
    size: tuple[int, int]
    boxes: np.ndarray
    split: str | None = None


@dataclasses.dataclass(frozen=True)
class BoxedPictures:
    """What a folder has: pictures with boxes, and the names of the classes."""

    pictures: list[BoxedPicture]
    classes: list[str]

    @property
    def splits(self) -> np.ndarray | None:
        """The part of the data that each picture is in, where the data is split."""
        names = [picture.split for picture in self.pictures]
        return None if None in names else np.asarray(names)


@dataclasses.dataclass(frozen=True)
class _Object:
    """A box as a file has it: its class by name or number, its corners, and where that stands."""

    kind: str | int
    corners: tuple[float, float, float, float]
    where: str


@dataclasses.dataclass(frozen=True)
class _Labelled:
    """A picture with what a file says of it; corners are shares of the sides where `relative` is true."""

    file: Path
    objects: list[_Object]
    split: str | None
    relative: bool = False


@dataclasses.dataclass(frozen=True)
class _Layout:
    """What a layout says: its pictures, and the names of classes if it states them, and where."""

    pictures: list[_Labelled]
    classes: list[str] | None
    where: str


def has_boxes(path: Path) -> bool:
    """Whether a folder or file has boxes in a layout that is read here."""
    return _reader(path) is not None


def find_boxed_pictures(path: Path, classes: Sequence[str] | None) -> BoxedPictures:
    """The pictures of a folder with their boxes, all checked before training.

    `classes` are names in the order of the numbers; by default those that the data states.
    """
    if not path.exists():
        raise DataError(f"no data at '{path}'", f"it is {_LAYOUTS}")
    reader = _reader(path)
    if reader is None:
        raise DataError(f"no boxes in '{path}'", f"they lie in {_LAYOUTS}")
    layout = reader(path)
    if not layout.pictures:
        raise DataError(f"no image in '{path}'", f"they lie in {_LAYOUTS}")
    if not any(picture.objects for picture in layout.pictures):
        raise DataError(
            f"none of the {len(layout.pictures)} images of '{path}' has a box",
            "are the labels where they should be?",
        )
    names = list(classes) if classes is not None else layout.classes or _names_of(layout.pictures)
    where = layout.where if classes is None else "the classes"
    # all at once: a broken picture would end the run after an hour
    require_readable([picture.file for picture in layout.pictures])
    numbers = {name: number for number, name in reversed([*enumerate(names)])}
    return BoxedPictures([_check(picture, names, numbers, where) for picture in layout.pictures], names)


def _reader(path: Path) -> Callable[[Path], _Layout] | None:
    if path.suffix.lower() in YAML:
        if not path.is_file():
            return None
        folders = list(read_yaml(path)[0].values()) or [path.parent]
        pictures = (file for folder in folders for file in files_in(folder, PICTURES))
        return _read_yolo if any(_label_file(file) for file in pictures) else None
    if path.suffix.lower() == ".json":
        return _read_coco if path.is_file() and _coco_files(path) else None
    if not path.is_dir():
        return None
    folders = [path, *split_folders(path).values()]
    if any(
        next((folder / "labels").glob("**/*.txt"), None) for folder in folders if (folder / "labels").is_dir()
    ):
        return _read_yolo
    if _coco_files(path):
        return _read_coco
    if any(next(folder.glob("**/*.xml"), None) for folder in folders):
        return _read_voc
    return _read_yolo if (path / "data.yaml").is_file() and (path / "labels").is_dir() else None


def _names_of(pictures: Sequence[_Labelled]) -> list[str]:
    """The classes of data that states none: its names in alphabetical order, or numbers."""
    objects = [one for picture in pictures for one in picture.objects]
    last = max((one for one in objects if isinstance(one.kind, int)), key=lambda one: one.kind, default=None)
    if last is None:
        return sorted({str(one.kind) for one in objects})
    if int(last.kind) >= _MOST_CLASSES:
        raise DataError(
            f"{last.where}: the class is {str(last.kind)[:20]}, and the data names no classes",
            "correct the number, or name the classes in data.yaml",
        )
    return [str(number) for number in range(int(last.kind) + 1)]


def _check(picture: _Labelled, names: Sequence[str], numbers: Mapping[str, int], where: str) -> BoxedPicture:
    """A picture with its boxes in pixels; one outside it, or of a class that there is not, is an error."""
    height, width = upright_size(picture.file)
    across, down = (width, height) if picture.relative else (1, 1)
    rows = []
    for one in picture.objects:
        number = one.kind if isinstance(one.kind, int) else numbers.get(one.kind, -1)
        if number not in range(len(names)):
            raise DataError(
                f"{one.where}: the class is {one.kind!r}, and {where} has {first_of(names)}",
                f"numbers are 0 to {len(names) - 1}" if isinstance(one.kind, int) else "correct the name",
            )
        x1, y1, x2, y2 = np.asarray(one.corners) * [across, down, across, down]
        if x2 - x1 <= 0 or y2 - y1 <= 0:
            raise DataError(
                f"{one.where}: the box has no area: from ({x1:g}, {y1:g}) to ({x2:g}, {y2:g})",
                "correct or remove it",
            )
        slack = _TOLERANCE * max(width, height)
        if min(x1, y1) < -slack or x2 > width + slack or y2 > height + slack:
            raise DataError(
                f"{one.where}: the box from ({x1:g}, {y1:g}) to ({x2:g}, {y2:g}) is outside the image "
                f"'{picture.file}', which has {width} × {height} pixels",
                "corners are pixels in COCO and VOC, shares of the sides in YOLO",
            )
        rows.append([number, max(x1, 0), max(y1, 0), min(x2, width), min(y2, height)])
    return BoxedPicture(
        picture.file, (height, width), np.asarray(rows, np.float32).reshape(-1, 5), picture.split
    )


def _read_yolo(path: Path) -> _Layout:
    parts, names = read_yaml(path)
    where = f"'{path if path.is_file() else path / 'data.yaml'}'"
    root = path.parent if path.is_file() else path
    if names is None:
        file = next((root / name for name in _NAME_FILES if (root / name).is_file()), None)
        lines = [] if file is None else [line.strip() for line in read_text(file).splitlines()]
        names, where = tuple(line for line in lines if line) or None, f"'{file}'"
    folders: list[tuple[str | None, Path]] = [*parts.items()] or [*split_folders(root).items()]
    if not folders and (root / "images").is_dir():
        folders = [*split_folders(root / "images").items()]
    pictures = []
    for split, folder in folders or [(None, root)]:
        for file in files_in(folder, PICTURES):
            labels = _label_file(file)
            objects = [] if labels is None else list(_yolo_lines(labels))
            pictures.append(_Labelled(file, objects, split, relative=True))
    return _Layout(pictures, None if names is None else list(names), where if names else "the data")


def _label_file(picture: Path) -> Path | None:
    """The text file of a picture: images/ becomes labels/ in its path; none means that there is nothing in it."""
    parts = list(picture.parts)
    # from behind, as Ultralytics does: folders above may be called images too
    for index in range(len(parts) - 2, -1, -1):
        if parts[index] == "images":
            labels = Path(*parts[:index], "labels", *parts[index + 1 :]).with_suffix(".txt")
            if labels.is_file():
                return labels
            break
    beside = picture.with_suffix(".txt")
    return beside if beside.is_file() else None


def _yolo_lines(file: Path) -> Iterator[_Object]:
    for number, line in enumerate(read_text(file).splitlines(), 1):
        if not line.strip():
            continue
        where = f"'{file}', line {number}"
        try:
            values = [float(part) for part in line.split()]
        except ValueError:
            values = []
        if len(values) != 5 or not all(map(math.isfinite, values)) or values[0] != int(values[0]):
            polygon = "; this looks like a polygon, and boxes are wanted" if len(values) > 6 else ""
            raise DataError(
                f"{where}: '{line.strip()[:60]}' is no box", f"a line is: class x y width height{polygon}"
            )
        kind, x, y, width, height = values
        if max(x, y, width, height) > 1 + _TOLERANCE or min(x, y) < -_TOLERANCE:
            raise DataError(
                f"{where}: the box at ({x:g}, {y:g}) is outside the image",
                "numbers are shares of the image's sides, from 0 to 1",
            )
        corners = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        yield _Object(int(kind), corners, where)


def _coco_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if _looks_like_coco(path) else []
    folders = [path, path / "annotations", *split_folders(path).values()]
    files = [file for folder in folders if folder.is_dir() for file in sorted(folder.glob("*.json"))]
    return [file for file in files if _looks_like_coco(file)]


def _looks_like_coco(file: Path) -> bool:
    """Whether the begin or the end of a file has a key of COCO's: large files are not read for that."""
    # COCO's keys may stand at either end, and its files have hundreds of megabytes
    with open(file, "rb") as stream:
        ends = stream.read(_END)
        stream.seek(max(0, file.stat().st_size - _END))
        ends += stream.read()
    return b'"annotations"' in ends or (b'"images"' in ends and b'"categories"' in ends)


def _read_coco(path: Path) -> _Layout:
    pictures: list[_Labelled] = []
    names: list[str] | None = None
    files = _coco_files(path)
    for file in files:
        split = _split_of(file) if len(files) > 1 else None
        document = _read_table(file)
        numbers = {entry["id"]: str(entry["name"]) for entry in document["categories"]}
        # COCO's ids have gaps: classes are numbered in their order
        own = [numbers[number] for number in sorted(numbers)]
        if names is not None and own != names:
            raise DataError(f"'{file}' has the classes {first_of(own)}, another file {first_of(names)}")
        names = own
        pictures += _coco_pictures(file, document, numbers, split)
    return _Layout(pictures, names, f"'{files[0]}'" if files else "the data")


def _read_table(file: Path) -> Mapping[str, Any]:
    try:
        document = parse_json(read_text(file), object)
    except ValueError as error:
        raise DataError(f"cannot read '{file}': {error}", "is it JSON?") from error
    if not isinstance(document, dict):
        raise DataError(f"'{file}' is no table", "it has images, annotations and categories")
    for key, needed in (("images", ("id", "file_name")), ("categories", ("id", "name")),
                        ("annotations", ("image_id", "category_id", "bbox"))):  # fmt: skip
        rows = document.get(key)
        if not isinstance(rows, list):
            raise DataError(f"'{file}' has no list '{key}'", "it has images, annotations and categories")
        for index, row in enumerate(rows):
            missing = [name for name in needed if not isinstance(row, dict) or name not in row]
            if missing:
                raise DataError(f"'{file}', {key}[{index}]: no '{missing[0]}'", "correct or remove it")
            wrong = [name for name in needed if name != "bbox" and type(row[name]) not in (int, str)]
            if wrong or (key == "categories" and type(row["id"]) is not type(rows[0]["id"])):
                raise DataError(
                    f"'{file}', {key}[{index}]: its {first_of(wrong or ['id'])} is no number and no text, or not as "
                    "that of the others",
                    "ids are numbers, names are texts",
                )
    return document


def _coco_pictures(
    file: Path, document: Mapping[str, Any], numbers: Mapping[Any, str], split: str | None
) -> list[_Labelled]:
    objects: dict[Any, list[_Object]] = {entry["id"]: [] for entry in document["images"]}
    for index, entry in enumerate(document["annotations"]):
        where = f"'{file}', annotations[{index}]"
        if entry["image_id"] not in objects:
            raise DataError(f"{where}: no image has the id {entry['image_id']}", "correct or remove it")
        if entry["category_id"] not in numbers:
            raise DataError(
                f"{where}: no category has the id {entry['category_id']}",
                f"there are {first_of(list(numbers))}",
            )
        box = entry["bbox"]
        if not isinstance(box, list) or len(box) != 4 or not all(map(_is_pixel, box)):
            raise DataError(
                f"{where}: {json.dumps(box)[:60]} is no box", "it is [x, y, width, height] in pixels"
            )
        if not entry.get("iscrowd"):  # a crowd is no object
            x, y, width, height = map(float, box)
            kind = numbers[entry["category_id"]]
            objects[entry["image_id"]].append(_Object(kind, (x, y, x + width, y + height), where))
    folders = [file.parent, file.parent / "images", file.parent.parent, file.parent.parent / "images"]
    folders += [base / name for base in folders[2:] for name in SPLITS if SPLITS[name] == split]
    pictures = []
    for index, entry in enumerate(document["images"]):
        name = str(entry["file_name"])
        picture = next((folder / name for folder in folders if os.path.isfile(folder / name)), None)
        # a JSON file from elsewhere must not name files outside its folder
        if picture is None or ".." in Path(name).parts or Path(name).is_absolute():
            raise DataError(
                f"'{file}', images[{index}]: no file '{name}'", "images lie beside the JSON, or in images/"
            )
        pictures.append(_Labelled(picture, objects[entry["id"]], split))
    return pictures


def _is_pixel(number: Any) -> bool:
    # JSON of Python's has NaN, Infinity and whole numbers of any length
    return type(number) in (int, float) and abs(number) < 1 << 32


def _split_of(file: Path) -> str | None:
    # instances_val2017.json, valid/_annotations.coco.json
    words = file.stem.lower().replace("-", "_").replace(".", "_").split("_") + [file.parent.name.lower()]
    named = [SPLITS[word.rstrip("0123456789")] for word in words if word.rstrip("0123456789") in SPLITS]
    return named[0] if named else "train"


def _read_voc(path: Path) -> _Layout:
    folders: list[tuple[str | None, Path]] = [*split_folders(path).items()] or [(None, path)]
    pictures = []
    for split, folder in folders:
        by_stem = {file.stem: file for file in files_in(folder, PICTURES)}
        for file in sorted(folder.rglob("*.xml")):
            if file.stem not in by_stem:
                raise DataError(
                    f"'{file}' has no image of its name", f"it would be in '{folder}'; remove it otherwise"
                )
            pictures.append(_Labelled(by_stem[file.stem], _voc_objects(file), split))
    return _Layout(pictures, None, "the data")


def _voc_objects(file: Path) -> list[_Object]:
    from xml.etree import ElementTree

    text = read_text(file)
    if "<!DOCTYPE" in text or "<!ENTITY" in text:  # entities can be made to take any memory
        raise DataError(f"'{file}' declares a document type", "annotations need none: remove it")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise DataError(f"'{file}', line {error.position[0]}: {error}", "is it XML?") from error
    objects, line, position = [], 1, 0
    for entry in root.iter("object"):
        start = text.find("<object", position) + 1
        # from the last one on: from the beginning each time, a long file takes hours
        line += text.count("\n", position, start)
        position = start
        where = f"'{file}', line {line}"
        name = entry.findtext("name")
        corners = [entry.findtext(f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax")]
        try:
            x1, y1, x2, y2 = (float(corner or "nan") for corner in corners)
        except ValueError:
            x1 = y1 = x2 = y2 = math.nan
        if not name or not math.isfinite(x1 + y1 + x2 + y2):
            raise DataError(f"{where}: the object has no name or no whole box", "it has name and bndbox")
        # the first pixel is 1 there
        objects.append(_Object(name.strip(), (x1 - 1, y1 - 1, x2, y2), where))
    return objects
