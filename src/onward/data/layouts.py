"""The samples of a folder with their labels, in the layouts that people have.

Class folders; the same below train/val/test folders, which are the split then; `metadata.csv` or `.jsonl` with a
column `file_name`; `data.yaml` with the names of the classes and the folders of each part. Knows nothing of what is
in the files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.columns import EmbeddedFile, column_of_values, read_arrow, read_table
from onward.data.label_sets import join_label_columns
from onward.errors import DataError
from onward.escape import first_of
from onward.reading import parse_json, read_text

SPLITS: Mapping[str, str] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
YAML = frozenset({".yaml", ".yml"})
# the parser takes seconds for each megabyte
_LARGEST_YAML = 1 << 21
_SHOWN = 50  # files that an error lists


@dataclass
class Samples:
    """Files, the label of each, the part of the data that each is in, and the order of the classes if it is stated."""

    files: list[Any]
    labels: np.ndarray | None = None
    splits: np.ndarray | None = None
    classes: tuple[str, ...] | None = None

    def take(self, rows: np.ndarray) -> Samples:
        """The samples of these rows."""
        return Samples(
            [self.files[row] for row in rows],
            None if self.labels is None else self.labels[rows],
            None if self.splits is None else self.splits[rows],
            self.classes,
        )


def find_samples(
    path: Path,
    endings: frozenset[str],
    what: str,
    *,
    labelled: bool,
    label: str | None = None,
    together: bool = False,
) -> Samples:
    """The files with these endings, in order, and their labels where the model takes some.

    `label` is the column of `metadata.csv` that has the labels; with `together`, several columns of 0 and 1 may.
    """
    if path.is_file() and path.suffix.lower() not in YAML:
        return Samples([path])
    parts, classes = read_yaml(path)
    parts = parts or split_folders(path)
    places = parts or {"": path}
    samples = [
        _samples_of(folder, endings, what, labelled=labelled, label=label, together=together)
        for folder in places.values()
    ]
    files = [file for part in samples for file in part.files]
    if not files:
        raise DataError(
            f"no {what} in '{path}'", f"{what}s lie in one folder for each class: folder/cat/1.png"
        )
    labels = [part.labels for part in samples if part.labels is not None]
    return Samples(
        files,
        _join_labels(labels, str(path)) if labels else None,
        np.repeat(list(parts), [len(part.files) for part in samples]) if parts else None,
        classes,
    )


def files_in(folder: Path, endings: frozenset[str]) -> list[Path]:
    """The files with these endings in a folder and below it, in order; none that are hidden."""
    files = (file for file in folder.rglob("*") if file.suffix.lower() in endings and file.is_file())
    return sorted(file for file in files if not _is_hidden(file.relative_to(folder)))


def _join_labels(parts: Sequence[np.ndarray], where: str) -> np.ndarray:
    """The labels of several parts as one array; records of labels have their fields in the order of the first."""
    fields = parts[0].dtype.names
    other = next(
        (part.dtype.names for part in parts if set(part.dtype.names or ()) != set(fields or ())), fields
    )
    if other != fields:
        raise DataError(
            f"'{where}': its parts have other label columns: {first_of(fields or ())}; {first_of(other or ())}",
            "give all parts the same",
        )
    return np.concatenate(parts if fields is None else [part[list(fields)] for part in parts])


def _samples_of(
    folder: Path, endings: frozenset[str], what: str, *, labelled: bool, label: str | None, together: bool
) -> Samples:
    table = next((file for name in _TABLES if (file := folder / name).is_file()), None)
    if table is not None:
        return _read_metadata(table, what, labelled=labelled, label=label, together=together)
    files = files_in(folder, endings)
    if not labelled or not files:
        return Samples(files)
    classes = [file.relative_to(folder).parts[0] for file in files]
    if any((folder / name).is_file() for name in classes):
        raise DataError(
            f"'{folder}' has {what}s outside of class folders",
            "put each into a folder named as its class, or list them in metadata.csv: file_name,label",
        )
    empty = sorted(
        part.name for part in folder.iterdir() if part.is_dir() and not _is_hidden(Path(part.name))
        and part.name not in set(classes)
    )  # fmt: skip
    if {"images", "labels"} == {*classes, *empty}:
        raise DataError(
            f"'{folder}' has images/ and labels/, as object detectors take", "classifiers take class folders"
        )
    if empty:
        # a class without samples would shift the numbers of the others, or never be learned
        raise DataError(
            f"no {what} in {'the class folder' if len(empty) == 1 else 'class folders'} {first_of(empty)} "
            f"of '{folder}'",
            "put some there, or remove the folder",
        )
    return Samples(files, np.asarray(classes))


_TABLES = ("metadata.csv", "metadata.jsonl")


def _read_metadata(table: Path, what: str, *, labelled: bool, label: str | None, together: bool) -> Samples:
    """The files that a table names, as Hugging Face's imagefolder and audiofolder have them."""
    columns = read_table(table)
    if "file_name" not in columns:
        raise DataError(f"'{table}' has no column 'file_name'", f"it has {', '.join(columns)}")
    files = [table.parent / str(name) for name in columns.pop("file_name")]
    inside = table.parent.resolve()
    strange = [
        file for file in files if not file.resolve().is_relative_to(inside) or not os.path.isfile(file)
    ]
    if strange:
        raise DataError(
            f"'{table}' names {len(strange)} files that are not in its folder: {first_of(strange, _SHOWN)}",
            "correct the names, or remove the lines",
        )
    if not labelled:
        return Samples(files)
    if together:
        columns, label = join_label_columns(columns, label, None, str(table), others="label" not in columns)
    name = label or (
        "label" if "label" in columns else next(iter(columns), None) if len(columns) == 1 else None
    )
    if name is None or name not in columns:
        raise DataError(
            f"'{table}' has no column '{name}'"
            if name
            else f"'{table}': which column is the label of an {what}?",
            f"it has {', '.join(columns) or 'no other'}; --label names it",
        )
    return Samples(files, columns[name])


