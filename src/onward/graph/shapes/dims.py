"""Sizes that are numbers, names, products of names, or not known: arithmetic with them, and inference by them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto

from onward.graph.compute import REARRANGED, rearrange

if TYPE_CHECKING:
    import onnx_ir as ir


# A number, a name (or a product of names and a number, like "2*batch*sequence"), or unknown.
Dim = int | str | None

# By ONNX's numbers: programs that only train read names of sizes too, and onnx_ir takes a third of a second to load.
_WHOLE = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)


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
            # A name may be a product itself, from an earlier Reshape.
            factor, parts = _factors(dim)
            number *= factor
            names += parts
    # An empty tensor stays empty whatever the names are.
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
        # Once for each time that it occurs: batch*batch / batch is batch.
        names.remove(name)
    # 3*batch / 2 may be whole at run time, but has no spelling here.
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
    # A negative factor is a sign or a -1 of Reshape, and no size.
    if (isinstance(a, int) and a < 0) or (isinstance(b, int) and b < 0):
        return a * b if isinstance(a, int) and isinstance(b, int) else None
    return product([a, b])


def div(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        # Towards zero, as the runtime divides integers; // rounds down.
        return int(a / b) if b else None
    return a if b == 1 else quotient(a, b)


def windows(size: Dim, margin: int, stride: int) -> Dim:
    """floor((size + margin) / stride) + 1: as many windows as fit, the margin being padding less a window's reach.

    Two layers whose windows fit equally often have results of one name.
    """
    if isinstance(size, int):
        return (size + margin) // stride + 1
    # A window of one, or padding "same": the name stays, so that residual sums are seen to fit.
    if stride == 1 and margin == -1:
        return size
    # A name with brackets in a product would be cut apart at its operators.
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


# --- Symbolic shape inference: tracks the elements of shape vectors, and the shapes computed from them.
#
# ONNX's inference loses the names of dimensions in `Reshape(x, Concat(Shape(x)[0], -1, …))` and the like, with
# which exporters write every view and expand. Here the elements of such vectors are followed as numbers,
# names and products of names, so that two shapes that are equal can be seen to be equal.


# The elements of an integer tensor of rank 0 or 1.
Elements = tuple[int, tuple[Dim, ...]]
_LONGEST = 64
_RECURSION = 200


class Symbols:
    """Remembers the elements of shape vectors of one graph."""

    def __init__(self) -> None:
        self._elements: dict[ir.Value, Elements | None] = {}
        self._depth = 0

    def elements(self, value: ir.Value | None) -> Elements | None:
        """The rank and elements of an integer vector or scalar, or None where nothing is known of it."""
        if value is None:
            return None
        if value in self._elements:
            return self._elements[value]
        # Not an error: what is not followed is only unnamed.
        if self._depth > _RECURSION:  # a chain of nodes may be longer than the stack of Python
            return None
        self._depth += 1
        computed = self._compute(value)
        self._depth -= 1
        # None is remembered too: otherwise each reader would walk the whole chain again.
        self._elements[value] = computed
        return computed

    def refine(self, node: ir.Node) -> bool:
        """Sharpen the shape of the output of a node that takes a shape vector; whether anything changed."""
        rule = _SHAPED.get(node.op_type)
        if rule is None or node.domain not in ("", "ai.onnx") or len(node.inputs) < 1:
            return False
        output = node.outputs[0]
        dims = rule(self, node)
        if dims is None:
            return False
        # ONNX's inference says another rank: which of the two is right is not settled here.
        if output.shape is not None and output.shape.rank() != len(dims):
            return False
        current = dims_of(output.shape) if output.shape is not None else (None,) * len(dims)
        # Numbers of inference are never overwritten by a name, names by better ones are.
        merged = tuple(old if new is None or isinstance(old, int) else new for old, new in zip(current, dims))
        if output.shape is not None and merged == current:
            return False
        from onnx_ir import Shape

        output.shape = Shape(merged)
        return True

    def _compute(self, value: ir.Value) -> Elements | None:
        # An initializer that is an input may be fed with something else.
        if value.is_graph_input():
            return None
        if value.const_value is not None:
            return _constant(value.const_value)
        node = value.producer()
        if node is None or node.domain not in ("", "ai.onnx"):
            return None
        rule = _VALUES.get(node.op_type)
        computed = rule(self, node) if rule is not None else None
        return computed if computed is None or len(computed[1]) <= _LONGEST else None


def _constant(tensor: ir.TensorProtocol) -> Elements | None:
    if tensor.size > _LONGEST or len(tensor.shape) > 1:
        return None
    # Shapes computed in float (older exporters' Ceil of sizes) are left to constant folding.
    if tensor.dtype not in _WHOLE:
        return None
    array = tensor.numpy()
    return array.ndim, tuple(int(item) for item in np.ravel(array))


def _shape(_: Symbols, node: ir.Node) -> Elements | None:
    x = node.inputs[0]
    if x is None or x.shape is None:
        return None
    dims = dims_of(x.shape)
    return 1, dims[slice(node.attributes.get_int("start", 0), node.attributes.get_int("end", None))]


def _size(_: Symbols, node: ir.Node) -> Elements | None:
    x = node.inputs[0]
    return None if x is None or x.shape is None else (0, (product(dims_of(x.shape)),))


def _cast(symbols: Symbols, node: ir.Node) -> Elements | None:
    return symbols.elements(node.inputs[0]) if node.attributes.get_int("to", 0) in _WHOLE else None


def _moved(symbols: Symbols, node: ir.Node) -> Elements | None:
    """Elements that are only moved: names as `compute` moves numbers."""
    parts = [symbols.elements(value) for value in node.inputs]
    if any(value is not None and part is None for value, part in zip(node.inputs, parts)):
        return None
    arrays = [part and np.array(part[1], object).reshape([len(part[1])] * part[0]) for part in parts]
    moved = rearrange(node.op_type, {name: attr.value for name, attr in node.attributes.items()}, arrays)
    return None if moved is None or moved.ndim > 1 else (moved.ndim, tuple(moved.ravel()))


def _concat(symbols: Symbols, node: ir.Node) -> Elements | None:
    joined: list[Dim] = []
    for value in node.inputs:
        part = symbols.elements(value)
        if part is not None and part[0] == 1:
            joined.extend(part[1])
        elif value is not None and value.shape is not None and value.shape.rank() == 1:
            count = value.shape[0]
            if not isinstance(count, int):
                return None
            joined.extend([None] * count)
        else:
            return None
    return 1, tuple(joined)


def _reshape_vector(symbols: Symbols, node: ir.Node) -> Elements | None:
    data, shape = symbols.elements(node.inputs[0]), symbols.elements(node.inputs[1])
    if data is None or shape is None:
        return None
    return (len(shape[1]), data[1]) if len(shape[1]) <= 1 else None


def _elementwise(function: Callable[..., Dim]) -> Callable[[Symbols, ir.Node], Elements | None]:
    def rule(symbols: Symbols, node: ir.Node) -> Elements | None:
        parts = [part for value in node.inputs if (part := symbols.elements(value)) is not None]
        length = max((len(items) for _, items in parts), default=0)
        if len(parts) < len(node.inputs) or any(len(items) not in (1, length) for _, items in parts):
            return None
        spread = [items * length if len(items) == 1 else items for _, items in parts]
        return max(rank for rank, _ in parts), tuple(function(*items) for items in zip(*spread))

    return rule


def _choose(condition: Dim, a: Dim, b: Dim) -> Dim:
    return a if a == b or condition == 1 else (b if condition == 0 else None)


def _reduce_prod(symbols: Symbols, node: ir.Node) -> Elements | None:
    data = symbols.elements(node.inputs[0])
    if data is None:
        return None
    return node.attributes.get_int("keepdims", 1) and data[0], (product(data[1]),)


_VALUES: dict[str, Callable[[Symbols, ir.Node], Elements | None]] = {
    "Shape": _shape,
    "Size": _size,
    **dict.fromkeys(REARRANGED, _moved),
    "Cast": _cast,
    "Concat": _concat,
    "Reshape": _reshape_vector,
    "Where": _elementwise(_choose),
    "ReduceProd": _reduce_prod,
    "Add": _elementwise(add),
    "Sub": _elementwise(sub),
    "Mul": _elementwise(mul),
    "Div": _elementwise(div),
    "Equal": _elementwise(equal),
}


def _expanded(symbols: Symbols, node: ir.Node) -> Sequence[Dim] | None:
    x, target = node.inputs[0], symbols.elements(node.inputs[1])
    if x is None or x.shape is None or target is None:
        return None
    have, want = list(dims_of(x.shape)), list(target[1])
    rank = max(len(have), len(want))
    have, want = [1] * (rank - len(have)) + have, [1] * (rank - len(want)) + want
    return [broadcast(a, b) for a, b in zip(have, want)]


def _reshaped(symbols: Symbols, node: ir.Node) -> Sequence[Dim] | None:
    x, target = node.inputs[0], symbols.elements(node.inputs[1])
    if x is None or target is None:
        return None
    have = dims_of(x.shape) if x.shape is not None else None
    dims: list[Dim] = list(target[1])
    if not node.attributes.get_int("allowzero", 0):
        for index, dim in enumerate(dims):
            if dim == 0:
                dims[index] = have[index] if have is not None and index < len(have) else None
    # Two of them are an error that the runtime reports; none needs nothing.
    if dims.count(-1) == 1:
        index = dims.index(-1)
        others = product([dim for dim in dims if dim != -1])
        dims[index] = quotient(product(have), others) if have is not None else None
    return None if -1 in dims else dims


def _constant_of_shape(symbols: Symbols, node: ir.Node) -> Sequence[Dim] | None:
    shape = symbols.elements(node.inputs[0])
    return None if shape is None else shape[1]


def _counted(symbols: Symbols, node: ir.Node) -> Sequence[Dim] | None:
    parts = [symbols.elements(value) for value in node.inputs]
    start, limit, step = (part[1][0] if part is not None and part[1] else None for part in parts)
    return None if step != 1 else [sub(limit, start)]


def _sliced(symbols: Symbols, node: ir.Node) -> Sequence[Dim] | None:
    """x[:n] has n rows. (Fewer where x is shorter, but then n is no dimension that it is combined with.)"""
    x = node.inputs[0]
    parts = [symbols.elements(value) for value in node.inputs[1:]]
    if x is None or x.shape is None or len(parts) < 2 or parts[0] is None or parts[1] is None:
        return None
    count = len(parts[0][1])
    axes = parts[2][1] if len(parts) > 2 and parts[2] is not None else tuple(range(count))
    steps = parts[3][1] if len(parts) > 3 and parts[3] is not None else (1,) * count
    if any(len(part) != count for part in (parts[1][1], axes, steps)):
        return None
    have = dims_of(x.shape)
    dims: list[Dim] = [None] * len(have)
    touched = set()
    for start, stop, axis, step in zip(parts[0][1], parts[1][1], axes, steps):
        if not isinstance(axis, int):
            return None
        touched.add(axis % len(have))
        whole = have[axis]
        # torch's tracing writes x[:, :n] for "as long as n", where x is a table of positions.
        if start == 0 and step == 1 and isinstance(stop, str) and (whole == stop or _many(whole)):
            dims[axis] = stop
    return [dims[axis] if axis in touched else have[axis] for axis in range(len(have))]


def _padded(symbols: Symbols, node: ir.Node) -> Sequence[Dim] | None:
    """Axes that nothing is added to keep their names."""
    x, pads, _, axes = (*node.inputs, None, None, None)[:4]
    counts, named = symbols.elements(pads), symbols.elements(axes)
    if x is None or x.shape is None or counts is None or (axes is not None and named is None):
        return None
    dims = list(dims_of(x.shape))
    padded_axes = tuple(range(len(dims))) if named is None else named[1]
    if len(counts[1]) != 2 * len(padded_axes):
        return None
    for axis, begin, end in zip(padded_axes, counts[1], counts[1][len(padded_axes) :]):
        if not isinstance(axis, int):
            return None
        dims[axis] = add(dims[axis], add(begin, end))
    return dims


def _slid(_: Symbols, node: ir.Node) -> Sequence[Dim] | None:
    """Spatial sizes of a convolution or pooling, by name where the input has names."""
    x = node.inputs[0]
    # With ceil_mode, whether a last window starts in the padding decides, and runtime and ONNX disagreed
    # about it.
    if x is None or x.shape is None or node.attributes.get_int("ceil_mode", 0):
        return None
    have, count = dims_of(x.shape), x.shape.rank() - 2
    kernel: Sequence[Dim] = list(node.attributes.get_ints("kernel_shape", []) or [])
    weight = node.inputs[1] if node.op_type == "Conv" else None
    if not kernel and weight is not None and weight.shape is not None:
        kernel = dims_of(weight.shape)[2:]
    pads = list(node.attributes.get_ints("pads", []) or [0] * 2 * count)
    strides, dilations = (
        list(node.attributes.get_ints(name, []) or [1] * count) for name in ("strides", "dilations")
    )
    # SAME makes sizes depend on the stride in a way that one name cannot spell.
    fixed = node.attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")
    if not fixed or len(kernel) != count or len(pads) != 2 * count:
        return None
    dims: list[Dim] = [have[0], None]
    for axis in range(count):
        size, length = kernel[axis], have[2 + axis]
        if not isinstance(size, int) or isinstance(length, int):
            dims.append(None)
            continue
        margin = pads[axis] + pads[count + axis] - (size - 1) * dilations[axis] - 1
        dims.append(windows(length, margin, strides[axis]))
    return dims


def _many(dim: Dim) -> bool:
    return isinstance(dim, int) and dim > 1


_SHAPED: dict[str, Callable[[Symbols, ir.Node], Sequence[Dim] | None]] = {
    "Expand": _expanded,
    "Reshape": _reshaped,
    "ConstantOfShape": _constant_of_shape,
    "Range": _counted,
    "Slice": _sliced,
    "Pad": _padded,
    "Conv": _slid,
    "MaxPool": _slid,
    "AveragePool": _slid,
    "LpPool": _slid,
}
