"""Labels that may hold together: a cell with several, or a column of 0 and 1 for each label.

`cat|dog` in a cell is a set, and so is a list in JSON lines, which `columns` writes that way. Columns of 0 and 1 become
one column of records, whose fields are the labels. `number_label_sets` makes a table of truth values of either: a row
for each sample, a column for each label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.data.columns import LABEL_MARK, join_words, row_of
from onward.errors import DataError
from onward.escape import first_of

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec

# the name of the column that columns of 0 and 1 become
TOGETHER = "labels"


def takes_label_sets(spec: InputSpec | None) -> bool:
    """Whether a target is a truth value for each label, and not the number of one."""
    return spec is not None and spec.dtype.kind == "b" and spec.dims is not None and len(spec.dims) == 2


def has_label_sets(column: np.ndarray) -> bool:
    """Whether some cell of a column has several labels; or rows of 0 and 1, of which not each has a single 1."""
    if column.dtype.names is not None:
        return True
    if column.ndim == 2 and column.shape[1] > 1:
        return _is_binary(column) and bool((column.sum(axis=1) != 1).any())
    return column.dtype.kind == "U" and any(LABEL_MARK in cell for cell in column.ravel())


def join_lists(labels: Any) -> Any:
    """Lists of words, one for each sample, as cells; any other labels as they are.

    >>> join_lists([["cat", "dog"], ["dog"]]).tolist()
    ['cat|dog', 'dog']
    """
    rows = labels if isinstance(labels, list | tuple) else ()
    if not any(isinstance(row, list | tuple) and any(isinstance(word, str) for word in row) for row in rows):
        return labels
    return join_words([list(row) if isinstance(row, tuple) else row for row in rows], "labels", "the data")


def join_label_columns(
    columns: Mapping[str, np.ndarray],
    label: str | None,
    classes: Sequence[str] | None,
    where: str,
    *,
    others: bool,
) -> tuple[dict[str, np.ndarray], str | None]:
    """The columns, those of 0 and 1 for a label each as one; and the name of the label column.

    They are those that `label` names with commas between them, or the model's labels; or with `others` all columns of
    numbers, where there are several and each has 0 and 1 alone.
    """
    names = _label_columns(columns, label, classes, where, others)
    if not names:
        return dict(columns), label
    for name in names:
        column = columns[name]
        bad = np.flatnonzero(~np.isin(column, (0, 1))) if column.ndim == 1 else np.zeros(1, int)
        if len(bad):
            row = int(bad[0])
            raise DataError(
                f"{row_of(where, row)}: '{name}' is {column[row]}, and the column of a label has 0 and 1",
                f"fix it, or name the label columns: --label {','.join(names)}",
            )
    records = np.empty(len(columns[names[0]]), [(name, np.bool_) for name in names])
    for name in names:
        records[name] = columns[name] == 1
    joined = {name: column for name, column in columns.items() if name not in names}
    return {**joined, TOGETHER: records}, TOGETHER


def _label_columns(
    columns: Mapping[str, np.ndarray],
    label: str | None,
    classes: Sequence[str] | None,
    where: str,
    others: bool,
) -> list[str]:
    if label is not None and (label not in columns or _is_binary(columns[label])):
        names = [name.strip() for name in label.split(",")]
        missing = [name for name in names if name not in columns]
        if missing:
            raise DataError(f"'{where}' has no column '{missing[0]}'", f"it has {', '.join(columns)}")
        return list(dict.fromkeys(names))
    if label is not None:
        return []
    if classes and all(name in columns for name in classes):
        return list(classes)
    numbers = [name for name, column in columns.items() if column.dtype.kind not in "UO"]
    binary = others and len(numbers) > 1 and all(_is_binary(columns[name]) for name in numbers)
    return numbers if binary else []


def _is_binary(column: np.ndarray) -> bool:
    return column.dtype.kind in "biuf" and bool(np.isin(column, (0, 1)).all())


def number_label_sets(
    labels: np.ndarray, classes: Sequence[str] | None, name_row: Callable[[int], str]
) -> tuple[np.ndarray, list[str] | None]:
    """A truth value for each sample and label, in the order of `classes`; and the names of the labels.

    Where no source says an order it is that of the columns, or of the alphabet for the labels of cells, as for classes.
    A matrix of numbers names none.

    >>> number_label_sets(np.array(["cat|dog", "dog"]), None, str)[0].tolist()
    [[True, True], [False, True]]
    """
    if labels.ndim == 2 and labels.dtype.kind in "biuf":
        bad = np.argwhere(~np.isin(labels, (0, 1)))
        if len(bad):
            row, column = map(int, bad[0])
            raise DataError(
                f"{name_row(row)}: the labels have {labels[row, column]}",
                "each is 0 or 1; to predict numbers choose another task, such as tabular-regression",
            )
        names = list(classes) if classes else None
        if names is not None and len(names) != labels.shape[1]:
            raise DataError(
                f"the labels have {labels.shape[1]} columns, and there are {len(names)} labels: {first_of(names)}",
                "give a column for each label, in this order",
            )
        return labels.astype(bool), names
    # columns of 0 and 1 arrive as records, whose fields are the labels
    if labels.dtype.names is not None:
        sets = [[name for name in labels.dtype.names if row[name]] for row in labels]
        names = list(labels.dtype.names if classes is None else classes)
        _require_listed([(0, name) for name in labels.dtype.names], names, name_row)
    else:
        sets = [_parts(cell, row, name_row) for row, cell in enumerate(labels.tolist())]
        names = list(classes) if classes is not None else sorted({name for row in sets for name in row})
        _require_listed([(row, name) for row, parts in enumerate(sets) for name in parts], names, name_row)
    index = {name: number for number, name in enumerate(names)}
    matrix = np.zeros((len(sets), len(names)), bool)
    for row, parts in enumerate(sets):
        matrix[row, [index[name] for name in parts]] = True
    return matrix, names


def _parts(cell: object, row: int, name_row: Callable[[int], str]) -> list[str]:
    """The labels of a cell."""
    text = str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell).strip()
    parts = [part.strip() for part in text.split(LABEL_MARK)]
    if "" in parts or text == "nan":
        raise DataError(
            f"{name_row(row)}: {'the set of labels is empty' if len(parts) == 1 else f'{text!r} has an empty label'}",
            "fill it, or drop the row; a sample to which no label applies needs a column of 0 and 1 for each label",
        )
    return parts


def _require_listed(
    labels: Sequence[tuple[int, str]], names: Sequence[str], name_row: Callable[[int], str]
) -> None:
    listed = set(names)
    for row, name in labels:
        if name not in listed:
            raise DataError(
                f"{name_row(row)}: the label '{name}' is none of {first_of(list(names), 12)}",
                "correct it, drop the row, or train a head for it: --classes NAME,NAME…",
            )
