"""Data in every format that people have, matched to a model's inputs; and what is said about bad data."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.newcomer import make_data
from onward.cli.data import load_data
from onward.cli.errors import CommandError
from onward.data.match_inputs import InputSpec, fit
from onward.data.read import DataOptions
from onward.errors import DataError

INPUTS = [
    InputSpec("x", np.dtype(np.float32), (None, 4)),
    InputSpec("labels", np.dtype(np.int64), (None,)),
]
CLASSES = ["iris", "rose", "tulip"]


def write_npz(data: dict[str, np.ndarray]) -> list[str]:
    np.savez("d.npz", **data)
    return ["d.npz"]


def write_npy(data: dict[str, np.ndarray]) -> list[str]:
    for name, array in data.items():
        np.save(f"d-{name}.npy", array)
    return [f"{name}=d-{name}.npy" for name in data]


def write_csv(data: dict[str, np.ndarray]) -> list[str]:
    with open("d.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["a", "b", "c", "d", "labels"])
        rows.writerows([*map(float, row), int(label)] for row, label in zip(data["x"], data["labels"]))
    return ["d.csv"]


def write_csv_of_words(data: dict[str, np.ndarray]) -> list[str]:
    with open("w.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["a", "b", "c", "d", "flower"])
        rows.writerows([*map(float, row), CLASSES[label]] for row, label in zip(data["x"], data["labels"]))
    return ["w.csv"]


def write_parquet(data: dict[str, np.ndarray]) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"x": [row.tolist() for row in data["x"]], "labels": data["labels"]})
    pyarrow.parquet.write_table(table, "d.parquet")
    return ["d.parquet"]


def write_safetensors(data: dict[str, np.ndarray]) -> list[str]:
    from onward.checkpoint import CheckpointData, to_safetensors

    to_safetensors(CheckpointData(trainable=dict(data)), "d.safetensors")
    return ["d.safetensors"]


WRITERS: list[Callable[[dict[str, np.ndarray]], list[str]]] = [
    write_npz, write_npy, write_csv, write_csv_of_words, write_parquet, write_safetensors,
]  # fmt: skip


@pytest.mark.parametrize("write", WRITERS, ids=lambda function: function.__name__)
def test_every_format_gives_the_same_arrays(place: Path, write: Callable[..., list[str]]) -> None:
    data = make_data()
    loaded = load_data(write(data), INPUTS)
    assert loaded.arrays is not None
    assert list(loaded.arrays) == ["x", "labels"]
    np.testing.assert_array_equal(loaded.arrays["x"], data["x"])
    np.testing.assert_array_equal(loaded.arrays["labels"], data["labels"])
    assert (loaded.arrays["x"].dtype, loaded.arrays["labels"].dtype) == (np.float32, np.int64)


def test_images_become_pixels_and_folders_classes(place: Path) -> None:
    from PIL import Image

    for index, name in enumerate(["cat", "dog", "dog"]):
        folder = Path("pictures") / name
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 6), (255 * (name == "dog"), 0, 0)).save(folder / f"{index}.png")
    inputs = [InputSpec("image", np.dtype(np.float32), (None, 3, 4, 4)), INPUTS[1]]
    loaded = load_data(["pictures"], inputs)
    assert loaded.arrays is not None and loaded.classes == ["cat", "dog"]
    assert loaded.arrays["image"].shape == (3, 3, 4, 4)
    assert loaded.arrays["labels"].tolist() == [0, 1, 1]
    assert loaded.arrays["image"][:, 0].mean(axis=(1, 2)).tolist() == [0.0, 1.0, 1.0]


def test_a_function_may_give_batches(artifacts: Path, run: Any) -> None:
    Path("my_loader.py").write_text(
        "import numpy as np\n"
        "def batches():\n"
        "    data = np.load('data.npz')\n"
        "    return [(data['x'][i:i + 16], data['labels'][i:i + 16]) for i in range(0, 96, 16)]\n",
        encoding="utf-8",
    )
    found = run("train", "artifacts", "-d", "my_loader:batches", "-e", 2, "--json").json
    assert found["steps"] == 12


def test_arrays_of_other_names_are_matched_by_what_fits() -> None:
    arrays = {"y": np.zeros(5, np.int64), "features": np.zeros((5, 4))}
    fitted, notes = fit(arrays, INPUTS)
    assert fitted["x"].shape == (5, 4) and fitted["labels"].shape == (5,)
    assert notes == [
        "taking 'features' of the data as the model's 'x'",
        "taking 'y' of the data as the model's 'labels'",
    ]


def test_rows_are_reshaped_where_the_model_says_how() -> None:
    spec = InputSpec("image", np.dtype(np.float32), (None, 1, 2, 2))
    fitted, _ = fit({"image": np.arange(8, dtype=np.uint8).reshape(2, 4)}, [spec])
    assert fitted["image"].shape == (2, 1, 2, 2)
    assert fitted["image"].dtype == np.float32


def test_classes_of_the_training_data_number_those_of_other_data(trained_on_words: Path, run: Any) -> None:
    with open("few.csv", "w", encoding="utf-8") as file:
        file.write("a,b,c,d,flower\n0,0,9,0,tulip\n0,0,8,0,tulip\n")  # alone, 'tulip' would be class 0
    found = run("evaluate", "run", "-d", "few.csv", "-m", "accuracy", "--json").json
    assert found["accuracy"] == 1.0


@pytest.fixture
def trained_on_words(artifacts: Path, run: Any) -> Path:
    (path,) = write_csv_of_words(make_data())
    run("train", "artifacts", "-d", path, "-e", 20, "--lr", 0.02)
    return artifacts.parent / "run"


def text_file(name: str, text: str) -> Callable[[], list[str]]:
    def write() -> list[str]:
        Path(name).write_text(text, encoding="utf-8")
        return [name]

    return write


def npz(**arrays: np.ndarray) -> Callable[[], list[str]]:
    return lambda: write_npz(arrays)


def half_an_npz() -> list[str]:
    write_npz(make_data())
    data = Path("d.npz").read_bytes()
    Path("d.npz").write_bytes(data[: len(data) // 2])
    return ["d.npz"]


def objects() -> list[str]:
    np.save("o.npy", np.asarray([{}, {}], object), allow_pickle=True)
    return ["x=o.npy"]


X, Y = np.zeros((5, 4), np.float32), np.zeros(5, np.int64)
BAD: list[tuple[str, Callable[[], list[str]], str]] = [
    ("no file", lambda: ["nowhere.npz"], "no data at 'nowhere.npz'"),
    ("unknown ending", text_file("d.xyz", "1"), "unknown ending"),
    ("damaged", half_an_npz, "cannot read 'd.npz'"),
    ("not an npz", text_file("d.npz", "hello"), "cannot read 'd.npz'"),
    ("Python objects", objects, "Python objects, which are not loaded"),
    ("missing array", npz(x=X), "has no 'labels'"),
    ("other shapes", npz(x=np.zeros((5, 7)), labels=Y), "'x' has shape [5, 7]"),
    ("unequal lengths", npz(x=X, labels=Y[:3]), "different numbers of samples: x 5, labels 3"),
    ("fractions as labels", npz(x=X, labels=Y + 0.5), "'labels' has fractions"),
    ("words as numbers", npz(x=np.full((5, 4), "a"), labels=Y), "not numbers"),
    ("empty", npz(x=X[:0], labels=Y[:0]), "has no sample"),
    ("a single number", npz(x=np.float32(1), labels=Y), "is a single number"),
    ("header only", text_file("d.csv", "a,b\n"), "no row below its header"),
    ("ragged rows", text_file("d.csv", "a,b\n1,2\n3\n"), "row 3: 1 cells"),
    ("twice a column", text_file("d.csv", "a,a\n1,2\n"), "names a column twice"),
    ("a word among numbers", text_file("d.csv", "a,b,c,d,labels\n1,2,x,4,0\n1,2,3,4,0\n1,2,3,4,0\n"), "'c' is 'x'"),
    ("more features than the model takes", text_file("d.csv", "a,b,c,d,labels\n1,2,x,4,0\n1,2,y,4,0\n"), "makes 5"),
    ("no module", lambda: ["nowhere:fn"], "no module 'nowhere'"),
    ("no function", lambda: ["os:nothing_here"], "has no 'nothing_here'"),
    ("an empty folder", lambda: [str(Path("empty").mkdir() or "empty")], "no image and no WAV file in 'empty'"),
]  # fmt: skip


@pytest.mark.parametrize(("write", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_data_is_named(place: Path, write: Callable[[], list[str]], message: str) -> None:
    with pytest.raises((CommandError, DataError)) as caught:
        load_data(write(), INPUTS)
    assert message in str(caught.value)


def test_a_class_that_was_not_trained_on_is_refused(place: Path) -> None:
    sources = write_csv_of_words(make_data())
    with pytest.raises(DataError, match="the class 'tulip', which the model has not"):
        load_data(sources, INPUTS, DataOptions(classes=["iris", "rose"]))


def test_a_map_must_name_what_is_there(place: Path) -> None:
    sources = write_npz(make_data())
    with pytest.raises(DataError, match="no input 'y'"):
        load_data(sources, INPUTS, DataOptions(mapping={"y": "labels"}))
    with pytest.raises(DataError, match="has no 'z'"):
        load_data(sources, INPUTS, DataOptions(mapping={"x": "z"}))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
@pytest.mark.parametrize(
    "name", ["d.csv", "d.tsv", "d.jsonl", "d.parquet", "d.npz", "d.npy", "d.wav", "d.png"]
)
def test_devices_and_pipes_are_no_data(artifacts: Path, run: Any, name: str) -> None:
    Path(name).symlink_to("/dev/zero")
    said = _refusal(run, name)
    assert said.startswith("error: ")
    Path(name).unlink()
    os.mkfifo(name)
    assert _refusal(run, name) == said


def _refusal(run: Any, name: str) -> str:
    return run("train", "artifacts", "-d", name, code=1).stderr.splitlines()[0]


def test_data_that_unpacks_to_far_more_than_it_is(artifacts: Path, run: Any) -> None:
    np.savez_compressed("bomb.npz", x=np.zeros((200_000, 4), np.float32), labels=np.zeros(200_000, np.int64))
    assert (
        "unpacked_bytes"
        in run("train", "artifacts", "-d", "bomb.npz", "--limit", "unpacked_bytes=1000", code=1).stderr
    )
    claims = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (1 << 45,)}
    np.lib.format.write_array_header_1_0(claims, header)
    Path("big.npy").write_bytes(claims.getvalue() + b"1234")
    assert "4 are there" in run("train", "artifacts", "-d", "x=big.npy", code=1).stderr
