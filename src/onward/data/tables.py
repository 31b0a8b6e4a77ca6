"""Columns of tables as arrays: a column for an input of its name, the others together as features.

A column of words becomes one feature for each of its categories (one-hot). Empty cells of numbers are NaN until
`fit_table` has seen the training rows: it fills them with the mean there, and optionally standardizes every column of
numbers. Categories and statistics are stored, and used again for inference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.data.columns import DROP, is_number, row_of
from onward.data.label_sets import number_label_sets, takes_label_sets
from onward.data.labels import number_labels
from onward.errors import DataError
from onward.escape import first_of
from onward.info.preprocessing import Preprocessing

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec


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
    table = Table({})
    if label is not None and label not in left and len(inputs) > 1:
        raise DataError(f"'{where}' has no column '{label}'", f"it has {', '.join(left)}")
    unnamed = [spec for spec in inputs if spec.name not in left]
    for spec in inputs:
        if spec.name in left:
            table.arrays[spec.name] = left.pop(spec.name)
    if unnamed:
        last = unnamed[-1] if len(inputs) > 1 and unnamed[-1] is inputs[-1] else None
        if last is not None and left:
            name = label or list(left)[-1]
            if name in left:
                table.arrays[last.name], table.label = left.pop(name), name
                if label is None and name != last.name:
                    table.notes.append(f"the last column, '{name}', is the label; --label names another one")
            unnamed = [spec for spec in unnamed if spec is not last]
        elif label is not None:
            left.pop(label, None)  # a table of the training set, used for inference
        if len(unnamed) > 1:
            names = ", ".join(f"'{spec.name}'" for spec in unnamed)
            raise DataError(f"'{where}' has no columns {names}", f"it has {', '.join(columns)}")
        if unnamed:
            _add_features(table, left, unnamed[0], where, earlier)
    for spec in inputs:
        array = table.arrays.get(spec.name)
        if array is None or (table.features is not None and spec.name == table.features.input):
            continue
        if not spec.is_integer and not takes_label_sets(spec) and array.dtype.kind in "UO":
            raise DataError(
                f"'{where}': the column of '{spec.name}' has words", f"it takes {spec}; is --label right?"
            )
        if spec.is_integer and spec.name == target and array.ndim == 1:
            table.arrays[spec.name], table.classes = number_labels(array, classes, class_count, where)
        elif spec.name == target and takes_label_sets(spec):
            table.arrays[spec.name], table.classes = number_label_sets(
                array, classes, lambda row: row_of(where, row)
            )
        if spec.name == target and table.classes is not None:
            table.notes.append(f"{len(table.classes)} classes: {first_of(table.classes)}")
    return table


def _add_features(
    table: Table, left: dict[str, np.ndarray], spec: InputSpec, where: str, earlier: Features | None
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
            raise DataError(f"'{where}': column '{words}' has words, beside columns of lists", DROP)
        parts = [column.reshape(len(column), -1) for column in left.values()]
        table.arrays[spec.name] = np.concatenate(parts, axis=1)
        return
    categories = (
        dict(earlier.categories)
        if earlier is not None
        else {name: _categories(name, c, where) for name, c in left.items() if c.dtype.kind in "UO"}
    )
    table.features = Features(spec.name, list(left), categories)
    table.arrays[spec.name] = encode(left, table.features, where)
    if earlier is None:
        for name, words in categories.items():
            table.notes.append(
                f"column '{name}' has words: one feature for each of its {len(words)} categories"
            )
        names = table.features.names
        takes = spec.dims[1] if spec.dims is not None and len(spec.dims) == 2 else None
        if takes is not None and takes != len(names):
            raise DataError(
                f"'{where}' makes {len(names)} features, and the model's '{spec.name}' takes {takes}",
                f"the features are {first_of(names, 12)}; leave columns out with --drop COLUMN",
            )


def _categories(name: str, column: np.ndarray, where: str) -> list[str]:
    """The different words of a column; an error for one that has numbers, or too many of them."""
    # sorted: the same rows in another order make the same features
    words = sorted({str(word) for word in column} - {""})
    if not words:
        raise DataError(f"'{where}': column '{name}' is empty", DROP)
    numeric = np.asarray([is_number(word) for word in column])
    filled = np.asarray([bool(word) for word in column])
    words_at = np.flatnonzero(filled & ~numeric)
    # a single typing error would otherwise turn a column of numbers into categories
    if len(words_at) and numeric.sum() * 2 > filled.sum():
        row = int(words_at[0])
        raise DataError(
            f"{row_of(where, row)}: '{name}' is '{column[row]}', and most of the column are numbers",
            "fix it, or leave the cell empty",
        )
    if len(words) > _MOST_CATEGORIES:
        raise DataError(
            f"'{where}': column '{name}' has {len(words):,} different words, too many for categories", DROP
        )
    return words


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
            row = next(i for i, cell in enumerate(column) if not is_number(cell))
            raise DataError(
                f"{row_of(where, row)}: '{name}' is '{column[row]}', and training had numbers there",
                "fix it, or leave the cell empty",
            ) from None
        if np.isinf(numbers).any():
            row = int(np.flatnonzero(np.isinf(numbers))[0])
            raise DataError(f"{row_of(where, row)}: '{name}' is infinite", "fix it, or leave the cell empty")
        parts.append(numbers)
    return np.stack(parts, axis=1)


def _word(cell: Any) -> str:
    """A cell as a category's name: numbers as CSV files have them."""
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        cell = int(cell)
    return str(cell)


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
    # one-hot features have no gaps, and stay 0 and 1
    missing = np.count_nonzero(np.isnan(values), axis=0)
    empty = [names[i] for i in np.flatnonzero(missing == len(values))]
    if empty:
        raise DataError(f"column '{empty[0]}' has no number among the training rows", DROP)
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
        # a constant column has deviation 0, and stays as it is
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
    # large numbers, such as years in seconds, lose their differences in float32
    values = np.asarray(array, np.float64)
    if values.ndim != 2 or values.shape[1] != len(settings["fill"]):
        raise DataError(f"features of shape {list(values.shape)}: {len(settings['fill'])} columns are needed")
    values = np.where(np.isnan(values), np.asarray(settings["fill"]), values)
    if settings.get("mean"):
        values = (values - np.asarray(settings["mean"])) / np.asarray(settings["scale"])
    # float32 would hold it as infinity, and the loss would be NaN somewhere else
    largest = float(np.abs(values).max(initial=0.0))
    if largest > float(np.finfo(np.float32).max):
        column = Features("", settings["columns"], settings.get("categories", {})).names[
            int(np.argmax(np.abs(values).max(axis=0)))
        ]
        raise DataError(
            f"'{column}' has {largest:.4g}, which is too large for float32", "scale it, or drop the row"
        )
    return values.astype(np.float32)
