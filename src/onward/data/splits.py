"""The parts of data: those that people have split off, and samples that are held out for evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.errors import DataError
from onward.train.batches import Rows

if TYPE_CHECKING:
    from onward.data.read import Data


def split(data: Data, share: float, *, seed: int) -> tuple[Data, Data]:
    """A training and an evaluation part, the same for the same seed; every class is in both where it can be."""
    if not 0 < share < 1:
        raise DataError(f"--hold-out is {share}: it is a share of the samples", "for example --hold-out 0.1")
    if data.samples is None:
        raise DataError("--hold-out needs arrays, not a function", "give --eval-data instead")
    count = round(share * data.samples)
    if not 0 < count < data.samples:
        raise DataError(
            f"--hold-out {share} of {data.samples} samples leaves nothing on one side", "choose another share"
        )
    held_out = _held_out(data.arrays, count, np.random.default_rng(seed))
    return _take(data, ~held_out), _take(data, held_out)


def own_split(data: Data) -> tuple[Data, Data] | None:
    """The training and the evaluation part of data that people have split already; None where they have not.

    Evaluation is on the validation part, or on the test part where there is no other.
    """
    if data.splits is None:
        return None
    names = [name for name in ("validation", "test") if name in data.splits]
    if not names or "train" not in data.splits:
        return None
    train, evaluation = _take(data, data.splits == "train"), _take(data, data.splits == names[0])
    left = f"; {names[1]} is left for later" if len(names) > 1 else ""
    said = f"{train.samples} samples of train, evaluated on {evaluation.samples} of {names[0]}{left}"
    train.notes = [*data.notes, said]
    return train, evaluation


def evaluation_part(data: Data) -> Data:
    """The part of data that says how good a model is: test, else validation, else all of it."""
    name = next(
        (name for name in ("test", "validation") if data.splits is not None and name in data.splits), None
    )
    if name is None:
        return data
    part = _take(data, data.splits == name)
    part.notes = [*data.notes, f"evaluated on the {part.samples} samples of {name}"]
    return part


def take_rows(array: Any, rows: np.ndarray) -> Any:
    """Some rows of an array; what is in files stays there."""
    return array.part(rows) if isinstance(array, Rows) else array[rows]


def _take(data: Data, chosen: np.ndarray) -> Data:
    rows = np.flatnonzero(chosen)
    arrays = {name: take_rows(array, rows) for name, array in data.arrays.items()}
    exact = None if data.exact is None else data.exact[rows]
    return dataclasses.replace(data, arrays=arrays, exact=exact, splits=None, notes=[])


def _held_out(arrays: Mapping[str, Any], count: int, rng: np.random.Generator) -> np.ndarray:
    """Which samples to hold out: as many of each class as its share, where the last array has classes."""
    labels = list(arrays.values())[-1]
    samples = len(labels)
    order = rng.permutation(samples)
    chosen = np.zeros(samples, bool)
    if isinstance(labels, Rows) or labels.ndim != 1 or labels.dtype.kind not in "iub" or len(arrays) < 2:
        chosen[order[:count]] = True
        return chosen
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    if len(sizes) * 2 > samples:
        chosen[order[:count]] = True
        return chosen
    # the place of each sample among those of its class, from 0 to 1: the first of all classes are taken
    rank = np.empty(samples)
    for kind in range(len(sizes)):
        members = order[classes[order] == kind]
        rank[members] = (np.arange(len(members)) + rng.random()) / len(members)
    chosen[np.argsort(rank, kind="stable")[:count]] = True
    for kind, size in enumerate(sizes):  # a class that is on one side only, though it need not be
        members = order[classes[order] == kind]
        if size > 1 and chosen[members].all():
            chosen[members[0]] = False
        elif size > 1 and not chosen[members].any() and count >= len(sizes):
            chosen[members[0]] = True
    return chosen
