"""Converts a model to an older opset, where every node has the same meaning there.

Operators that the older opset lacks are first written in those that it has (`older_forms`). Most others have only
gained types since; some gained attributes that are at their defaults here, or take as inputs what were attributes.
Any other difference is an error, and all are reported at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.dialect.older_forms import older_form
from onward.graph.dialect.pads import all_pads
from onward.graph.dialect.rewrite import Expansion, rewrite
from onward.graph.nodes import nodes_within, optional_input, required_input, subgraphs_of
from onward.graph.shapes.model import infer_shapes

OLDEST_OUTPUT = 7

# Between the version given and opset 21 these gained types and attributes only.
_SAME_SINCE = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Equal", "Pow", "CumSum", "Greater", "Less"), 7),
    **dict.fromkeys(("Identity", "Size", "Transpose", "Reshape", "Shape", "Cast", "Constant", "Tile"), 1),
    **dict.fromkeys(
        ("Abs", "Ceil", "Exp", "Floor", "Log", "Neg", "Reciprocal", "Sigmoid", "Sqrt", "Tanh"), 6
    ),
    **dict.fromkeys(("Relu", "LeakyRelu", "Conv", "ConvTranspose", "LRN", "MatMul", "Gather", "Concat"), 1),
    **dict.fromkeys(("ArgMax", "ArgMin", "DepthToSpace", "SpaceToDepth", "Flatten"), 1),
    **dict.fromkeys(("Gemm", "PRelu", "AveragePool"), 7),
    **dict.fromkeys(("Max", "Min", "Sum", "Mean", "Expand", "MaxPool"), 8),
    **dict.fromkeys(("ConstantOfShape", "IsNaN", "Where", "Erf", "Sign", "NonZero", "OneHot", "Compress"), 9),
    **dict.fromkeys(("MaxUnpool", "MeanVarianceNormalization"), 9),
    **dict.fromkeys(("IsInf", "Mod", "NonMaxSuppression"), 10),
    **dict.fromkeys(("GreaterOrEqual", "LessOrEqual", "OptionalHasElement", "OptionalGetElement"), 11),
    **dict.fromkeys(("Scan",), 9),
    **dict.fromkeys(("If", "Loop", "Softmax", "LogSoftmax", "Hardmax"), 1),
    **dict.fromkeys(("GatherElements", "ScatterND", "ScatterElements", "GatherND", "Clip"), 11),
    **dict.fromkeys(("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss", "Dropout"), 12),
    **dict.fromkeys(("LSTM", "GRU", "RNN", "BatchNormalization"), 7),
    "LpPool": 11,
    "CastLike": 14,
}
_REDUCTIONS = frozenset(
    {
        *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"),
        *("ReduceProd", "ReduceSum", "ReduceSumSquare"),
    }
)


class _Different(Exception):
    """Why a node cannot be written in the older opset."""


def lower(model: ir.Model, opset: int, *, at_any_cost: bool = True) -> ir.Model:
    """A copy of a model in an older opset; raises an error that names every node that cannot be converted.

    Without `at_any_cost`, operators stay whole: one that the older opset lacks (Gelu, LayerNormalization) is an error
    rather than many older ones, which run more slowly.
    """
    current = model.graph.opset_imports[""]
    if opset == current:
        return model
    if not OLDEST_OUTPUT <= opset < current:
        raise ModelError(f"opset {opset} cannot be made: choose one from {OLDEST_OUTPUT} to {current}")
    if not at_any_cost and (missing := _without_form(model.graph, opset)):
        raise ModelError(
            f"the model cannot be written in opset {opset}: {missing} is newer\nAsk for a newer one"
        )
    # The caller may try several opsets, the newest that works winning.
    copy = model.clone()
    rewritten = _write_in_older(copy, current, opset, at_any_cost)
    op = Builder(copy.graph)
    op.opset = opset
    problems = list(rewritten.values()) + [
        f"  {node.op_type:<24} node '{node.name}': {problem}"
        for builder, node in _nodes(op, copy.graph)
        if node not in rewritten and (problem := _lower_node(builder, node, current, opset))
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
    # of the same age: whoever needs an older opset has an older runtime. Before 4, initializers were inputs too.
    copy.ir_version = max(4, _ir_version(opset))
    return copy


def _ir_version(opset: int) -> int:
    return onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])


def _without_form(graph: ir.Graph, opset: int) -> str | None:
    """The first operator that an opset lacks and for which no other is as fast: a copy tells the same, but slowly."""
    for node in nodes_within(graph):
        if (
            node.domain == ""
            and not _exists(node.op_type, opset)
            and node.op_type not in _AS_FAST | {"Resize"}
        ):
            return node.op_type
    return None


# Operators whose older form runs as fast.
_AS_FAST = frozenset({"CastLike", "ScatterElements", "Shape"})


def _write_in_older(model: ir.Model, current: int, opset: int, at_any_cost: bool) -> dict[ir.Node, str]:
    """Replace what the older opset lacks by what it has; returns what could not be."""
    problems: dict[ir.Node, str] = {}

    def lookup(node: ir.Node) -> Expansion | None:
        form = older_form(node, opset) if at_any_cost or node.op_type in _AS_FAST else None
        if form is None or node in problems:
            return None

        def checked(op: Builder, node: ir.Node) -> ir.Value | Sequence[ir.Value | None]:
            try:
                return form(op, node)
            except ModelError as error:
                problems[node] = f"  {node.op_type:<24} node '{node.name}': {error}"
                raise

        return checked

    while True:  # a form may be written in what needs one itself
        try:
            if not rewrite(model, lookup, opset=current, infer=infer_shapes):
                return problems
        except ModelError:
            if not problems:
                raise


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
    newer = _operator(node.op_type, current)  # before the node may get an older name
    op.before, op.scope = node, node.name or ""
    if node.op_type == "ScatterElements" and 9 <= opset < 11:
        node.op_type = "Scatter"
    try:
        if node.op_type == "Resize" and opset < 10:
            _upsample(op, node)
            return None
        if not _exists(node.op_type, opset):
            return "is newer"
        older = _operator(node.op_type, opset)
        # The same schema in both opsets: nothing to do but types and attributes.
        if newer.since != older.since:
            if rewritten := _REWRITES.get(node.op_type):
                rewritten(op, node, older.since)
            elif node.op_type in _REDUCTIONS and "axes" in older.attributes:
                _axes_to_attribute(op, node)
            elif older.since < _SAME_SINCE.get(node.op_type, current + 1):
                return f"changed its meaning in opset {newer.since}"
        if opset < 11:
            _count_from_the_start(op, node)
        _drop_defaults(node, newer, older)
        _check_types(node, older)
    except _Different as problem:
        return str(problem)
    finally:
        op.before, op.scope = None, ""
    return None


@dataclasses.dataclass(frozen=True)
class _Operator:
    """An operator of one opset, read from its schema once: each look at a schema converts the whole of it."""

    since: int
    attributes: Mapping[str, onnx.defs.OpSchema.Attribute]
    most_inputs: int
    most_outputs: int
    inputs: tuple[frozenset[str], ...]  # the types that each takes
    outputs: tuple[frozenset[str], ...]


@functools.cache
def _operator(op_type: str, opset: int) -> _Operator:
    schema = onnx.defs.get_schema(op_type, opset, "")
    return _Operator(
        schema.since_version,
        schema.attributes,
        schema.max_input,
        schema.max_output,
        tuple(frozenset(formal.types) for formal in schema.inputs),
        tuple(frozenset(formal.types) for formal in schema.outputs),
    )


def _drop_defaults(node: ir.Node, newer: _Operator, older: _Operator) -> None:
    for name in [name for name in node.attributes if name not in older.attributes]:
        value = node.attributes[name].value
        # attributes without a default in the schema whose absence means this
        neutral = name == "dilations" and all(size == 1 for size in value)
        if not neutral and not _is_default(node, name, newer):
            raise _Different(f"has {name}={value}, which is newer")
        del node.attributes[name]


def _is_default(node: ir.Node, name: str, operator: _Operator) -> bool:
    default = operator.attributes[name].default_value if name in operator.attributes else None
    return default is not None and default.type != 0 and ir.from_proto(default) == node.attributes[name]


def _check_types(node: ir.Node, older: _Operator) -> None:
    if len(node.inputs) > older.most_inputs or len(node.outputs) > older.most_outputs:
        raise _Different("has more inputs or outputs than there")
    for values, formals in ((node.inputs, older.inputs), (node.outputs, older.outputs)):
        for index, value in enumerate(values):
            if value is None or value.type is None:
                continue
            types = formals[min(index, len(formals) - 1)]
            kind = _type_name(value.type)
            # Schemas of variadic inputs list no types of their own.
            if types and kind not in types:
                raise _Different(f"'{value.name}' is {kind}, a type that it does not take there")


def _type_name(kind: ir.TypeProtocol) -> str:
    if isinstance(kind, ir.SequenceType):
        return f"seq({_type_name(kind.elem_type)})"
    if isinstance(kind, ir.OptionalType):
        return f"optional({_type_name(kind.elem_type)})"
    return f"tensor({kind.dtype.name.lower()})"


# ---- the opset of a model whose operators stay as they are ------------------------------------------


def relabel(model: ir.Model, floor: int) -> None:
    """Say that a model is of the lowest opset from `floor` on that has every node of it, with its types."""
    newest = needed = model.graph.opset_imports[""]
    nodes = [node for node in model.graph.all_nodes() if node.domain in ("", "ai.onnx")]
    for node in nodes:
        if _exists(node.op_type, floor):
            older, newer = _operator(node.op_type, floor), _operator(node.op_type, newest)
            for name in [name for name in node.attributes if name not in older.attributes]:
                if _is_default(node, name, newer):
                    del node.attributes[name]
    needed = floor
    for node in nodes:
        # Older runtimes load older opsets only, so the lowest that holds all nodes is the most widely usable.
        needed = next((opset for opset in range(needed, newest) if _fits(node, opset)), newest)
    model.graph.opset_imports[""] = needed


def _exists(op_type: str, opset: int) -> bool:
    return onnx.defs.has(op_type, opset, "")


def _fits(node: ir.Node, opset: int) -> bool:
    if not _exists(node.op_type, opset):
        return False
    operator = _operator(node.op_type, opset)
    try:
        _check_types(node, operator)
    except _Different:
        return False
    return set(node.attributes) <= set(operator.attributes)


# ---- other forms -----------------------------------------------------------------------------------


def _axes_to_attribute(op: Builder, node: ir.Node) -> None:
    """Reductions had their axes in an attribute before opset 18."""
    axes = _constant_numbers(op, node, 1, "axes")
    # Before opset 18 no axes always meant all of them.
    if node.attributes.get_int("noop_with_empty_axes", 0) and not axes:
        raise _Different("reduces nothing without axes, which is newer")
    node.resize_inputs(1)
    node.attributes.pop("noop_with_empty_axes", None)
    if axes:
        node.attributes["axes"] = ir.AttrInt64s("axes", axes)


def _count_from_the_start(op: Builder, node: ir.Node) -> None:
    """Axes were not negative before opset 11."""
    if node.op_type in ("Unsqueeze", "Squeeze") or (
        node.op_type not in _BY_RESULT and (node.inputs == () or node.inputs[0] is None)
    ):
        return  # done where they became attributes
    for name in ("axis", "axes"):
        value = None if name not in node.attributes else node.attributes[name].value
        numbers = [value] if isinstance(value, int) else list(value or ())
        if all(number >= 0 for number in numbers):
            continue
        counted = node.outputs[0] if node.op_type in _BY_RESULT else required_input(node)
        rank = op.rank(counted)
        numbers = [int(number) % rank for number in numbers]
        if isinstance(value, int):
            node.attributes[name] = ir.AttrInt64(name, numbers[0])
        else:
            node.attributes[name] = ir.AttrInt64s(name, numbers)


# Their axes are those of the result.
_BY_RESULT = frozenset({"OneHot", "Unsqueeze"})


def _extreme(op: Builder, node: ir.Node, since: int) -> None:
    if since < 18:
        _axes_to_attribute(op, node)


def _squeeze(op: Builder, node: ir.Node, since: int) -> None:
    """Axes were an attribute before opset 13."""
    if since >= 13:
        return
    axes = _constant_numbers(op, node, 1, "axes")
    if axes is not None:
        counted = node.outputs[0] if node.op_type == "Unsqueeze" else required_input(node)
        positions = [axis % op.rank(counted) if axis < 0 else axis for axis in axes]
        node.attributes["axes"] = ir.AttrInt64s("axes", positions)
    node.resize_inputs(1)


def _constant_numbers(op: Builder, node: ir.Node, index: int, what: str) -> list[int] | None:
    """The numbers of an input that was an attribute; None where it is not given."""
    value = optional_input(node, index)
    if value is None:
        return None
    numbers = op.const_value(value)
    if numbers is None:
        raise _Different(f"its {what} are known at run time only")
    return [int(number) for number in numbers.reshape(-1)]


def _slice(op: Builder, node: ir.Node, since: int) -> None:
    """Starts and ends were attributes before opset 10."""
    if since >= 10:
        return
    starts, ends, axes, steps = (
        _constant_numbers(op, node, index + 1, what)
        for index, what in enumerate(("starts", "ends", "axes", "steps"))
    )
    assert starts is not None and ends is not None
    if any(step != 1 for step in steps or ()):
        raise _Different("has steps, which are newer")
    if axes is not None and any(axis < 0 for axis in axes):
        axes = [axis % op.rank(required_input(node)) for axis in axes]
    node.resize_inputs(1)
    for name, numbers in (("starts", starts), ("ends", ends), ("axes", axes)):
        if numbers is not None:
            node.attributes[name] = ir.AttrInt64s(name, numbers)


def _clip(op: Builder, node: ir.Node, since: int) -> None:
    """Bounds were attributes before opset 11; those known at run time have a form of their own."""
    if since >= 11:
        return
    for index, name in ((1, "min"), (2, "max")):
        value = op.const_value(optional_input(node, index))
        if value is not None:
            node.attributes[name] = ir.AttrFloat32(name, float(value))
    node.resize_inputs(1)


def _top_k(op: Builder, node: ir.Node, since: int) -> None:
    """How many was an attribute before opset 10; which end, and whether in order, are newer than that."""
    if since < 10:
        numbers = _constant_numbers(op, node, 1, "numbers of results")
        assert numbers is not None
        node.attributes["k"] = ir.AttrInt64("k", numbers[0])
        node.resize_inputs(1)
    if since < 11:
        node.attributes.pop("sorted", None)


def _reshape(op: Builder, node: ir.Node, since: int) -> None:
    """A zero meant "as before" always until opset 13, and since then by default: it matters to empty tensors alone."""
    shape = op.const_value(node.inputs[1])
    if since < 14 and (shape is None or (shape != 0).all()):
        node.attributes.pop("allowzero", None)


def _resize(op: Builder, node: ir.Node, since: int) -> None:
    """Regions and scales had to be given before opset 13; only scales from the corner were known before 11."""
    mode = node.attributes.get_string("coordinate_transformation_mode", "half_pixel")
    if since < 19 and mode == "half_pixel_symmetric":
        raise _Different("half_pixel_symmetric is newer")
    if since < 11:
        _require_from_the_corner(op, node)
        node.resize_inputs(3)
        # Upsample and Resize-10 had no region of interest in between.
        scales = node.inputs[2]
        node.resize_inputs(2)
        node.replace_input_with(1, scales)
        for name in list(node.attributes):
            if name != "mode":
                del node.attributes[name]
    elif since < 13:
        # Opset 11 requires all three; empty tensors mean "not given" there.
        node.resize_inputs(max(3, len(node.inputs)))
        for index in (1, 2):
            if node.inputs[index] is None:
                node.replace_input_with(index, op.constant(np.zeros(0, np.float32), name="none"))


def _require_from_the_corner(op: Builder, node: ir.Node) -> None:
    mode = node.attributes.get_string("mode", "nearest")
    where = node.attributes.get_string("coordinate_transformation_mode", "half_pixel")
    nearest = node.attributes.get_string("nearest_mode", "round_prefer_floor")
    # All that Upsample and Resize-10 could do is read from the corner.
    if mode == "cubic" or where != "asymmetric" or (mode == "nearest" and nearest != "floor"):
        raise _Different(f"{mode} from {where} coordinates is newer")
    if optional_input(node, 2) is None:
        raise _Different("resizes to given sizes, which is newer")


def _upsample(op: Builder, node: ir.Node) -> None:
    """Upsample until opset 9: scales from the corner, an attribute before 9."""
    _require_from_the_corner(op, node)
    scales = op.const_value(node.inputs[2])
    mode = {"mode": node.attributes.get_string("mode", "nearest")}
    if op.opset >= 9:
        upsampled = op.node("Upsample", [node.inputs[0], node.inputs[2]], mode)
    elif scales is None:
        raise _Different("its scales are known at run time only")
    else:
        numbers = [float(number) for number in scales.reshape(-1)]
        upsampled = op.node("Upsample", [node.inputs[0]], {**mode, "scales": numbers})
    _replace(op, node, upsampled[0])


def _quantize(op: Builder, node: ir.Node, since: int) -> None:
    scale = node.inputs[1]
    if since < 13 and (scale is None or scale.shape is None or any(size != 1 for size in scale.shape)):
        raise _Different("has a scale for each channel, which is newer")
    if since < 13:
        node.attributes.pop("axis", None)


def _split(op: Builder, node: ir.Node, since: int) -> None:
    """The number of outputs says how many equal parts there are; before opset 18 all had to be equal."""
    if optional_input(node, 1) is not None:
        node.attributes.pop("num_outputs", None)
        if since < 13:
            node.attributes["split"] = ir.AttrInt64s("split", _constant_numbers(op, node, 1, "sizes") or [])
            node.resize_inputs(1)
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
    if since >= 18:
        return
    if optional_input(node, 3) is not None:
        pads = all_pads(op, node)
        if pads is None:
            raise _Different("its padded axes are known at run time only")
        node.replace_input_with(1, pads)
    node.resize_inputs(min(len(node.inputs), 3))
    if since < 11:
        _pads_to_attribute(op, node)


def _pads_to_attribute(op: Builder, node: ir.Node) -> None:
    value = optional_input(node, 2)
    number = op.const_value(value)
    if value is not None and number is None:
        raise _Different("the number that it pads with is known at run time only")
    node.attributes["pads"] = ir.AttrInt64s("pads", _constant_numbers(op, node, 1, "pads") or [])
    node.attributes["value"] = ir.AttrFloat32("value", 0.0 if number is None else float(number))
    node.resize_inputs(1)


def _scatter(op: Builder, node: ir.Node, since: int) -> None:
    reduction = node.attributes.get_string("reduction", "none")
    if reduction != "none" and (since < 16 or (since < 18 and reduction in ("min", "max"))):
        what = "adds up what falls on the same place" if reduction == "add" else f"reduces by {reduction}"
        raise _Different(f"{what}, which is newer")
    if since < 16:
        node.attributes.pop("reduction", None)


def _average_pool(op: Builder, node: ir.Node, _since: int) -> None:
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
    "Split": _split,
    "Squeeze": _squeeze,
    "Unsqueeze": _squeeze,
    "Slice": _slice,
    "Clip": _clip,
    "TopK": _top_k,
    "Reshape": _reshape,
    "Resize": _resize,
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _quantize,
    "Pad": _pad,
    "ScatterND": _scatter,
    "ScatterElements": _scatter,
    "Scatter": _scatter,
    "AveragePool": _average_pool,
}
