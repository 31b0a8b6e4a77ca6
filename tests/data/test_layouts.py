"""Data in the layouts that people have: splits, metadata files, `datasets` folders, data.yaml; and damaged files."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from onward.data.match_inputs import InputSpec
from onward.data.read import DataOptions, read_data
from onward.data.splits import evaluation_part, own_split
from onward.errors import DataError

PIXELS = InputSpec("x", np.dtype(np.float32), (None, 3, 4, 4))
LABEL = InputSpec("labels", np.dtype(np.int64), (None,))
WAVE = InputSpec("x", np.dtype(np.float32), (None, None))
TOKENS = InputSpec("input_ids", np.dtype(np.int64), (None, None))


def picture(path: Path, shade: int = 9, *, ending: str = "png") -> Path:
    path = path.with_suffix(f".{ending}")
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(shade).integers(0, 255, (32, 32, 3)).astype(np.uint8)
    Image.fromarray(noise).save(path)
    return path


def cut(path: Path) -> Path:
    """A picture whose header is whole and whose pixels are not."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def png(shade: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (4, 4), (shade, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def wav(samples: int = 40) -> bytes:
    sound = np.arange(samples, dtype="<i2").tobytes()
    head = struct.pack("<HHIIHH", 1, 1, 16000, 32000, 2, 16)
    chunks = b"fmt " + struct.pack("<I", 16) + head + b"data" + struct.pack("<I", len(sound)) + sound
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def read(path: Path, *inputs: InputSpec, **options: object):
    return read_data([(None, path)], inputs or (PIXELS, LABEL), DataOptions(**options))


def by_file(data: object) -> dict[str, int]:
    arrays = data.arrays
    return {Path(str(file)).name: int(n) for file, n in zip(arrays["x"].files, arrays["labels"])}


@pytest.mark.parametrize(
    "names", [("train", "val", "test"), ("Training", "validation", "test"), ("train", "valid")]
)
def test_train_and_val_folders_are_the_split_and_not_classes(tmp_path: Path, names: tuple[str, ...]) -> None:
    for number, name in enumerate(names):
        for label in ("wolf", "cat"):
            for sample in range(3 - number):
                picture(tmp_path / "ds" / name / label / f"{sample}")
    data = read(tmp_path / "ds", classes=("wolf", "cat"))
    assert data.classes == ["wolf", "cat"]
    parts = own_split(data)
    assert parts is not None
    train, evaluation = parts
    assert (train.samples, evaluation.samples) == (6, 4)
    assert np.bincount(train.arrays["labels"]).tolist() == [3, 3]
    assert evaluation_part(data).samples == (2 if "test" in names else 4)


def test_classes_called_train_and_plane_are_classes(tmp_path: Path) -> None:
    for label in ("train", "plane"):
        picture(tmp_path / label / "1")
    data = read(tmp_path)
    assert data.classes == ["plane", "train"]
    assert own_split(data) is None


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_metadata_names_the_files_and_their_labels(tmp_path: Path, kind: str) -> None:
    rows = [("b.png", "wolf"), ("a.png", "cat"), ("inner/c.png", "wolf")]
    for name, _ in rows:
        picture(tmp_path / name)
    if kind == "csv":
        text = "file_name,label\n" + "".join(f"{name},{label}\n" for name, label in rows)
    else:
        text = "".join(json.dumps({"file_name": name, "label": label}) + "\n" for name, label in rows)
    (tmp_path / f"metadata.{kind}").write_text(text)
    data = read(tmp_path, classes=("wolf", "cat"))
    assert by_file(data) == {"b.png": 0, "a.png": 1, "c.png": 0}


