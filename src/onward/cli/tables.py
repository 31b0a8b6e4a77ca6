"""Tables (CSV, Parquet) as arrays: a column for an input of its name, the others together as features."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from onward.cli.command import CommandError
from onward.cli.match_inputs import InputSpec

__all__ = ["Table", "assemble", "read_csv", "read_parquet"]


@dataclass
class Table:
    """Arrays by input, the names of classes where labels were words, and what was assumed."""

    arrays: dict[str, np.ndarray]
    classes: list[str] | None = None
    notes: list[str] = field(default_factory=list)


def read_csv(path: Path) -> dict[str, np.ndarray]:
    """The columns of a file with a header; numbers where all cells of a column are numbers."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ","))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CommandError(
            f"cannot read '{path}': {error}", "a CSV file is UTF-8 text with a header"
        ) from error
    rows = [row for row in rows if row]
    if len(rows) < 2:
        raise CommandError(f"'{path}' has no row below its header", "the first line names the columns")
    header = [name.strip() for name in rows[0]]
    if len(set(header)) != len(header):
        raise CommandError(f"'{path}' names a column twice", "each column needs a name of its own")
    if len(header) == 1 and ";" in header[0]:
        raise CommandError(f"'{path}' seems to separate its columns by ';'", "save it with commas")
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise CommandError(
                f"'{path}', row {number}: {len(row)} cells, the header has {len(header)}",
                "is a comma missing?",
            )
        hole = next((name for name, cell in zip(header, row) if not cell.strip()), None)
        if hole is not None:
            raise CommandError(
                f"'{path}', row {number}: '{hole}' is empty", "fill or drop rows with empty cells first"
            )
    return {name: _column([row[i] for row in rows[1:]]) for i, name in enumerate(header)}


def read_parquet(path: Path) -> dict[str, np.ndarray]:
    """The columns of a Parquet file; lists of equal length become rows of a matrix."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise CommandError(f"cannot read '{path}': {error}", "is it a whole Parquet file?") from error
    columns = {}
    for name in table.column_names:
        values = table.column(name).to_pylist()
        if any(value is None for value in values):
            raise CommandError(f"'{path}': column '{name}' has empty cells", "fill or drop them first")
        try:
            columns[name] = np.asarray(values)
        except ValueError as error:
            raise CommandError(
                f"'{path}': the rows of '{name}' have different lengths", "pad them"
            ) from error
    return columns


def assemble(
    columns: Mapping[str, np.ndarray],
    inputs: Sequence[InputSpec],
    *,
    label: str | None = None,
    classes: Sequence[str] | None = None,
    where: str = "the table",
) -> Table:
    """Arrays for a model's inputs: columns of their name, the label, and the rest as features."""
    left = dict(columns)
    made = Table({})
    if label is not None and label not in left:
        raise CommandError(f"'{where}' has no column '{label}'", f"it has {', '.join(left)}")
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
            raise CommandError(f"'{where}' has no columns {names}", f"it has {', '.join(columns)}")
        if wanted:
            made.arrays[wanted[0].name] = _features(left, where)
    for spec in inputs:
        array = made.arrays.get(spec.name)
        if array is not None and array.dtype.kind in "UO":
            if not spec.is_integer:
                raise CommandError(f"'{where}': the column of '{spec.name}' has words", f"it takes {spec}")
            made.arrays[spec.name], made.classes = _numbered(array, classes, where)
            made.notes.append(f"{len(made.classes)} classes: {', '.join(made.classes[:8])}")
    return made


def _features(columns: Mapping[str, np.ndarray], where: str) -> np.ndarray:
    if not columns:
        raise CommandError(f"'{where}' has no column left for the features", "is it the right file?")
    for name, column in columns.items():
        if column.dtype.kind not in "biuf":
            raise CommandError(
                f"'{where}': column '{name}' has words, not numbers", "drop it, or make numbers of it first"
            )
    parts = [column[:, None] if column.ndim == 1 else column for column in columns.values()]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def _numbered(words: np.ndarray, classes: Sequence[str] | None, where: str) -> tuple[np.ndarray, list[str]]:
    known = list(classes) if classes is not None else sorted({str(word) for word in words})
    numbers = {name: index for index, name in enumerate(known)}
    missing = sorted({str(word) for word in words} - set(known))
    if missing:
        raise CommandError(
            f"'{where}' has the class '{missing[0]}', which the training data had not",
            f"it had {', '.join(known)}",
        )
    return np.asarray([numbers[str(word)] for word in words], np.int64), known


def _column(cells: Sequence[str]) -> np.ndarray:
    try:
        numbers = np.asarray([float(cell) for cell in cells])
    except ValueError:
        return np.asarray([cell.strip() for cell in cells])
    if (
        np.isfinite(numbers).all()
        and np.array_equal(numbers, np.round(numbers))
        and np.abs(numbers).max() < 2**53
    ):
        return numbers.astype(np.int64)
    return numbers.astype(np.float32)
