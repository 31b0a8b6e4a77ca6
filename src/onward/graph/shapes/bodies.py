"""Type and shape inference where ONNX's stops: through the bodies of If, Loop, Scan and SequenceMap.

ONNX drops the shape of a loop's state, since it may change between iterations. Here the shape of the first iteration
is assumed and the body inferred with it; dimensions that change are made unknown, until a fixed point that holds for
every iteration is found. Changes types and shapes only, never nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes import subgraphs_of
from onward.graph.shapes.dims import dims_of, forget_invented
from onward.graph.shapes.model import rank_from_lengths

if TYPE_CHECKING:
    from onward.graph.builder import Builder

_CONTROL = frozenset({"If", "Loop", "Scan", "SequenceMap"})


def infer_graph(op: Builder) -> None:
    """Infer the builder's graph again from its first node with a body or a sequence on; nothing if none."""
    # What comes before is inferred already, by ONNX, and better than here: with values of shape vectors.
    started = False
    for node in op.graph:
        started = started or bool(subgraphs_of(node)) or any(_is_container(v) for v in node.inputs)
        started = started or "Sequence" in node.op_type or node.op_type == "Optional"
        if started:
            infer_node(op, node)


def infer_node(op: Builder, node: ir.Node) -> None:
    """Describe a node's outputs, and the values in its bodies, from its inputs."""
    if node.domain in ("", "ai.onnx") and node.op_type in _CONTROL:
        _INFER[node.op_type](op, node)
        return
    # What was known before any assumption about a loop's state was tried.
    before = [
        (v, v.type, v.meta.setdefault(_DECLARED, v.shape and forget_invented(v.shape))) for v in node.outputs
    ]
    try:
        op.infer(node)
    except ModelError:
        for value, kind, shape in before:
            describe(value, kind, shape)
        return
    for value, kind, shape in before:
        describe(value, kind if value.type is None else value.type, _sharper(value.shape, shape))
    first = node.outputs[0] if node.outputs else None
    if first is not None and first.shape is None and isinstance(first.type, ir.TensorType):
        rank = rank_from_lengths(node)
        first.shape = None if rank is None else ir.Shape([None] * rank)


def infer_body(
    op: Builder, body: ir.Graph, arguments: Sequence[tuple[ir.TypeProtocol | None, ir.Shape | None]]
) -> None:
    """Describe the values of a body whose inputs are of these types and shapes."""
    for value, (kind, shape) in zip(body.inputs, arguments):
        describe(value, kind or value.type, shape)
    for node in body:
        infer_node(op, node)


def describe(value: ir.Value, kind: ir.TypeProtocol | None, shape: ir.Shape | None) -> None:
    """Set a value's type and shape."""
    value.type = kind
    value.shape = None if shape is None else ir.Shape(shape)


def keeps_its_shape(value: ir.Value) -> bool:
    """Whether a value in an inferred body has the same shape in every iteration."""
    return value.shape is not None and not _is_container(value) and None not in dims_of(value.shape)


def _infer_if(op: Builder, node: ir.Node) -> None:
    branches = subgraphs_of(node)
    for branch in branches:
        infer_body(op, branch, [])
    for outcome, *alternatives in zip(node.outputs, *(branch.outputs for branch in branches)):
        shape = alternatives[0].shape
        for other in alternatives[1:]:
            # Only what holds whichever branch runs.
            shape = _common(shape, other.shape)
        # Both branches must give one type; ranks may differ, which ONNX allows and no rule can use.
        describe(outcome, alternatives[0].type or outcome.type, _sharper(shape, outcome.shape))


def _infer_loop(op: Builder, node: ir.Node) -> None:
    body = node.attributes["body"].as_graph()
    states = list(node.inputs[2:])
    # The number of the iteration and whether to go on are the body's first inputs, whatever the states are.
    counters = [
        (ir.TensorType(ir.DataType.INT64), ir.Shape([])),
        (ir.TensorType(ir.DataType.BOOL), ir.Shape([])),
    ]
    settled = _settle(op, body, states, counters, body.inputs[2:], body.outputs[1:], [])
    for outcome, (kind, shape) in zip(node.outputs, settled):
        describe(outcome, kind, _outside(shape))
    for outcome, element in zip(node.outputs[len(states) :], body.outputs[1 + len(states) :]):
        shape = _outside(element.shape)
        # How many iterations there are is known when they are over.
        describe(outcome, element.type, None if shape is None else ir.Shape([None, *shape]))


