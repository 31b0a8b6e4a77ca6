"""Replaces arithmetic on sizes by constants where the inferred shapes, symbols included, tell the result.

Exporters write a reshape to [batch, length, heads, size] as a dozen nodes that ask for each size. With shapes
inferred, `Reshape` takes [0, 0, heads, size] ("as the input has it"), `Expand` takes ones where nothing is repeated,
and sizes that are numbers are constants. Gradients then need no sizes either, and no sums over axes that may or may
not have been repeated. Results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onward.graph.builder import Builder
from onward.graph.cleanup import remove_unused, share_subexpressions, simplify
from onward.graph.fold import fold_constants
from onward.graph.nodes import optional_input, producer_of
from onward.graph.shapes.dims import dims_of
from onward.graph.shapes.model import infer_shapes, sharpen

_END = 2**31 - 1


def rename_sizes(model: ir.Model, names: Mapping[str, str]) -> None:
    """Say that symbolic sizes are others: `{"total_sequence": "sequence"}`; shapes are inferred again."""
    graph = model.graph
    for value in graph.inputs:
        if value.shape is not None:
            dims = dims_of(value.shape)
            value.shape = ir.Shape([names.get(dim, dim) if isinstance(dim, str) else dim for dim in dims])
    _infer(model)


def settle_sizes(model: ir.Model) -> ir.Model:
    """Settle what shapes tell about a model in the dialect, in place; floating initializers stay as they are."""
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
