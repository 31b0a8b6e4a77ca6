"""Converts a model to an older opset, where every node has the same meaning there.

Most operators have only gained types since; some gained attributes that are at their defaults here, or take as
inputs what were attributes. Any other difference is an error, and all are reported at once. Opset 13 is the oldest:
below it Softmax has another meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.dialect.pads import all_pads
from onward.graph.nodes import subgraphs_of

__all__ = ["OLDEST_OUTPUT", "lower"]

OLDEST_OUTPUT = 13

# Between the version given and opset 21 these gained types and attributes only.
_SAME_SINCE = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Relu", "Equal", "Where", "Pow", "CumSum", "Flatten"), 7),
    **dict.fromkeys(("Identity", "Size", "Transpose", "Reshape", "Shape", "Cast", "Constant"), 1),
    **dict.fromkeys(("ConstantOfShape", "IsNaN", "IsInf", "LeakyRelu", "PRelu"), 6),
    **dict.fromkeys(("If", "Loop", "Scan", "GreaterOrEqual", "LessOrEqual", "OptionalHasElement"), 11),
    **dict.fromkeys(("Squeeze", "Unsqueeze", "Split", "Pad", "OptionalGetElement"), 11),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear", "ScatterND", "ScatterElements"), 13),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), 7),
    **dict.fromkeys(("BatchNormalization", "CastLike"), 14),
    **dict.fromkeys(("ReduceMax", "ReduceMin"), 18),
    "AveragePool": 11,
}
_REDUCTIONS = frozenset(
    {
        *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"),
        *("ReduceProd", "ReduceSumSquare"),
    }
)


class _Different(Exception):
    """Why a node cannot be written in the older opset."""


def lower(model: ir.Model, opset: int) -> ir.Model:
    """A copy of a model in an older opset; raises an error that names every node that cannot be converted."""
    current = model.graph.opset_imports[""]
    if opset == current:
        return model
    if not OLDEST_OUTPUT <= opset < current:
        raise ModelError(f"opset {opset} cannot be made: choose one from {OLDEST_OUTPUT} to {current}")
    copy = model.clone()
    op = Builder(copy.graph)
    op.opset = opset
    problems = [
        f"  {node.op_type:<24} node '{node.name}': {problem}"
        for builder, node in _nodes(op, copy.graph)
        if (problem := _lower_node(builder, node, current, opset))
    ]
    if problems:
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ModelError(
            f"the model cannot be written in opset {opset}:\n"
            + "\n".join(problems[:8])
            + more
            + "\nAsk for a newer one"
        )
    for graph in copy.graphs():
        if "" in graph.opset_imports:
            graph.opset_imports[""] = opset
    _drop_unread(copy.graph)
    return copy


def _drop_unread(graph: ir.Graph) -> None:
    """Constants that became attributes."""
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
            del graph.initializers[name]


def _nodes(op: Builder, graph: ir.Graph) -> Iterator[tuple[Builder, ir.Node]]:
    for node in list(graph):
        for inner in subgraphs_of(node):
            builder = Builder(inner, parent=op)
            builder.opset = op.opset
            yield from _nodes(builder, inner)
        yield op, node


def _lower_node(op: Builder, node: ir.Node, current: int, opset: int) -> str | None:
    """Rewrite a node where it needs it; the reason where it cannot be done."""
    if node.domain != "":
        return None
    newer = onnx.defs.get_schema(node.op_type, current, "")
    op.before, op.scope = node, node.name or ""
    if node.op_type == "CastLike" and opset < 15:
        _replace(op, node, op.Cast(node.inputs[0], to=op.dtype(node.outputs[0])))
        op.before, op.scope = None, ""
        return None
    try:
        older = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return "is newer"
    try:
        if newer.since_version != older.since_version:
            if rewritten := _REWRITES.get(node.op_type):
                rewritten(op, node, older.since_version)
            elif node.op_type in _REDUCTIONS and older.since_version < 18:
                _axes_to_attribute(op, node)
            elif older.since_version < _SAME_SINCE.get(node.op_type, current + 1):
                return f"changed its meaning in opset {newer.since_version}"
        _drop_defaults(node, newer, older)
        _check_types(node, older)
    except _Different as problem:
        return str(problem)
    finally:
        op.before, op.scope = None, ""
    return None


def _drop_defaults(node: ir.Node, newer: onnx.defs.OpSchema, older: onnx.defs.OpSchema) -> None:
    for name in [name for name in node.attributes if name not in older.attributes]:
        default = newer.attributes[name].default_value if name in newer.attributes else None
        value = node.attributes[name].value
        same = default is not None and default.type and ir.from_proto(default) == node.attributes[name]
        # attributes without a default in the schema whose absence means this
        neutral = name == "dilations" and all(size == 1 for size in value)
        if not same and not neutral:
            raise _Different(f"has {name}={value}, which is newer")
        del node.attributes[name]


def _check_types(node: ir.Node, older: onnx.defs.OpSchema) -> None:
    if len(node.inputs) > older.max_input or len(node.outputs) > older.max_output:
        raise _Different("has more inputs or outputs than there")
    for values, formals in ((node.inputs, older.inputs), (node.outputs, older.outputs)):
        for index, value in enumerate(values):
            if value is None or value.type is None:
                continue
            formal = formals[min(index, len(formals) - 1)]
            kind = _type_name(value.type)
            if formal.types and kind not in formal.types:
                raise _Different(f"'{value.name}' is {kind}, a type that it does not take there")


def _type_name(kind: ir.TypeProtocol) -> str:
    if isinstance(kind, ir.SequenceType):
        return f"seq({_type_name(kind.elem_type)})"
    if isinstance(kind, ir.OptionalType):
        return f"optional({_type_name(kind.elem_type)})"
    return f"tensor({kind.dtype.name.lower()})"


# ---- other forms -----------------------------------------------------------------------------------


def _axes_to_attribute(op: Builder, node: ir.Node) -> None:
    """Reductions had their axes in an attribute before opset 18."""
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    keep_all = node.attributes.get_int("noop_with_empty_axes", 0)
    numbers = op.const_value(axes)
    if axes is not None and numbers is None:
        raise _Different("its axes are known at run time only")
    if keep_all and (numbers is None or numbers.size == 0):
        raise _Different("reduces nothing without axes, which is newer")
    node.resize_inputs(1)
    node.attributes.pop("noop_with_empty_axes", None)
    if numbers is not None and numbers.size:
        node.attributes["axes"] = ir.AttrInt64s("axes", [int(axis) for axis in numbers.reshape(-1)])


def _extreme(op: Builder, node: ir.Node, since: int) -> None:
    if since < 18:
        _axes_to_attribute(op, node)


def _shape(op: Builder, node: ir.Node, since: int) -> None:
    """Shape of some axes was a slice of the shape before opset 15."""
    if since >= 15 or ("start" not in node.attributes and "end" not in node.attributes):
        return
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
    for name in ("start", "end"):
        node.attributes.pop(name, None)
    if start == 0 and end is None:
        return
    whole = op.Shape(node.inputs[0])
    stop = np.iinfo(np.int64).max if end is None else end
    part = op.Slice(whole, np.asarray([start]), np.asarray([stop], np.int64), np.asarray([0]))
    _replace(op, node, part)


def _split(op: Builder, node: ir.Node, since: int) -> None:
    """The number of outputs says how many equal parts there are; before opset 18 all had to be equal."""
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        node.attributes.pop("num_outputs", None)
        return
    x = node.inputs[0]
    size = None if x is None or x.shape is None else x.shape[node.attributes.get_int("axis", 0)]
    if not isinstance(size, int) or size % len(node.outputs):
        raise _Different("splits into parts that may not be equal")
    node.attributes.pop("num_outputs", None)


def _pad(op: Builder, node: ir.Node, since: int) -> None:
    """Pads named all axes before opset 18."""
    if since < 19 and node.attributes.get_string("mode", "constant") == "wrap":
        raise _Different("wraps around, which is newer")
    if since >= 18 or len(node.inputs) < 4 or node.inputs[3] is None:
        if since < 18:
            node.resize_inputs(min(len(node.inputs), 3))
        return
    pads = all_pads(op, node)
    if pads is None:
        raise _Different("its padded axes are known at run time only")
    node.replace_input_with(1, pads)
    node.resize_inputs(3)


def _scatter(op: Builder, node: ir.Node, since: int) -> None:
    reduction = node.attributes.get_string("reduction", "none")
    if reduction == "add" and since < 16 and node.op_type == "ScatterElements":
        _scatter_sum(op, node)
    elif reduction != "none" and (since < 16 or (since < 18 and reduction in ("min", "max"))):
        raise _Different(f"reduces by {reduction}, which is newer")
    if since < 16:
        node.attributes.pop("reduction", None)


def _scatter_sum(op: Builder, node: ir.Node) -> None:
    """Where each row gets one number, adding is scattering the sum with what is there."""
    data, indices, updates = node.inputs
    assert data is not None and indices is not None and updates is not None
    axis = node.attributes.get_int("axis", 0)
    if op.static_dim(indices, axis) != 1:
        raise _Different("adds up what falls on the same place, which is newer")
    there = op.GatherElements(data, indices, axis=axis)
    node.replace_input_with(2, op.Add(there, updates))


def _average_pool(op: Builder, node: ir.Node, since: int) -> None:
    if node.attributes.get_int("ceil_mode", 0):
        raise _Different("rounds sizes up, which changed in opset 19")


def _replace(op: Builder, node: ir.Node, value: ir.Value) -> None:
    old = node.outputs[0]
    ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
    name, old.name = old.name, None
    value.name = name
    value.shape = value.shape if old.shape is None else old.shape
    op.graph.remove(node, safe=True)


_REWRITES: dict[str, Callable[[Builder, ir.Node, int], None]] = {
    "ReduceMax": _extreme,
    "ReduceMin": _extreme,
    "Shape": _shape,
    "Split": _split,
    "Pad": _pad,
    "ScatterND": _scatter,
    "ScatterElements": _scatter,
    "AveragePool": _average_pool,
}
