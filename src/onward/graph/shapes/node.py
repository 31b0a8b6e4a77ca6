"""ONNX's own inference for one node at a time, with a cache."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import onnx
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes import SMALL, attributes_key, captured_values, subgraphs_of, type_proto
from onward.graph.shapes.dims import dims_of, forget_invented

_Dim = int | ir.SymbolicDim


class NodeInference:
    """Infers nodes; nodes alike are inferred once."""

    def __init__(self) -> None:
        self._seen: dict[tuple, list] = {}

    def describe(self, node: ir.Node, opset: int) -> None:
        """Set the types and shapes of a node's outputs, read in this opset, which stays the same."""
        schema = find_schema(node.op_type, opset, node.domain)
        if schema is None or _describe_elementwise(node):
            return
        seen = self._seen
        signature = None if node.op_type == "DFT" else _signature(node)  # its sizes have names of their own
        if signature is not None and signature in seen:
            for value, (dtype, shape) in zip(node.outputs, seen[signature]):
                if dtype is not None:
                    value.type, value.shape = ir.TensorType(dtype), None if shape is None else ir.Shape(shape)
            return
        types: dict[str, onnx.TypeProto] = {}
        data: dict[str, onnx.TensorProto] = {}
        captured = captured_values(node) if subgraphs_of(node) else []
        for value in (*node.inputs, *captured):
            if value is None or value.type is None:
                continue
            types[value.name or ""] = type_proto(value)
            tensor = value.const_value
            if tensor is not None and tensor.size <= SMALL and not value.is_graph_input():
                data[value.name or ""] = ir.serde.serialize_tensor(tensor)
        try:
            inferred = onnx.shape_inference.infer_node_outputs(
                schema,
                ir.serde.serialize_node(node),
                types,
                data,
                opset_imports=[onnx.helper.make_opsetid("", opset)],
                ir_version=10,
            )
        except Exception as error:
            raise ModelError(f"cannot build {node.op_type} '{node.name}': {error}".strip()) from error
        for value in node.outputs:
            type_and_shape = inferred.get(value.name or "")
            if type_and_shape is not None:
                value.type = ir.serde.deserialize_type_proto_for_type(type_and_shape)
                value.shape = ir.serde.deserialize_type_proto_for_shape(type_and_shape)
                value.shape = None if value.shape is None else forget_invented(value.shape)
                forget_copied_size(node)
                if node.attributes.get_int("ceil_mode", 0) and value.shape is not None:
                    # inference counts windows that start in the padding, which the runtime leaves out
                    value.shape = ir.Shape([*value.shape[:2], *[None] * (value.shape.rank() - 2)])
        if signature is not None and all(
            v.type is None or type(v.type) is ir.TensorType for v in node.outputs
        ):
            seen[signature] = [
                (v.dtype, None if v.shape is None else tuple(v.shape))
                if (v.name or "") in inferred
                else (None, None)
                for v in node.outputs
            ]


# Their result has the type and shape of the first input; the others, if any, are numbers or vectors beside it.
_LIKE_FIRST = frozenset(
    {
        *("Abs", "Ceil", "Clip", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish"),
        *("Identity", "LeakyRelu", "Log", "Neg", "Not", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign"),
        *("Sin", "Softplus", "Sqrt", "Tanh"),
    }
)
# Their inputs have one type, which is the result's, and are broadcast.
_ARITHMETIC = frozenset({"Add", "Div", "Max", "Min", "Mul", "Sub"})


def _describe_elementwise(node: ir.Node) -> bool:
    """Describe half of all nodes without ONNX's inference, which has to be asked in protobuf; whether it was one."""
    op_type, inputs = node.op_type, node.inputs
    if node.domain != "" or not inputs or len(node.outputs) != 1:
        return False
    if op_type in _LIKE_FIRST:
        inputs = inputs[:1]
    elif op_type not in _ARITHMETIC:
        return False
    dtype, dims = None, ()
    for value in inputs:
        if value is None or type(value.type) is not ir.TensorType or value.shape is None:
            return False
        if dtype is not None and value.type.dtype != dtype:
            return False
        dtype = value.type.dtype
        joined = _broadcast(dims, value.shape.dims)
        if joined is None:
            return False
        dims = joined
    assert dtype is not None
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(dtype), ir.Shape(dims)
    return True


def _broadcast(one: tuple[_Dim, ...], other: tuple[_Dim, ...]) -> tuple[_Dim, ...] | None:
    """The sizes of two shapes broadcast, where they are the same or 1; None where it takes more to tell."""
    if not one or one == other:
        return other if _all_named(other) else None
    if len(one) < len(other):
        one, other = other, one
    dims = []
    offset = len(one) - len(other)
    for axis, dim in enumerate(one):
        beside = 1 if axis < offset else other[axis - offset]
        if dim == 1:
            dim = beside
        elif beside not in (1, dim):
            return None
        dims.append(dim)
    return tuple(dims) if _all_named(dims) else None


def _all_named(dims: Iterable[_Dim]) -> bool:
    """Whether every size is a number or has a name."""
    return all(isinstance(dim, int) or dim.value is not None for dim in dims)


@functools.cache
def find_schema(op_type: str, opset: int, domain: str) -> onnx.defs.OpSchema | None:
    """The schema of an operator in an opset; None for other domains."""
    if domain not in ("", "ai.onnx"):
        return None
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        raise ModelError(f"operator {op_type} does not exist in opset {opset}") from None


def _signature(node: ir.Node) -> tuple | None:
    """All that inference looks at; None where that is too much to compare."""
    attrs = attributes_key(node.attributes)
    if attrs is None:
        return None
    inputs = []
    for value in node.inputs:
        if value is None or value.type is None:
            inputs.append(None)
            continue
        if type(value.type) is not ir.TensorType:
            return None
        dims = None if value.shape is None else dims_of(value.shape)
        tensor = value.const_value
        is_small = tensor is not None and tensor.size <= SMALL and not value.is_graph_input()
        if tensor is not None and tensor.dtype == ir.DataType.STRING:
            return None
        inputs.append((value.type.dtype, dims, tensor.tobytes() if is_small and tensor is not None else None))
    return (node.op_type, node.domain, attrs, tuple(inputs), tuple(bool(v.name) for v in node.outputs))


def forget_copied_size(node: ir.Node) -> None:
    """Forget sizes that inference copies though they may be others: two values of one name have one size.

    A transform's along its axis, where it is a name and the transform cuts or pads: it gets a name of its own, since
    the runtime infers the same. Those of a sequence's elements, which need not be alike.
    """
    value = node.outputs[0] if node.outputs else None
    if value is None or value.shape is None or node.op_type not in ("DFT", "SequenceAt"):
        return
    if node.op_type == "SequenceAt":
        value.shape = forget_invented(value.shape)
    elif node.attributes.get_int("onesided", 0) or (len(node.inputs) > 1 and node.inputs[1] is not None):
        sizes = enumerate(value.shape)
        value.shape = ir.Shape(
            [d if isinstance(d, int) or i == 0 else f"{value.name}.size{i}" for i, d in sizes]
        )
