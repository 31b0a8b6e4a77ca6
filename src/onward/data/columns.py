"""Reads the columns of tables: CSV, JSON lines and Parquet files."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from onward.errors import DataError, LimitError
from onward.limits import current, require
from onward.reading import parse_json

TABLES = frozenset({".csv", ".tsv", ".jsonl", ".ndjson", ".parquet"})
# between labels of one sample in a cell
LABEL_MARK = "|"
DROP = "leave it out with --drop COLUMN, or take it out of the file"
_EMPTY = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})


@dataclass(frozen=True, eq=False)
class EmbeddedFile:
    """A file inside another one, such as a picture in a Parquet table."""

    name: str
    content: bytes

    def __str__(self) -> str:
        return self.name


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
                    odd = min(set(row) ^ set(rows[0]))
                    raise DataError(
                        f"'{path}', line {number}: '{odd}' is not in every line", "give all the same keys"
                    )
                rows.append(row)
    except DataError:  # a ValueError too
        raise
    except (OSError, ValueError, LimitError) as error:
        where = f"'{path}', line {len(rows) + 1}"
        raise DataError(f"{where}: {error}", "each line is one JSON object") from error
    if not rows:
        raise DataError(f"'{path}' has no line", 'a line is {"text": "…", "label": …}')
    return {name: column_of_values([row[name] for row in rows], name, path) for name in rows[0]}


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """The lines of a file, where none is longer than a text may be: a file without an end of line is one line."""
    most = current().text_bytes
    while line := file.readline(most + 1):
        require("text_bytes", len(line), f"'{path}': a line's length")
        if "\0" in line:
            raise DataError(f"cannot read '{path}': it holds a NUL character", "save it as UTF-8 text")
        yield line


def _read_parquet(path: Path) -> dict[str, np.ndarray]:
    table = read_arrow(path)
    if len(set(table.column_names)) != len(table.column_names):
        raise DataError(f"cannot read '{path}': two columns have the same name", "rename one")
    names = table.column_names
    return {name: column_of_values(table.column(name).to_pylist(), name, path) for name in names}


def read_arrow(path: Path) -> Any:
    """The table of an Arrow or Parquet file."""
    import pyarrow
    import pyarrow.parquet

    try:
        if path.suffix.lower() == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                # a few bytes can stand for millions of equal rows
                about = file.metadata
                groups = [about.row_group(index) for index in range(about.num_row_groups)]
                unpacked = max(8 * about.num_rows * about.num_columns, sum(g.total_byte_size for g in groups))
                require_unpacked(unpacked, path)
                return file.read()
        with pyarrow.memory_map(str(path)) as source:
            try:
                table = pyarrow.ipc.open_stream(source).read_all()  # what `datasets` writes
            except pyarrow.ArrowInvalid:
                table = pyarrow.ipc.open_file(source).read_all()
        require_unpacked(table.nbytes, path)
        return table
    except LimitError:
        raise
    except Exception as error:  # pyarrow raises errors of its own, and of Python's
        kind = "Parquet" if path.suffix.lower() == ".parquet" else "Arrow"
        raise DataError(f"cannot read '{path}': {error}", f"is it a whole {kind} file?") from error


def require_unpacked(size: int, path: Path) -> None:
    """Refuse a data file that is far smaller than what it says it holds."""
    require("unpacked_bytes", size - 16 * path.stat().st_size, f"'{path}': what it unpacks to, in bytes,")


def column_of_values(values: list[Any], name: str, path: Path) -> np.ndarray:
    """A column of Python objects; lists of words become cells, other lists of equal length rows of a matrix."""
    lists = [value for value in values if isinstance(value, list)]
    if any(isinstance(word, str) for words in lists for word in words):
        return join_words(values, name, str(path))
    if any(isinstance(value, str) for value in values):
        return np.asarray(["" if value is None else str(value).strip() for value in values])
    if any(isinstance(value, dict) for value in values):
        raise DataError(f"'{path}': column '{name}' holds objects", "flatten them first")
    if all(value is None for value in values):
        raise DataError(f"'{path}': column '{name}' is empty", DROP)
    try:
        array = np.asarray([np.nan if value is None else value for value in values])
    except ValueError as error:
        raise DataError(f"'{path}': the rows of '{name}' have different lengths", "pad them") from error
    if array.dtype.kind == "O":
        raise DataError(f"'{path}': column '{name}' is neither numbers nor words", DROP)
    return array


def join_words(values: Sequence[Any], name: str, where: str) -> np.ndarray:
    """Lists of words as cells with a mark between them, as CSV files have several labels of a sample."""
    for row, words in enumerate(values):
        if words is not None and not isinstance(words, list):
            raise DataError(f"{row_of(where, row)}: '{name}' is no list", "give each row a list")
        strange = next((w for w in words or () if not isinstance(w, str) or LABEL_MARK in w), None)
        if strange is not None:
            raise DataError(
                f"{row_of(where, row)}: '{name}' has {strange!r}", f"give words without {LABEL_MARK}"
            )
    return np.asarray([LABEL_MARK.join(words or ()) for words in values])


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
        raise DataError(f"'{path}': column '{name}' is empty", DROP)
    # from 2⁵³ on float64 has gaps between whole numbers: identifiers would change
    whole = np.isfinite(numbers).all() and np.array_equal(numbers, np.round(numbers))
    return numbers.astype(np.int64) if whole and np.abs(numbers).max() < 2**53 else numbers


def row_of(where: str, row: int) -> str:
    """A sample as its file counts rows: from 1, and a CSV file's header is the first."""
    first = {".csv": 2, ".tsv": 2, ".jsonl": 1, ".ndjson": 1, ".parquet": 1}.get(Path(where).suffix.lower())
    return f"'{where}', sample {row} (from 0)" if first is None else f"'{where}', row {row + first}"


def is_number(cell: Any) -> bool:
    """Whether a cell of a table reads as a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True
