"""Sizes: replaces arithmetic on them by constants where shapes tell the result, and opens a batch that is fixed.

Exporters write a reshape to [batch, length, heads, size] as a dozen nodes that ask for each size. With shapes
inferred, symbols included, `Reshape` takes [0, 0, heads, size] ("as the input has it"), `Expand` takes ones where
nothing is repeated, and sizes that are numbers are constants. Gradients then need no sizes either, and no sums over
axes that may or may not have been repeated. Results are the same to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused, share_subexpressions, simplify
from onward.graph.fold import fold_constants
from onward.graph.nodes import captured_values, optional_input, producer_of, subgraphs_of
from onward.graph.shapes.dims import Dim, dims_of, forget_invented
from onward.graph.shapes.model import infer_shapes, rename_dimensions, sharpen

_END = 2**31 - 1


def rename_sizes(model: ir.Model, names: Mapping[str, str]) -> None:
    """Say that symbolic sizes are others: `{"total_sequence": "sequence"}`; shapes are inferred again."""
    rename_dimensions(model, names)
    sharpen(model)


def settle_sizes(model: ir.Model) -> ir.Model:
    """Settle what shapes tell about a model in the dialect, in place; floating initializers stay as they are."""
    # Exporters ask for the same Shape again before every reshape.
    share_subexpressions(model)
    for _ in range(2):  # a slice that keeps everything tells more sizes
        if not _drop_whole_slices(model.graph):
            break
        _infer(model)
    op = Builder(model.graph)
    for node in list(model.graph):
        if node.domain != "" or len(node.inputs) < 2:
            continue
        op.before = node
        if node.op_type == "Gather":
            _settle_gather(op, node)
        elif node.op_type in ("Reshape", "Expand") and _const(node.inputs[1]) is None:
            target = _reshape(node) if node.op_type == "Reshape" else _expand(node)
            if target is not None:
                node.replace_input_with(1, op.constant(np.asarray(target, np.int64)))
    op.before = None
    remove_unused(model)
    fold_constants(model)
    simplify(model)
    sharpen(model)  # slices whose bounds are numbers now
    return model


def _infer(model: ir.Model) -> None:
    for node in model.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None
    infer_shapes(model)
    sharpen(model)


def _const(value: ir.Value | None) -> np.ndarray | None:
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    return value.const_value.numpy() if value.const_value.size <= 64 else None


def _dims(value: ir.Value | None) -> list[int | str] | None:
    """The sizes of a value, numbers or symbols; None where one has no name."""
    dims = (
        []
        if value is None or value.shape is None
        else [dim for dim in dims_of(value.shape) if dim is not None]
    )
    return dims if value is not None and value.shape is not None and len(dims) == value.shape.rank() else None


def _settle_gather(op: Builder, node: ir.Node) -> None:
    """One size of a shape, where it is a number."""
    _, sizes = op.symbols.elements(node.outputs[0]) or (0, (None,))
    index = _const(node.inputs[1])
    if producer_of(node.inputs[0], "Shape") is None or index is None or node.outputs[0].is_graph_output():
        return
    if all(isinstance(size, int) for size in sizes):
        settled = op.constant(np.asarray(sizes, np.int64).reshape(index.shape))
        ir.convenience.replace_all_uses_with(node.outputs[0], settled)


def _reshape(node: ir.Node) -> list[int] | None:
    """Sizes that are numbers, 0 where the input has the same in that place, and at most one -1."""
    before, after = _dims(node.inputs[0]), _dims(node.outputs[0])
    if before is None or after is None or node.attributes.get_int("allowzero", 0) or 0 in after:
        return None
    target, unknown = [], 0
    for axis, size in enumerate(after):
        if isinstance(size, int):
            target.append(size)
        elif axis < len(before) and before[axis] == size:
            target.append(0)
        else:
            target.append(-1)
            unknown += 1
    return target if unknown <= 1 else None


def _expand(node: ir.Node) -> list[int] | None:
    """1 where the input has the size already, else the number."""
    before, after = _dims(node.inputs[0]), _dims(node.outputs[0])
    if before is None or after is None or len(before) > len(after):
        return None
    before = [1] * (len(after) - len(before)) + before
    target = []
    for old, new in zip(before, after):
        if old == new:
            target.append(1)
        elif isinstance(new, int):
            target.append(new)
        else:
            return None
    return target


def _drop_whole_slices(graph: ir.Graph) -> bool:
    """Remove each Slice that keeps the last n of n: what an exporter writes to skip a cache, where there is none."""
    changed = False
    for node in list(graph):
        if node.domain != "" or node.op_type != "Slice" or node.outputs[0].is_graph_output():
            continue
        source, start, end, axes = (*node.inputs, None)[:4]
        step = optional_input(node, 4)
        ends, axis, steps = _const(end), _const(axes), _const(step)
        dims = _dims(source)
        if source is None or dims is None or ends is None or axis is None or axis.size != 1:
            continue
        if (step is not None and (steps is None or steps.item() != 1)) or ends.item() < _END:
            continue
        if _negated_size(start) == dims[int(axis.item())]:
            ir.convenience.replace_all_uses_with(node.outputs[0], source)
            graph.remove(node, safe=True)
            changed = True
    return changed


def _negated_size(value: ir.Value | None) -> int | str | None:
    """n where a value is computed as minus the size n."""
    producer = producer_of(_unwrapped(value), "Neg", "Mul")
    if producer is None:
        return None
    if producer.op_type == "Mul":
        number = next((constant for constant in map(_const, producer.inputs) if constant is not None), None)
        if number is None or number.size != 1 or number.item() != -1:
            return None
        return _size(next(value for value in producer.inputs if _const(value) is None))
    return _size(producer.inputs[0])


def _size(value: ir.Value | None) -> int | str | None:
    gather = producer_of(_unwrapped(value), "Gather", "Shape")
    if gather is None:
        return None
    shape = gather if gather.op_type == "Shape" else producer_of(gather.inputs[0], "Shape")
    dims = None if shape is None else _dims(shape.inputs[0])
    if shape is None or dims is None:
        return None
    dims = dims[shape.attributes.get_int("start", 0) : shape.attributes.get_int("end", None)]
    index = _const(gather.inputs[1]) if gather.op_type == "Gather" else np.zeros(1, np.int64)
    if index is None or index.size != 1 or (gather.op_type == "Shape" and len(dims) != 1):
        return None
    return dims[int(index.item())]


def _unwrapped(value: ir.Value | None) -> ir.Value | None:
    """What a value was before it became a vector of one, or another integer type."""
    while producer := producer_of(value, "Unsqueeze", "Squeeze", "Cast", "Identity", "Reshape"):
        value = producer.inputs[0]
    return value


# --- Opens a fixed batch: a model whose file says "one image" (or 32) takes any number of samples.
#
# Follows the batch axis from the inputs through the graph. Sizes that were written as numbers and mean the batch are
# written so that they follow it; constants that stand beside a batch are repeated for it. Whether the result treats
# each sample as before is for the caller to check with numbers.


BATCH = "batch"  # the name of the size
_RECURRENT = ("LSTM", "GRU", "RNN")
_SIZED = ("Expand", "ConstantOfShape", "Tile", "Range")


def batch_of(model: ir.Model) -> int | None:
    """The number of samples that a model is fixed to: the first size, a number, of its inputs and all its outputs."""
    firsts = [_first(value) for value in model.graph.inputs if value.name not in model.graph.initializers]
    sizes = {first for first in firsts if first is not None}
    outputs = {_first(value) for value in model.graph.outputs}
    return outputs.pop() if len(outputs) == 1 and outputs <= sizes else None


def _first(value: ir.Value) -> int | None:
    dims = _named_dims(value)
    return dims[0] if dims and isinstance(dims[0], int) else None


def open_batch(model: ir.Model, size: int) -> None:
    """Let the batch of a model, fixed to `size`, be any, in place; raises ModelError where a node rules it out."""
    graph = model.graph
    weights = set(graph.initializers)
    for value in [value for value in graph.inputs if value.name in graph.initializers]:
        graph.inputs.remove(value)  # older files list weights among the inputs
    model.ir_version = max(model.ir_version, 4)
    infer_shapes(model)
    walk = _Walk(graph, size)
    for value in graph.inputs:
        dims = _named_dims(value)
        if dims and dims[0] == size:
            value.shape = ir.Shape([BATCH, *dims[1:]])
    # Old shapes say "1" where the batch is: folding would write that number everywhere.
    walk.forget()
    fold_constants(model)
    for node in list(graph):
        walk.follow(node)
    remove_unused(model)
    _move_constants_to_nodes(graph, weights)
    for value in graph.outputs:
        dims = _named_dims(value)
        if dims and dims[0] not in (BATCH, None):
            raise ModelError(f"output '{value.name}' is {list(dims)} for any number of samples")
        if dims:
            value.shape = ir.Shape([BATCH, *dims[1:]])


def _move_constants_to_nodes(graph: ir.Graph, weights: set[str]) -> None:
    """Constants that are not among the weights of the file are nodes: weights may train, constants never do."""
    for name in [name for name in graph.initializers if name not in weights]:
        value = graph.initializers.pop(name)
        tensor = value.const_value
        node = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)] if tensor is not None else [])
        (constant,) = node.outputs
        constant.type, constant.shape, constant.const_value = value.type, value.shape, tensor
        ir.convenience.replace_all_uses_with(value, constant)
        constant.name = name
        graph.insert_before(graph[0], node)


class _Walk:
    """One pass over the nodes in order; shapes of what comes before a node are already the new ones."""

    def __init__(self, graph: ir.Graph, size: int) -> None:
        # Two sizes of one name are one size to inference.
        if any(BATCH in (_named_dims(value) or ()) for value in graph.inputs):
            raise ModelError(f"another of its sizes is called '{BATCH}'")
        self.size = size
        self.op = Builder(graph)
        # of a size that has the batch in it: how much of it is before the batch
        self.inner: dict[ir.Value, int] = {}
        self.old: dict[ir.Value, tuple[ir.TypeProtocol | None, Dims]] = {}

    def forget(self) -> None:
        """Set shapes that may have the batch in them aside: nothing must take them for constants."""
        reached = {value for value in self.op.graph.inputs if self._axis(value) is not None}
        for node in self.op.graph:
            self.old |= {value: (value.type, _named_dims(value)) for value in node.outputs}
            if reached.intersection(node.inputs) or reached.intersection(captured_values(node)):
                reached.update(node.outputs)
                for value in node.outputs:
                    value.shape = None

    def follow(self, node: ir.Node) -> None:
        """Adapt a node to inputs of any batch, and infer what it gives."""
        batched = any(self._axis(value) is not None for value in node.inputs)
        ours = node.domain in ("", "ai.onnx")
        if batched or node.op_type == "Expand":
            adapt = _ADAPT.get(node.op_type) if ours else None
            with self.op.inserting(node):
                (adapt or _Walk.beside)(self, node)
        if ours and not subgraphs_of(node):
            self.op.infer(node)
            self.op.symbols.refine(node)
        for value in node.outputs:
            self._settle(node, value)

    def _settle(self, node: ir.Node, value: ir.Value) -> None:
        """Where inference knows less than it did, sizes are as before, and the first is the batch."""
        kind, old = self.old.get(value, (value.type, None))
        new = _named_dims(value)
        if new is None or (old is not None and len(new) != len(old)):
            if old is None:
                return
            value.type, new = kind, (None,) * len(old)
        # Inference followed the batch itself: then it is right about where it went.
        named = any(isinstance(dim, str) for dim in new)
        first = node.inputs[0] if node.inputs else None
        opens = not named and self._axis(first) == 0 and bool(old) and old[0] == self.size
        dims: list[Dim] = []
        for axis, dim in enumerate(new):
            if dim is None and old is not None:
                # by the graph: may follow the batch
                computed = node.op_type in _SIZED and old[axis] == self.size
                dim = BATCH if opens and axis == 0 else None if computed else old[axis]
            dims.append(dim)
        value.shape = ir.Shape(dims)
        if first in self.inner and self._axis(value) is not None:
            self.inner.setdefault(value, self.inner[first])

    def _axis(self, value: ir.Value | None) -> int | None:
        """The axis of a value that has the batch in its size."""
        for axis, dim in enumerate(_named_dims(value) or ()):
            if isinstance(dim, str) and BATCH in dim.split("*"):
                return axis
        return None

    def _batch(self) -> ir.Value:
        """The number of samples, as a vector of one number."""
        source = next(value for value in self.op.graph.inputs if self._axis(value) == 0)
        return self.op.Gather(self.op.Shape(source), [0], axis=0)

    def _repeat(self, value: ir.Value, axis: int) -> ir.Value:
        """A value without a batch, repeated along an axis for each sample."""
        dims = _named_dims(value)
        if dims is not None and dims[axis] is None:
            return value
        if dims is None or dims[axis] != self.size:
            raise ModelError(f"'{value.name}' has no size that could be the batch")
        if self.size > 1:
            value = self._one_row(value, axis)
        ones: list[ir.Value] = [self.op.constant(np.ones(axis, np.int64))] if axis else []
        trailing = len(dims) - axis - 1
        parts = [*ones, self._batch(), *([self.op.constant(np.ones(trailing, np.int64))] if trailing else [])]
        return self.op.Expand(value, parts[0] if len(parts) == 1 else self.op.Concat(*parts, axis=0))

    def _one_row(self, value: ir.Value, axis: int) -> ir.Value:
        """What a value repeats for each sample."""
        node = value.producer()
        if node is not None and node.op_type == "Expand":
            source, target = node.inputs[0], self.op.const_value(node.inputs[1])
            dims = _named_dims(source)
            if source is not None and dims is not None and target is not None:
                padded = (1,) * (len(target) - len(dims)) + dims
                if padded[axis] == 1:
                    return self.op.Expand(source, np.where(np.arange(len(target)) == axis, 1, target))
        rows = self.op.const_value(value)
        first = None if rows is None else np.take(rows, [0], axis)
        if rows is None or first is None or not np.array_equal(rows, np.broadcast_to(first, rows.shape)):
            raise ModelError(f"'{value.name}' has other numbers for each of {self.size} samples")
        return self.op.constant(first)

    def beside(self, node: ir.Node) -> None:
        """Elementwise operators broadcast one row themselves; a constant of several equal rows becomes one row."""
        if self.size == 1:
            return
        batched = next(value for value in node.inputs if self._axis(value) is not None)
        rank, axis = len(_named_dims(batched) or ()), self._axis(batched)
        assert axis is not None
        for index, value in enumerate(node.inputs):
            dims = _named_dims(value)
            if value is None or not dims or self._axis(value) is not None or len(dims) < rank - axis:
                continue
            position = len(dims) - (rank - axis)
            if dims[position] == self.size and node.op_type in _ELEMENTWISE:
                node.replace_input_with(index, self._one_row(value, position))

    # ---- operators with sizes in them -----------------------------------------------------------------

    def reshape(self, node: ir.Node) -> None:
        """Find the size of a constant target that has the batch in it: elements keep their order."""
        source, (_, old) = node.inputs[0], self.old.get(node.outputs[0], (None, None))
        target = self.op.const_value(optional_input(node, 1))
        axis = self._axis(source)
        have = _named_dims(source)
        if target is None or old is None or axis is None or have is None or source is None:
            return  # sizes that the graph computes follow the batch
        ahead = math.prod(dim if isinstance(dim, int) else 0 for dim in have[:axis]) * self.inner.get(
            source, 1
        )
        # Elements before the batch are counted to find it again in the new shape; an unknown size cannot be.
        if ahead == 0:
            raise ModelError(f"Reshape '{node.name}' has other sizes before the batch")
        batch_axis = self._batch_axis(old, ahead)
        if batch_axis is None:
            raise ModelError(f"Reshape '{node.name}' to {list(old)} has no size for the batch")
        sizes = [int(number) for number in target]
        for index, dim in enumerate(old):
            if isinstance(dim, int):
                sizes[index] = dim
        same = batch_axis == axis and have[axis] == BATCH and old[batch_axis] == self.size
        if same and not node.attributes.get_int("allowzero", 0):
            sizes[batch_axis] = 0
        else:
            sizes[batch_axis] = -1
        # Reshape can find out one size only.
        if sizes.count(-1) > 1:
            raise ModelError(f"Reshape '{node.name}' has two unknown sizes")
        node.replace_input_with(1, self.op.constant(np.asarray(sizes, np.int64), name="sizes"))
        self.inner[node.outputs[0]] = ahead // math.prod(int(dim) for dim in old[:batch_axis])  # type: ignore[arg-type]

    def _batch_axis(self, dims: tuple[Dim, ...], ahead: int) -> int | None:
        """Which size has the batch in it, if `ahead` elements come before it.

        With a batch of one there may be several: rows of a matrix, else one that begins with the batch, or is it.
        """
        fits = []
        for index, dim in enumerate(dims):
            if not all(isinstance(earlier, int) for earlier in dims[:index]) or not isinstance(dim, int):
                break
            earlier = math.prod(int(size) for size in dims[:index])  # type: ignore[arg-type]
            if earlier and ahead % earlier == 0 and dim % (ahead // earlier * self.size) == 0:
                fits.append((len(dims) > 2 and earlier != ahead, dim != self.size, index))
        return min(fits)[2] if fits else None

    def expand(self, node: ir.Node) -> None:
        """A size that is the batch's is as the input has it; rows that the batch repeats are one row."""
        source, have = node.inputs[0], _named_dims(node.inputs[0])
        target, axis = self.op.const_value(node.inputs[1]), self._axis(node.inputs[0])
        if source is None or have is None:
            return
        if axis is None and target is not None:
            padded = (1,) * (len(target) - len(have)) + have
            if len(target) and target[0] == self.size and padded[0] == 1:  # a token or query for each sample
                other_sizes = self.op.constant(np.array(target[1:]), name="sizes")
                node.replace_input_with(1, self.op.Concat(self._batch(), other_sizes, axis=0))
        elif axis is None:
            sizes = self.op.symbols.elements(node.inputs[1])
            batch_axis = (
                len(have) - len(sizes[1]) + sizes[1].index(BATCH) if sizes and BATCH in sizes[1] else -1
            )
            if batch_axis >= 0 and self.size > 1 and have[batch_axis] == self.size:
                node.replace_input_with(0, self._one_row(source, batch_axis))
        elif target is not None and len(target) - len(have) + axis >= 0:
            target_sizes = np.array(target)
            target_sizes[len(target) - len(have) + axis] = 1
            node.replace_input_with(1, self.op.constant(target_sizes, name="sizes"))

    def join(self, node: ir.Node) -> None:
        """What is put beside a batch is repeated for each sample."""
        batched = next(value for value in node.inputs if self._axis(value) is not None)
        assert batched is not None
        axis, rank = self._axis(batched), len(_named_dims(batched) or ())
        assert axis is not None
        # Samples joined with something else are no samples: [class token; images] along the batch, for one.
        if node.attributes["axis"].as_int() % rank == axis:
            raise ModelError(f"Concat '{node.name}' joins along the batch")
        for index, value in enumerate(node.inputs):
            if value is not None and self._axis(value) is None:
                node.replace_input_with(index, self._repeat(value, axis))

    def recurrence(self, node: ir.Node) -> None:
        """Initial states and lengths, where they are constants, are repeated for each sample."""
        first = bool(node.attributes.get_int("layout", 0))
        for index, axis in ((4, 0), (5, 0 if first else 1), (6, 0 if first else 1)):
            value = optional_input(node, index)
            if value is not None and self._axis(value) is None:
                node.replace_input_with(index, self._repeat(value, axis))

    def resize(self, node: ir.Node) -> None:
        """Sizes of the result: the batch as it comes, the others as they are."""
        source = node.inputs[0]
        sizes = self.op.const_value(optional_input(node, 3))
        if sizes is None or source is None or "axes" in node.attributes:
            return
        if self._axis(source) != 0 or len(sizes) < 2:
            raise ModelError(f"Resize '{node.name}' changes the batch")
        other_sizes = self.op.constant(np.asarray(sizes[1:], np.int64), name="sizes")
        node.replace_input_with(3, self.op.Concat(self._batch(), other_sizes, axis=0))

    def squeeze(self, node: ir.Node) -> None:
        """Without axes, all of size 1 go; a batch of one stays."""
        dims = _named_dims(node.inputs[0])
        if len(node.inputs) > 1 or "axes" in node.attributes or dims is None:
            return
        axes = [axis for axis, dim in enumerate(dims) if dim == 1]
        if self.op.opset < 13:
            node.attributes["axes"] = ir.AttrInt64s("axes", axes)
        else:
            node.resize_inputs(2)
            node.replace_input_with(1, self.op.constant(np.asarray(axes, np.int64), name="axes"))

    def slice(self, node: ir.Node) -> None:
        """A slice of all samples stays one."""
        axis, rank = self._axis(node.inputs[0]), len(_named_dims(node.inputs[0]) or ())
        if len(node.inputs) < 3 or axis is None:  # before opset 10, in attributes
            return
        starts, stops = (self.op.const_value(value) for value in node.inputs[1:3])
        axes = self.op.const_value(optional_input(node, 3))
        if starts is None or stops is None:
            return
        named = [int(one) % rank for one in axes] if axes is not None else list(range(len(starts)))
        if axis not in named:
            return
        index = named.index(axis)
        if int(starts[index]) != 0 or int(stops[index]) < self.size:
            raise ModelError(f"Slice '{node.name}' takes some of the samples")
        stops = np.asarray(stops).copy()
        stops[index] = np.iinfo(stops.dtype).max
        node.replace_input_with(2, self.op.constant(stops, name="ends"))


Dims = tuple[Dim, ...] | None
_ADAPT: dict[str, Callable[[_Walk, ir.Node], None]] = {
    "Reshape": _Walk.reshape,
    "Expand": _Walk.expand,
    "Concat": _Walk.join,
    "Resize": _Walk.resize,
    "Slice": _Walk.slice,
    "Squeeze": _Walk.squeeze,
    **dict.fromkeys(_RECURRENT, _Walk.recurrence),
}
_ELEMENTWISE = frozenset({
    "Add", "Sub", "Mul", "Div", "Pow", "Where", "Max", "Min", "Sum", "PRelu", "And", "Or", "Xor", "Equal",
    "Greater", "Less", "GreaterOrEqual", "LessOrEqual", "MatMul",
})  # fmt: skip


def _named_dims(value: ir.Value | None) -> Dims:
    """The sizes of a value; what inference only numbered is not known."""
    if value is None or value.shape is None:
        return None
    return dims_of(forget_invented(value.shape))
