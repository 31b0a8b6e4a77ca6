"""Sizes that are numbers, names, products of names, or not known; and arithmetic with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

# A number, a name (or a product of names and a number, like "2*batch*sequence"), or unknown.
Dim = int | str | None


def dims_of(shape: ir.Shape) -> tuple[Dim, ...]:
    """A shape as numbers, names and None."""
    return tuple(dim if isinstance(dim, int) else dim.value for dim in shape)


def forget_invented(shape: ir.Shape) -> ir.Shape:
    """A shape without the names that ONNX's inference makes up.

    It counts `unk__0`, `unk__1`, … from the start in each call, so that one name stands for sizes that differ.
    """
    return type(shape)(
        [None if isinstance(dim, str) and dim.startswith("unk__") else dim for dim in dims_of(shape)]
    )


def product(dims: Sequence[Dim]) -> Dim:
    """The product of dimensions, as a number or in one spelling."""
    number, names = 1, []
    for dim in dims:
        if dim is None:
            return None
        if isinstance(dim, int):
            number *= dim
        else:
            factor, parts = _factors(dim)
            number *= factor
            names += parts
    if number == 0 or not names:
        return number
    return _spell(number, names)


def quotient(whole: Dim, part: Dim) -> Dim:
    """whole / part where it divides evenly by its spelling."""
    if whole is None or part is None or part == 0:
        return None
    top, top_names = (whole, []) if isinstance(whole, int) else _factors(whole)
    bottom, bottom_names = (part, []) if isinstance(part, int) else _factors(part)
    names = list(top_names)
    for name in bottom_names:
        if name not in names:
            return None
        names.remove(name)
    if top % bottom:
        return None
    return _spell(top // bottom, names) if names else top // bottom


def _factors(name: str) -> tuple[int, list[str]]:
    number, names = 1, []
    for part in name.split("*"):
        if part.isdigit():
            number *= int(part)
        else:
            names.append(part)
    return number, names


def _spell(number: int, names: Sequence[str]) -> str:
    return "*".join(([str(number)] if number != 1 else []) + sorted(names))


def add(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return a if b == 0 else (b if a == 0 else None)


def sub(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a - b
    if b == 0:
        return a
    return 0 if a is not None and a == b else None


def mul(a: Dim, b: Dim) -> Dim:
    if (isinstance(a, int) and a < 0) or (isinstance(b, int) and b < 0):
        return a * b if isinstance(a, int) and isinstance(b, int) else None
    return product([a, b])


def div(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return int(a / b) if b else None
    return a if b == 1 else quotient(a, b)


def windows(size: Dim, margin: int, stride: int) -> Dim:
    """floor((size + margin) / stride) + 1: as many windows as fit, the margin being padding less a window's reach.

    Two layers whose windows fit equally often have results of one name.
    """
    if isinstance(size, int):
        return (size + margin) // stride + 1
    if stride == 1 and margin == -1:
        return size
    if size is None or "*" in size:
        return None
    return f"({size}{margin:+d})/{stride}+1"


_WINDOWS = re.compile(r"\((.+)([+-]\d+)\)/(\d+)\+1")


def number_of(name: str, sizes: Mapping[str, int]) -> int | None:
    """The number that a name stands for, which may be a product or one of `windows`; None where it is not known."""
    if name in sizes:
        return sizes[name]
    match = _WINDOWS.fullmatch(name)
    if match is not None:
        inner, stride = number_of(match[1], sizes), int(match[3])
        return None if inner is None or not stride else (inner + int(match[2])) // stride + 1
    total = 1
    for part in name.split("*"):
        factor = int(part) if part.isdigit() else sizes.get(part)
        if factor is None:
            return None
        total *= factor
    return total


def equal(a: Dim, b: Dim) -> Dim:
    if a is None or b is None:
        return None
    if isinstance(a, int) and isinstance(b, int):
        return int(a == b)
    if a == b:
        return 1
    # a dimension is never negative
    return 0 if (isinstance(a, int) and a < 0) or (isinstance(b, int) and b < 0) else None


def broadcast(a: Dim, b: Dim) -> Dim:
    if a == b or b == 1:
        return a
    if a == 1 or (isinstance(b, int) and b > 1):
        return b
    return a if isinstance(a, int) and a > 1 else None
