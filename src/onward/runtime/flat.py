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

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self.spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name, shape in shapes.items():
            size = int(np.prod(shape, dtype=np.int64))
            self.spans[name] = (end, end + size)
            end += -(-size // _ALIGN) * _ALIGN
        self.vector = _aligned(end)
        self.views = {
            name: self.vector[start:stop].reshape(tuple(shapes[name]))
            for name, (start, stop) in self.spans.items()
        }


def _aligned(count: int) -> np.ndarray:
    raw = np.zeros(count + _ALIGN, np.float32)
    offset = (-raw.ctypes.data // 4) % _ALIGN
    return raw[offset : offset + count]
