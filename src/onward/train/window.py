"""The batches of one update, as an engine takes them and reports on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from onward.train.batches import sample_count

if TYPE_CHECKING:
    from onward.train.batches import Batch
    from onward.train.progress import Position


class ReadAhead:
    """A stream of batches that knows whether there is a next one.

    >>> stream = ReadAhead(iter([[1], [2]]))
    >>> stream.take(), stream.has_next()
    ([1], True)
    """

    def __init__(self, stream: Iterator[Batch]) -> None:
        self._stream = stream
        self._next: Batch | None = None
        self._started = False

    def has_next(self) -> bool:
        """Whether `take` has a batch to give."""
        # The first batch is read here and not when the object is made: a reader's error belongs to the update,
        # where all ranks hear of it.
        if not self._started:
            self._next, self._started = next(self._stream, None), True
        return self._next is not None

    def take(self) -> Batch:
        """The next batch; the one after it is read first."""
        if not self.has_next() or self._next is None:
            raise AssertionError("there is no further batch")
        batch, self._next = self._next, next(self._stream, None)
        return batch


class Window:
    """Gives an engine the batches of one update and adds up what it says of them.

    `consistent` is False while the state of the run is between two batches' states and must not be saved.
    """

    def __init__(
        self, stream: ReadAhead, position: Position, *, size: int, check_interrupt: Callable[[], None]
    ) -> None:
        self._stream, self._position, self._size = stream, position, size
        self._check_interrupt = check_interrupt
        self.consistent = True
        self.last: Batch | None = None
        self.batches = self.samples = 0

    def __iter__(self) -> Iterator[Batch]:
        position = self._position
        # counted from the position: a window that an interrupt cut short goes on where it was
        while position.window_batches < self._size and self._stream.has_next():
            self._check_interrupt()
            batch = self._stream.take()
            self.consistent = False
            position.batch += 1
            position.window_batches += 1
            self.batches += 1
            self.samples += sample_count(batch)
            self.last = batch
            yield batch
            self.consistent = True
        self.consistent = False

    @property
    def number(self) -> int:
        """The number of the batch at hand in the whole run, from 0: the seeds of dropout come from it."""
        # by the update, not by batches read: the last window of an epoch may be short, on one rank only
        return self.end - self._size + self._position.window_batches - 1

    @property
    def end(self) -> int:
        """The number of the next window's first batch."""
        return (self._position.step + 1) * self._size

    @property
    def unit(self) -> float:
        """The weight of the last batch, in units of which the gradients are; 0 where there is none yet."""
        return self._position.unit

    @property
    def has_next(self) -> bool:
        """Whether this rank's epoch has further batches."""
        return self._stream.has_next()

    def add(self, loss: float, weight: float) -> None:
        """Take note of a batch's mean loss and of its weight."""
        self._position.add(loss, weight)
