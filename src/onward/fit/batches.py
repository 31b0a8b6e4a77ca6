"""Batches from what people have: arrays, dicts of arrays, data loaders, generators, functions.

Every source gives, for an epoch, the same batches in every run, so that a resumed run can go on at the batch
where it stopped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

__all__ = ["ArrayBatches", "Batch", "Batches", "StreamBatches", "make_batches"]

Batch = list[Any]
Source = Iterable[Any] | Callable[..., Iterable[Any]]


class Batches:
    """A source of batches, each a list of inputs in the model's order."""

    # how many batches an epoch has, where known
    count: int | None = None

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, without the first `skip`."""
        raise NotImplementedError


class ArrayBatches(Batches):
    """Slices of arrays that have one row for each sample, shuffled anew in every epoch."""

    def __init__(
        self,
        arrays: Sequence[np.ndarray],
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool = False,
    ) -> None:
        if batch_size <= 0:
            raise ValueError(f"batch_size is {batch_size}: it must be positive")
        lengths = {len(array) for array in arrays}
        if len(lengths) != 1:
            raise ValueError(
                f"the arrays have different numbers of samples: {[len(array) for array in arrays]}"
            )
        self.samples = lengths.pop()
        if self.samples == 0:
            raise ValueError("the arrays are empty")
        self._arrays = list(arrays)
        self._size, self._shuffle, self._seed = min(batch_size, self.samples), shuffle, seed
        whole, rest = divmod(self.samples, self._size)
        self.count = whole + (1 if rest and not drop_last else 0)

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[Batch]:
        order = np.arange(self.samples)
        if self._shuffle:
            np.random.default_rng([self._seed, number]).shuffle(order)
        assert self.count is not None
        for index in range(skip, self.count):
            chosen = order[index * self._size : (index + 1) * self._size]
            yield [np.ascontiguousarray(array[chosen]) for array in self._arrays]


class StreamBatches(Batches):
    """Batches that something else makes: a loader, or a function that gives an iterator (of an epoch)."""

    def __init__(self, source: Source, names: Sequence[str]) -> None:
        self._source, self._names = source, names
        self._takes_epoch = callable(source) and len(inspect.signature(source).parameters) > 0
        try:
            self.count = None if callable(source) else len(source)  # type: ignore[arg-type]
        except TypeError:
            self.count = None
        self._used = False

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[Batch]:
        if callable(self._source):
            stream = self._source(number) if self._takes_epoch else self._source()
        else:
            if isinstance(self._source, Iterator):
                if self._used:
                    raise ValueError(
                        "the training data is an iterator and is used up after one epoch: "
                        "pass a function that makes a new one, or a list"
                    )
                self._used = True
            stream = self._source
        for index, batch in enumerate(stream):
            if index >= skip:
                yield in_order(batch, self._names)


def make_batches(
    data: Any,
    names: Sequence[str],
    *,
    batch_size: int = 32,
    shuffle: bool = False,
    seed: int = 0,
) -> Batches:
    """Batches of whatever `data` is, for a model with these inputs.

    Arrays come as a tuple or list in the model's order, or as a dict by name; anything else that can be
    iterated over, or a function that returns such a thing, is taken to give batches.

    >>> source = make_batches((np.zeros((5, 2)), np.zeros(5)), ["x", "y"], batch_size=2)
    >>> [len(batch[0]) for batch in source.epoch(0)]
    [2, 2, 1]
    """
    if isinstance(data, Batches):
        return data
    if isinstance(data, np.ndarray):
        data = (data,)
    if isinstance(data, Mapping) and all(hasattr(value, "shape") for value in data.values()):
        data = [_by_name(data, name) for name in names]
    if isinstance(data, tuple | list) and data and all(_is_array(item) for item in data):
        if len(data) != len(names):
            raise ValueError(
                f"the model takes {len(names)} inputs ({', '.join(names)}), the data has {len(data)}"
            )
        arrays = [np.asarray(item) for item in data]
        return ArrayBatches(arrays, batch_size=batch_size, shuffle=shuffle, seed=seed)
    if callable(data) or isinstance(data, Iterable):
        return StreamBatches(cast("Source", data), names)
    raise TypeError(
        f"cannot make batches of {type(data).__name__}: pass arrays, a dict of arrays, an iterable of batches, "
        "or a function that returns one"
    )


def in_order(batch: Any, names: Sequence[str]) -> Batch:
    """One batch as a list in the model's order."""
    if isinstance(batch, Mapping):
        return [_as_input(_by_name(batch, name)) for name in names]
    if isinstance(batch, tuple | list):
        if len(batch) != len(names):
            raise ValueError(
                f"a batch has {len(batch)} items, the model takes {len(names)} ({', '.join(names)})"
            )
        return [_as_input(item) for item in batch]
    if len(names) == 1:
        return [_as_input(batch)]
    raise TypeError(f"a batch must be a tuple, list or dict of arrays, got {type(batch).__name__}")


def _by_name(data: Mapping[str, Any], name: str) -> Any:
    if name not in data:
        raise KeyError(f"the data has no '{name}', which the model takes; it has {', '.join(map(str, data))}")
    return data[name]


def _is_array(item: Any) -> bool:
    return hasattr(item, "shape") and hasattr(item, "dtype") and len(item.shape) > 0


def _as_input(item: Any) -> Any:
    if hasattr(item, "detach"):  # a torch tensor
        item = item.detach().cpu().numpy()
    return item
