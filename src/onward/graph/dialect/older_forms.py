"""Operators written in those of an older opset, in the dialect's own spelling.

One table: operator, the opset that first has it (or has it with the meaning or the types in use), and the function
that builds it from older ones. `lower` applies it before it changes how operators are spelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.forms.cumulative import cumulative
from onward.graph.nodes import attribute, is_used, optional_input, required_input

if TYPE_CHECKING:
    from onward.graph.builder import Builder
    from onward.graph.dialect.rewrite import Expansion

# operator → (the opset from which on it can stay, whether a node needs the rewrite before that, the rewrite)
_TABLE: dict[str, list[tuple[int, Callable[[ir.Node], bool], Expansion]]] = {}
_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def older_form(node: ir.Node, opset: int) -> Expansion | None:
    """The rewrite of a node that this opset does not have; None where it has it, or nothing is known."""
    if node.domain != "":
        return None
    # In the order of the file: a case that is told by its types comes before the general one.
    for since, applies, expansion in _TABLE.get(node.op_type, ()):
        if opset < since and applies(node):
            return expansion
    return None


def _before(
    since: int, *op_types: str, where: Callable[[ir.Node], bool] = lambda node: True
) -> Callable[[Expansion], Expansion]:
    def register(expansion: Expansion) -> Expansion:
        for op_type in op_types:
            _TABLE.setdefault(op_type, []).append((since, where, expansion))
        return expansion

    return register


def _dtype(node: ir.Node, index: int = 0) -> ir.DataType | None:
    value = optional_input(node, index)
    return None if value is None else value.dtype


# ---- activations ----------------------------------------------------------------------------------------


@_before(20, "Gelu")
def _gelu(op: Builder, node: ir.Node) -> ir.Value:
    """x/2·(1 + erf(x/√2)), or x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³)))"""
    x = required_input(node)
    if attribute(node, "approximate", "none") == "tanh":
        cube = op.Mul(op.Mul(op.Mul(x, x), x), 0.044715)
        inner = op.Tanh(op.Mul(op.Add(x, cube), float(np.sqrt(2 / np.pi))))
    else:
        inner = op.Erf(op.Mul(x, float(np.sqrt(0.5))))
    return op.Mul(op.Mul(x, 0.5), op.Add(inner, 1.0))


@_before(14, "HardSwish")
def _hard_swish(op: Builder, node: ir.Node) -> ir.Value:
    return op.Mul(required_input(node), op.HardSigmoid(required_input(node), alpha=1 / 6, beta=0.5))


@_before(18, "Mish")
def _mish(op: Builder, node: ir.Node) -> ir.Value:
    return op.Mul(required_input(node), op.Tanh(op.Softplus(required_input(node))))


@_before(12, "Celu")
def _celu(op: Builder, node: ir.Node) -> ir.Value:
    """α·elu(x/α)"""
    alpha = attribute(node, "alpha", 1.0)
    return op.Mul(op.Elu(op.Div(required_input(node), alpha)), alpha)


# ---- normalization --------------------------------------------------------------------------------------


@_before(17, "LayerNormalization")
def _layer_normalization(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """y = (x − mean)/√(var + ε)·scale + bias, over the axes from `axis` on"""
    x, rank = required_input(node), op.rank(required_input(node))
    axes = list(range(attribute(node, "axis", -1) % rank, rank))
    stash = ir.DataType(attribute(node, "stash_type", 1))
    # The operator computes mean and variance in stash_type, float32 unless said otherwise, whatever x is.
    wide = x if op.dtype(x) == stash else op.Cast(x, to=stash.value)
    mean = op.ReduceMean(wide, axes, keepdims=1)
    centred = op.Sub(wide, mean)
    var = op.ReduceMean(op.Mul(centred, centred), axes, keepdims=1)
    inverse = op.Reciprocal(op.Sqrt(op.Add(var, attribute(node, "epsilon", 1e-5))))
    normal = op.Mul(centred, inverse)
    if op.dtype(x) != stash:
        normal = op.Cast(normal, to=op.dtype(x))
    y = op.Mul(normal, required_input(node, 1))
    bias = optional_input(node, 2)
    return [y if bias is None else op.Add(y, bias), mean, inverse]


@_before(21, "GroupNormalization")
def _group_normalization(op: Builder, node: ir.Node) -> ir.Value:
    """Instance normalization of the groups as channels, then a scale and a bias of each channel."""
    x, scale, bias = required_input(node), required_input(node, 1), required_input(node, 2)
    groups, rank = attribute(node, "num_groups"), op.rank(x)
    rows = op.Reshape(x, [0, groups, -1])
    # InstanceNormalization exists since opset 1, and has the runtime's own kernel.
    ones, zeros = np.ones(groups, op.dtype(x).numpy()), np.zeros(groups, op.dtype(x).numpy())
    normal = op.InstanceNormalization(rows, ones, zeros, epsilon=attribute(node, "epsilon", 1e-5))
    normal = op.Reshape(normal, op.shape(x))
    shape = np.asarray([-1] + [1] * (rank - 2), np.int64)
    return op.Add(op.Mul(normal, op.Reshape(scale, shape)), op.Reshape(bias, shape))


@_before(14, "BatchNormalization", where=lambda node: attribute(node, "training_mode", 0) == 1)
def _batch_normalization(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """The batch's mean and variance, inference mode with them, and momentum·before + (1 − momentum)·batch"""
    x, scale, bias, old_mean, old_var = (required_input(node, index) for index in range(5))
    axes = [axis for axis in range(op.rank(x)) if axis != 1]
    centre = op.ReduceMean(x, axes, keepdims=1)
    # Not E[x²] − mean²: that loses all digits where the mean is large.
    centred = op.Sub(x, centre)
    mean = op.ReduceMean(x, axes, keepdims=0)
    var = op.ReduceMean(op.Mul(centred, centred), axes, keepdims=0)
    y = op.BatchNormalization(x, scale, bias, mean, var, epsilon=attribute(node, "epsilon", 1e-5))
    momentum = attribute(node, "momentum", 0.9)
    outputs: list[ir.Value | None] = [y]
    for index, old, new in ((1, old_mean, mean), (2, old_var, var)):
        if is_used(node, index):
            outputs.append(op.Add(op.Mul(old, momentum), op.Mul(new, 1.0 - momentum)))
        else:
            outputs.append(None)
    return outputs