def test_metadata_below_each_part_of_a_split(tmp_path: Path) -> None:
    for part in ("train", "test"):
        picture(tmp_path / part / "1")
        (tmp_path / part / "metadata.csv").write_text("file_name,label,photographer\n1.png,wolf,Ada\n")
    data = read(tmp_path, classes=("wolf", "cat"))
    assert data.splits.tolist() == ["train", "test"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file_name,label\n../secret.png,a\n", "files that are not in its folder"),
        (
            "file_name,label\nnone.png,a\nnot.png,b\n",
            "2 files that are not in its folder: .*none.png, .*not.png",
        ),
        ("file,label\n1.png,a\n", "no column 'file_name'"),
        ("file_name,animal,colour\n1.png,a,b\n", "which column is the label"),
        ("file_name\n1.png\n", "which column is the label"),
    ],
)
def test_metadata_that_cannot_be_followed_is_one_error(tmp_path: Path, text: str, message: str) -> None:
    picture(tmp_path / "secret")
    picture(tmp_path / "ds" / "1")
    (tmp_path / "ds" / "metadata.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "ds")


def test_data_yaml_names_the_classes_and_the_parts(tmp_path: Path) -> None:
    for part in ("images-a", "images-b"):
        for label in ("wolf", "cat"):
            picture(tmp_path / part / label / "1")
    (tmp_path / "data.yaml").write_text("train: images-a\nval: images-b\nnames: {0: wolf, 1: cat}\n")
    for place in (tmp_path, tmp_path / "data.yaml"):
        data = read(place)
        assert data.classes == ["wolf", "cat"]
        assert data.splits.tolist() == ["train", "train", "validation", "validation"]


def test_data_yaml_leads_elsewhere_where_the_user_names_it(tmp_path: Path) -> None:
    for label in ("wolf", "cat"):
        picture(tmp_path / "datasets" / "pets" / "images" / label / "1")
    picture(tmp_path / "settings" / "1")
    file = tmp_path / "settings" / "data.yaml"
    for text in (
        "path: ../datasets/pets\ntrain: images\n",
        f"train: {(tmp_path / 'datasets' / 'pets' / 'images').as_posix()}\n",
    ):
        file.write_text(text)
        assert read(file).classes == ["cat", "wolf"]
        with pytest.raises(DataError, match="in its own folder") as error:
            read(file.parent)
        assert f"name the file: {file}" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: nowhere\n", "no folder 'nowhere' for train"),
        ("names: {1: a, 2: b}\n", "its names are no list"),
        ("a: [", "cannot read"),
        ("- 1\n", "no table of settings"),
        ("!!python/object/apply:os.system ['true']\n", "cannot read"),
    ],
)
def test_a_yaml_file_that_cannot_be_followed_is_one_error(tmp_path: Path, text: str, message: str) -> None:
    picture(tmp_path / "a" / "1")
    (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_an_empty_class_folder_is_an_error(tmp_path: Path) -> None:
    picture(tmp_path / "cat" / "1")
    (tmp_path / "wolf").mkdir()
    (tmp_path / ".cache").mkdir()
    with pytest.raises(DataError, match="no image in the class folder wolf"):
        read(tmp_path)


def test_every_damaged_picture_is_listed_and_may_be_left_out(tmp_path: Path) -> None:
    for number in range(4):
        picture(tmp_path / "cat" / f"{number}", number, ending="jpg")
        picture(tmp_path / "wolf" / f"{number}", number)
    bad = [cut(tmp_path / "cat" / "1.jpg"), cut(tmp_path / "wolf" / "2.png"), tmp_path / "wolf" / "3.png"]
    bad[2].write_bytes(b"no picture")
    with pytest.raises(DataError, match="cannot read 3 images") as caught:
        read(tmp_path)
    assert all(str(file) in str(caught.value) for file in bad)
    data = read(tmp_path, skip_bad=True)
    assert data.samples == 5
    assert data.arrays["labels"].tolist() == [0, 0, 0, 1, 1]
    assert any(note.startswith("3 of 8 images cannot be read and are left out") for note in data.notes)
    np.asarray(data.arrays["x"])


def test_damaged_sounds_are_listed_too(tmp_path: Path) -> None:
    for label in ("hum", "beep"):
        (tmp_path / label).mkdir()
        (tmp_path / label / "1.wav").write_bytes(wav())
        (tmp_path / label / "2.wav").write_bytes(b"RIFF")
    with pytest.raises(DataError, match="cannot read 2 sounds"):
        read(tmp_path, WAVE, LABEL)
    assert read(tmp_path, WAVE, LABEL, skip_bad=True).samples == 2


def test_where_nothing_can_be_read_nothing_can_be_left_out(tmp_path: Path) -> None:
    cut(picture(tmp_path / "cat" / "1"))
    with pytest.raises(DataError, match="none of the 1 images"):
        read(tmp_path, skip_bad=True)


def save_dataset(
    folder: Path, parts: dict[str, list[tuple[object, int]]], column: str, *, parquet: bool
) -> None:
    """What `datasets` writes: a schema with the features, Arrow streams below each split, or Parquet files."""
    import pyarrow
    import pyarrow.parquet

    features = {"label": {"names": ["wolf", "cat"], "_type": "ClassLabel"}}
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    folder.mkdir(parents=True)
    for part, rows in parts.items():
        table = pyarrow.table({column: [row[0] for row in rows], "label": [row[1] for row in rows]})
        table = table.replace_schema_metadata(about)
        if parquet:
            pyarrow.parquet.write_table(table, folder / f"{part}-00000-of-00001.parquet")
            continue
        (folder / part).mkdir()
        path = str(folder / part / "data-00000-of-00001.arrow")
        with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("parquet", [True, False], ids=["parquet", "arrow"])
def test_a_datasets_folder_has_its_pictures_classes_and_parts(tmp_path: Path, parquet: bool) -> None:
    rows = [({"bytes": png(10 * number), "path": f"{number}.png"}, number % 2) for number in range(6)]
    save_dataset(tmp_path / "ds", {"train": rows[:4], "test": rows[4:]}, "image", parquet=parquet)
    data = read(tmp_path / "ds")
    assert data.classes == ["wolf", "cat"]
    assert data.arrays["labels"].tolist() == [0, 1, 0, 1, 0, 1]
    assert data.splits.tolist() == ["train"] * 4 + ["test"] * 2
    assert np.asarray(data.arrays["x"]).shape == (6, 3, 4, 4)
    swapped = read(tmp_path / "ds", classes=("cat", "wolf"))
    assert swapped.arrays["labels"].tolist() == [1, 0, 1, 0, 1, 0]


def test_a_datasets_folder_of_sounds(tmp_path: Path) -> None:
    rows = [({"bytes": wav(), "path": None}, number % 2) for number in range(2)]
    save_dataset(tmp_path / "ds", {"train": rows}, "audio", parquet=True)
    assert read(tmp_path / "ds", WAVE, LABEL).arrays["x"].shape == (2, 40)


def test_a_datasets_folder_of_numbers_is_a_table(tmp_path: Path) -> None:
    save_dataset(tmp_path / "ds", {"train": [(0.5, 1), (1.5, 0)], "test": [(2.5, 1)]}, "size", parquet=False)
    data = read(tmp_path / "ds", InputSpec("x", np.dtype(np.float32), (None, 1)), LABEL)
    assert data.classes == ["wolf", "cat"]
    assert data.arrays["labels"].tolist() == [1, 0, 1]
    assert own_split(data) is not None


def test_a_damaged_datasets_file_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "data-00000-of-00001.arrow").write_bytes(b"ARROW?")
    with pytest.raises(DataError, match="cannot read"):
        read(tmp_path)


def test_images_and_labels_of_a_detector_are_told_from_classes(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "1")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "1.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    with pytest.raises(DataError, match="as object detectors take"):
        read(tmp_path)
