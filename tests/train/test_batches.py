"""Batches from whatever people have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from onward.train.batches import make_batches

X, Y = np.arange(10, dtype=np.float32).reshape(5, 2), np.arange(5)
NAMES = ["x", "y"]
PAIRS = [(X[:2], Y[:2]), (X[2:4], Y[2:4]), (X[4:], Y[4:])]


def generator() -> Any:
    yield from PAIRS


def by_epoch(epoch: int) -> Any:
    return generator()


def with_default(size: int = 2) -> Any:
    assert size == 2
    return generator()


class Loader:
    """Iterable, and callable for something else."""

    def __iter__(self) -> Any:
        return generator()

    def __len__(self) -> int:
        return 3

    def __call__(self, what: str) -> None:
        raise AssertionError


FORMS: dict[str, tuple[Callable[[], Any], int | None]] = {
    "tuple of arrays": (lambda: (X, Y), 3),
    "list of arrays": (lambda: [X, Y], 3),
    "dict of arrays": (lambda: {"y": Y, "x": X, "unused": X}, 3),
    "dict of lists": (lambda: {"x": X.tolist(), "y": Y.tolist()}, 3),
    "torch tensors": (lambda: (torch.tensor(X), torch.tensor(Y)), 3),
    "torch tensors with gradient": (lambda: (torch.tensor(X, requires_grad=True), torch.tensor(Y)), 3),
    "OrtValues": (lambda: tuple(map(ort.OrtValue.ortvalue_from_numpy, (X, Y))), 3),
    "list of tuples": (lambda: list(PAIRS), 3),
    "list of dicts": (lambda: [{"y": y, "x": x, "more": 0} for x, y in PAIRS], 3),
    "list of OrtValues": (lambda: [tuple(map(ort.OrtValue.ortvalue_from_numpy, pair)) for pair in PAIRS], 3),
    "DataLoader": (lambda: DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)), batch_size=2), 3),
    "generator": (generator, None),
    "generator function": (lambda: generator, None),
    "function of the epoch": (lambda: by_epoch, None),
    "function with a default": (lambda: with_default, None),
    "loader that can be called": (Loader, 3),
}


@pytest.mark.parametrize(("make", "count"), FORMS.values(), ids=FORMS)
def test_every_form_gives_the_same_batches(make: Callable[[], Any], count: int | None) -> None:
    source = make_batches(make(), NAMES, batch_size=2)
    assert source.count == count
    found = list(source.epoch(0))
    assert len(found) == 3
    for batch, expected in zip(found, PAIRS):
        assert [np.asarray(item).tolist() for item in batch] == [item.tolist() for item in expected]


@pytest.mark.parametrize(("make", "count"), FORMS.values(), ids=FORMS)
def test_an_epoch_may_begin_in_its_middle(make: Callable[[], Any], count: int | None) -> None:
    (batch,) = make_batches(make(), NAMES, batch_size=2).epoch(0, skip=2)
    np.testing.assert_array_equal(np.asarray(batch[1]), [4])


def test_shuffling_is_by_seed_and_epoch_and_loses_nothing() -> None:
    x = np.arange(40)

    def order(seed: int, epoch: int) -> list[int]:
        source = make_batches((x, x), NAMES, batch_size=7, shuffle=True, seed=seed)
        return [int(i) for a, b in source.epoch(epoch) for i in a if (a == b).all()]

    orders = {(seed, epoch): order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)}
    assert all(sorted(found) == x.tolist() for found in orders.values())
    assert len({tuple(found) for found in orders.values()}) == 4
    assert order(0, 1) == orders[0, 1]


def test_one_input_takes_bare_arrays_and_streams_of_them() -> None:
    for data in (X, (X,), {"x": X}):
        assert [len(batch[0]) for batch in make_batches(data, ["x"], batch_size=3).epoch(0)] == [3, 2]
    assert [len(b[0]) for b in make_batches([X, X, X[:1]], ["x"]).epoch(0)] == [5, 5, 1]
    assert [len(b[0]) for b in make_batches(lambda: iter([X, X[:2]]), ["x"]).epoch(0)] == [5, 2]


def test_labels_that_are_not_needed_are_left_out() -> None:
    for data in ((X, Y), [(X, Y)], [{"x": X, "y": Y}], {"x": X, "y": Y}):
        (batch,) = make_batches(data, ["x"], batch_size=9, order=NAMES).epoch(0)
        assert len(batch) == 1
        np.testing.assert_array_equal(batch[0], X)


def test_a_batch_larger_than_the_data_is_the_data() -> None:
    assert [len(batch[0]) for batch in make_batches((X, Y), NAMES, batch_size=99).epoch(0)] == [5]


def test_an_iterator_serves_one_epoch() -> None:
    source = make_batches(generator(), NAMES)
    assert source.once and len(list(source.epoch(0))) == 3
    with pytest.raises(ValueError, match="used up after one epoch"):
        next(source.epoch(1))


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "too few arrays": ((X, Y, Y), ValueError, r"takes 2 inputs \(x, y\), the data has 3"),
    "lengths": ((X, Y[:3]), ValueError, r"different numbers of samples: \[5, 3\]"),
    "empty": ((X[:0], Y[:0]), ValueError, "empty"),
    "missing name": ({"x": X}, KeyError, "the data has no 'y'.*it has x"),
    "number": (3, TypeError, "cannot make batches of int"),
    "string": ("data.npz", TypeError, "cannot make batches of str"),
    "short batch": ([(X,), (X,)], ValueError, r"a batch has 1 items, the model takes 2 \(x, y\)"),
    "batch without names": ([3], TypeError, "a batch must be a tuple, list or dict of arrays, got int"),
    "batch without a name": ([{"x": X}], KeyError, "the data has no 'y'"),
}


@pytest.mark.parametrize(("data", "error", "message"), WRONG.values(), ids=WRONG)
def test_what_gives_no_batches_is_named(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        list(make_batches(data, NAMES).epoch(0))
    with pytest.raises(ValueError, match="batch_size is 0"):
        make_batches((X, Y), NAMES, batch_size=0)


def test_a_masked_array_is_refused_as_its_mask_would_be_lost() -> None:
    x = np.ma.masked_array(np.zeros((4, 2), np.float32), mask=np.eye(4, 2, dtype=bool))
    with pytest.raises(ValueError, match="masked array with 2 masked elements"):
        list(make_batches((x, np.zeros(4, np.int64)), ["x", "labels"], batch_size=2))
