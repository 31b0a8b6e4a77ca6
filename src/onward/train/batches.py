"""Batches from arrays, dicts of arrays, data loaders, generators and functions.

Every source gives the same batches for an epoch in every run, so that a resumed run can continue at the batch
where it stopped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import onnxruntime as ort

from onward.api.convert_inputs import refuse_masked
from onward.errors import hinted
from onward.ort_session import array_of

if TYPE_CHECKING:
    from onward.runtime.signature import Signature

Batch = list[Any]
Source = Iterable[Any] | Callable[..., Iterable[Any]]
# changes a batch in training: augmentation, say
Transform = Callable[[Batch, np.random.Generator], Batch]


class Rows:
    """An array whose rows are loaded lazily: images in files, for example."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        if isinstance(rows, tuple):
            return self[rows[0]][(slice(None), *rows[1:])]
        # numpy turns slices, masks and negative numbers into row numbers
        chosen = np.arange(len(self))[rows]
        return self.read(chosen) if chosen.ndim else self.read(chosen[None])[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read(np.arange(len(self))), dtype)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """The rows of these numbers."""
        raise NotImplementedError

    def part(self, rows: np.ndarray) -> Rows:
        """Some of the rows, still unread."""
        raise NotImplementedError


class Batches:
    """A source of batches, each a list of inputs in the model's order."""

    # how many batches an epoch has, where known
    count: int | None = None
    # whether there is only one epoch in it
    once = False

    def epoch(self, number: int, *, skip: int = 0, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """The batches of an epoch, without the first `skip`; of several ranks, this one's share of each."""
        raise NotImplementedError

    def description(self) -> dict[str, Any]:
        """What must be the same on all ranks, by name."""
        return {}

    def rows(self, number: int, index: int, *, rank: int = 0, world: int = 1) -> np.ndarray | None:
        """The rows of the data that this rank's share of a batch is made of, where that is known."""
        return None

    def require(self, epochs: int) -> None:
        """Raise an error if the data does not last for this many epochs."""
        if self.once and epochs > 1:
            raise ValueError(
                "the data is an iterator and is used up after one epoch: "
                "pass a function that makes a new one, or a list"
            )


class ArrayBatches(Batches):
    """Slices of arrays that have one row for each sample, reshuffled in every epoch."""

    def __init__(
        self,
        arrays: Sequence[np.ndarray | Rows],
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool = False,
        transform: Transform | None = None,
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
        # a batch larger than the data would change what a mean of the loss is divided by
        self._size, self._shuffle, self._seed = min(batch_size, self.samples), shuffle, seed
        self._transform = transform
        whole, remainder = divmod(self.samples, self._size)
        self.count = whole + (1 if remainder and not drop_last else 0)

    def epoch(self, number: int, *, skip: int = 0, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        order = self._order(number)
        assert self.count is not None
        for index in range(skip, self.count):
            # sessions read contiguous memory in place
            rows = order[index * self._size : (index + 1) * self._size]
            share = _share(len(rows), rank, world)
            if self._transform is None:
                yield [np.ascontiguousarray(array[rows[share]]) for array in self._arrays]
                continue
            # A transform sees the whole batch, of which mixup needs all samples, with a generator of its own: a
            # resumed run, and one on another number of ranks, draws the same numbers.
            batch = [np.ascontiguousarray(array[rows]) for array in self._arrays]
            batch = self._transform(batch, np.random.default_rng([self._seed, number, index, 1]))
            yield [np.ascontiguousarray(array[share]) for array in batch] if world > 1 else batch

    def description(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "batch size": self._size,
            "batches": self.count,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "arrays": [f"{array.dtype}{list(array.shape[1:])}" for array in self._arrays],
        }

    def rows(self, number: int, index: int, *, rank: int = 0, world: int = 1) -> np.ndarray:
        rows = self._order(number)[index * self._size : (index + 1) * self._size]
        return rows[_share(len(rows), rank, world)]

    def _order(self, number: int) -> np.ndarray:
        order = np.arange(self.samples)
        if self._shuffle:
            # by the number of the epoch: a resumed run, and every rank, has the same order
            np.random.default_rng([self._seed, number]).shuffle(order)
        return order


def _share(size: int, rank: int, world: int) -> slice:
    """A rank's part of a batch; some are empty where there are more ranks than samples."""
    # shares differ by one at most, whatever the sizes: no rank waits for another's longer one
    return slice(size * rank // world, size * (rank + 1) // world)


class StreamBatches(Batches):
    """Batches that something else makes: a loader, or a function that gives an iterator (of an epoch)."""

    def __init__(self, source: Source, names: Sequence[str], order: Sequence[str] = ()) -> None:
        self._source, self._names, self._order = source, names, order or names
        # an object that can be iterated over is a loader, even if it can be called as well
        self._make = (
            cast("Callable[..., Iterable[Any]]", source) if not isinstance(source, Iterable) else None
        )
        self._takes_epoch = self._make is not None and _needs_argument(self._make)
        try:
            self.count = None if self._make is not None else len(source)  # type: ignore[arg-type]
        except TypeError:
            self.count = None
        self.once = isinstance(source, Iterator)
        self._used = False

    def epoch(self, number: int, *, skip: int = 0, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        # a stream is a rank's own: torch's samplers share by rank, and shuffle by the epoch that they are told
        sampler = getattr(self._source, "sampler", None)
        for set_epoch in (getattr(self._source, "set_epoch", None), getattr(sampler, "set_epoch", None)):
            if set_epoch is not None:
                set_epoch(number)
        if self._make is not None:
            stream = self._make(number) if self._takes_epoch else self._make()
        else:
            if self._used:
                self.require(2)
            self._used = True
            stream = cast("Iterable[Any]", self._source)
        for index, batch in enumerate(stream):
            if index >= skip:
                yield in_order(batch, self._names, self._order)


def make_batches(
    data: Any,
    names: Sequence[str],
    *,
    batch_size: int = 32,
    shuffle: bool = False,
    seed: int = 0,
    order: Sequence[str] = (),
    transform: Transform | None = None,
) -> Batches:
    """A source of batches from `data`, for a model with these inputs.

    Arrays come as a tuple or list in the model's order, or as a dict by name; anything else that can be
    iterated over, or a function that returns such a thing, is taken to give batches. `order` is that of
    data that may have more than the model takes: that of training, labels included.

    >>> source = make_batches((np.zeros((5, 2)), np.zeros(5)), ["x", "y"], batch_size=2)
    >>> [len(batch[0]) for batch in source.epoch(0)]
    [2, 2, 1]
    """
    if isinstance(data, Batches):
        return data
    if _is_array(data):
        data = (data,)
    if isinstance(data, Mapping):
        data = [_whole(_by_name(data, name)) for name in names]
    if isinstance(data, tuple | list) and data and all(_is_array(item) for item in data):
        if len(data) == len(order):
            data = [data[order.index(name)] for name in names]
        if len(data) == len(names):
            arrays = [_whole(item) for item in data]
            return ArrayBatches(
                arrays, batch_size=batch_size, shuffle=shuffle, seed=seed, transform=transform
            )
        if len(names) > 1:
            raise ValueError(
                f"the model takes {len(names)} inputs ({', '.join(names)}), the data has {len(data)}"
            )
    if transform is not None:
        raise TypeError("transform needs arrays: change the batches where they are made")
    if not isinstance(data, str | bytes) and (callable(data) or isinstance(data, Iterable)):
        return StreamBatches(cast("Source", data), names, order)
    raise hinted(
        TypeError(
            f"cannot make batches of {type(data).__name__}: pass arrays, a dict of arrays, an iterable of batches, "
            "or a function that returns one"
        ),
        "docs/cli.md says what a module:function may return",
    )


def in_order(batch: Any, names: Sequence[str], order: Sequence[str] = ()) -> Batch:
    """One batch as a list in the model's order."""
    if isinstance(batch, Mapping):
        return [_as_input(_by_name(batch, name)) for name in names]
    if isinstance(batch, tuple | list):
        if len(batch) == len(order):
            batch = [batch[order.index(name)] for name in names]
        if len(batch) != len(names):
            raise ValueError(
                f"a batch has {len(batch)} items, the model takes {len(names)} ({', '.join(names)})"
            )
        return [_as_input(item) for item in batch]
    if len(names) == 1:
        return [_as_input(batch)]
    raise TypeError(f"a batch must be a tuple, list or dict of arrays, got {type(batch).__name__}")


def sample_count(batch: Sequence[Any]) -> int:
    """How many samples a batch has: the size of its first input's first axis."""
    if not batch:
        return 1
    # an OrtValue on a device has a shape without being copied
    first = batch[0]
    shape: Sequence[int] = first.shape() if isinstance(first, ort.OrtValue) else np.shape(first)
    return int(shape[0]) if shape else 1


def batch_weight(signature: Signature, batch: Sequence[Any]) -> float:
    """How many terms the mean of a batch's loss has: labels that are not ignored, or samples."""
    for index, _, ignored in signature.labels:
        if index < len(batch):  # the step says what is missing
            # the first output with labels decides, as in onnxruntime's loss: the mean is over its terms
            labels = np.asarray(array_of(batch[index]))
            return float(labels.size if ignored is None else np.count_nonzero(labels != ignored))
    return float(sample_count(batch))


def _needs_argument(function: Callable[..., Any]) -> bool:
    """Whether a function must be given the number of the epoch."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


def _by_name(data: Mapping[str, Any], name: str) -> Any:
    if name not in data:
        raise KeyError(f"the data has no '{name}', which the model takes; it has {', '.join(map(str, data))}")
    return data[name]


def _is_array(item: Any) -> bool:
    if isinstance(item, ort.OrtValue):
        return len(item.shape()) > 0
    return hasattr(item, "shape") and hasattr(item, "dtype") and len(item.shape) > 0


def _whole(item: Any) -> np.ndarray | Rows:
    return item if isinstance(item, Rows) else np.asarray(_as_input(item))


def _as_input(item: Any) -> Any:
    refuse_masked(item, "the data")
    # known by its method: torch is not imported here
    if hasattr(item, "detach"):  # a torch tensor
        item = item.detach().cpu().numpy()
    return array_of(item)