# ---- comparisons and choices ----------------------------------------------------------------------------


@_before(12, "GreaterOrEqual", "LessOrEqual")
def _or_equal(op: Builder, node: ir.Node) -> ir.Value:
    a, b = required_input(node), required_input(node, 1)
    # Not(Less) would be true for NaN, which is neither.
    strict = op.Greater(a, b) if node.op_type == "GreaterOrEqual" else op.Less(a, b)
    return op.Or(strict, op.Equal(a, b))


@_before(11, "Equal", where=lambda node: _dtype(node) in _FLOATS)
def _equal(op: Builder, node: ir.Node) -> ir.Value:
    """Neither less nor greater, and no NaN."""
    a, b = required_input(node), required_input(node, 1)
    apart = op.Or(op.Less(a, b), op.Greater(a, b))
    return op.Not(op.Or(apart, op.Or(op.IsNaN(a), op.IsNaN(b))))


@_before(12, "Max", "Min", where=lambda node: _dtype(node) not in _FLOATS)
def _extreme_of_integers(op: Builder, node: ir.Node) -> ir.Value:
    result = required_input(node)
    for index in range(1, len(node.inputs)):
        other = required_input(node, index)
        first = op.Greater(result, other) if node.op_type == "Max" else op.Less(result, other)
        result = op.Where(first, result, other)
    return result


def _one_condition(node: ir.Node) -> bool:
    """Whether one truth value decides between two tensors of the same shape, which is that of the result."""
    condition, a, b = (None if value is None else value.shape for value in node.inputs)
    if condition is None or a is None or b is None or any(size != 1 for size in condition):
        return False
    return a == b and a.rank() >= condition.rank()


@_before(9, "Where", where=_one_condition)
def _where(op: Builder, node: ir.Node) -> ir.Value:
    # If is the one choice that opset 8 has for every type.
    yes, no = op.subgraph("yes"), op.subgraph("no")
    yes.graph.outputs.append(yes.Identity(required_input(node, 1)))
    no.graph.outputs.append(no.Identity(required_input(node, 2)))
    return op.If(required_input(node), then_branch=yes, else_branch=no)


@_before(9, "Sign")
def _sign(op: Builder, node: ir.Node) -> ir.Value:
    x, kind = required_input(node), op.dtype(required_input(node)).value
    zero = op.constant_like(0, x)
    return op.Sub(op.Cast(op.Greater(x, zero), to=kind), op.Cast(op.Less(x, zero), to=kind))


