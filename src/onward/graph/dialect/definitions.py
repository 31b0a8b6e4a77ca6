"""Operators that ONNX itself defines by a function body, replaced by that body.

For the few whose definition is long and already in elementary operators: writing the expansion by hand would
only repeat it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

from onward.errors import ModelError
from onward.graph.nodes import type_proto

BY_DEFINITION = frozenset({"LinearAttention"})
_DOMAIN = "onward.definitions"


def expand_by_definition(model: ir.Model, version: int, *, infer: Callable[[ir.Model], None]) -> None:
    """Inline the schema's own definition of each operator in `BY_DEFINITION`; `infer` supplies types after each."""
    while nodes := [n for n in model.graph.all_nodes() if n.domain == "" and n.op_type in BY_DEFINITION]:
        ready = [n for n in nodes if all(v is None or v.type is not None for v in n.inputs)]
        # A definition depends on the types of its inputs: the schema writes it for the node at hand.
        if not ready:
            raise ModelError(f"{nodes[0].op_type} '{nodes[0].name}': the types of its inputs are unknown")
        for index, node in enumerate(ready):
            function = _body(node, version, f"{node.op_type}_{index}")
            model.functions[function.identifier()] = function
            node.domain, node.op_type = _DOMAIN, function.name
            for name in list(node.attributes):
                del node.attributes[name]
        model.graph.opset_imports[_DOMAIN] = 1
        passes.InlinePass()(model)
        model.functions.clear()
        del model.graph.opset_imports[_DOMAIN]
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        infer(model)


def _body(node: ir.Node, version: int, name: str) -> ir.Function:
    schema: Any = onnx.defs.get_schema(node.op_type, version, "")  # its stubs lack these methods
    proto = onnx.FunctionProto()
    types = [onnx.TypeProto() if value is None else type_proto(value) for value in node.inputs]
    data = schema.get_context_dependent_function_with_opset_version(
        max(v for v in schema.context_dependent_function_opset_versions if v <= version),
        ir.to_proto(node).SerializeToString(),
        [t.SerializeToString() for t in types],
    )
    if not data:
        raise ModelError(
            f"{node.op_type} '{node.name}' has no definition in the installed onnx for its inputs"
        )
    proto.ParseFromString(data)
    proto.name, proto.domain = name, _DOMAIN
    # The body is written for these attributes: nothing refers to them any more.
    del proto.attribute[:]
    del proto.opset_import[:]
    proto.opset_import.append(onnx.helper.make_opsetid("", version))
    return ir.from_proto(proto)
