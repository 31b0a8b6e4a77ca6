"""Tables (CSV, JSON lines, Parquet) as arrays: a column for an input of its name, the others together as features.

A column of words becomes one feature for each of its categories (one-hot). Empty cells of numbers are NaN until
`fit_table` has seen the training rows: it fills them with the mean there, and optionally standardizes every column of
numbers. Categories and statistics are stored, and used again for inference.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from onward.data.images import number_classes
from onward.data.preprocessing import Preprocessing
from onward.errors import DataError, LimitError
from onward.escape import first_of
from onward.limits import current, require
from onward.reading import parse_json

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec

__all__ = [
    "TABLES",
    "Features",
    "Table",
    "apply_table",
    "assemble",
    "encode",
    "fit_table",
    "number_labels",
    "numbered_classes",
    "read_table",
    "require_unpacked",
]

TABLES = frozenset({".csv", ".tsv", ".jsonl", ".ndjson", ".parquet"})
_DROP = "leave it out with --drop COLUMN, or take it out of the file"
_EMPTY = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})


# a column with more different words is no category: names, comments, identifiers
_MOST_CATEGORIES = 100


@dataclass(frozen=True)
class Features:
    """The columns that an input is made of, and the categories of those that have words."""

    input: str
    columns: list[str]
    categories: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """One name for each feature: the column, or column=category."""
        return [
            name if word is None else f"{name}={word}"
            for name in self.columns
            for word in self.categories.get(name, [None])
        ]


@dataclass
class Table:
    """Arrays by input, the names of classes where labels were words, the features' columns, and what was assumed."""

    arrays: dict[str, np.ndarray]
    classes: list[str] | None = None
    features: Features | None = None
    label: str | None = None  # the column of the labels
    notes: list[str] = field(default_factory=list)


def read_table(path: Path) -> dict[str, np.ndarray]:
    """The columns of a file; numbers (with NaN where cells are empty), words, or matrices."""
    kind = path.suffix.lower()
    if not path.is_file():  # nor a pipe or a device, which would never end
        raise DataError(f"no file at '{path}'", "is the path right?")
    if kind == ".parquet":
        return _read_parquet(path)
    return _read_json_lines(path) if kind in (".jsonl", ".ndjson") else _read_csv(path)


def _read_csv(path: Path) -> dict[str, np.ndarray]:
    before = csv.field_size_limit()
    try:
        csv.field_size_limit(max(before, min(path.stat().st_size, 2**31 - 1)))  # a cell may be a whole text
        with open(path, newline="", encoding="utf-8-sig") as file:
            mark = "\t" if path.suffix.lower() == ".tsv" else ","
            rows = list(csv.reader(_lines(file, path), delimiter=mark))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read '{path}': {error}", "a CSV file is UTF-8 text with a header") from error
    finally:
        csv.field_size_limit(before)
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
    return {name: _column([row[i] for row in rows[1:]], name, path) for i, name in enumerate(header)}


def _read_json_lines(path: Path) -> dict[str, np.ndarray]:
    rows: list[dict[str, Any]] = []
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(_lines(file, path), start=1):
                if not line.strip():
                    continue
                row = parse_json(line, object)
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
    except (OSError, ValueError, LimitError) as error:
        where = f"'{path}', line {len(rows) + 1}"
        raise DataError(f"{where}: {error}", "each line is one JSON object") from error
    if not rows:
        raise DataError(f"'{path}' has no line", 'a line is {"text": "…", "label": …}')
    return {name: _values([row[name] for row in rows], name, path) for name in rows[0]}


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """The lines of a file, where none is longer than a text may be: a file without an end of line is one line."""
    most = current().text_bytes
    while line := file.readline(most + 1):
        require("text_bytes", len(line), f"'{path}': a line's length")
        if "\0" in line:
            raise DataError(f"cannot read '{path}': it holds a NUL character", "save it as UTF-8 text")
        yield line


def _read_parquet(path: Path) -> dict[str, np.ndarray]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            # a few bytes can stand for millions of equal rows
            about = file.metadata
            groups = [about.row_group(index) for index in range(about.num_row_groups)]
            unpacked = max(8 * about.num_rows * about.num_columns, sum(g.total_byte_size for g in groups))
            require_unpacked(unpacked, path)
            table = file.read()
        if len(set(table.column_names)) != len(table.column_names):
            raise ValueError("two columns have the same name")
        columns = {name: table.column(name).to_pylist() for name in table.column_names}
    except LimitError:
        raise
    except Exception as error:  # pyarrow raises errors of its own, and of Python's
        raise DataError(f"cannot read '{path}': {error}", "is it a whole Parquet file?") from error
    return {name: _values(values, name, path) for name, values in columns.items()}


