"""Packs many tensors into one float32 vector: one message for each cut.

Integers and booleans are sent as their bytes; every tensor begins at a multiple of 64 bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from onward.runtime.memory import Tensor

_ALIGN = 16


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each tensor is in the vector."""

    names: tuple[str, ...]
    dtypes: tuple[np.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    size: int

    def pack(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """A new vector with these tensors; those that are missing are zero."""
        vector = np.zeros(self.size, np.float32)
        for name, view in self.unpack(vector).items():
            if name in arrays:
                np.copyto(view, arrays[name])
        return vector

    def unpack(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Views of the tensors in a vector."""
        views = {}
        for name, dtype, shape, start in zip(self.names, self.dtypes, self.shapes, self.starts):
            count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            views[name] = vector[start:].view(np.uint8)[:count].view(dtype).reshape(shape)
        return views

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The tensors in a vector of training's memory, on the host or a device."""
        parts = zip(self.names, self.dtypes, self.shapes, self.starts)
        return {name: vector.view(start, shape, dtype) for name, dtype, shape, start in parts}

    def describe(self) -> np.ndarray:
        """Ranks and dimensions as numbers, for a receiver that knows names and types."""
        # the number of dimensions, and room for eight: a receiver must know the size of the message
        table = np.zeros((len(self.names), 9), np.int64)
        for row, shape in zip(table, self.shapes):
            row[0] = len(shape)
            row[1 : 1 + len(shape)] = shape
        return table


def layout_of(names: Sequence[str], dtypes: Sequence[np.dtype], shapes: Sequence[Sequence[int]]) -> Layout:
    """Place tensors one after the other.

    >>> layout = layout_of(["x", "n"], [np.dtype("float32"), np.dtype("int64")], [(2, 3), (1,)])
    >>> layout.unpack(layout.pack({"n": np.array([7])}))["n"]
    array([7])
    """
    starts, end = [], 0
    for dtype, shape in zip(dtypes, shapes):
        starts.append(end)
        floats = -(-int(np.prod(shape, dtype=np.int64)) * dtype.itemsize // 4)
        end += -(-floats // _ALIGN) * _ALIGN
    return Layout(
        tuple(names),
        tuple(dtypes),
        tuple(tuple(map(int, s)) for s in shapes),
        tuple(starts),
        max(end, _ALIGN),
    )
