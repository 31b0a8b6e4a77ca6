"""Pairs, triplets and pairs with a score: the columns of a table, or lists in memory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.columns import TABLES, read_table, row_of
from onward.errors import DataError

# the names that sentence-transformers' datasets use; the first of each is what is searched with
_NAMES = (
    ("anchor", "positive"),
    ("query", "positive"),
    ("query", "answer"),
    ("query", "passage"),
    ("query", "document"),
    ("question", "answer"),
    ("sentence1", "sentence2"),
    ("sentence_A", "sentence_B"),
    ("text1", "text2"),
    ("premise", "hypothesis"),
    ("image1", "image2"),
    ("audio1", "audio2"),
)
_SCORES = ("score", "similarity_score", "similarity", "label")
_HINT = (
    "columns are anchor and positive (and negative), or sentence1, sentence2 and score; --column names others"
)


def read_pairs(
    data: Any, *, columns: Sequence[str] | None, score: str | None
) -> tuple[dict[str, list[str]], np.ndarray | None, str]:
    """The texts or files of each view by its column, the scores where there are any, and where the data is from."""
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        if path.is_dir() or path.suffix.lower() not in TABLES:
            raise DataError(
                f"'{path}' has no pairs: they are a table", f"{', '.join(sorted(TABLES))}; {_HINT}"
            )
        table, where = read_table(path), str(path)
    else:
        table, where = _table_of(data), "the data"
    names = _views(table, columns, score, where)
    views = {name: _texts(table[name], name, where) for name in names}
    # where no column has one of the names, the only one of numbers is meant
    name = score or next((one for one in _SCORES if one in table and one not in names), None)
    if name is None:
        numbers = [one for one in table if one not in names and table[one].dtype.kind in "iuf"]
        name = numbers[0] if len(numbers) == 1 else None
    # triplets need no score: numbers beside them are something else
    if name is None or (score is None and len(names) > 2):
        return views, None, where
    return views, _scores(table, name, where), where


def _table_of(data: Any) -> dict[str, np.ndarray]:
    """Columns of pairs in memory: a dict of lists, or a list of tuples or dicts."""
    if isinstance(data, Mapping):
        columns = {str(name): list(values) for name, values in data.items()}
    elif isinstance(data, Sequence) and data and isinstance(data[0], Mapping):
        odd = next((row for row, item in enumerate(data) if set(item) != set(data[0])), None)
        if odd is not None:
            raise DataError(f"the data, sample {odd} (from 0) has other names than the first", _HINT)
        columns = {str(name): [item[name] for item in data] for name in data[0]}
    elif isinstance(data, Sequence) and data and isinstance(data[0], Sequence):
        odd = next((row for row, item in enumerate(data) if len(item) != len(data[0])), None)
        if odd is not None:
            raise DataError(
                f"the data, sample {odd} (from 0) has {len(data[odd])} parts, the first {len(data[0])}", _HINT
            )
        scored = len(data[0]) == 3 and not isinstance(data[0][2], str)
        names = ["sentence1", "sentence2", "score"] if scored else ["anchor", "positive"]
        names += [f"negative_{number}" for number in range(len(data[0]) - len(names))]
        columns = {name: [item[index] for item in data] for index, name in enumerate(names)}
    else:
        raise DataError(
            f"the data has no pairs: it is {type(data).__name__}, or empty",
            "give the path of a table, a list of (anchor, positive) or a dict of lists",
        )
    if len({len(values) for values in columns.values()}) > 1:
        sizes = ", ".join(f"{name} {len(values)}" for name, values in columns.items())
        raise DataError(f"the columns have different lengths: {sizes}", "a pair has a text in each")
    return {name: np.asarray(values) for name, values in columns.items()}


def pair_columns(table: Mapping[str, Any]) -> list[str]:
    """The two columns whose names say that they are a pair; none where there are no such names.

    >>> pair_columns({"id": [1], "Query": ["a"], "answer": ["b"]})
    ['Query', 'answer']
    """
    lowered = {name.lower(): name for name in table}
    for names in _NAMES:
        chosen = [lowered[name.lower()] for name in names if name.lower() in lowered]
        if len(chosen) == len(names):
            return chosen
    return []


def _views(
    table: Mapping[str, np.ndarray], columns: Sequence[str] | None, score: str | None, where: str
) -> list[str]:
    """The columns that are texts or files of a pair, what is searched with first."""
    for name in [*(columns or ()), *([score] if score else [])]:
        if name not in table:
            raise DataError(f"'{where}' has no column '{name}'", f"it has {', '.join(table)}")
    if columns:
        if len(columns) < 2:
            raise DataError("a pair has two columns or more", _HINT)
        return list(columns)
    chosen = pair_columns(table)
    if chosen:
        return [*chosen, *(name for name in table if re.fullmatch(r"negative(_\d+)?", name.lower()))]
    words = [name for name in table if table[name].dtype.kind in "UO" and name != score]
    if len(words) < 2:
        raise DataError(f"'{where}' has {len(words)} columns of text, and a pair has two", _HINT)
    if len(words) > 2:
        raise DataError(f"'{where}': which columns are the pair? It has {', '.join(table)}", _HINT)
    return words


def _texts(column: np.ndarray, name: str, where: str) -> list[str]:
    if column.ndim != 1:
        raise DataError(f"'{where}': column '{name}' has lists, and not texts", _HINT)
    texts = ["" if cell is None else str(cell) for cell in column.tolist()]
    # 'nan' is what a missing cell of numbers becomes as text
    hole = next((row for row, text in enumerate(texts) if not text.strip() or text == "nan"), None)
    if hole is not None:
        raise DataError(
            f"{row_of(where, hole)}: '{name}' is empty, so the pair has no partner",
            "fill it, or remove the row",
        )
    return texts


def _scores(table: Mapping[str, np.ndarray], name: str, where: str) -> np.ndarray:
    column = table[name]
    if column.dtype.kind not in "iufb" or column.ndim != 1:
        raise DataError(f"'{where}': the scores in '{name}' are no numbers", "--score names another column")
    scores = column.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(scores))
    if len(bad):
        raise DataError(f"{row_of(where, int(bad[0]))}: '{name}' is no number", "fill it, or remove the row")
    return scores
