"""Connects names and values: runs a function over values and appends the nodes it built to a ModelProto."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx
import onnx_ir as ir

from onward.contract import OPSET
from onward.errors import SEE_NAMES, ModelError
from onward.graph.builder import Builder
from onward.graph.nodes import Namer
from onward.onnxblock.context import current_model, to_dialect


def emit(
    names: Sequence[str], build: Callable[..., ir.Value | Sequence[ir.Value]], *, scope: str = ""
) -> list[str]:
    """Call `build(op, *values)` for values of these names, append its nodes to the base model, return names."""
    model = current_model()
    # A graph of this block's nodes alone: reading the whole model for every block would take the square of
    # their number.
    graph = ir.Graph([], [], nodes=[], opset_imports={"": _opset(model)}, name="emit")
    op = Builder(graph)
    # Names must be free in the base, which the small graph does not know.
    op.namer = _namer(model)
    op.scope = scope
    values = [value_of(name) for name in names]
    graph.inputs.extend(dict.fromkeys(values))
    built = build(op, *values)
    results = [built] if isinstance(built, ir.Value) else list(built)
    for node in graph:
        model.graph.node.append(ir.serde.serialize_node(node))
        for output in node.outputs:
            if output.type is not None:
                # written down: the next block asks for these types, and inference would look at the whole model again
                model.graph.value_info.append(ir.serde.serialize_value(output))
    for value in graph.initializers.values():
        assert value.const_value is not None
        model.graph.initializer.append(ir.serde.serialize_tensor(value.const_value))
    return [value.name or "" for value in results]


def has_name(name: str) -> bool:
    """Whether the base model has a value of this name already."""
    graph = current_model().graph
    return (
        any(value.name == name for value in graph.input)
        or any(tensor.name == name for tensor in graph.initializer)
        or any(name in node.output for node in graph.node)
    )


def add_input(value: ir.Value) -> None:
    """Add an input to the base model."""
    current_model().graph.input.append(ir.serde.serialize_value(value))


def find_type(name: str) -> onnx.TypeProto:
    """The type of a value of the base model, inferred where it is not written down."""
    model = current_model()
    kind = _written_type(model, name)
    if kind is None and has_name(name):
        # Only where a type is asked for and missing: inference over the whole model takes longer than the
        # block.
        model.graph.value_info.extend(_inferred(model))
        kind = _written_type(model, name)
    if kind is None:
        raise ModelError(
            f"The provided name {name} is not a graph value info or a graph output.", hint=SEE_NAMES
        )
    return kind


def value_of(name: str) -> ir.Value:
    """A value of the base model, by name: what is known of its type and shape."""
    if not isinstance(name, str):
        raise TypeError(f"blocks take the names of values, got {type(name).__name__}")
    proto = find_type(name)
    return ir.Value(
        name=name,
        type=ir.serde.deserialize_type_proto_for_type(proto),
        shape=ir.serde.deserialize_type_proto_for_shape(proto),
    )


def _inferred(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    described = {value.name for value in model.graph.value_info}
    # not strict: a block may be built on operators of other domains, which inference skips
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    return [value for value in inferred.graph.value_info if value.name not in described]


def _written_type(model: onnx.ModelProto, name: str) -> onnx.TypeProto | None:
    graph = model.graph
    for value in [*graph.input, *graph.value_info, *graph.output]:
        if value.name == name and value.type.WhichOneof("value") is not None:
            return value.type
    for tensor in graph.initializer:
        if tensor.name == name:
            return onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    return None


def _opset(model: onnx.ModelProto) -> int:
    versions = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    if not versions:
        model.opset_import.append(onnx.helper.make_opsetid("", OPSET))
        return OPSET
    if versions[0] < OPSET:  # its owner has set it since the base was entered
        to_dialect(model)
        return OPSET
    return versions[0]


def _namer(model: onnx.ModelProto) -> Namer:
    namer = Namer(ir.Graph([], [], nodes=[], name="names"))
    graph = model.graph
    for value in [*graph.input, *graph.output]:
        namer.take(value.name)
    for tensor in graph.initializer:
        namer.take(tensor.name)
    for node in graph.node:
        namer.take(node.name)
        for name in node.output:
            namer.take(name)
    return namer