def require_unpacked(size: int, path: Path) -> None:
    """Refuse a data file that is far smaller than what it says it holds."""
    require("unpacked_bytes", size - 16 * path.stat().st_size, f"'{path}': what it unpacks to, in bytes,")


def _values(values: list[Any], name: str, path: Path) -> np.ndarray:
    """A column of Python objects; lists of equal length become rows of a matrix."""
    if any(isinstance(value, str) for value in values):
        return np.asarray(["" if value is None else str(value).strip() for value in values])
    if any(isinstance(value, dict) for value in values):
        raise DataError(f"'{path}': column '{name}' holds objects", "flatten them first")
    if all(value is None for value in values):
        raise DataError(f"'{path}': column '{name}' is empty", _DROP)
    try:
        array = np.asarray([np.nan if value is None else value for value in values])
    except ValueError as error:
        raise DataError(f"'{path}': the rows of '{name}' have different lengths", "pad them") from error
    if array.dtype.kind == "O":
        raise DataError(f"'{path}': column '{name}' is neither numbers nor words", _DROP)
    return array


def _column(cells: Sequence[str], name: str, path: Path) -> np.ndarray:
    """A column of a CSV file: numbers where all cells that are not empty are, else words."""
    try:
        numbers = np.asarray(cells).astype(np.float64)
    except ValueError:
        empty = [cell.strip().lower() in _EMPTY for cell in cells]
        try:
            numbers = np.asarray([np.nan if hole else float(cell) for cell, hole in zip(cells, empty)])
        except ValueError:
            return np.asarray([cell.strip() for cell in cells])
    if np.isnan(numbers).all():
        raise DataError(f"'{path}': column '{name}' is empty", _DROP)
    whole = np.isfinite(numbers).all() and np.array_equal(numbers, np.round(numbers))
    return numbers.astype(np.int64) if whole and np.abs(numbers).max() < 2**53 else numbers


