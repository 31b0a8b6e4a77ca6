"""Boxes in YOLO's, COCO's and Pascal VOC's files: the same pictures say the same, and mistakes say where they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.data.boxes import find_boxed_pictures, has_boxes
from onward.errors import DataError

pytest.importorskip("PIL")
from PIL import Image

# class, corners in pixels, of pictures of 40 × 20
OBJECTS = {"a": [("dog", 4, 2, 14, 12)], "b": [("cat", 0, 0, 40, 20), ("dog", 10, 5, 30, 15)], "c": []}


def _pictures(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in OBJECTS:
        Image.new("RGB", (40, 20)).save(folder / f"{name}.png")


def yolo(folder: Path) -> Path:
    _pictures(folder / "images")
    (folder / "labels").mkdir()
    for name, boxes in OBJECTS.items():
        lines = [
            f"{['cat', 'dog'].index(kind)} {(x1 + x2) / 80} {(y1 + y2) / 40} {(x2 - x1) / 40} {(y2 - y1) / 20}"
            for kind, x1, y1, x2, y2 in boxes
        ]
        (folder / "labels" / f"{name}.txt").write_text("\n".join(lines))
    (folder / "data.yaml").write_text("names: [cat, dog]\ntrain: images\n")
    return folder


def coco_document() -> dict[str, Any]:
    names = list(OBJECTS)
    return {
        "images": [{"id": 7 + i, "file_name": f"{name}.png"} for i, name in enumerate(names)],
        "categories": [{"id": 3, "name": "cat"}, {"id": 9, "name": "dog"}],
        "annotations": [
            {"id": 1, "image_id": 7 + names.index(name), "category_id": {"cat": 3, "dog": 9}[kind],
             "bbox": [x1, y1, x2 - x1, y2 - y1]}
            for name, boxes in OBJECTS.items() for kind, x1, y1, x2, y2 in boxes
        ],
    }  # fmt: skip


def coco(folder: Path, document: dict[str, Any] | None = None) -> Path:
    _pictures(folder / "images")
    (folder / "annotations.json").write_text(json.dumps(document or coco_document()))
    return folder


def voc(folder: Path) -> Path:
    _pictures(folder / "JPEGImages")
    (folder / "Annotations").mkdir()
    for name, boxes in OBJECTS.items():
        text = "".join(
            f"<object>\n<name>{kind}</name>\n<bndbox><xmin>{x1 + 1}</xmin><ymin>{y1 + 1}</ymin><xmax>{x2}</xmax>"
            f"<ymax>{y2}</ymax></bndbox>\n</object>\n"
            for kind, x1, y1, x2, y2 in boxes
        )
        (folder / "Annotations" / f"{name}.xml").write_text(f"<annotation>\n{text}</annotation>")
    return folder


@pytest.mark.parametrize("write", [yolo, coco, voc])
def test_every_layout_says_the_same(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    folder = write(tmp_path / "data")
    assert has_boxes(folder)
    boxed = find_boxed_pictures(folder, None)
    assert boxed.classes == ["cat", "dog"]
    for picture in boxed.pictures:
        expected = [(["cat", "dog"].index(kind), *corners) for kind, *corners in OBJECTS[picture.file.stem]]
        np.testing.assert_allclose(picture.boxes, np.reshape(expected, (-1, 5)), atol=1e-4)
        assert picture.size == (20, 40)


def test_a_file_alone_is_read_too(tmp_path: Path) -> None:
    assert len(find_boxed_pictures(coco(tmp_path / "coco") / "annotations.json", None).pictures) == 3
    assert len(find_boxed_pictures(yolo(tmp_path / "yolo") / "data.yaml", None).pictures) == 3


def test_a_yaml_that_is_named_leads_to_pictures_elsewhere(tmp_path: Path) -> None:
    yolo(tmp_path / "datasets" / "pets")
    (tmp_path / "settings").mkdir()
    file = tmp_path / "settings" / "pets.yaml"
    file.write_text("path: ../datasets/pets\nnames: [cat, dog]\ntrain: images\n")
    assert has_boxes(file) and len(find_boxed_pictures(file, None).pictures) == 3


def test_train_and_val_folders_are_the_split(tmp_path: Path) -> None:
    for part in ("train", "val"):
        yolo(tmp_path / part)
        (tmp_path / part / "data.yaml").unlink()
    (tmp_path / "classes.txt").write_text("cat\ndog")
    boxed = find_boxed_pictures(tmp_path, None)
    assert boxed.splits is not None and sorted(set(boxed.splits)) == ["train", "validation"]
    assert boxed.classes == ["cat", "dog"]


def _changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    document = coco_document()
    change(document)
    return document


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d["annotations"][2].update(bbox=[30, 5, 20, 5]),
            r"annotations\[2\]: the box .* is outside",
        ),
        (lambda d: d["annotations"][1].update(category_id=4), r"annotations\[1\]: no category has the id 4"),
        (lambda d: d["annotations"][1].update(image_id=1), r"annotations\[1\]: no image has the id 1"),
        (lambda d: d["annotations"][0].update(bbox=[1, 2]), r"annotations\[0\]: \[1, 2\] is no box"),
        (lambda d: d["images"][1].pop("file_name"), r"images\[1\]: no 'file_name'"),
        (lambda d: d["images"][1].update(file_name="x.png"), r"images\[1\]: no file 'x.png'"),
        (lambda d: d["images"][1].update(file_name="../images/a.png"), r"images\[1\]: no file '../images"),
    ],
)
def test_mistakes_in_coco_name_the_entry(tmp_path: Path, change: Callable[..., Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        find_boxed_pictures(coco(tmp_path / "data", _changed(change)), None)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<xmax>40</xmax>", "<xmax>90</xmax>", r"b\.xml', line 2: the box .* is outside"),
        ("<xmin>11</xmin>", "<xmin>left</xmin>", r"b\.xml', line 6: the object has no name or no whole box"),
        ("</annotation>", "", r"b\.xml', line \d+: "),
        ("<annotation>", "<!DOCTYPE a [<!ENTITY b 'c'>]><annotation>", r"b\.xml' declares a document type"),
    ],
)
def test_mistakes_in_voc_name_the_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    folder = voc(tmp_path / "data")
    file = folder / "Annotations" / "b.xml"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(DataError, match=message):
        find_boxed_pictures(folder, None)


def test_names_that_the_user_gives_are_the_order_and_the_list(tmp_path: Path) -> None:
    folder = voc(tmp_path / "data")
    boxed = find_boxed_pictures(folder, ["dog", "cat"])
    assert next(p for p in boxed.pictures if p.file.stem == "a").boxes[0, 0] == 0
    with pytest.raises(DataError, match=r"the class is 'cat', and the classes has dog"):
        find_boxed_pictures(folder, ["dog"])


@pytest.mark.parametrize("text", ["names: [a, b]\ntrain: images\n"])
def test_a_yaml_without_labels_has_no_boxes(tmp_path: Path, text: str) -> None:
    (tmp_path / "data.yaml").write_text(text)
    _pictures(tmp_path / "images" / "cat")
    assert not has_boxes(tmp_path / "data.yaml") and not has_boxes(tmp_path)
