"""Sliding windows over spatial axes: their sizes, paddings and slices, as numbers where shapes are known.

Shared by convolutions and pooling. Every size is a vector with one entry per spatial axis: a numpy array
where it is known when the graph is built, else a value of the graph. Registers no rule.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

Sizes = np.ndarray | ir.Value


@dataclasses.dataclass(frozen=True)
class Window:
    """Where a kernel lies: tap t of window p is at `p·strides + t·dilations − begin` of the input."""

    kernel: Sizes
    strides: np.ndarray
    dilations: np.ndarray
    begin: Sizes
    end: Sizes

    @property
    def axes(self) -> list[int]:
        """The spatial axes."""
        return list(range(2, 2 + len(self.strides)))

    @property
    def static_pads(self) -> list[int] | None:
        """Both paddings in the order of the `pads` attribute, or None where they are known only at run time."""
        if isinstance(self.begin, np.ndarray) and isinstance(self.end, np.ndarray):
            return [*self.begin.tolist(), *self.end.tolist()]
        return None

    @property
    def static_kernel(self) -> list[int] | None:
        """The kernel's size, or None where it is known only at run time."""
        return self.kernel.tolist() if isinstance(self.kernel, np.ndarray) else None

    def taps(self) -> Iterator[np.ndarray]:
        """The offset of every tap, in the order of the weights."""
        assert isinstance(self.kernel, np.ndarray)
        for index in itertools.product(*map(range, self.kernel.tolist())):
            yield np.asarray(index, np.int64) * self.dilations


def calculate(op, kind: str, a: Sizes | int, b: Sizes | int) -> Sizes:
    """An elementwise operator on sizes, done now where both are known. Div is for sizes from 0 up."""
    if isinstance(a, ir.Value) or isinstance(b, ir.Value):
        return getattr(op, kind)(a, b)
    now = {
        "Add": np.add,
        "Sub": np.subtract,
        "Mul": np.multiply,
        "Div": np.floor_divide,
        "Max": np.maximum,
        "Min": np.minimum,
    }
    return np.asarray(now[kind](a, b), np.int64)


def spatial(op, value: ir.Value, *, start: int = 2) -> Sizes:
    """The sizes of a value's axes from `start` on."""
    dims = [op.static_dim(value, axis) for axis in range(start, op.rank(value))]
    if all(dim is not None for dim in dims):
        return np.asarray(dims, np.int64)
    return op.sizes(value, start)


def ranked(dy: ir.Value, x: ir.Value) -> ir.Value:
    """`dy` with as many dimensions as `x`: inference gives up on a kernel of unknown size."""
    if dy.shape is None and x.shape is not None:
        dy.shape = ir.Shape([None] * x.shape.rank())
    return dy


def reach(op, window_kernel: Sizes, dilations: np.ndarray) -> Sizes:
    """How many elements a dilated kernel spans."""
    return calculate(op, "Add", calculate(op, "Mul", calculate(op, "Sub", window_kernel, 1), dilations), 1)


def window_of(op, node: ir.Node, x: ir.Value, kernel: Sizes) -> Window:
    """The window of a convolution or pooling node over its input."""
    rank = op.rank(x) - 2
    strides = ints(node, "strides", [1] * rank)
    dilations = ints(node, "dilations", [1] * rank)
    auto_pad = node.attributes.get_string("auto_pad", "NOTSET")
    if auto_pad == "NOTSET":
        pads = ints(node, "pads", [0] * 2 * rank)
        return Window(kernel, strides, dilations, pads[:rank], pads[rank:])
    nothing = np.zeros(rank, np.int64)
    if auto_pad == "VALID":
        return Window(kernel, strides, dilations, nothing, nothing)
    span = reach(op, kernel, dilations)
    # SAME at stride 1 depends on the kernel alone, so that open sizes have known pads.
    if np.all(strides == 1):
        total = calculate(op, "Sub", span, 1)
    else:
        size = spatial(op, x)
        steps = calculate(op, "Div", calculate(op, "Sub", size, 1), strides)
        covered = calculate(op, "Add", calculate(op, "Mul", steps, strides), span)
        total = calculate(op, "Max", calculate(op, "Sub", covered, size), nothing)
    return Window(kernel, strides, dilations, *split_padding(op, total, upper=auto_pad == "SAME_UPPER"))


def split_padding(op, total: Sizes, *, upper: bool) -> tuple[Sizes, Sizes]:
    """(begin, end) of a total padding; an odd element goes to the end if `upper`, else to the beginning."""
    small = calculate(op, "Div", total, 2)
    large = calculate(op, "Sub", total, small)
    return (small, large) if upper else (large, small)


def ints(node: ir.Node, name: str, default: list[int]) -> np.ndarray:
    """An attribute with one number per axis, which may be absent."""
    numbers = node.attributes.get_ints(name, default)
    return np.asarray(numbers if numbers else default, np.int64)


def padded(op, x: ir.Value, begin: Sizes, end: Sizes, *, axes: list[int]) -> ir.Value:
    """`x` with zeros around it."""
    if isinstance(begin, np.ndarray) and isinstance(end, np.ndarray):
        if not begin.any() and not end.any():
            return x
        return op.Pad(x, np.concatenate([begin, end]), None, np.asarray(axes, np.int64))
    return op.Pad(x, op.Concat(begin, end, axis=0), None, np.asarray(axes, np.int64))


def cut(op, x: ir.Value, start: Sizes, size: Sizes, *, axes: list[int]) -> ir.Value:
    """`size` elements of `x` from `start` on."""
    if isinstance(start, np.ndarray) and isinstance(size, np.ndarray):
        have = [op.static_dim(x, axis) for axis in axes]
        if not start.any() and have == size.tolist():
            return x
    # From the beginning on, the end is the size: no arithmetic on sizes.
    first = isinstance(start, np.ndarray) and not start.any()
    end = size if first else calculate(op, "Add", start, size)
    return op.Slice(x, start, end, np.asarray(axes, np.int64))


def tap_slice(
    op, x: ir.Value, offset: np.ndarray, window: Window, count: Sizes, *, axes: list[int]
) -> ir.Value:
    """What one tap of each of `count` windows reads from a padded input."""
    ones = np.ones_like(window.strides)
    if window.static_kernel == ones.tolist() and np.array_equal(window.strides, ones):
        return x  # every place
    last = calculate(op, "Mul", calculate(op, "Sub", count, 1), window.strides)
    size = calculate(op, "Add", last, 1)
    if np.all(window.strides == 1):
        return cut(op, x, offset, size, axes=axes)
    end = calculate(op, "Add", offset, size)
    return op.Slice(x, offset, end, np.asarray(axes, np.int64), window.strides)