def _infer_scan(op: Builder, node: ir.Node) -> None:
    body = node.attributes["body"].as_graph()
    count = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    states, scanned = list(node.inputs[:count]), list(node.inputs[count:])
    axes = node.attributes.get_ints("scan_input_axes", None) or [0] * len(scanned)
    slices = []
    for value, axis in zip(scanned, axes):
        sizes = None if value is None or value.shape is None else list(value.shape)
        if sizes is not None:
            del sizes[axis]
        if value is not None:
            slices.append((value.type, None if sizes is None else ir.Shape(sizes)))
    settled = _settle(op, body, states, [], body.inputs[:count], body.outputs[:count], slices)
    for outcome, (kind, shape) in zip(node.outputs, settled):
        describe(outcome, kind, _sharper(_outside(shape), outcome.shape))
    axes_out = node.attributes.get_ints("scan_output_axes", None) or [0] * (len(node.outputs) - count)
    lengths = [v.shape[axis] for v, axis in zip(scanned, axes) if v is not None and v.shape is not None]
    for outcome, element, axis in zip(node.outputs[count:], body.outputs[count:], axes_out):
        shape = _outside(element.shape)
        if shape is None:
            describe(outcome, element.type, outcome.shape)
            continue
        dims: list[int | ir.SymbolicDim | None] = list(shape)
        dims.insert(axis if axis >= 0 else axis + len(dims) + 1, lengths[0] if lengths else None)
        describe(outcome, element.type, ir.Shape(dims))


def _infer_sequence_map(op: Builder, node: ir.Node) -> None:
    body = node.attributes["body"].as_graph()
    kinds = []
    for value in node.inputs:
        kind = None if value is None else value.type
        kinds.append(
            (kind.elem_type if isinstance(kind, ir.SequenceType) else kind, value.shape if value else None)
        )
    infer_body(op, body, kinds)
    for outcome, element in zip(node.outputs, body.outputs):
        if isinstance(element.type, ir.TensorType):
            describe(outcome, ir.SequenceType(element.type), element.shape)


_INFER = {"If": _infer_if, "Loop": _infer_loop, "Scan": _infer_scan, "SequenceMap": _infer_sequence_map}


def _settle(
    op: Builder,
    body: ir.Graph,
    initial: Sequence[ir.Value | None],
    leading: list,
    entering: Sequence[ir.Value],
    leaving: Sequence[ir.Value],
    trailing: list,
) -> list[tuple[ir.TypeProtocol | None, ir.Shape | None]]:
    """The types and shapes that the states have in every iteration; the body is left inferred with them."""
    guess = []
    for value, state in zip(initial, entering):
        kind = value.type if value is not None and value.type is not None else state.type
        declared = state.meta.setdefault(_DECLARED, state.shape)
        guess.append((kind, _named(op, declared if value is None or value.shape is None else value.shape)))
    while True:
        infer_body(op, body, [*leading, *guess, *trailing])
        unchanged = [(kind, _common(shape, after.shape)) for (kind, shape), after in zip(guess, leaving)]
        if all(have[1] == want[1] for have, want in zip(unchanged, guess)):
            return guess
        # Sizes only ever become unknown, so that this ends after as many rounds as there are sizes.
        guess = unchanged


_PRIVATE = "turn__"
_DECLARED = "onward.declared_shape"


def _named(op: Builder, shape: ir.Shape | None) -> ir.Shape | None:
    """Unknown sizes get a name, so that one sees whether they come out as they went in."""
    if shape is None:
        return None
    return ir.Shape([op.namer(_PRIVATE) if dim is None else dim for dim in dims_of(shape)])


def _outside(shape: ir.Shape | None) -> ir.Shape | None:
    """Those names mean nothing outside of the body."""
    if shape is None:
        return None
    return ir.Shape([None if str(dim).startswith(_PRIVATE) else dim for dim in dims_of(shape)])


def _common(first: ir.Shape | None, second: ir.Shape | None) -> ir.Shape | None:
    """What holds of both shapes."""
    if first is None or second is None or first.rank() != second.rank():
        return None
    return ir.Shape([a if a == b else None for a, b in zip(dims_of(first), dims_of(second))])


def _sharper(inferred: ir.Shape | None, before: ir.Shape | None) -> ir.Shape | None:
    """The shape found, with what was known before where it says nothing."""
    if inferred is None or before is None:
        return inferred or before
    if inferred.rank() != before.rank():
        return inferred
    return ir.Shape([b if a is None else a for a, b in zip(dims_of(inferred), dims_of(before))])


def _is_container(value: ir.Value | None) -> bool:
    return value is not None and isinstance(value.type, ir.SequenceType | ir.OptionalType)
