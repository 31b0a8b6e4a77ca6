"""Which opset a model needs, by the operators, attributes and element types that it uses."""

from __future__ import annotations

import onnx
import onnx_ir as ir

__all__ = ["lowest_opset"]


def lowest_opset(model: ir.Model, version: int, floor: int) -> int:
    """The lowest opset from `floor` on in which every node exists with the types that it has here."""
    needed = floor
    for node in model.graph.all_nodes():
        if node.domain in ("", "ai.onnx"):
            needed = _needed(node, needed, version)
    return needed


def _needed(node: ir.Node, floor: int, version: int) -> int:
    for opset in range(floor, version + 1):
        try:
            schema = onnx.defs.get_schema(node.op_type, opset, "")
        except onnx.defs.SchemaError:
            continue
        if set(node.attributes) <= set(schema.attributes) and _types_fit(node, schema):
            return opset
    return version


def _types_fit(node: ir.Node, schema: onnx.defs.OpSchema) -> bool:
    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    for values, formals in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        if len(values) > len(formals) and (
            not formals or formals[-1].option != onnx.defs.OpSchema.FormalParameterOption.Variadic
        ):
            return False
        for index, value in enumerate(values):
            if value is None or not isinstance(value.type, ir.TensorType):
                continue
            formal = formals[min(index, len(formals) - 1)]
            name = f"tensor({value.type.dtype.name.lower()})"
            names = allowed.get(formal.type_str, {formal.type_str})
            if name not in names:
                return False
    return True
