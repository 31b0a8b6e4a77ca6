"""One buffer for many tensors: each parameter is a view, and the whole is one vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

__all__ = ["FlatBuffer"]

# Views start at multiples of this many floats, so that each is aligned to a cache line.
_ALIGN = 16


class FlatBuffer:
    """A float32 vector with a named view for each tensor.

    >>> flat = FlatBuffer({"w": (2, 3), "b": (3,)})
    >>> flat.views["w"][:] = 1
    >>> flat.vector.sum()
    np.float32(6.0)
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], *, parts: int = 1) -> None:
        self.spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name, shape in shapes.items():
            size = int(np.prod(shape, dtype=np.int64))
            self.spans[name] = (end, end + size)
            end += -(-size // _ALIGN) * _ALIGN
        # divisible into equal parts, each aligned
        self.vector = _aligned(-(-end // (_ALIGN * parts)) * _ALIGN * parts)
        self.views = {
            name: self.vector[start:stop].reshape(tuple(shapes[name]))
            for name, (start, stop) in self.spans.items()
        }

    def part(self, start: int, stop: int) -> FlatBuffer:
        """The same memory from `start` to `stop` (multiples of 16): what lies there of each tensor, flat.

        >>> flat = FlatBuffer({"w": (20,), "b": (3,)})
        >>> {name: view.shape for name, view in flat.part(16, 48).views.items()}
        {'w': (4,), 'b': (3,)}
        """
        if start % _ALIGN or stop % _ALIGN:
            raise ValueError(f"a part begins and ends at multiples of {_ALIGN}, not at {start} and {stop}")
        part = FlatBuffer({})
        for name, (first, last) in self.spans.items():
            if max(first, start) < min(last, stop):
                part.spans[name] = (max(first, start) - start, min(last, stop) - start)
                part.views[name] = self.vector[max(first, start) : min(last, stop)]
        end = max((last for _, last in part.spans.values()), default=0)
        part.vector = self.vector[start : start + -(-end // _ALIGN) * _ALIGN]
        return part


def _aligned(count: int) -> np.ndarray:
    raw = np.zeros(count + _ALIGN, np.float32)
    offset = (-raw.ctypes.data // 4) % _ALIGN
    return raw[offset : offset + count]