def split_folders(folder: Path) -> dict[str, Path]:
    """The folders of a train/val/test split; none where the folders are classes."""
    parts = [part for part in folder.iterdir() if part.is_dir() and not _is_hidden(Path(part.name))]
    names = [SPLITS.get(part.name.lower()) for part in parts]
    # two classes may be called train and plane: all are parts, or none is
    if None in names or "train" not in names or len(set(names)) != len(names):
        return {}
    order = ("train", "validation", "test")
    by_name = {str(name): part for name, part in zip(names, parts)}
    return {name: by_name[name] for name in order if name in by_name}


def read_yaml(path: Path) -> tuple[dict[str, Path], tuple[str, ...] | None]:
    """The parts and the classes of a `data.yaml`, as Ultralytics has it.

    In a folder that came from elsewhere it names folders of its own alone; a file that the user names may lead away.
    """
    is_named = not path.is_dir()
    file = path if is_named else path / "data.yaml"
    if not file.is_file():
        return {}, None
    import yaml

    if file.stat().st_size > _LARGEST_YAML:
        raise DataError(f"'{file}' has {file.stat().st_size:,} bytes", "it has folders and names alone")
    try:
        document = yaml.safe_load(read_text(file))
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read '{file}': {error}", "is it YAML?") from error
    if not isinstance(document, dict):
        raise DataError(f"'{file}' is no table of settings", "it has names:, train: and val:")
    names = document.get("names")
    if isinstance(names, dict) and set(names) == set(range(len(names))):
        names = [names[number] for number in range(len(names))]
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str | int) for name in names)
    ):
        raise DataError(f"'{file}': its names are no list", "names are a list, or a table from 0 on")
    for key in ("path", "train", "val", "test"):
        # aliases make of a short file a list that has no end in memory once it is text
        if not isinstance(document.get(key), str | None):
            raise DataError(f"'{file}': {key} is no text", "it is the path of one folder")
    base = document.get("path") or ""
    parts = {}
    for key, split in (("train", "train"), ("val", "validation"), ("test", "test")):
        name = document.get(key)
        if name is None:
            continue
        # Roboflow writes ../train/images for a folder beside the file
        options = (os.path.join(base, name), name, name.removeprefix("../"))
        folders = (file.parent / option for option in options if is_named or is_inside(option))
        folder = next((folder for folder in folders if os.path.isdir(folder)), None)
        if folder is None:
            where = "" if is_named else " in its own folder"
            raise DataError(
                f"'{file}': no folder '{name}' for {key}{where}",
                "correct its paths, or remove the line"
                + ("" if is_named else f"; to follow them elsewhere, name the file: {file}"),
            )
        parts[split] = folder
    return parts, None if names is None else tuple(str(name) for name in names)


def is_inside(name: str | os.PathLike[str]) -> bool:
    """Whether a path that a file names stays in the file's own folder: a file from elsewhere must not name others."""
    return not os.path.isabs(name) and os.path.normpath(name).split(os.sep)[0] != ".."


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in path.parts)


def check_files(
    samples: Samples, why_unreadable: Callable[[Any], str | None], what: str, *, skip_bad: bool
) -> tuple[Samples, list[str]]:
    """The samples whose files can be read, and a remark on the others.

    Without `skip_bad` these are an error that lists them all: one run is enough to clean the data.
    """
    with ThreadPoolExecutor(4) as pool:  # decoding leaves Python's lock
        reasons = list(pool.map(why_unreadable, samples.files))
    bad = [(file, reason) for file, reason in zip(samples.files, reasons) if reason is not None]
    if not bad:
        return samples, []
    if not skip_bad:
        raise _unreadable(bad, what)
    rows = np.flatnonzero([reason is None for reason in reasons])
    if not len(rows):
        raise DataError(f"none of the {len(bad)} {what}s can be read: {bad[0][1]}", "are they whole?")
    return samples.take(rows), [
        f"{len(bad)} of {len(samples.files)} {what}s cannot be read and are left out: "
        + first_of([str(file) for file, _ in bad])
    ]