def assemble(
    columns: Mapping[str, np.ndarray],
    inputs: Sequence[InputSpec],
    *,
    label: str | None = None,
    classes: Sequence[str] | None = None,
    class_count: int | None = None,
    where: str = "the table",
    earlier: Features | None = None,
    target: str | None = None,
) -> Table:
    """Arrays for a model's inputs: columns of their name, the label, and the rest as features.

    `target` is the input that takes labels, and `class_count` how many classes the model has; `earlier` are the columns
    that training had, in its order.
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
        last = wanted[-1] if len(inputs) > 1 and wanted[-1] is inputs[-1] else None
        if last is not None and left:
            name = label or list(left)[-1]
            if name in left:
                made.arrays[last.name], made.label = left.pop(name), name
                if label is None and name != last.name:
                    made.notes.append(f"the last column, '{name}', is the label; --label names another one")
            wanted = [spec for spec in wanted if spec is not last]
        elif label is not None:
            left.pop(label, None)  # a table of the training set, used for inference
        if len(wanted) > 1:
            names = ", ".join(f"'{spec.name}'" for spec in wanted)
            raise DataError(f"'{where}' has no columns {names}", f"it has {', '.join(columns)}")
        if wanted:
            _add_features(made, left, wanted[0], where, earlier)
    for spec in inputs:
        array = made.arrays.get(spec.name)
        if array is None or (made.features is not None and spec.name == made.features.input):
            continue
        if not spec.is_integer and array.dtype.kind in "UO":
            raise DataError(
                f"'{where}': the column of '{spec.name}' has words", f"it takes {spec}; is --label right?"
            )
        if spec.is_integer and spec.name == target and array.ndim == 1:
            made.arrays[spec.name], made.classes = number_labels(array, classes, class_count, where)
            if made.classes is not None:
                made.notes.append(f"{len(made.classes)} classes: {first_of(made.classes)}")
    return made


def _add_features(
    made: Table, left: dict[str, np.ndarray], spec: InputSpec, where: str, earlier: Features | None
) -> None:
    """Put what is left of the columns together, for one input."""
    if earlier is not None:
        missing = [name for name in earlier.columns if name not in left]
        if missing:
            raise DataError(
                f"'{where}' has no column '{missing[0]}', which the model was trained with",
                f"it has {', '.join(left)}",
            )
        left = {name: left[name] for name in earlier.columns}
    if not left:
        raise DataError(f"'{where}' has no column left for the features", "is it the right file?")
    if any(column.ndim > 1 for column in left.values()):
        words = next((name for name, column in left.items() if column.dtype.kind in "UO"), None)
        if words is not None:
            raise DataError(f"'{where}': column '{words}' has words, beside columns of lists", _DROP)
        parts = [column.reshape(len(column), -1) for column in left.values()]
        made.arrays[spec.name] = np.concatenate(parts, axis=1)
        return
    categories = (
        dict(earlier.categories)
        if earlier is not None
        else {name: _categories(name, c, where) for name, c in left.items() if c.dtype.kind in "UO"}
    )
    made.features = Features(spec.name, list(left), categories)
    made.arrays[spec.name] = encode(left, made.features, where)
    if earlier is None:
        for name, words in categories.items():
            made.notes.append(
                f"column '{name}' has words: one feature for each of its {len(words)} categories"
            )
        names = made.features.names
        takes = spec.dims[1] if spec.dims is not None and len(spec.dims) == 2 else None
        if takes is not None and takes != len(names):
            raise DataError(
                f"'{where}' makes {len(names)} features, and the model's '{spec.name}' takes {takes}",
                f"the features are {first_of(names, 12)}; leave columns out with --drop COLUMN",
            )


def _categories(name: str, column: np.ndarray, where: str) -> list[str]:
    """The different words of a column; an error for one that has numbers, or too many of them."""
    words = sorted({str(word) for word in column} - {""})
    if not words:
        raise DataError(f"'{where}': column '{name}' is empty", _DROP)
    numeric = np.asarray([_is_number(word) for word in column])
    filled = np.asarray([bool(word) for word in column])
    words_at = np.flatnonzero(filled & ~numeric)
    if len(words_at) and numeric.sum() * 2 > filled.sum():
        row = int(words_at[0])
        raise DataError(
            f"{_place(where, row)}: '{name}' is '{column[row]}', and most of the column are numbers",
            "fix it, or leave the cell empty",
        )
    if len(words) > _MOST_CATEGORIES:
        raise DataError(
            f"'{where}': column '{name}' has {len(words):,} different words, too many for categories", _DROP
        )
    return words


def _place(where: str, row: int) -> str:
    """A sample as its file counts rows: from 1, and a CSV file's header is the first."""
    first = {".csv": 2, ".tsv": 2, ".jsonl": 1, ".ndjson": 1, ".parquet": 1}.get(Path(where).suffix.lower())
    return f"'{where}', sample {row} (from 0)" if first is None else f"'{where}', row {row + first}"


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def encode(columns: Mapping[str, Any], features: Features, where: str = "data") -> np.ndarray:
    """A row of numbers for each sample: numbers as they are, words as one 1 among zeros.

    A category that training had not, or an empty cell, is zeros.

    >>> columns = {"age": [3, 5], "kind": ["oak", "fir"]}
    >>> encode(columns, Features("x", ["age", "kind"], {"kind": ["fir", "oak"]})).tolist()
    [[3.0, 0.0, 1.0], [5.0, 1.0, 0.0]]
    """
    parts = []
    for name in features.columns:
        column = np.asarray(columns[name])
        if name in features.categories:
            words = np.asarray([_word(cell) for cell in column])
            parts += [(words == word).astype(np.float64) for word in features.categories[name]]
            continue
        try:
            numbers = column.astype(np.float64)
        except (ValueError, TypeError):
            row = next(i for i, cell in enumerate(column) if not _is_number(cell))
            raise DataError(
                f"{_place(where, row)}: '{name}' is '{column[row]}', and training had numbers there",
                "fix it, or leave the cell empty",
            ) from None
        if np.isinf(numbers).any():
            row = int(np.flatnonzero(np.isinf(numbers))[0])
            raise DataError(f"{_place(where, row)}: '{name}' is infinite", "fix it, or leave the cell empty")
        parts.append(numbers)
    return np.stack(parts, axis=1)


def _word(cell: Any) -> str:
    """A cell as a category's name: numbers as CSV files have them."""
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        cell = int(cell)
    return str(cell)