@_before(9, "IsNaN")
def _is_nan(op: Builder, node: ir.Node) -> ir.Value:
    """Neither less than one nor greater than zero."""
    x = required_input(node)
    return op.Not(op.Or(op.Less(x, op.constant_like(1.0, x)), op.Greater(x, op.constant_like(0.0, x))))


@_before(9, "OneHot")
def _one_hot(op: Builder, node: ir.Node) -> ir.Value:
    """The places that equal the index, or the index counted from the end."""
    depth, values = op.const_value(required_input(node, 1)), op.const_value(required_input(node, 2))
    # The form below is made of products and sums of floating numbers.
    if depth is None or values is None or values.dtype.kind != "f" or op.rank(required_input(node)) is None:
        raise ModelError("its depth or values are no known floating numbers")
    rank, count = op.rank(required_input(node)), int(depth.reshape(-1)[0])
    axis = int(attribute(node, "axis", -1)) % (rank + 1)
    classes = np.arange(count, dtype=np.int64).reshape([-1] + [1] * (rank - axis))
    index = op.Unsqueeze(op.Cast(required_input(node), to=ir.DataType.INT64), [axis])
    # A negative index counts from the end since OneHot-11; before, it set nothing.
    hit = op.Or(op.Equal(index, classes), op.Equal(index, classes - count))
    off, on = (np.asarray(number) for number in values)
    return op.Add(op.Mul(op.Cast(hit, to=op.dtype(required_input(node, 2)).value), on - off), off)


@_before(8, "Expand")
def _expand(op: Builder, node: ir.Node) -> ir.Value:
    """A single number is repeated; anything else is multiplied by ones of a known shape."""
    x, sizes = required_input(node), op.const_value(required_input(node, 1))
    count = op.static_dim(required_input(node, 1), 0)
    if x.shape is not None and all(dim == 1 for dim in x.shape) and count is not None:
        return op.Tile(op.Reshape(x, [1] * max(count, len(x.shape))), required_input(node, 1)) if count else x
    if sizes is None or x.dtype not in _FLOATS:
        raise ModelError("expands to a shape that is known at run time only")
    return op.Mul(x, np.ones([int(size) for size in sizes], op.dtype(x).numpy()))


# ---- shapes ---------------------------------------------------------------------------------------------


@_before(
    15, "Shape", where=lambda node: attribute(node, "start", 0) != 0 or attribute(node, "end") is not None
)
def _shape(op: Builder, node: ir.Node) -> ir.Value:
    """Shape of some axes was a slice of the shape."""
    x, start, end = required_input(node), attribute(node, "start", 0), attribute(node, "end")
    stop = np.iinfo(np.int64).max if end is None else end
    if x.shape is not None:  # Slice of old opsets takes no negative numbers past the beginning
        rank = x.shape.rank()
        start, stop, _ = slice(start, end).indices(rank)
        stop = max(start, stop)
    return op.Slice(op.Shape(x), np.asarray([start]), [stop], np.asarray([0]))


@_before(9, "ConstantOfShape")
def _constant_of_shape(op: Builder, node: ir.Node) -> ir.Value:
    tensor = attribute(node, "value")
    number = np.zeros(1, np.float32) if tensor is None else tensor.numpy()
    return op.Expand(op.constant(number.reshape(())), required_input(node))


@_before(15, "CastLike")
def _cast_like(op: Builder, node: ir.Node) -> ir.Value:
    return op.Cast(required_input(node), to=op.dtype(node.outputs[0]))


@_before(11, "Range", where=lambda node: _dtype(node) in (ir.DataType.INT64, ir.DataType.INT32))
def _range(op: Builder, node: ir.Node) -> ir.Value:
    """start + delta·(0, 1, …): the places of the non-zeros of as many ones"""
    start, limit, delta = (op.Cast(required_input(node, index), to=ir.DataType.INT64) for index in range(3))
    step = op.const_value(required_input(node, 2))
    one = op.constant(np.asarray(1, np.int64))
    if step is not None and int(step) == 1:
        count = op.Sub(limit, start)
    else:  # rounded up, for steps of either sign
        ahead = op.Sub(limit, start)
        # Integer Div of ONNX truncates towards zero, as C does.
        floor = op.Div(ahead, delta)
        remainder = op.Not(op.Equal(op.Mul(floor, delta), ahead))
        count = op.Add(floor, op.Cast(remainder, to=ir.DataType.INT64))
    count = op.Where(op.Less(count, op.constant(np.asarray(0, np.int64))), op.Sub(one, one), count)
    # Old opsets count up to a number that only the run knows by the places of as many ones.
    ones = op.ConstantOfShape(op.Reshape(count, [1]), value=ir.tensor(np.ones(1, np.float32)))
    steps = op.Squeeze(op.NonZero(ones), [0])
    result = op.Add(start, op.Mul(steps, delta))
    kind = op.dtype(required_input(node))
    return result if kind == ir.DataType.INT64 else op.Cast(result, to=kind.value)