def _unreadable(bad: Sequence[tuple[Any, str]], what: str) -> DataError:
    if len(bad) == 1:
        return DataError(
            f"cannot read the {what} '{bad[0][0]}': {bad[0][1]}", "remove it, fix it, or add --skip-bad"
        )
    lines = [f"  {file}: {reason}" for file, reason in bad[:_SHOWN]]
    more = [f"  … and {len(bad) - _SHOWN} more"] if len(bad) > _SHOWN else []
    return DataError(
        "\n".join([f"cannot read {len(bad)} {what}s:", *lines, *more]),
        "remove them, fix them, or add --skip-bad",
    )


# --- Folders of Hugging Face's `datasets`: Arrow files of `save_to_disk`, or Parquet files as the hub has
# them.
#
# Pictures and sounds lie inside the tables, classes are numbers whose names the table's schema has. Needs
# pyarrow.


@dataclass
class Dataset:
    """Columns of words and numbers, columns of files, the names of classes by column, and the part of each row."""

    columns: dict[str, np.ndarray]
    files: dict[str, list[EmbeddedFile]]
    classes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    splits: np.ndarray | None = None


def dataset_files(folder: Path) -> dict[str, list[Path]]:
    """The Arrow or Parquet files of a folder by the part of the data that they hold; empty where it has none."""
    for ending in (".arrow", ".parquet"):
        parts: dict[str, list[Path]] = {}
        for file in sorted(folder.rglob(f"*{ending}")):
            if file.is_file() and not file.name.startswith("cache-"):  # what `map` computed earlier
                parts.setdefault(_split_of(file.relative_to(folder)), []).append(file)
        if parts:
            order = ("train", "validation", "test", "")
            return {name: parts[name] for name in order if name in parts}
    return {}


def _split_of(path: Path) -> str:
    """`train/data-00000-of-00001.arrow`, `data/train-00000-of-00002.parquet`, `test.parquet`."""
    words = [*path.parts[:-1], re.split(r"[-._]", path.name)[0]]
    return next((SPLITS[word.lower()] for word in reversed(words) if word.lower() in SPLITS), "")


def read_dataset(folder: Path, parts: Mapping[str, list[Path]]) -> Dataset:
    """All rows of these files."""
    tables = [(split, read_arrow(file)) for split, files in parts.items() for file in files]
    names = list(tables[0][1].column_names)
    other = next((table for _, table in tables if set(table.column_names) != set(names)), None)
    if other is not None:
        odd = min(set(other.column_names) ^ set(names))
        raise DataError(
            f"'{folder}': '{odd}' is not in every file", "files of one dataset have the same columns"
        )
    classes = _class_names(tables[0][1].schema.metadata or {}, str(folder))
    dataset = Dataset({}, {}, classes)
    for name in names:
        values = [value for _, table in tables for value in table.column(name).to_pylist()]
        if isinstance(next((value for value in values if value is not None), None), dict):
            dataset.files[name] = _embedded(values, name, folder)
            continue
        if name in classes:
            values = [_name_of(number, classes[name], name, folder) for number in values]
        dataset.columns[name] = column_of_values(values, name, folder)
    if set(parts) != {""}:
        dataset.splits = np.repeat(
            [split or "train" for split, _ in tables], [len(table) for _, table in tables]
        )
    return dataset


def _class_names(metadata: Mapping[bytes, bytes], where: str) -> dict[str, tuple[str, ...]]:
    """The names of the classes of each column, from the features that `datasets` keeps in the schema."""
    try:
        document = parse_json(metadata.get(b"huggingface", b"{}").decode("utf-8"))
        features = document.get("info", {}).get("features", {})
        return {
            name: tuple(map(str, feature["names"]))
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names")
        }
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"'{where}': its features cannot be read: {error}", "save it again") from error


def _name_of(number: Any, names: tuple[str, ...], column: str, folder: Path) -> str:
    if type(number) is not int or not 0 <= number < len(names):
        raise DataError(
            f"'{folder}': column '{column}' has the class {number}, and the names are of 0 to {len(names) - 1}",
            "remove rows without a class",
        )
    return names[number]


def _embedded(values: list[Any], name: str, folder: Path) -> list[EmbeddedFile]:
    """Pictures or sounds that `datasets` has stored with their bytes."""
    files = []
    for row, value in enumerate(values):
        content = value.get("bytes") if isinstance(value, dict) else None
        if not isinstance(content, bytes):
            raise DataError(
                f"'{folder}': row {row} of '{name}' has no bytes of a file",
                "save the dataset with its files embedded, or give a folder of files",
            )
        files.append(EmbeddedFile(str(value.get("path") or f"{name} {row}"), content))
    return files
