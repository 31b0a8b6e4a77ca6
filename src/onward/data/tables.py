"""Tables (CSV, JSON lines, Parquet) as arrays: a column for an input of its name, the others together as features.

Empty cells of features are NaN until `fit_table` has seen the training rows: it fills them with the mean there,
and optionally standardizes every column. The statistics are stored, and used again for inference.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.data.images import number_classes
from onward.data.preprocessing import Preprocessing
from onward.errors import DataError

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec

__all__ = ["TABLES", "Table", "apply_table", "assemble", "fit_table", "read_table"]

TABLES = frozenset({".csv", ".tsv", ".jsonl", ".ndjson", ".parquet"})
_EMPTY = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})


@dataclass
class Table:
    """Arrays by input, the names of classes where labels were words, the features' columns, and what was assumed."""

    arrays: dict[str, np.ndarray]
    classes: list[str] | None = None
    features: tuple[str, list[str]] | None = None  # the input, and the columns that it is made of
    notes: list[str] = field(default_factory=list)


def read_table(path: Path) -> dict[str, np.ndarray]:
    """The columns of a file; numbers (with NaN where cells are empty), words, or matrices."""
    kind = path.suffix.lower()
    if kind == ".parquet":
        return _read_parquet(path)
    return _read_json_lines(path) if kind in (".jsonl", ".ndjson") else _read_csv(path)


def _read_csv(path: Path) -> dict[str, np.ndarray]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ","))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read '{path}': {error}", "a CSV file is UTF-8 text with a header") from error
    rows = [row for row in rows if row]
    if len(rows) < 2:
        raise DataError(f"'{path}' has no row below its header", "the first line names the columns")
    header = [name.strip() for name in rows[0]]
    if len(set(header)) != len(header):
        raise DataError(f"'{path}' names a column twice", "each column needs a name of its own")
    if len(header) == 1 and ";" in header[0]:
        raise DataError(f"'{path}' seems to separate its columns by ';'", "save it with commas")
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise DataError(
                f"'{path}', row {number}: {len(row)} cells, the header has {len(header)}",
                "is a comma missing?",
            )
    return {name: _column([row[i] for row in rows[1:]], name, path, first=2) for i, name in enumerate(header)}


def _read_json_lines(path: Path) -> dict[str, np.ndarray]:
    rows: list[dict[str, Any]] = []
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise DataError(
                        f"'{path}', line {number}: not an object", 'a line is {"text": "…", "label": …}'
                    )
                if rows and set(row) != set(rows[0]):
                    odd = sorted(set(row) ^ set(rows[0]))[0]
                    raise DataError(
                        f"'{path}', line {number}: '{odd}' is not in every line", "give all the same keys"
                    )
                rows.append(row)
    except DataError:
        raise
    except (OSError, ValueError) as error:
        where = f"'{path}', line {len(rows) + 1}"
        raise DataError(f"{where}: {error}", "each line is one JSON object") from error
    if not rows:
        raise DataError(f"'{path}' has no line", 'a line is {"text": "…", "label": …}')
    return {name: _values([row[name] for row in rows], name, path) for name in rows[0]}


def _read_parquet(path: Path) -> dict[str, np.ndarray]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"cannot read '{path}': {error}", "is it a whole Parquet file?") from error
    return {name: _values(table.column(name).to_pylist(), name, path) for name in table.column_names}


def _values(values: list[Any], name: str, path: Path) -> np.ndarray:
    """A column of Python objects; lists of equal length become rows of a matrix."""
    if any(isinstance(value, str) for value in values):
        return _words([None if value is None else str(value) for value in values], name, path, first=1)
    if any(isinstance(value, dict) for value in values):
        raise DataError(f"'{path}': column '{name}' holds objects", "flatten them first")
    try:
        array = np.asarray([np.nan if value is None else value for value in values])
    except ValueError as error:
        raise DataError(f"'{path}': the rows of '{name}' have different lengths", "pad them") from error
    if array.dtype.kind == "O":
        raise DataError(f"'{path}': column '{name}' is neither numbers nor words", "drop it")
    return array


def _column(cells: Sequence[str], name: str, path: Path, *, first: int) -> np.ndarray:
    empty = [cell.strip().lower() in _EMPTY for cell in cells]
    try:
        numbers = np.asarray([np.nan if hole else float(cell) for cell, hole in zip(cells, empty)])
    except ValueError:
        return _words([None if not cell.strip() else cell.strip() for cell in cells], name, path, first=first)
    if all(empty):
        raise DataError(f"'{path}': column '{name}' is empty", "drop it")
    whole = np.isfinite(numbers).all() and np.array_equal(numbers, np.round(numbers))
    return numbers.astype(np.int64 if whole and np.abs(numbers).max() < 2**53 else np.float32)


def _words(values: Sequence[str | None], name: str, path: Path, *, first: int) -> np.ndarray:
    """Words have no mean: an empty cell among them is an error that names the row."""
    hole = next((row for row, value in enumerate(values) if value is None), None)
    if hole is not None:
        raise DataError(
            f"'{path}', row {hole + first}: '{name}' is empty",
            "fill or drop rows with empty cells of words first",
        )
    return np.asarray(values)