@_before(14, "Trilu")
def _trilu(op: Builder, node: ir.Node) -> ir.Value:
    """Where the column is not before (upper) or not after (lower) the row plus k."""
    x, k = required_input(node), optional_input(node, 1)
    row, column = (op.positions(op.dim(x, axis)) for axis in (-2, -1))
    row = op.Unsqueeze(row, [1])
    row = row if k is None else op.Add(row, k)
    column = op.Unsqueeze(column, [0])
    upper = attribute(node, "upper", 1)
    inside = op.GreaterOrEqual(column, row) if upper else op.LessOrEqual(column, row)
    return op.Where(inside, x, op.constant_like(0, x))


# ---- sums, choices by index -----------------------------------------------------------------------------


@_before(11, "CumSum")
def _cum_sum(op: Builder, node: ir.Node) -> ir.Value:
    x, axis = required_input(node), op.const_value(optional_input(node, 1))
    if axis is None:
        raise ModelError("its axis is known at run time only")
    return cumulative(op, node, x, int(axis.reshape(())) % op.rank(x), combine="Add", start=0)


def _one_a_row(node: ir.Node) -> bool:
    indices = optional_input(node, 1)
    axis = attribute(node, "axis", 0)
    return indices is not None and indices.shape is not None and indices.shape[axis] == 1


def _mask(op: Builder, x: ir.Value, indices: ir.Value, axis: int) -> ir.Value:
    """True at the one place of each row that the indices name; negative ones count from the end."""
    size = op.dim(x, axis)
    # OneHot of opset 9 to 10 knows no negative indices.
    wide = op.Cast(op.Squeeze(indices, [axis]), to=ir.DataType.INT64)
    wide = op.Where(op.Less(wide, op.constant(np.asarray(0, np.int64))), op.Add(wide, size), wide)
    marks = op.OneHot(wide, size, op.constant(np.asarray([0, 1], np.int64)), axis=axis)
    return op.Cast(marks, to=ir.DataType.BOOL)


@_before(11, "GatherElements", where=_one_a_row)
def _gather_elements(op: Builder, node: ir.Node) -> ir.Value:
    """One element of each row: the row without the others, summed."""
    x, indices = required_input(node), required_input(node, 1)
    axis = attribute(node, "axis", 0) % op.rank(x)
    chosen = op.Where(_mask(op, x, indices, axis), x, op.constant_like(0, x))
    return op.ReduceSum(chosen, [axis], keepdims=1)


@_before(
    16, "ScatterElements",
    where=lambda node: attribute(node, "reduction", "none") == "add" and _one_a_row(node),
)  # fmt: skip
def _scatter_add(op: Builder, node: ir.Node) -> ir.Value:
    """Where each row gets one number, adding is scattering the sum with what is there."""
    x, indices, updates = required_input(node), required_input(node, 1), required_input(node, 2)
    axis = attribute(node, "axis", 0)
    there = op.GatherElements(x, indices, axis=axis)
    return op.ScatterElements(x, indices, op.Add(there, updates), axis=axis)


def _adds_flat(node: ir.Node) -> bool:
    if attribute(node, "reduction", "none") != "add":
        return False
    x, indices = optional_input(node, 0), optional_input(node, 1)
    return node.op_type == "ScatterElements" or (
        x is not None
        and x.shape is not None
        and x.shape.rank() == 1
        and indices is not None
        and indices.shape is not None
        and indices.shape[-1] == 1
    )