def number_labels(
    labels: np.ndarray, classes: Sequence[str] | None, class_count: int | None, where: str
) -> tuple[np.ndarray, list[str] | None]:
    """Labels as numbers from 0, and the names of the classes where there are any.

    Words and numbers that do not count from 0 (years, 1 to 5) are names; numbers that do are taken as they are.
    """
    if labels.dtype.kind == "f" and np.isnan(labels).any():
        row = int(np.argwhere(np.isnan(labels))[0][0])
        raise DataError(f"{_place(where, row)}: the label is empty", "fill it, or drop the row")
    if labels.dtype.kind == "f":
        if not np.array_equal(labels, np.round(labels)):
            row = int(np.flatnonzero(labels != np.round(labels))[0])
            raise DataError(
                f"{_place(where, row)}: the label is {labels[row]:g}: classes are words or whole numbers",
                "to predict numbers choose another loss, such as mse; is the label column right?",
            )
        labels = labels.astype(np.int64)
    if labels.dtype.kind in "iu":
        known = np.unique(labels)
        named = classes is not None and all(_is_number(name) for name in classes)
        count = len(classes) if classes is not None else class_count
        counted = known[0] >= 0 and known[-1] < (len(known) if count is None else count)
        if (counted and not named) or (known[0] < 0 and class_count is not None):
            return labels, None
        if count is not None and not named and len(known) != count:
            return labels, None  # out of range: refused with the row, where the model is known
        if classes is None and len(known) > max(20, len(labels) // 2):
            raise DataError(
                f"'{where}': the label has {len(known):,} different numbers in {len(labels):,} samples",
                "to predict numbers choose another loss, such as mse; is the label column right?",
            )
        if classes is None:
            classes = [str(number) for number in known]
    words = [str(word) for word in labels]
    if "" in words:
        raise DataError(f"{_place(where, words.index(''))}: the label is empty", "fill it, or drop the row")
    return number_classes(words, classes, where)


def numbered_classes(count: int | None) -> list[str] | None:
    """The names of classes that have none: their numbers; not of thousands, which are words or the like."""
    return None if count is None or count > 1000 else [str(number) for number in range(count)]


def fit_table(
    values: np.ndarray, features: Features, *, standardize: bool
) -> tuple[Preprocessing, list[str]]:
    """What to do to the features, found on the training rows alone; and remarks on it."""
    names, numbers = features.names, [name not in features.categories for name in features.columns]
    is_number = np.asarray(
        [
            number
            for name, number in zip(features.columns, numbers)
            for _ in features.categories.get(name, [None])
        ]
    )
    missing = np.count_nonzero(np.isnan(values), axis=0)
    empty = [names[i] for i in np.flatnonzero(missing == len(values))]
    if empty:
        raise DataError(f"column '{empty[0]}' has no number among the training rows", _DROP)
    mean = np.where(is_number, np.nanmean(values, axis=0), 0.0)
    with np.errstate(over="ignore"):  # refused where it is used
        spread = np.where(is_number, np.nanstd(values, axis=0), 1.0)
    settings: dict[str, Any] = {"columns": features.columns, "fill": [float(x) for x in mean]}
    if features.categories:
        settings["categories"] = dict(features.categories)
    notes = [
        f"{missing[i]} empty cells of '{names[i]}' take the mean of the training rows, {mean[i]:.4g}"
        for i in np.flatnonzero(missing)
    ]
    if standardize:
        settings |= {"mean": settings["fill"], "scale": [float(x) if x > 0 else 1.0 for x in spread]}
        notes.append(
            f"{int(is_number.sum())} columns of numbers are brought to mean 0 and deviation 1, as in the training rows"
        )
    elif is_number.any() and (largest := float(np.nanmax(np.abs(values[:, is_number])))) > 100:
        column = names[int(np.nanargmax(np.where(is_number, np.abs(values), 0).max(axis=0)))]
        notes.append(
            f"'{column}' goes up to {largest:.4g}: --standardize if the model was trained on scaled columns"
        )
    return Preprocessing("table", features.input, settings), notes


def apply_table(array: np.ndarray, settings: Mapping[str, Any]) -> np.ndarray:
    """Features with their gaps filled, standardised where training did."""
    values = np.asarray(array, np.float64)
    if values.ndim != 2 or values.shape[1] != len(settings["fill"]):
        raise DataError(f"features of shape {list(values.shape)}: {len(settings['fill'])} columns are needed")
    values = np.where(np.isnan(values), np.asarray(settings["fill"]), values)
    if settings.get("mean"):
        values = (values - np.asarray(settings["mean"])) / np.asarray(settings["scale"])
    largest = float(np.abs(values).max(initial=0.0))
    if largest > float(np.finfo(np.float32).max):
        column = Features("", settings["columns"], settings.get("categories", {})).names[
            int(np.argmax(np.abs(values).max(axis=0)))
        ]
        raise DataError(
            f"'{column}' has {largest:.4g}, which is too large for float32", "scale it, or drop the row"
        )
    return values.astype(np.float32)
