"""Labels of data as the numbers that a model takes: in the order of its own labels, where it has any."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onward.data.columns import is_number, row_of
from onward.errors import DataError
from onward.escape import first_of
from onward.info.model_info import ModelInfo


def number_classes(
    words: Sequence[str], classes: Sequence[str] | None, where: str
) -> tuple[np.ndarray, list[str]]:
    """Class names as numbers, in the order of `classes`; and the names.

    Where no source says an order there is none to keep: the head is new, or learns its classes here. Then it is that
    of the alphabet, as torchvision and Hugging Face number class folders, and the run records it.
    """
    names = tuple(sorted(set(words)) if classes is None else classes)
    return np.asarray(ModelInfo(labels=names).number(words, where), np.int64), list(names)


def number_labels(
    labels: np.ndarray, classes: Sequence[str] | None, class_count: int | None, where: str
) -> tuple[np.ndarray, list[str] | None]:
    """Labels as numbers from 0, and the names of the classes where there are any.

    Words and numbers that do not count from 0 (years, 1 to 5) are names; numbers that do are taken as they are.
    """
    if labels.dtype.kind == "f" and np.isnan(labels).any():
        row = int(np.argwhere(np.isnan(labels))[0][0])
        raise DataError(f"{row_of(where, row)}: the label is empty", "fill it, or drop the row")
    if labels.dtype.kind == "f":
        if not np.array_equal(labels, np.round(labels)):
            row = int(np.flatnonzero(labels != np.round(labels))[0])
            raise DataError(
                f"{row_of(where, row)}: the label is {labels[row]:g}: classes are words or whole numbers",
                "to predict numbers choose another loss, such as mse; is the label column right?",
            )
        labels = labels.astype(np.int64)
    if labels.dtype.kind in "iu":
        values = np.unique(labels)
        named = classes is not None and all(is_number(name) for name in classes)
        count = len(classes) if classes is not None else class_count
        counted = values[0] >= 0 and values[-1] < (len(values) if count is None else count)
        if (counted and not named) or (values[0] < 0 and class_count is not None):
            return labels, None
        if count is not None and not named and len(values) != count:
            return labels, None  # out of range: refused with the row, where the model is known
        if classes is None and len(values) > max(20, len(labels) // 2):
            raise DataError(
                f"'{where}': the label has {len(values):,} different numbers in {len(labels):,} samples",
                "to predict numbers choose another loss, such as mse; is the label column right?",
            )
        if classes is None:
            classes = [str(number) for number in values]
    words = [str(word) for word in labels]
    if "" in words:
        raise DataError(f"{row_of(where, words.index(''))}: the label is empty", "fill it, or drop the row")
    return number_classes(words, classes, where)


def numbered_classes(count: int | None) -> list[str] | None:
    """The names of classes that have none: their numbers; not of thousands, which are words or the like."""
    return None if count is None or count > 1000 else [str(number) for number in range(count)]


def order_of_labels(classes: Sequence[str], labels: Sequence[str] | None) -> np.ndarray | None:
    """Where each class of data stands among a model's labels; None where both are the same, or data has numbers only.

    >>> order_of_labels(["cat", "dog"], ["dog", "cow", "cat"])
    array([2, 0])
    """
    if labels is None or list(classes) == list(labels) or list(classes) == numbered_classes(len(classes)):
        return None
    missing = [name for name in classes if name not in labels]
    if missing:
        raise DataError(
            f"the data has the class '{missing[0]}', and the model's are {first_of(labels)}",
            "is it another model's data?",
        )
    return np.asarray([list(labels).index(name) for name in classes])
