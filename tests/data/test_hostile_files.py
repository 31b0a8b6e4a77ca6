"""Pictures and tokenizers from anyone: one error, no other program, no memory without bounds."""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.ImageFile import ImageFile

from onward.data import images
from onward.data.boxes import find_boxed_pictures
from onward.data.images import read_picture
from onward.data.layouts import Samples, check_files
from onward.data.lettering import read_lines
from onward.data.text import read_tokenizer, text_settings
from onward.errors import DataError

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for Ghostscript is a shell script")
@pytest.mark.parametrize("name", ["picture.png", "picture.eps", "picture"])
def test_a_picture_starts_no_program(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, trace = tmp_path / "bin", tmp_path / "started"
    programs.mkdir()
    program = programs / "gs"
    program.write_text(f"#!/bin/sh\ntouch '{trace}'\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    picture = tmp_path / name
    picture.write_bytes(EPS)
    with pytest.raises(DataError, match="cannot read the image"):
        read_picture(picture)
    assert not trace.exists()


def tokenizer_file(folder: Path, **parts: object) -> Path:
    path = folder / "tokenizer.json"
    document = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
        "decoder": None, "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"},
    }  # fmt: skip
    path.write_text(json.dumps({**document, **parts}))
    return path


def replace(pattern: dict[str, str], content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize("stage, parts", [("normalizer", "normalizers"), ("decoder", "decoders")])
@pytest.mark.parametrize("pattern", [{"String": "a"}, {"Regex": "a"}, {"Regex": ""}])
def test_a_tokenizer_that_makes_texts_much_longer_is_refused(
    stage: str, parts: str, pattern: dict[str, str], tmp_path: Path
) -> None:
    steps = {"type": "Sequence", parts: [replace(pattern, "aa")] * 33}
    with pytest.raises(DataError, match=f"its {stage} may make a text .* times longer"):
        read_tokenizer(tokenizer_file(tmp_path, **{stage: steps}))


def test_a_tokenizer_that_replaces_a_little_is_read(tmp_path: Path) -> None:
    steps = {
        "type": "Sequence",
        "normalizers": [replace({"String": " "}, "▁"), replace({"Regex": " {2,}"}, " ")],
    }
    tokenizer = read_tokenizer(tokenizer_file(tmp_path, normalizer=steps))
    assert (
        tokenizer.encode("a").ids == [0] and tokenizer.decode([0]) == "a" and tokenizer.get_vocab_size() == 2
    )


def test_a_pattern_that_backtracks_without_end_is_one_error(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = read_tokenizer(tokenizer_file(tmp_path, pre_tokenizer=split))
    with pytest.raises(DataError, match="fails on a text"):
        tokenizer.encode_batch(["a" * 40 + "b"])


def _write(folder: Path, files: dict[str, str]) -> Path:
    """A folder of pictures with these texts beside them."""
    for name in ("images/0.png", "0.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / name)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


BOX = "0 .5 .5 .2 .2\n"
BOMB = "a: &a [" + "x," * 10 + "]\n" + "".join(
    f"{name}: &{name} [{f'*{before},' * 10}]\n" for before, name in zip("abcdefgh", "bcdefghi")
)  # fmt: skip


def _coco(**changes: Any) -> str:
    document = {
        "images": [{"id": 1, "file_name": "0.png"}], "categories": [{"id": 1, "name": "a"}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [1, 1, 5, 5]}],
    }  # fmt: skip
    return json.dumps({**document, **changes})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"labels/0.txt": "99999999999 .5 .5 .2 .2"}, "line 1: the class is 99999999999, and the data names no"),
        ({"labels/0.txt": BOX, "data.yaml": f"{BOMB}path: *i\n"}, "path is no text"),
        ({"labels/0.txt": BOX, "data.yaml": f"{BOMB}train: *i\n"}, "train is no text"),
        ({"labels/0.txt": BOX, "data.yaml": "names: [a]\n" + " " * (1 << 21)}, "2,097,163 bytes"),
        ({"labels/0.txt": BOX, "data.yaml": "train: /\n"}, "no folder '/' for train in its own folder"),
        ({"labels/0.txt": BOX, "data.yaml": "path: ../\ntrain: secret\n"}, "no folder 'secret' for train"),
        ({"a.json": _coco(images=[{"id": [1], "file_name": "0.png"}])}, r"images\[0\]: its id is no number"),
        ({"a.json": _coco(categories=[{"id": 1, "name": {}}])}, r"categories\[0\]: its name is no number"),
        (
            {"a.json": _coco(categories=[{"id": 1, "name": "a"}, {"id": "2", "name": "b"}])},
            r"categories\[1\]: its id is no number and no text, or not as that of the others",
        ),
        *[
            ({"a.json": _coco(annotations=[{"image_id": 1, "category_id": 1, "bbox": [1, 1, 5, size]}])}, "no box")
            for size in (float("nan"), float("inf"), 10**400)
        ],
        ({"a.json": _coco(images=[{"id": 1, "file_name": "a" * 5000}], annotations=[])}, "no file 'aaa"),
    ],
)  # fmt: skip
def test_boxes_that_lie_are_one_error(tmp_path: Path, files: dict[str, str], message: str) -> None:
    (tmp_path / "secret").mkdir()
    folder = _write(tmp_path / "data", files)
    with pytest.raises(DataError, match=message):
        find_boxed_pictures(folder, None)


@pytest.mark.parametrize("name", ["../secret.png", "{0}/secret.png", "/dev/zero", "a" * 5000, "a\0.png"])
def test_a_list_of_texts_names_files_of_its_own_folder(tmp_path: Path, name: str) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    folder = _write(tmp_path / "data", {"rec_gt.txt": f"{name.format(tmp_path)}\ttext\n"})
    with pytest.raises(DataError, match="line 1: no file"):
        read_lines(folder)


def test_a_folder_beside_the_yaml_that_it_calls_one_above_is_read(tmp_path: Path) -> None:
    """As Roboflow writes it."""
    files = {"labels/0.txt": BOX, "data.yaml": "train: ../images\nnames: [a]\n"}
    assert find_boxed_pictures(_write(tmp_path, files), None).classes == ["a"]


def test_a_tokenizer_of_texts_shorter_than_none_is_refused(tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": -3}')
    with pytest.raises(DataError, match="its longest text has -3 tokens"):
        text_settings(path)


def test_a_text_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    folder = _write(tmp_path, {"labels/0.txt": ""})
    (folder / "labels/0.txt").write_bytes(b"\xff\xfe0 .5")
    with pytest.raises(DataError, match="txt' is no UTF-8 text: invalid start byte at byte 0"):
        find_boxed_pictures(folder, None)


def test_large_pictures_are_decoded_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few that unpack to much would take all memory at once."""
    monkeypatch.setattr(images, "_LARGE_PIXELS", 63)
    for number in range(8):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    decode, busy = ImageFile.load, threading.Lock()
    at_once: list[bool] = []

    def load(picture: Any) -> Any:
        at_once.append(not busy.acquire(blocking=False))
        time.sleep(0.005)
        if not at_once[-1]:
            busy.release()
        return decode(picture)

    monkeypatch.setattr(ImageFile, "load", load)
    check_files(Samples(list(tmp_path.iterdir())), images.why_unreadable_image, "image", skip_bad=False)
    assert at_once == [False] * 8