@_before(16, "ScatterElements", "ScatterND", where=_adds_flat)
def _scatter_sum(op: Builder, node: ir.Node) -> ir.Value:
    """Rounds of plain scattering, until nothing is left: of those that fall on one place, each round adds one.

    Every update writes its own number to its place; who reads it back again has won the round. Losers, and who is
    done, write to one place more, after the end. There are as many rounds as updates of the busiest place.
    """
    x, indices, updates = required_input(node), required_input(node, 1), required_input(node, 2)
    int64, minus = ir.DataType.INT64.value, np.asarray([-1], np.int64)
    size = op.Reshape(op.Size(x), [1])
    index = op.Cast(op.Reshape(indices, minus), to=int64)
    axis = attribute(node, "axis", 0) % op.rank(x)
    zero = np.asarray(0, np.int64)
    if op.rank(x) > 1:
        length = op.dim(x, axis)
        wide = op.Cast(indices, to=int64)
        wide = op.Where(op.Less(wide, zero), op.Add(wide, length), wide)
        numbers = op.Reshape(op.positions(size), op.shape(x))
        index = op.Reshape(op.GatherElements(numbers, wide, axis=axis), minus)
    else:
        index = op.Where(op.Less(index, zero), op.Add(index, size), index)
    values = op.Reshape(updates, minus)
    own = op.positions(op.Shape(index))
    more = op.Add(size, [1])
    start = op.Concat(op.Reshape(x, minus), op.constant(np.zeros(1, op.dtype(x).numpy())), axis=0)
    left = op.Expand(op.constant(np.ones(1, np.bool_)), op.Shape(index))
    body = op.subgraph("round")
    body.input("number", ir.DataType.INT64, [])
    body.input("going", ir.DataType.BOOL, [])
    so_far = body.input("so_far", x.dtype, [None])
    waiting = body.input("waiting", ir.DataType.BOOL, [None])
    aim = body.Where(waiting, index, size)
    # One place more than x has: losers write there.
    blank = body.ConstantOfShape(more, value=ir.tensor(np.zeros(1, np.int64)))
    seen = body.Gather(body.ScatterElements(blank, aim, own, axis=0), aim, axis=0)
    won = body.And(waiting, body.Equal(seen, own))
    nothing = ir.tensor(np.zeros(1, op.dtype(x).numpy()))
    added = body.ScatterElements(
        body.ConstantOfShape(more, value=nothing),
        body.Where(won, index, size),
        body.Where(won, values, op.constant_like(0, x)),
        axis=0,
    )
    still = body.And(waiting, body.Not(won))
    busy = body.ReduceMax(body.Cast(still, to=ir.DataType.INT32), keepdims=0)
    body.graph.outputs.extend(
        [body.Cast(busy, to=ir.DataType.BOOL), body.Add(so_far, added), body.Identity(still)]
    )
    # Without any update the loop must not run: its body would reduce nothing.
    first = op.Not(op.Equal(op.Squeeze(op.Shape(index), [0]), zero))
    total, _ = op.Loop(None, first, start, left, body=body, outputs=2)
    total.shape = ir.Shape([None])
    return op.Reshape(op.Slice(total, [0], size, [0]), op.shape(x))


@_before(10, "Slice", where=lambda node: any(_unknown(node, index) for index in (1, 2)))
def _slice(op: Builder, node: ir.Node) -> ir.Value:
    """Starts and ends that are known at run time only: the elements between them, by their numbers."""
    x, axes, steps = required_input(node), optional_input(node, 3), optional_input(node, 4)
    axis_numbers, strides = op.const_value(axes), op.const_value(steps)
    if (axes is not None and axis_numbers is None) or (steps is not None and strides is None):
        raise ModelError("its axes or steps are known at run time only")
    if strides is not None and (strides != 1).any():
        raise ModelError("has steps, which are newer")
    one, zero = np.asarray(1, np.int64), np.asarray([0], np.int64)
    count = op.static_dim(required_input(node, 1), 0)
    if axis_numbers is None and count is None:
        raise ModelError("its axes are unknown")
    numbers = range(count or 0) if axis_numbers is None else [int(axis) for axis in axis_numbers.reshape(-1)]
    for number, axis in enumerate(numbers):
        size = op.dim(x, axis)
        ends = []
        for bounds in (required_input(node, 1), required_input(node, 2)):
            end = op.Cast(op.Gather(bounds, [number]), to=ir.DataType.INT64)
            end = op.Where(op.Less(end, zero), op.Add(end, size), end)
            end = op.Where(op.Less(end, zero), zero, end)
            ends.append(op.Squeeze(op.Where(op.Less(size, end), size, end), [0]))
        x = op.Gather(x, op.Range(ends[0], ends[1], one), axis=axis % op.rank(x))
    return x