def assemble(
    columns: Mapping[str, np.ndarray],
    inputs: Sequence[InputSpec],
    *,
    label: str | None = None,
    classes: Sequence[str] | None = None,
    where: str = "the table",
    features: Sequence[str] | None = None,
) -> Table:
    """Arrays for a model's inputs: columns of their name, the label, and the rest as features.

    `features` are the columns that training had, in its order.
    """
    left = dict(columns)
    made = Table({})
    if label is not None and label not in left and len(inputs) > 1:
        raise DataError(f"'{where}' has no column '{label}'", f"it has {', '.join(left)}")
    wanted = [spec for spec in inputs if spec.name not in left]
    for spec in inputs:
        if spec.name in left:
            made.arrays[spec.name] = left.pop(spec.name)
    if wanted:
        target = wanted[-1] if len(inputs) > 1 and wanted[-1] is inputs[-1] else None
        if target is not None and left:
            name = label or list(left)[-1]
            if name in left:
                made.arrays[target.name] = left.pop(name)
                if label is None and name != target.name:
                    made.notes.append(f"taking the last column, '{name}', as the model's '{target.name}'")
            wanted = [spec for spec in wanted if spec is not target]
        elif label is not None:
            left.pop(label, None)  # a table of the training set, used for inference
        if len(wanted) > 1:
            names = ", ".join(f"'{spec.name}'" for spec in wanted)
            raise DataError(f"'{where}' has no columns {names}", f"it has {', '.join(columns)}")
        if wanted:
            if features is not None:
                missing = [name for name in features if name not in left]
                if missing:
                    raise DataError(
                        f"'{where}' has no column '{missing[0]}', which the model was trained with",
                        f"it has {', '.join(columns)}",
                    )
                left = {name: left[name] for name in features}
            made.arrays[wanted[0].name] = _features(left, where)
            if all(column.ndim == 1 for column in left.values()):
                made.features = (wanted[0].name, list(left))
    for spec in inputs:
        array = made.arrays.get(spec.name)
        if array is None:
            continue
        if spec.is_integer and array.dtype.kind == "f" and np.isnan(array).any():
            row = int(np.argwhere(np.isnan(array))[0][0])
            raise DataError(f"'{where}', sample {row}: the label is empty", "fill it, or drop the row")
        if array.dtype.kind in "UO" or (spec.is_integer and array.dtype.kind == "b"):
            if not spec.is_integer:
                raise DataError(f"'{where}': the column of '{spec.name}' has words", f"it takes {spec}")
            made.arrays[spec.name], made.classes = number_classes(
                [str(word) for word in array], classes, where
            )
            made.notes.append(f"{len(made.classes)} classes: {', '.join(made.classes[:8])}")
    return made


def fit_table(
    train: dict[str, Any], features: tuple[str, list[str]], *, standardize: bool
) -> tuple[Preprocessing, list[str]]:
    """What to do to the features, found on the training rows alone; and remarks on it."""
    name, columns = features
    values = np.asarray(train[name], np.float64)
    counted = np.isfinite(values)
    missing = np.count_nonzero(~counted, axis=0)
    if np.isinf(values).any():
        row, column = (int(i) for i in np.argwhere(np.isinf(values))[0])
        raise DataError(f"sample {row}: '{columns[column]}' is infinite", "drop the row, or fix it")
    empty = [columns[i] for i in np.flatnonzero(missing == len(values))]
    if empty:
        raise DataError(f"column '{empty[0]}' has no number among the training rows", "drop it")
    with np.errstate(invalid="ignore"):
        mean = np.nanmean(values, axis=0)
        spread = np.nanstd(values, axis=0)
    settings: dict[str, Any] = {"columns": columns, "fill": [float(x) for x in mean]}
    notes = [
        f"{missing[i]} empty cells of '{columns[i]}' take the mean of the training rows, {mean[i]:.4g}"
        for i in np.flatnonzero(missing)
    ]
    if standardize:
        settings |= {"mean": settings["fill"], "scale": [float(x) if x > 0 else 1.0 for x in spread]}
        notes.append(f"{len(columns)} columns are brought to mean 0 and deviation 1, as in the training rows")
    return Preprocessing("table", name, settings), notes


def apply_table(array: np.ndarray, settings: Mapping[str, Any]) -> np.ndarray:
    """Features with their gaps filled, standardised where training did."""
    values = np.asarray(array, np.float64)
    if values.ndim != 2 or values.shape[1] != len(settings["fill"]):
        raise DataError(f"features of shape {list(values.shape)}: {len(settings['fill'])} columns are needed")
    values = np.where(np.isnan(values), np.asarray(settings["fill"]), values)
    if settings.get("mean"):
        values = (values - np.asarray(settings["mean"])) / np.asarray(settings["scale"])
    return values.astype(np.float32)


def _features(columns: Mapping[str, np.ndarray], where: str) -> np.ndarray:
    if not columns:
        raise DataError(f"'{where}' has no column left for the features", "is it the right file?")
    for name, column in columns.items():
        if column.dtype.kind not in "biuf":
            raise DataError(
                f"'{where}': column '{name}' has words, not numbers", "drop it, or make numbers of it first"
            )
    parts = [column[:, None] if column.ndim == 1 else column for column in columns.values()]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