@_before(10, "Slice", where=lambda node: _has_steps(node))
def _strided_slice(op: Builder, node: ir.Node) -> ir.Value:
    """Slices had no steps: the places that they leave are gathered, one axis after the other."""
    x = required_input(node)
    starts, ends, steps = (op.const_value(required_input(node, index)) for index in (1, 2, 4))
    axes = optional_input(node, 3)
    axis_numbers = np.arange(len(steps)) if axes is None and steps is not None else op.const_value(axes)
    if starts is None or ends is None or steps is None or axis_numbers is None:
        raise ModelError("its axes or steps are known at run time only")
    for start, end, step, axis in zip(
        *(np.ravel(numbers) for numbers in (starts, ends, steps, axis_numbers))
    ):
        if step == 1:
            x = op.Slice(x, [int(start)], [int(end)], [int(axis)])
            continue
        size = op.static_dim(x, int(axis))
        if size is None:
            raise ModelError("has steps over an axis of unknown size, which are newer")
        # Python's own arithmetic of slices, clamping included.
        indices = range(size)[_within(int(start), int(end), int(step))]
        x = op.Gather(x, np.asarray(indices, np.int64), axis=int(axis))
    return x


def _has_steps(node: ir.Node) -> bool:
    steps = optional_input(node, 4)
    tensor = None if steps is None else ir.convenience.get_const_tensor(steps)
    return tensor is not None and bool((tensor.numpy() != 1).any())


def _within(start: int, end: int, step: int) -> slice:
    """ONNX's bounds as Python's: the smallest of all integers as an end means the beginning, going backwards."""
    return slice(start, None if step < 0 and end < -(2**31) else end, step)


def _unknown(node: ir.Node, index: int) -> bool:
    value = optional_input(node, index)
    return value is not None and (value.is_graph_input() or value.const_value is None)


@_before(18, "Resize", where=lambda node: "axes" in node.attributes)
def _resize(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Scales and sizes named all axes."""
    x = required_input(node)
    rank = op.rank(x)
    axes = [int(axis) % rank for axis in attribute(node, "axes")]
    roi, scales, sizes = (optional_input(node, index) for index in (1, 2, 3))
    if roi is not None:
        raise ModelError("resizes a region of some axes, which is newer")

    def every(some: ir.Value | None, other: Callable[[int], ir.Value]) -> ir.Value | None:
        if some is None:
            return None
        parts = [op.Gather(some, [axes.index(axis)]) if axis in axes else other(axis) for axis in range(rank)]
        constant = op.const_value(some)
        if constant is not None and some is scales:
            full = np.ones(rank, np.float32)
            full[axes] = constant
            return op.constant(full)
        return op.Concat(*parts, axis=0)

    one = np.ones(1, np.float32)
    whole = [
        x,
        None,
        every(scales, lambda axis: op.constant(one)),
        every(sizes, lambda axis: op.dim(x, axis)),
    ]
    attributes = {name: value for name, value in node.attributes.items() if name != "axes"}
    return op.node("Resize", whole, attributes)


# ---- the same operator with another meaning or other types ----------------------------------------------


def _not_last(node: ir.Node) -> bool:
    x = optional_input(node, 0)
    axis = attribute(node, "axis", -1)
    return x is None or x.shape is None or axis % max(x.shape.rank(), 1) != x.shape.rank() - 1


@_before(13, "Softmax", "LogSoftmax", "Hardmax", where=_not_last)
def _softmax(op: Builder, node: ir.Node) -> ir.Value:
    """Until opset 12 the axes from `axis` on were one: the same only for the last."""
    x, rank = required_input(node), op.rank(required_input(node))
    if rank == 0:
        raise ModelError("of a single number means something else there")
    axis = attribute(node, "axis", -1) % rank
    # Over the last axis both meanings agree, so that one transposition each way does it.
    order = [i for i in range(rank) if i != axis] + [axis]
    last = op.node(node.op_type, [op.Transpose(x, perm=order)], {"axis": rank - 1})[0]
    return op.Transpose(last, perm=[order.index(i) for i in range(rank)])


@_before(12, "Dropout")
def _dropout(op: Builder, node: ir.Node) -> ir.Value | Sequence[ir.Value | None]:
    training, ratio = optional_input(node, 2), op.const_value(optional_input(node, 1))
    mode = np.asarray(False) if training is None else op.const_value(training)
    never = ratio is not None and float(ratio) == 0.0
    if not never and (mode is None or bool(mode)):
        raise ModelError("drops at random, which is newer")
    if not is_used(node, 1):
        return [required_input(node)]
    return [required_input(node), op.Expand(np.ones((1,), np.bool_), op.shape(required_input(node)))]


@_before(12, "Pow", where=lambda node: _dtype(node) != _dtype(node, 1))
def _pow(op: Builder, node: ir.Node) -> ir.Value:
    return op.Pow(
        required_input(node), op.Cast(required_input(node, 1), to=op.dtype(required_input(node)).value)
    )


@_before(12, "Clip", where=lambda node: _dtype(node) not in _FLOATS)
@_before(11, "Clip", where=lambda node: _unknown(node, 1) or _unknown(node, 2))
def _clip(op: Builder, node: ir.Node) -> ir.Value:
    x, low, high = required_input(node), optional_input(node, 1), optional_input(node, 2)
    x = x if low is None else op.Max(x, low)
    x = x if high is None else op.Min(x, high)
    return op.Identity(x) if low is None and high is None else x


@_before(11, "TopK", where=lambda node: attribute(node, "largest", 1) == 0)
def _smallest(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """The smallest are the largest of −x."""
    axis = attribute(node, "axis", -1)
    values, indices = op.TopK(op.Neg(required_input(node)), required_input(node, 1), axis=axis, outputs=2)
    return [op.Neg(values), indices]


@_before(11, "Gemm", where=lambda node: optional_input(node, 2) is None)
def _gemm(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    zero = op.constant(np.zeros(1, op.dtype(required_input(node)).numpy()))
    return op.node("Gemm", [required_input(node), required_input(node, 1), zero], dict(node.attributes))


@_before(8, "Sum", "Mean")
def _sum(op: Builder, node: ir.Node) -> ir.Value:
    total = required_input(node)
    for index in range(1, len(node.inputs)):
        total = op.Add(total, required_input(node, index))
    if node.op_type == "Mean":
        return op.Div(total, op.constant_like(len(node.inputs), total))
    return total if len(node.inputs) > 1 else op.Identity(total)


# ---- losses ---------------------------------------------------------------------------------------------


@_before(12, "NegativeLogLikelihoodLoss")
def _nll(op: Builder, node: ir.Node) -> ir.Value:
    return _nll_of(op, node, required_input(node))


@_before(12, "SoftmaxCrossEntropyLoss")
def _cross_entropy(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    logs = op.LogSoftmax(required_input(node), axis=1)
    return [_nll_of(op, node, logs), logs]


def _nll_of(op: Builder, node: ir.Node, x: ir.Value) -> ir.Value:
    """−w[t]·x[t] of each row, without those whose class is ignored; their sum, or their mean by weight."""
    target, weight, ignored = (
        required_input(node, 1),
        optional_input(node, 2),
        attribute(node, "ignore_index"),
    )
    target = op.Cast(target, to=ir.DataType.INT64)
    zero = op.constant_like(0, x)
    skip = None
    if ignored is not None:
        skip = op.Equal(target, np.asarray(ignored, np.int64))
        # An ignored label is often −100, which GatherElements refuses.
        target = op.Where(skip, 0, target)
    picked = op.Neg(op.Squeeze(op.GatherElements(x, op.Unsqueeze(target, [1]), axis=1), [1]))
    factors = None if weight is None else op.Gather(weight, target, axis=0)
    if factors is None and skip is not None:
        factors = op.Expand(op.constant_like(1, x), op.shape(picked))
    if skip is not None:
        picked, factors = op.Where(skip, zero, picked), op.Where(skip, zero, factors)
    loss = picked if factors is None else op.Mul(picked, factors)
    reduction = attribute(node, "reduction", "mean")
    if reduction == "none":
        return loss
    if reduction == "sum":
        return op.ReduceSum(loss, keepdims=0)
    if factors is None:
        return op.ReduceMean(loss, keepdims=0)
    # A mean by weight: torch and ONNX divide by the weights that count, and not by the number of samples.
    return op.Div(op.ReduceSum(loss, keepdims=0), op.ReduceSum(factors, keepdims=0))
